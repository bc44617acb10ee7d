// Attention over pages that no kernel reads in place (PageFormat::planar() is false), or shall not: every block becomes
// numbers first, in FP32; K and V by direction, or by channel where the format is planar. Correct and slow.
#pragma once

#include <crumb/attention.h>

#include <atomic>

namespace crumb {

// Called by each of n_threads threads with the same counter, which starts at 0: draws tiles and KV heads until there are
// none. A row's tokens are summed in ascending order of blocks, its coded ones before its exact ones within a block,
// so its bits depend on nothing else in the plan.
void attend_decoded(const AttentionLayer& layer, const AttentionPlan& plan, std::span<const SequenceView> sequences,
                    const AttentionIo& io, std::atomic<uint32_t>& next, int n_threads);

}  // namespace crumb

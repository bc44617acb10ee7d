// The host's side of attention over chunks of many rows (prefill.h). As in step.h: all memory is the caller's, nothing waits,
// and the shape of a step alone fixes all launches.
//
//   once a step:   plan_prefill()     what tiles of rows see
//   once a layer:  attend_prefill()   slice by slice: blocks become BF16 tiles, rows meet them
#pragma once

#include <crumb/recipe.h>

#include <vector>

#include "attention/cuda/prefill_plan.h"
#include "attention/cuda/step.h"

namespace crumb::cuda {

struct PrefillArgs;

// What is not a matter of the format.
struct PrefillLaunches {
    void (*plan)(const PrefillPlanArgs& args, Stream stream) = nullptr;
    void (*attend)(const PrefillArgs& args, int dim, int blocks, Stream stream) = nullptr;
};

// The shape of a step: it may be larger than what a replay needs.
struct PrefillShape {
    int n_chunks = 0, rows_per_chunk = 0;
    int n_head = 0, n_head_kv = 0;
    int blocks = 0;         // one a multiprocessor
    size_t most_entries = 0;  // of a chunk: blocks that it reads exactly and blocks that it reads through codes
    int dim = 0;
    size_t tile_bytes = size_t(160) << 20;  // for tiles, about: what does not fit is done in slices

    int group() const { return n_head / n_head_kv; }
    int rows_per_tile() const { return kTileColumns / group(); }
    int tiles_per_chunk() const { return up(rows_per_chunk, rows_per_tile()); }
    int slice_entries() const;  // of every chunk, even
    int slices() const;
};

// That a block takes, or 0: there is no kernel.
size_t prefill_shared_bytes(int dim);

struct PrefillWorkspace {
    size_t chunks = 0, tiles = 0, state = 0, pairs = 0;
    size_t bytes = 0;
};
PrefillWorkspace prefill_workspace(const PrefillShape& shape);

// HeadArrays::k_unmap, v_unmap. halves: FP16.
std::vector<u32> unmap_table(const SideTables& side, bool halves);

// tables.rows: [n_chunks][rows_per_chunk], rows of a chunk of one sequence.
void plan_prefill(const PrefillLaunches& launches, const PrefillShape& shape, const StepTables& tables, std::byte* memory, Stream stream);
void attend_prefill(const Kernels& kernels, const PrefillLaunches& launches, const PrefillShape& shape, const StepTables& tables,
                    const LayerData& layer, std::byte* memory, Stream stream);

// What attend_prefill() launches for slice i, one by one: benchmarks time them apart.
void unpack_slice(const Kernels& kernels, int i, const PrefillShape& shape, const StepTables& tables, const LayerData& layer,
                  std::byte* memory, Stream stream);
void attend_slice(const PrefillLaunches& launches, int i, const PrefillShape& shape, const StepTables& tables, const LayerData& layer,
                  std::byte* memory, Stream stream);

}  // namespace crumb::cuda

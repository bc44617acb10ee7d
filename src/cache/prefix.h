// What the tokens of a sequence are, so that another sequence which begins with the same ones finds their blocks.
//
// Block b of a sequence is named by a hash of the name of block b - 1 and of its own 64 token ids; the first by a salt
// (what else decides K and V: adapters). All else that decides what a block holds is the same for a whole cache. The
// hash is XXH3 of 128 bits with a seed that is drawn when the process starts, so nobody can make two texts meet.
//
// A block is named when it is full, nothing that is not clean went into it, and the step that made it is over. Clean is
// what a sequence holds that was computed from nothing by the position rule: every query saw exactly what the rule
// says. A crop that leaves tokens "aged early" ends that for all tokens that follow.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "cache/extent.h"
#include "cache/pool.h"

namespace crumb {

inline constexpr int32_t kAllClean = std::numeric_limits<int32_t>::max();

// Exact rows are much larger than codes, so of the blocks that leave the window of a growing sequence only those stay
// that make a prefix complete which ends at a multiple of this, or where somebody turned off or asked before.
inline constexpr int32_t kStopTokens = 2048;

struct Prefix {
    std::vector<int32_t> ids;      // by position
    std::optional<uint64_t> salt;  // nothing: nobody asked, blocks are not named
    int32_t clean = kAllClean;     // tokens from here on are not clean
    std::vector<int32_t> stops;    // where windows are worth keeping, multiples of 64
    std::vector<int32_t> prompt;   // what it is about to become, as far as reuse() was told

    // Of the first blocks, as far as they have been computed; cut off where tokens are.
    std::vector<BlockName> names;
    int32_t named_rows = 0, named_pages = 0;  // blocks and pages below have been offered under their names

    void add(int32_t id);
    void crop(int32_t length, int32_t page_tokens);
    // Names of the first n blocks, which `ids` has.
    std::span<const BlockName> first_names(int32_t n);
    // Whether the exact rows of block b are among those that a sequence of some stop's length wants. `begin_of` gives
    // the first block that a sequence of a length wants.
    bool keeps(int32_t b, auto begin_of) const {
        const auto wants = [&](int32_t stop) { return b < stop / kPageTokens && b >= begin_of(stop); };
        const int32_t next = (b * kPageTokens / kStopTokens + 1) * kStopTokens;
        bool any = wants(next);
        for (const int32_t stop : stops) {
            any = any || wants(stop);
        }
        return any;
    }
};

// A coded page of several blocks has the name of its last one.
std::vector<BlockName> page_names(std::span<const BlockName> blocks, int32_t blocks_a_page);
std::vector<BlockName> block_names(std::span<const int32_t> ids, uint64_t salt);

}  // namespace crumb

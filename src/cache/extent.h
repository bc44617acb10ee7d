// What a sequence holds, as four positions. Every operation of the cache is a function from extents to extents; the
// tables of block ids only follow. So what is held depends on positions alone, saved states need no tables, and the
// sizes of the pools can be proved.
//
//   0        sink              exact_begin        coded_end          length
//   | exact   | codes           | codes and exact  | exact            |
//
// Blocks of sinks stay exact for ever. Demotion encodes blocks below edge(length - 1), so coded_end is never less.
// Trimming frees other exact blocks that are encoded and that the next token cannot want, so exact_begin is at most
// edge(length); it is 0 as long as nothing was freed. A crop below exact_begin makes it the new length: then tokens
// inside the window are known through their codes only ("aged early"), and if it is no multiple of 64, so are the first
// rows of a block whose other rows will be exact.
//
// A page of 128 tokens (page.h, family C) is encoded as a whole when its first half is due, so coded_end is then a
// multiple of 128 and up to 64 tokens beyond edge(length - 1): these have codes that nobody reads yet.
#pragma once

#include <crumb/cache.h>

#include <cstdint>

namespace crumb {

struct Extent {
    int32_t length = 0;
    int32_t coded_end = 0;     // tokens below are encoded; a multiple of a page
    int32_t exact_begin = 0;   // tokens from here on have their BF16 rows, as sinks have
    int32_t window_begin = 0;  // tokens from here on lie in window blocks; a multiple of 64
    bool operator==(const Extent&) const = default;
};

// Blocks begin <= b < end; begin <= end.
struct BlockRange {
    int32_t begin = 0, end = 0;
    int32_t size() const { return end - begin; }
};

// Blocks that `tokens` tokens fill or begin.
constexpr int64_t blocks_for(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }
constexpr int32_t round_down(int32_t position, int32_t unit = kPageTokens) { return position / unit * unit; }

// The part of the configuration on which extents depend.
struct Rules {
    int32_t sink = 0;
    int32_t recent = 0;
    int32_t window = 0;   // the widest sliding window; 0: the model has none
    int32_t longest = 0;  // tokens per sequence
    int32_t page = kPageTokens;  // tokens of a coded page

    explicit Rules(const CacheConfig& config);

    int32_t edge(int32_t position) const { return coded_edge(position, recent); }
    // What is encoded once `position` is there: whole pages.
    int32_t encoded(int32_t position) const { return int32_t(pages_for(edge(position))) * page; }
    int64_t pages_for(int64_t tokens) const { return (tokens + page - 1) / page; }
    int32_t blocks_a_page() const { return page / kPageTokens; }

    // Blocks that an extent holds. Exact blocks are those of the sinks and the recent ones. Coded ones are pages, counted
    // in pages.
    BlockRange coded(const Extent& e) const;
    BlockRange sinks(const Extent& e) const;
    BlockRange exact(const Extent& e) const;
    BlockRange windows(const Extent& e) const;

    // Pages that become due for encoding between two extents.
    BlockRange demoted(const Extent& from, const Extent& to) const;

    int32_t lowest_crop(const Extent& e) const;
    Extent appended(Extent e, int32_t tokens) const;
    Extent cropped(Extent e, int32_t length) const;
    Extent trimmed(Extent e) const;  // without what no query can want any more

    // Whether a trimmed extent can be the result of operations above (saved states may come from anywhere).
    bool possible(const Extent& e) const;
};

// Blocks that one sequence can ever hold, outside of steps.
struct MostBlocks {
    int64_t coded = 0, exact = 0, window = 0;
};
MostBlocks most_blocks(const Rules& rules);

}  // namespace crumb

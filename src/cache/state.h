// What is inside a Cache, shared by the files that implement it: cache.cpp (sequences), step.cpp, save.cpp.
#pragma once

#include <crumb/cache.h>

#include <mutex>
#include <vector>

#include "cache/extent.h"
#include "cache/pool.h"
#include "cache/prefix.h"
#include "cache/shape.h"

namespace crumb {

struct Sequence {
    Extent extent;
    Prefix prefix;
    Extent before;               // at the start of the last step, for a step that was abandoned and is cropped away
    std::vector<int32_t> announced;  // a prompt that is to come
    int64_t promised = 0;        // coded blocks it may come to hold (room.cpp)
    bool begun = true;           // it holds what it began with; false: a promise was given, and it may yet begin anew
    uint32_t source = kNoBlock;  // coded block that the last step encoded again, because some of its rows were aged

    // Block ids by position / 64, coded ones by position / tokens of a page, kNoBlock where there is none. Their size
    // never changes: views point to them.
    std::vector<uint32_t> coded, exact, window;
};

// What a step does in the blocks of a coded page of every layer, or in one block of sliding-window layers.
struct BlockWork {
    struct Rows {
        uint32_t block = kNoBlock;  // BF16 rows
        int32_t first_row = 0;      // rows [first_row, first_row + n_rows) come from tokens [first_token, ..) of the step
        int32_t n_rows = 0;
        uint32_t first_token = 0;
    };
    Rows rows[2];
    uint32_t coded = kNoBlock;  // where to encode the page, if it is due
    uint32_t kept = kNoBlock;   // the coded page that rows below `keep` are taken over from
    int32_t keep = 0;
};

// What decides which rows a layer's queries see, and how.
struct Sight {
    explicit Sight(const CacheLayer& layer)
        : window(layer.window), form(layer.coded() ? SlidingForm::pages : layer.form) {}
    int32_t window;  // 0: everything
    SlidingForm form;
    auto operator<=>(const Sight&) const = default;
};

struct Step {
    std::vector<uint32_t> tokens;          // by sequence, ascending in position
    std::vector<BlockWork> blocks;         // layers that are coded
    std::vector<BlockWork> window_blocks;  // sliding-window layers
    std::vector<AttentionPlan> plans;      // by distinct sight
};

struct Cache::State {
    State(CacheConfig config, CacheShape shape);

    const CacheConfig config;
    const Rules rules;
    Pool coded, exact, window;
    std::vector<Sequence> sequences;

    std::vector<Sight> sights;                     // distinct ones
    std::vector<size_t> plan_of;                   // by layer: index into `sights` and `step.plans`
    std::vector<std::vector<SequenceView>> views;  // by layer; empty for layers that do not store
    Step step;

    std::mutex counting;
    CacheCounters counters;

    Sequence& at(uint32_t sequence);
    const HeadTables& tables(int layer, int head) const;  // empty ones for layers without codes

    // Moves a sequence to another extent: blocks that only the old one has are released, those of the new one taken.
    void reshape(Sequence& sequence, const Extent& to);
    // What can stay of its first `own` tokens if those from `whole_window` on will be computed (reuse rule).
    int32_t kept(const Sequence& sequence, int32_t own, int32_t whole_window) const;
    // Gives the blocks that are complete and clean their names.
    void offer_blocks(Sequence& sequence);
    // Drops what no query can want any more.
    void trim(Sequence& sequence);
    // Tokens of the window of the next token that are known through their codes only.
    int32_t lost(const Extent& extent) const;
    // Forgets how to undo the last step.
    void settle(Sequence& sequence);
    void crop(Sequence& sequence, int32_t length);
    // Makes room for tokens of the step, and its work in their blocks and in those that become due.
    void append(Sequence& sequence, std::span<const uint32_t> tokens);
    // Writes the rows of the step's tokens into the blocks of `work`, BF16 or, in a layer of SlidingForm::q8, codes.
    EncodeCounts write_rows(const Pool& pool, int layer, int head, const BlockWork& work, const RowSource& k,
                            const RowSource& v) const;
    // Query rows of a sequence's tokens, after append(), in layers of this sight.
    void add_rows(std::vector<QueryRow>& rows, const Sight& sight, const Sequence& sequence, std::span<const Append> tokens,
                  bool causal) const;
};

}  // namespace crumb

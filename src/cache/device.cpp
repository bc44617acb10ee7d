// What a step asks of a device, as words in one piece of memory.
#include <crumb/error.h>

#include <algorithm>
#include <set>

#include "attention/cuda/plan.h"
#include "cache/state.h"

namespace crumb {
namespace {

// Rows of a tile for sequences with so many rows in the step, at most: tiles are as small as they can be without taking
// more of them than needed.
int rows_per_tile(int64_t longest) { return longest > 4 ? 8 : longest > 2 ? 4 : longest > 1 ? 2 : 1; }

// Pages that a step of a sequence makes due, unless a step before it was abandoned.
int pages_due(int tokens) { return tokens / kPageTokens + 1; }

template <class T>
size_t words_of(size_t n) {
    static_assert(sizeof(T) % 4 == 0);
    return n * (sizeof(T) / 4);
}

// Chunks' blocks change a layout, and with it a graph, every 4096 tokens only.
constexpr int kChunkBlockStep = 64;

void place(StepLayout& layout, size_t n_sights, bool has_windows) {
    const auto take = [&](size_t words) {
        const size_t at = layout.words;
        layout.words += (words + 3) / 4 * 4;
        return at;
    };
    for (size_t w = 0; w < n_sights; w++) {
        layout.rows.push_back(take(words_of<QueryRow>(size_t(layout.n_tiles) * size_t(layout.rows_per_tile))));
        layout.chunk_rows.push_back(take(words_of<QueryRow>(size_t(layout.n_chunks) * size_t(layout.rows_per_chunk))));
    }
    layout.stores = take(words_of<StoreRow>(size_t(layout.n_stores)));
    layout.jobs = take(words_of<EncodeBlock>(size_t(layout.n_jobs)));
    const size_t ids = size_t(layout.n_sequences) * layout.ids_stride;
    layout.coded_ids = take(ids);
    layout.exact_ids = take(ids);
    layout.window_stores = take(has_windows ? words_of<StoreRow>(size_t(layout.n_stores)) : 0);
    layout.window_ids = take(has_windows ? ids : 0);
}

template <class T>
std::span<T> array(std::span<uint32_t> words, size_t at, size_t n) {
    static_assert(alignof(T) == 4);
    return {reinterpret_cast<T*>(words.data() + at), n};
}

void write_stores(std::span<StoreRow> to, const std::vector<BlockWork>& blocks, std::span<const uint32_t> tokens) {
    size_t n = 0;
    for (const BlockWork& work : blocks) {
        for (const BlockWork::Rows& rows : work.rows) {
            for (int32_t i = 0; i < rows.n_rows; i++) {
                to[n++] = {tokens[rows.first_token + size_t(i)], rows.block, uint32_t(rows.first_row + i)};
            }
        }
    }
    std::ranges::fill(to.subspan(n), StoreRow{0, kNoBlock, 0});
}

// Calls use(rows) for the rows of one sequence after the other.
void for_each_sequence(std::span<const QueryRow> rows, auto use) {
    for (size_t i = 0, end = 0; i < rows.size(); i = end) {
        while (end < rows.size() && rows[end].sequence == rows[i].sequence) {
            end++;
        }
        use(rows.subspan(i, end - i));
    }
}

// Of the sequences that `takes(number of rows)` wants.
void write_tiles(std::span<QueryRow> to, std::span<const QueryRow> rows, size_t rows_per_tile, auto takes) {
    size_t n = 0;
    const auto pad = [&](size_t end) {
        for (; n < end; n++) {
            to[n] = QueryRow{.token = cuda::kNoToken};
        }
    };
    for_each_sequence(rows, [&](std::span<const QueryRow> some) {
        if (!takes(some.size())) {
            return;
        }
        std::ranges::copy(some, to.begin() + std::ptrdiff_t(n));
        n += some.size();
        pad((n + rows_per_tile - 1) / rows_per_tile * rows_per_tile);
    });
    pad(to.size());
}

bool is_chunk(const CacheConfig& config, size_t rows) { return config.chunk_rows > 0 && rows >= size_t(config.chunk_rows); }

// Entries of a chunk (prefill_plan.h): blocks that some rows read exactly and others through codes count twice.
int blocks_read(std::span<const QueryRow> rows) {
    int32_t end = 0, coded_most = 0, coded_least = rows[0].coded_end;
    for (const QueryRow& row : rows) {
        end = std::max(end, row.end);
        coded_most = std::max(coded_most, row.coded_end);
        coded_least = std::min(coded_least, row.coded_end);
    }
    return int(blocks_for(end) + blocks_for(coded_most - coded_least)) + 4;
}

}  // namespace

StepLayout largest_layout(const CacheConfig& config, int n_tokens, int n_sequences) {
    StepLayout layout;
    layout.n_sequences = config.n_sequences;
    layout.ids_stride = size_t(blocks_for(config.tokens_per_sequence));
    layout.n_stores = n_tokens;
    n_sequences = std::clamp(n_sequences, 1, n_tokens);
    layout.rows_per_tile = rows_per_tile(n_tokens - n_sequences + 1);
    layout.n_tiles = (n_tokens - n_sequences) / layout.rows_per_tile + n_sequences;
    layout.n_jobs = n_tokens / kPageTokens + n_sequences;
    for (int chunks = 1; config.chunk_rows > 0 && chunks <= std::min(n_sequences, n_tokens / config.chunk_rows); chunks++) {
        const int rows = n_tokens - (chunks - 1) * config.chunk_rows;  // of one, and all get room for as many
        if (chunks * rows > layout.n_chunks * layout.rows_per_chunk) {
            layout.n_chunks = chunks;
            layout.rows_per_chunk = rows;
        }
        layout.chunk_blocks = 2 * int(layout.ids_stride) + 4;
    }
    std::set<Sight> sights;
    for (const CacheLayer& layer : config.layers) {
        if (layer.stores) {
            sights.insert(Sight(layer));
        }
    }
    place(layout, sights.size(), std::ranges::any_of(config.layers, &CacheLayer::windowed));
    return layout;
}

StepLayout Cache::step_layout() const {
    const State& state = *state_;
    const Step& step = state.step;
    StepLayout layout;
    layout.n_sequences = state.config.n_sequences;
    layout.ids_stride = state.sequences[0].coded.size();
    layout.n_stores = int(step.tokens.size());
    const std::span<const QueryRow> rows = step.plans[0].rows();
    size_t longest = 0;
    for_each_sequence(rows, [&](auto some) {
        if (is_chunk(state.config, some.size())) {
            layout.n_chunks++;
            layout.rows_per_chunk = std::max(layout.rows_per_chunk, int(some.size()));
        } else {
            longest = std::max(longest, some.size());
        }
    });
    layout.rows_per_tile = rows_per_tile(int64_t(longest));
    int due = 0;
    for_each_sequence(rows, [&](auto some) {
        if (!is_chunk(state.config, some.size())) {
            layout.n_tiles += (int(some.size()) + layout.rows_per_tile - 1) / layout.rows_per_tile;
        }
        due += pages_due(int(some.size()));
    });
    for (const AttentionPlan& plan : step.plans) {
        for_each_sequence(plan.rows(), [&](auto some) {
            if (is_chunk(state.config, some.size())) {
                layout.chunk_blocks = std::max(layout.chunk_blocks, blocks_read(some));
            }
        });
    }
    layout.chunk_blocks = (layout.chunk_blocks + kChunkBlockStep - 1) / kChunkBlockStep * kChunkBlockStep;
    layout.encodes_first = std::ranges::none_of(step.blocks, [](const BlockWork& w) {
        return w.coded != kNoBlock && std::ranges::any_of(w.rows, [](const BlockWork::Rows& rows) { return rows.n_rows > 0; });
    });
    layout.n_jobs = std::max(due, int(std::ranges::count_if(step.blocks, [](const BlockWork& w) { return w.coded != kNoBlock; })));
    place(layout, step.plans.size(), state.rules.window > 0);
    return layout;
}

void Cache::write_step(const StepLayout& layout, std::span<uint32_t> words) const {
    const State& state = *state_;
    const Step& step = state.step;
    CRUMB_ASSERT(words.size() == layout.words && state.rules.page == kPageTokens);
    for (size_t w = 0; w < step.plans.size(); w++) {
        const auto many = [&](size_t n) { return is_chunk(state.config, n); };
        const auto few = [&](size_t n) { return !many(n); };
        write_tiles(array<QueryRow>(words, layout.rows[w], size_t(layout.n_tiles) * size_t(layout.rows_per_tile)),
                    step.plans[w].rows(), size_t(layout.rows_per_tile), few);
        write_tiles(array<QueryRow>(words, layout.chunk_rows[w], size_t(layout.n_chunks) * size_t(layout.rows_per_chunk)),
                    step.plans[w].rows(), size_t(layout.rows_per_chunk), many);
    }
    const auto n_stores = size_t(layout.n_stores), n_jobs = size_t(layout.n_jobs);
    write_stores(array<StoreRow>(words, layout.stores, n_stores), step.blocks, step.tokens);
    size_t n = 0;
    const auto jobs = array<EncodeBlock>(words, layout.jobs, n_jobs);
    for (const BlockWork& work : step.blocks) {
        if (work.coded != kNoBlock) {
            jobs[n++] = {work.rows[0].block, work.coded, work.keep, work.kept};
        }
    }
    std::ranges::fill(jobs.subspan(n), EncodeBlock{});
    const auto write_ids = [&](size_t at, std::vector<uint32_t> Sequence::* ids) {
        for (const Sequence& s : state.sequences) {
            std::ranges::copy(s.*ids, words.begin() + std::ptrdiff_t(at));
            at += layout.ids_stride;
        }
    };
    write_ids(layout.coded_ids, &Sequence::coded);
    write_ids(layout.exact_ids, &Sequence::exact);
    if (state.rules.window > 0) {
        write_stores(array<StoreRow>(words, layout.window_stores, n_stores), step.window_blocks, step.tokens);
        write_ids(layout.window_ids, &Sequence::window);
    }
}

size_t Cache::plan_index(int layer) const { return state_->plan_of[layer]; }

std::byte* Cache::coded_base(int layer) const {
    return state_->config.layers[layer].windowed() ? nullptr : state_->coded.base(layer);
}

std::byte* Cache::exact_base(int layer) const {
    return (state_->config.layers[layer].windowed() ? state_->window : state_->exact).base(layer);
}

}  // namespace crumb

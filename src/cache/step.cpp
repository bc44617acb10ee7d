// A step: tokens are appended, blocks that become old enough are encoded, queries get their plans.
//
// Work is divided by (block, KV head): who writes the rows of a block also encodes it, so no barrier stands between.
#include <crumb/error.h>

#include <algorithm>
#include <utility>

#include "cache/state.h"

namespace crumb {
namespace {

std::vector<int32_t> count_by_sequence(std::span<const Append> appends, size_t n_sequences) {
    std::vector<int32_t> counts(n_sequences);
    for (const Append& a : appends) {
        CRUMB_ASSERT(a.sequence < n_sequences);
        counts[a.sequence]++;
    }
    return counts;
}

// The block that the next token of a sequence goes to, if it has rows already, must belong to this sequence alone.
void make_private(Pool& pool, std::vector<uint32_t>& ids, int32_t length) {
    if (length % kPageTokens == 0) {
        return;
    }
    uint32_t& id = ids[length / kPageTokens];
    if (!pool.is_shared(id)) {
        return;
    }
    const uint32_t copy = pool.take();
    pool.copy(id, copy);
    pool.release(std::exchange(id, copy));
}

// Rows of positions [from, to) that lie in `block`; first_token belongs to `from`.
BlockWork rows_of(int32_t block, uint32_t id, int32_t from, int32_t to, uint32_t first_token) {
    const int32_t begin = std::max(block * kPageTokens, from), end = std::min((block + 1) * kPageTokens, to);
    if (begin >= end) {
        return {.block = id};
    }
    return {.block = id,
            .first_row = begin % kPageTokens,
            .n_rows = end - begin,
            .first_token = first_token + uint32_t(begin - from)};
}

void to_row(const RowSource& source, uint32_t token, int head, std::span<bf16> row) {
    const float* x = source.data + token * source.token_stride + size_t(head) * source.head_stride;
    std::ranges::transform(x, x + row.size(), row.begin(), [](float value) { return to_bf16(value); });
}

// The rows of a BF16 page, token by token, as encode_page() takes them.
struct PageRows {
    std::vector<bf16> k, v;
    PageRows(const PageFormat& format, const std::byte* page) {
        k.reserve(size_t(kPageTokens * format.k.dim));
        v.reserve(size_t(kPageTokens * format.v.dim));
        for (int t = 0; t < kPageTokens; t++) {
            for (int i = 0; i < format.k.dim; i++) {
                k.push_back(key_at(format, page, t, i));
            }
            for (int i = 0; i < format.v.dim; i++) {
                v.push_back(value_at(format, page, t, i));
            }
        }
    }
};

}  // namespace

// Exact and window blocks suffice for every step (extent.cpp), so coded blocks and lengths decide.
bool Cache::fits(std::span<const Append> appends) const {
    const State& state = *state_;
    const Rules& rules = state.rules;
    const std::vector<int32_t> counts = count_by_sequence(appends, state.sequences.size());
    size_t needed = 0;
    for (size_t i = 0; i < counts.size(); i++) {
        const Extent& now = state.sequences[i].extent;
        if (int64_t(now.length) + counts[i] > rules.longest) {
            return false;
        }
        needed += size_t(rules.demoted(now, rules.appended(now, counts[i])).size());
    }
    return needed <= state.coded.available();
}

void Cache::State::append(Sequence& s, std::span<const uint32_t> tokens) {
    const Extent from = s.extent, to = rules.appended(from, int32_t(tokens.size()));
    const auto first_token = uint32_t(tokens.data() - step.tokens.data());
    make_private(exact, s.exact, from.length);
    if (rules.window > 0) {
        make_private(window, s.window, from.length);
    }
    reshape(s, to);

    const BlockRange demoted = rules.demoted(from, to);
    const auto is_due = [&](int32_t b) { return demoted.begin <= b && b < demoted.end; };
    const int32_t aged_block = from.exact_begin / kPageTokens, aged_rows = from.exact_begin % kPageTokens;
    if (aged_rows > 0 && is_due(aged_block)) {
        s.source = std::exchange(s.coded[aged_block], coded.take());
    }

    const int32_t first = from.length / kPageTokens, end = int32_t(blocks_for(to.length));
    for (int32_t b = demoted.size() > 0 ? std::min(demoted.begin, first) : first; b < end; b++) {
        BlockWork work = rows_of(b, s.exact[b], from.length, to.length, first_token);
        if (is_due(b)) {
            work.coded = s.coded[b];
        }
        if (is_due(b) && b == aged_block && aged_rows > 0) {
            work.kept = s.source;
            work.keep = aged_rows;
        }
        if (is_due(b) || work.n_rows > 0) {
            step.blocks.push_back(work);
        }
    }
    counters.demoted_blocks += uint64_t(demoted.size());
    for (int32_t b = first; b < end && rules.window > 0; b++) {
        step.window_blocks.push_back(rows_of(b, s.window[b], from.length, to.length, first_token));
    }
}

void Cache::State::add_rows(std::vector<QueryRow>& rows, int32_t width, const Sequence& s,
                            std::span<const Append> tokens, bool causal) const {
    const Extent& now = s.extent;
    int32_t position = s.before.length;
    for (const Append& t : tokens) {
        const int32_t newest = config.prefill == PrefillRule::exact ? s.before.length : position;
        QueryRow row{.sequence = t.sequence, .token = t.token, .position = position};
        row.begin = width == 0 ? 0 : std::max(0, position + 1 - width);
        row.coded_end = width == 0 ? std::max(rules.edge(newest), now.exact_begin) : 0;
        row.end = causal ? position + 1 : now.length;
        if (t.attends) {
            rows.push_back(row);
        }
        position++;
    }
}

bool Cache::begin(std::span<const Append> appends, bool causal) {
    State& state = *state_;
    if (appends.size() > size_t(state.config.max_step_tokens) || !fits(appends)) {
        return false;
    }
    for (Sequence& s : state.sequences) {
        state.reshape(s, state.rules.trimmed(s.extent));
        state.settle(s);
    }
    std::vector<Append> tokens(appends.begin(), appends.end());
    std::ranges::stable_sort(tokens, {}, &Append::sequence);
    Step& step = state.step;
    step.tokens.clear();
    step.blocks.clear();
    step.window_blocks.clear();
    for (const Append& t : tokens) {
        step.tokens.push_back(t.token);
    }

    std::vector<std::vector<QueryRow>> rows(state.windows.size());
    for (size_t i = 0, end = 0; i < tokens.size(); i = end) {
        while (end < tokens.size() && tokens[end].sequence == tokens[i].sequence) {
            end++;
        }
        Sequence& s = state.sequences[tokens[i].sequence];
        state.append(s, std::span(step.tokens).subspan(i, end - i));
        for (size_t w = 0; w < rows.size(); w++) {
            state.add_rows(rows[w], state.windows[w], s, std::span(tokens).subspan(i, end - i), causal);
        }
    }
    for (size_t w = 0; w < rows.size(); w++) {
        step.plans[w] = AttentionPlan(std::move(rows[w]), state.config.sink);
    }
    return true;
}

void Cache::store(int layer, RowSource k, RowSource v, int thread, int n_threads) {
    State& state = *state_;
    const CacheLayer& shape = state.config.layers[layer];
    CRUMB_ASSERT(shape.stores);
    const bool windowed = is_window(shape);
    const Pool& pool = windowed ? state.window : state.exact;
    const std::vector<BlockWork>& blocks = windowed ? state.step.window_blocks : state.step.blocks;
    const PageFormat& format = pool.shape().slabs[layer].format;
    std::vector<bf16> key(shape.dim_k), value(shape.dim_v);
    EncodeCounts encoded;
    for (size_t unit = thread; unit < blocks.size() * shape.n_head_kv; unit += n_threads) {
        const BlockWork& work = blocks[unit / shape.n_head_kv];
        const int head = int(unit % shape.n_head_kv);
        std::byte* page = pool.page(layer, work.block, head);
        for (int i = 0; i < work.n_rows; i++) {
            const uint32_t token = state.step.tokens[work.first_token + i];
            to_row(k, token, head, key);
            to_row(v, token, head, value);
            set_key(format, page, work.first_row + i, key);
            set_value(format, page, work.first_row + i, value);
        }
        if (work.coded == kNoBlock) {
            continue;
        }
        const PageRows rows(format, page);
        const std::byte* kept = work.kept == kNoBlock ? nullptr : state.coded.page(layer, work.kept, head);
        encoded += encode_page(state.config.recipe, state.coded.shape().slabs[layer].format, state.tables(layer, head),
                               rows.k, rows.v, state.coded.page(layer, work.coded, head), work.keep, kept);
    }
    if (encoded.rows == 0) {
        return;
    }
    const std::lock_guard lock(state.counting);
    state.counters.encoded += encoded;
}

}  // namespace crumb

// A step: tokens are appended, blocks that become old enough are encoded, queries get their plans.
//
// Work is divided by (coded page, KV head): who writes the rows of a page's blocks also encodes it, so no barrier stands
// between. A recipe whose keys are scaled over all heads is divided by page alone.
#include <crumb/error.h>

#include <algorithm>
#include <cmath>
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

// The block that the next token of a sequence goes to, if it has rows already, must belong to this sequence alone, and
// nobody may find it under the name of what it held. The old one goes first: then a step needs no more blocks than there
// are, and if it is the very one that is evicted for the copy, its rows are still there.
void make_private(Pool& pool, std::vector<uint32_t>& ids, int32_t length) {
    if (length % kPageTokens == 0) {
        return;
    }
    uint32_t& id = ids[length / kPageTokens];
    if (!pool.is_shared(id) && !pool.is_named(id)) {
        return;
    }
    pool.release(id);
    const uint32_t copy = pool.take();
    if (copy != id) {
        pool.copy(id, copy);
    }
    id = copy;
}

// Rows of positions [from, to) that lie in `block`; first_token belongs to `from`.
BlockWork::Rows rows_of(int32_t block, uint32_t id, int32_t from, int32_t to, uint32_t first_token) {
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

// The rows of a page, token by token, as encode_page() takes them; 0 where a block has no BF16 rows any more.
struct PageRows {
    std::vector<bf16> k, v;
    PageRows(const PageFormat& format, const Pool& pool, int layer, int head, std::span<const BlockWork::Rows> blocks) {
        for (const BlockWork::Rows& rows : blocks) {
            const std::byte* page = rows.block == kNoBlock ? nullptr : pool.page(layer, rows.block, head);
            for (int t = 0; t < kPageTokens; t++) {
                for (int i = 0; i < format.k.dim; i++) {
                    k.push_back(page ? key_at(format, page, t, i) : bf16{});
                }
                for (int i = 0; i < format.v.dim; i++) {
                    v.push_back(page ? value_at(format, page, t, i) : bf16{});
                }
            }
        }
    }
};

// Lengths of the centred keys of all heads together.
std::vector<float> layer_norms(const std::vector<PageRows>& heads, std::span<const HeadTables> tables, int tokens) {
    std::vector<float> norms(tokens);
    for (size_t head = 0; head < heads.size(); head++) {
        add_key_energy(tables[head].k, heads[head].k, norms);
    }
    std::ranges::transform(norms, norms.begin(), [](float energy) { return std::sqrt(energy); });
    return norms;
}

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
    s.begun = true;
    const Extent from = s.extent, to = rules.appended(from, int32_t(tokens.size()));
    const auto first_token = uint32_t(tokens.data() - step.tokens.data());
    make_private(exact, s.exact, from.length);
    if (rules.window > 0) {
        make_private(window, s.window, from.length);
    }
    reshape(s, to);

    const BlockRange demoted = rules.demoted(from, to);
    const auto is_due = [&](int32_t p) { return demoted.begin <= p && p < demoted.end; };
    const int32_t aged_page = from.exact_begin / rules.page, aged_rows = from.exact_begin % rules.page;
    if (aged_rows > 0 && is_due(aged_page)) {
        s.source = std::exchange(s.coded[aged_page], coded.take());
    }

    const int32_t first = from.length / rules.page, end = int32_t(rules.pages_for(to.length));
    for (int32_t p = demoted.size() > 0 ? std::min(demoted.begin, first) : first; p < end; p++) {
        BlockWork work;
        bool writes = false;
        for (int32_t i = 0; i < rules.blocks_a_page(); i++) {
            const int32_t b = p * rules.blocks_a_page() + i;
            if (b < blocks_for(to.length)) {
                work.rows[i] = rows_of(b, s.exact[b], from.length, to.length, first_token);
                writes |= work.rows[i].n_rows > 0;
            }
        }
        if (is_due(p)) {
            work.coded = s.coded[p];
        }
        if (is_due(p) && p == aged_page && aged_rows > 0) {
            work.kept = s.source;
            work.keep = aged_rows;
        }
        if (is_due(p) || writes) {
            step.blocks.push_back(work);
        }
    }
    counters.demoted_blocks += uint64_t(demoted.size());
    for (int32_t b = from.length / kPageTokens; b < blocks_for(to.length) && rules.window > 0; b++) {
        step.window_blocks.push_back({.rows = {rows_of(b, s.window[b], from.length, to.length, first_token)}});
    }
}

void Cache::State::add_rows(std::vector<QueryRow>& rows, const Sight& sight, const Sequence& s,
                            std::span<const Append> tokens, bool causal) const {
    const Extent& now = s.extent;
    int32_t position = s.before.length;
    for (const Append& t : tokens) {
        const int32_t newest = config.prefill == PrefillRule::exact ? s.before.length : position;
        QueryRow row{.sequence = t.sequence, .token = t.token, .position = position};
        row.begin = sight.window == 0 ? 0 : std::max(0, position + 1 - sight.window);
        row.end = causal ? position + 1 : now.length;
        row.coded_end = sight.form == SlidingForm::pages ? std::max(rules.edge(newest), now.exact_begin)
                        : sight.form == SlidingForm::q8  ? row.end
                                                         : 0;
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
        state.offer_blocks(s);
        state.trim(s);
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

    std::vector<std::vector<QueryRow>> rows(state.sights.size());
    for (size_t i = 0, end = 0; i < tokens.size(); i = end) {
        while (end < tokens.size() && tokens[end].sequence == tokens[i].sequence) {
            end++;
        }
        Sequence& s = state.sequences[tokens[i].sequence];
        state.append(s, std::span(step.tokens).subspan(i, end - i));
        for (const Append& t : std::span(tokens).subspan(i, end - i)) {
            s.prefix.add(causal ? t.id : -1);
        }
        for (size_t w = 0; w < rows.size(); w++) {
            state.add_rows(rows[w], state.sights[w], s, std::span(tokens).subspan(i, end - i), causal);
        }
    }
    for (size_t w = 0; w < rows.size(); w++) {
        const bool no_sink = state.sights[w].form == SlidingForm::q8;  // first tokens have codes like all others
        step.plans[w] = AttentionPlan(std::move(rows[w]), no_sink ? 0 : state.config.sink);
    }
    return true;
}

EncodeCounts Cache::State::write_rows(const Pool& pool, int layer, int head, const BlockWork& work, const RowSource& k,
                                      const RowSource& v) const {
    const PageFormat& format = pool.shape().slabs[layer].format;
    const auto dim_k = size_t(format.k.dim), dim_v = size_t(format.v.dim);
    EncodeCounts encoded;
    std::vector<bf16> keys, values;
    for (const BlockWork::Rows& rows : work.rows) {
        keys.resize(size_t(rows.n_rows) * dim_k);
        values.resize(size_t(rows.n_rows) * dim_v);
        for (int i = 0; i < rows.n_rows; i++) {
            const uint32_t token = step.tokens[rows.first_token + i];
            to_row(k, token, head, std::span(keys).subspan(size_t(i) * dim_k, dim_k));
            to_row(v, token, head, std::span(values).subspan(size_t(i) * dim_v, dim_v));
        }
        if (rows.n_rows == 0) {
            continue;
        }
        std::byte* page = pool.page(layer, rows.block, head);
        if (format.coded()) {
            encoded += encode_rows(sliding_recipe(), format, tables(layer, head), keys, values, rows.first_row, page);
            continue;
        }
        for (int i = 0; i < rows.n_rows; i++) {
            set_key(format, page, rows.first_row + i, std::span(keys).subspan(size_t(i) * dim_k, dim_k));
            set_value(format, page, rows.first_row + i, std::span(values).subspan(size_t(i) * dim_v, dim_v));
        }
    }
    return encoded;
}

void Cache::store(int layer, RowSource k, RowSource v, int thread, int n_threads) {
    State& state = *state_;
    const CacheLayer& shape = state.config.layers[layer];
    CRUMB_ASSERT(shape.stores);
    const bool windowed = shape.windowed();
    const Pool& pool = windowed ? state.window : state.exact;
    const std::vector<BlockWork>& blocks = windowed ? state.step.window_blocks : state.step.blocks;
    const PageFormat& format = pool.shape().slabs[layer].format;
    const Recipe& recipe = state.config.recipe;
    const bool together = !windowed && recipe.k.token_gain == TokenGain::layer_norm;
    const int heads = shape.n_head_kv, heads_a_unit = together ? heads : 1;
    EncodeCounts encoded;
    for (size_t unit = thread; unit < blocks.size() * heads / heads_a_unit; unit += n_threads) {
        const BlockWork& work = blocks[unit * heads_a_unit / heads];
        const int first = int(unit * heads_a_unit % heads);
        for (int head = first; head < first + heads_a_unit; head++) {
            encoded += state.write_rows(pool, layer, head, work, k, v);
        }
        if (work.coded == kNoBlock) {
            continue;
        }
        const PageFormat& coded = state.coded.shape().slabs[layer].format;
        std::vector<PageRows> rows;
        for (int head = first; head < first + heads_a_unit; head++) {
            rows.emplace_back(format, pool, layer, head, std::span(work.rows).first(coded.tokens / kPageTokens));
        }
        const std::vector<float> norms =
            together ? layer_norms(rows, state.config.tables[layer], coded.tokens) : std::vector<float>{};
        for (int head = first; head < first + heads_a_unit; head++) {
            const PageRows& page = rows[head - first];
            const std::byte* kept = work.kept == kNoBlock ? nullptr : state.coded.page(layer, work.kept, head);
            encoded += encode_page(recipe, coded, state.tables(layer, head), page.k, page.v,
                                   state.coded.page(layer, work.coded, head), work.keep, kept,
                                   together ? norms.data() : nullptr);
        }
    }
    if (encoded.rows == 0) {
        return;
    }
    const std::lock_guard lock(state.counting);
    state.counters.encoded += encoded;
}

}  // namespace crumb

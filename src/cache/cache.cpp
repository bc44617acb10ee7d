// Sequences: what crop and fork do to extents and tables.
#include <crumb/error.h>

#include <algorithm>
#include <utility>

#include "cache/state.h"

namespace crumb {
namespace {

// Calls use(block) for the blocks of `range` that are not in `other`.
void for_each_outside(BlockRange range, BlockRange other, auto use) {
    for (int32_t b = range.begin; b < std::min(range.end, other.begin); b++) {
        use(b);
    }
    for (int32_t b = std::max(range.begin, other.end); b < range.end; b++) {
        use(b);
    }
}

// The last block goes first, so of blocks that are kept those are evicted first on which no others follow.
void move(Pool& pool, std::vector<uint32_t>& ids, BlockRange from, BlockRange to) {
    std::vector<int32_t> released;
    for_each_outside(from, to, [&](int32_t b) { released.push_back(b); });
    std::ranges::reverse(released);
    for (const int32_t b : released) {
        pool.release(std::exchange(ids[b], kNoBlock));
    }
    for_each_outside(to, from, [&](int32_t b) {
        CRUMB_ASSERT(ids[b] == kNoBlock);
        ids[b] = pool.take();
    });
}

void share(Pool& pool, const std::vector<uint32_t>& from, std::vector<uint32_t>& to) {
    for (size_t b = 0; b < from.size(); b++) {
        to[b] = from[b];
        if (to[b] != kNoBlock) {
            pool.hold(to[b]);
        }
    }
}

}  // namespace

Cache::State::State(CacheConfig c, CacheShape shape)
    : config(std::move(c)),
      rules(config),
      coded(std::move(shape.coded), config.devices),
      exact(std::move(shape.exact), config.devices),
      window(std::move(shape.window), config.devices) {
    CRUMB_ASSERT(config.devices.empty() || config.devices.size() == config.layers.size());
    CRUMB_ASSERT(!config.recipe.coded() || config.tables.size() == config.layers.size());
    const std::vector<uint32_t> none(blocks_for(config.tokens_per_sequence), kNoBlock);
    sequences.resize(config.n_sequences);
    for (Sequence& sequence : sequences) {
        sequence.coded = sequence.exact = sequence.window = none;
    }

    const size_t n_layer = config.layers.size();
    plan_of.resize(n_layer);
    views.resize(n_layer);
    for (size_t i = 0; i < n_layer; i++) {
        const CacheLayer& layer = config.layers[i];
        if (!layer.stores) {
            continue;
        }
        CRUMB_ASSERT(!config.formats[i].coded() || int(config.tables.at(i).size()) == layer.n_head_kv);
        const Sight sight(layer);
        plan_of[i] = size_t(std::ranges::find(sights, sight) - sights.begin());
        if (plan_of[i] == sights.size()) {
            sights.push_back(sight);
        }
        const auto table = [i](const Pool& pool, const std::vector<uint32_t>& ids) {
            return BlockTable{pool.base(int(i)), pool.shape().slabs[i].stride(), ids};
        };
        for (const Sequence& s : sequences) {
            const BlockTable rows = table(window, s.window);
            views[i].push_back(layer.coded()       ? SequenceView{table(coded, s.coded), table(exact, s.exact)}
                               : layer.has_codes() ? SequenceView{rows, {}}
                                                   : SequenceView{{}, rows});
        }
    }
    step.plans.resize(sights.size());
}

Sequence& Cache::State::at(uint32_t sequence) {
    CRUMB_ASSERT(sequence < sequences.size());
    return sequences[sequence];
}

const HeadTables& Cache::State::tables(int layer, int head) const {
    static const HeadTables none;
    return config.tables.empty() || config.tables[layer].empty() ? none : config.tables[layer][head];
}

void Cache::State::reshape(Sequence& s, const Extent& to) {
    const Extent from = std::exchange(s.extent, to);
    move(coded, s.coded, rules.coded(from), rules.coded(to));
    move(exact, s.exact, rules.sinks(from), rules.sinks(to));
    move(exact, s.exact, rules.exact(from), rules.exact(to));
    move(window, s.window, rules.windows(from), rules.windows(to));
}

int32_t Cache::State::lost(const Extent& e) const {
    return std::max(0, std::min(e.exact_begin, e.length) - std::max(rules.edge(e.length), rules.sink));
}

void Cache::State::settle(Sequence& s) {
    if (s.source != kNoBlock) {
        coded.release(std::exchange(s.source, kNoBlock));
    }
    s.before = s.extent;
}

// A step that is cropped away entirely may have been abandoned before its blocks were encoded, so their codes go too:
// the exact rows are still there, and encoding them again gives the same bytes.
void Cache::State::crop(Sequence& s, int32_t length) {
    Extent now = s.extent;
    if (length >= now.length) {
        return;
    }
    if (length <= s.before.length) {
        now.coded_end = std::min(now.coded_end, s.before.coded_end);
        if (s.source != kNoBlock) {
            std::swap(s.coded[now.exact_begin / rules.page], s.source);
        }
    }
    const Extent next = rules.cropped(now, length);
    // Tokens that enter the window again without their BF16 rows.
    const int32_t aged_begin = std::max(rules.edge(length), rules.sink);
    const int32_t aged_end = std::min(next.exact_begin, rules.edge(s.extent.length));
    counters.aged_early_tokens += uint64_t(std::max(0, aged_end - aged_begin));
    reshape(s, next);
    settle(s);
    s.prefix.crop(length, rules.page);
    if (lost(next) > 0) {
        s.prefix.clean = std::min(s.prefix.clean, length);
    }
    // A block of codes that the crop went through has BF16 rows again: later tokens fill the upper ones, nothing reads
    // the lower ones, but they must not be what somebody else left there.
    const int32_t block = next.exact_begin / kPageTokens;
    if (next.exact_begin % kPageTokens != 0 && block < now.exact_begin / kPageTokens) {
        exact.clear(s.exact[block]);
    }
}

Cache::Cache(CacheConfig config) {
    CacheShape shape = shape_of(config);
    state_ = std::make_unique<State>(std::move(config), std::move(shape));
}
Cache::~Cache() = default;

const CacheConfig& Cache::config() const { return state_->config; }

CacheBytes Cache::bytes() const {
    CacheBytes bytes = cache_bytes(state_->config);
    bytes.coded = state_->coded.allocated();
    bytes.exact = state_->exact.allocated();
    bytes.window = state_->window.allocated();
    return bytes;
}

CacheCounters Cache::counters() const {
    CacheCounters counters = state_->counters;
    counters.shared_blocks = state_->coded.shared();
    counters.blocks_in_use = state_->coded.in_use();
    counters.blocks_total = counters.blocks_in_use + state_->coded.available();
    counters.exact_blocks_in_use = state_->exact.in_use();
    counters.window_blocks_in_use = state_->window.in_use();
    for (const Pool* pool : {&state_->coded, &state_->exact, &state_->window}) {
        counters.bytes_in_use += pool->in_use() * pool->shape().block_bytes();
    }
    counters.host_blocks_in_use = state_->coded.on_host();
    counters.kept_blocks = state_->coded.kept();
    counters.evicted_blocks = state_->coded.evicted();
    return counters;
}

int32_t Cache::length(uint32_t sequence) const { return state_->at(sequence).extent.length; }

SequenceStatus Cache::status(uint32_t sequence) const {
    State& state = *state_;
    const Sequence& s = state.at(sequence);
    const Rules& rules = state.rules;
    const Extent& e = s.extent;
    SequenceStatus status{.length = e.length,
                          .sinks = rules.sinks(e).size(),
                          .coded = rules.coded(e).size(),
                          .recent = rules.exact(e).size(),
                          .window = rules.windows(e).size()};
    status.shared = std::ranges::count_if(s.coded, [&](uint32_t id) { return id != kNoBlock && state.coded.is_shared(id); });
    status.bytes = size_t(status.coded) * state.coded.shape().block_bytes() +
                   size_t(status.sinks + status.recent) * state.exact.shape().block_bytes() +
                   size_t(status.window) * state.window.shape().block_bytes();
    for (const CacheLayer& layer : state.config.layers) {
        const int32_t tokens = layer.window > 0 ? std::min(e.length, layer.window) : e.length;
        status.bytes_at_16_bit += layer.stores ? size_t(tokens) * size_t(2 * layer.n_head_kv * (layer.dim_k + layer.dim_v)) : 0;
    }
    return status;
}

std::span<const int32_t> Cache::ids(uint32_t sequence) const { return state_->at(sequence).prefix.ids; }

int32_t Cache::lowest_crop(uint32_t sequence) const { return state_->rules.lowest_crop(state_->at(sequence).extent); }

bool Cache::crop(uint32_t sequence, int32_t length) {
    CRUMB_ASSERT(length >= 0);
    if (length != 0 && length < lowest_crop(sequence)) {
        return false;
    }
    state_->crop(state_->at(sequence), length);
    return true;
}

// All blocks are shared, the partial ones as well: who writes to a shared block first gets a copy of it (step.cpp).
bool Cache::fork(uint32_t from, uint32_t to, int32_t length) {
    if (from == to) {
        return crop(from, length);
    }
    CRUMB_ASSERT(length >= 0);
    if (length != 0 && length < lowest_crop(from)) {
        return false;
    }
    State& state = *state_;
    const Sequence& source = state.at(from);
    Sequence& copy = state.at(to);
    state.crop(copy, 0);
    share(state.coded, source.coded, copy.coded);
    share(state.exact, source.exact, copy.exact);
    share(state.window, source.window, copy.window);
    copy.extent = copy.before = source.extent;
    copy.prefix = source.prefix;
    state.crop(copy, length);
    return true;
}

const AttentionPlan& Cache::plan(int layer) const {
    CRUMB_ASSERT(state_->config.layers[layer].stores);
    return state_->step.plans[state_->plan_of[layer]];
}

std::span<const SequenceView> Cache::views(int layer) const {
    CRUMB_ASSERT(state_->config.layers[layer].stores);
    return state_->views[layer];
}

}  // namespace crumb

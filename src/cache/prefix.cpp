#include "cache/prefix.h"

#include <crumb/error.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "cache/state.h"

namespace crumb {
namespace {

constexpr size_t kMostStops = 8;

uint64_t secret_seed() {
    static const uint64_t seed = [] {
        std::random_device device;
        return uint64_t(device()) << 32 | device();
    }();
    return seed;
}

BlockName hash(const void* data, size_t bytes) {
    const XXH128_hash_t h = XXH3_128bits_withSeed(data, bytes, secret_seed());
    return {h.low64, h.high64};
}

// Continues `names` until there are n of them.
void extend(std::vector<BlockName>& names, std::span<const int32_t> ids, uint64_t salt, size_t n) {
    while (names.size() < n) {
        struct {
            BlockName before;
            int32_t ids[kPageTokens];
        } content{names.empty() ? hash(&salt, sizeof salt) : names.back(), {}};
        std::memcpy(content.ids, ids.data() + names.size() * kPageTokens, sizeof content.ids);
        names.push_back(hash(&content, sizeof content));
    }
}

// Offers a block under its name. If there is one already that holds the same, the sequence takes that one.
void offer(Pool& pool, uint32_t& id, const BlockName& name) {
    if (id == kNoBlock || pool.is_named(id)) {
        return;
    }
    const uint32_t other = pool.find(name);
    if (other == kNoBlock) {
        pool.name(id, name);
    } else if (pool.equal(id, other)) {
        pool.release(std::exchange(id, pool.hold(other)));
    }
}

size_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
    return size_t(std::ranges::mismatch(a, b).in1 - a.begin());
}

// The last stop that a text shares with a prompt, of which at least one token is to be computed.
int32_t parting(std::span<const int32_t> text, std::span<const int32_t> prompt) {
    return round_down(std::min(int32_t(common_prefix(text, prompt)), int32_t(prompt.size()) - 1));
}

void remember(std::vector<int32_t>& stops, int32_t stop) {
    if (stop <= 0) {
        return;
    }
    std::erase(stops, stop);
    stops.push_back(stop);
    if (stops.size() > kMostStops) {
        stops.erase(stops.begin());
    }
}

bool has_all(const Pool& pool, std::span<const BlockName> names, BlockRange range) {
    for (int32_t b = range.begin; b < range.end; b++) {
        if (pool.find(names[b]) == kNoBlock) {
            return false;
        }
    }
    return true;
}

// Names of a text, by block and by coded page.
struct Names {
    std::vector<BlockName> blocks, pages;
};

bool has_all(const Cache::State& state, const Names& text, const Extent& e) {
    const Rules& rules = state.rules;
    const std::span<const BlockName> names = text.blocks;
    return has_all(state.coded, text.pages, rules.coded(e)) && has_all(state.exact, names, rules.sinks(e)) &&
           has_all(state.exact, names, rules.exact(e)) && has_all(state.window, names, rules.windows(e));
}

// The longest start of at most `longest` tokens that can be made of named blocks. Not aged: with everything that a
// sequence which was computed up to there has. Aged: without the exact rows of its window.
Extent longest_start(const Cache::State& state, const Names& names, int32_t longest, bool aged) {
    const Rules& rules = state.rules;
    if (aged && rules.window > 0) {
        return {};
    }
    const int32_t unit = aged ? rules.page : kPageTokens;
    for (int32_t length = round_down(longest, unit); length > 0; length -= unit) {
        Extent e = rules.trimmed(rules.appended({}, length));
        if (aged) {
            e.coded_end = e.exact_begin = length;
        }
        if (rules.possible(e) && has_all(state, names, e)) {
            return e;
        }
    }
    return {};
}

void take_over(Pool& pool, std::vector<uint32_t>& ids, std::span<const BlockName> names, BlockRange range) {
    for (int32_t b = range.begin; b < range.end; b++) {
        ids[b] = pool.find(names[b]);
    }
}

void hold(Pool& pool, std::span<const BlockName> names, BlockRange range) {
    for (int32_t b = range.begin; b < range.end; b++) {
        pool.hold(pool.find(names[b]));
    }
}

}  // namespace

void Prefix::add(int32_t id) {
    if (id < 0) {
        clean = std::min(clean, int32_t(ids.size()));
    }
    ids.push_back(id);
}

void Prefix::crop(int32_t length, int32_t page_tokens) {
    ids.resize(length);
    const int32_t whole = length / kPageTokens;
    names.resize(std::min<size_t>(names.size(), whole));
    named_rows = std::min(named_rows, whole);
    named_pages = std::min(named_pages, whole * kPageTokens / page_tokens);
    if (length <= clean) {
        clean = kAllClean;
    }
    if (length == 0) {
        salt.reset();
        stops.clear();
        prompt.clear();
    }
}

std::span<const BlockName> Prefix::first_names(int32_t n) {
    extend(names, ids, *salt, size_t(n));
    return std::span(names).first(size_t(n));
}

std::vector<BlockName> page_names(std::span<const BlockName> blocks, int32_t blocks_a_page) {
    std::vector<BlockName> names;
    for (size_t last = size_t(blocks_a_page); last <= blocks.size(); last += size_t(blocks_a_page)) {
        names.push_back(blocks[last - 1]);
    }
    return names;
}

std::vector<BlockName> block_names(std::span<const int32_t> ids, uint64_t salt) {
    std::vector<BlockName> names;
    extend(names, ids, salt, ids.size() / kPageTokens);
    return names;
}

void Cache::State::offer_blocks(Sequence& s) {
    Prefix& p = s.prefix;
    if (!p.salt) {
        return;
    }
    const int32_t whole = std::min(s.extent.length, p.clean) / kPageTokens;
    const int32_t pages = std::min(whole / rules.blocks_a_page(), s.extent.coded_end / rules.page);
    const std::span<const BlockName> names = p.first_names(whole);
    for (; p.named_rows < whole; p.named_rows++) {
        offer(exact, s.exact[p.named_rows], names[p.named_rows]);
        offer(window, s.window[p.named_rows], names[p.named_rows]);
    }
    for (const std::vector<BlockName> by_page = page_names(names, rules.blocks_a_page()); p.named_pages < pages;
         p.named_pages++) {
        offer(coded, s.coded[p.named_pages], by_page[p.named_pages]);
    }
}

void Cache::State::trim(Sequence& s) {
    const Extent to = rules.trimmed(s.extent);
    const auto forget = [&](Pool& pool, const std::vector<uint32_t>& ids, BlockRange now, BlockRange then, auto begin) {
        for (int32_t b = now.begin; b < std::min(now.end, then.begin); b++) {
            if (!pool.is_shared(ids[b]) && !s.prefix.keeps(b, begin)) {
                pool.forget(ids[b]);
            }
        }
    };
    const auto at_stop = [&](int32_t stop) { return rules.trimmed(rules.appended({}, stop)); };
    forget(exact, s.exact, rules.exact(s.extent), rules.exact(to),
           [&](int32_t stop) { return rules.exact(at_stop(stop)).begin; });
    forget(window, s.window, rules.windows(s.extent), rules.windows(to),
           [&](int32_t stop) { return rules.windows(at_stop(stop)).begin; });
    reshape(s, to);
}

void Cache::announce(uint32_t sequence, std::span<const int32_t> ids) {
    state_->at(sequence).announced.assign(ids.begin(), ids.end());
    for (Sequence& s : state_->sequences) {
        if (s.prefix.salt && &s != &state_->at(sequence)) {
            remember(s.prefix.stops, parting(s.prefix.prompt, ids));
        }
    }
}

int32_t Cache::State::kept(const Sequence& s, int32_t own, int32_t whole_window) const {
    if (own < s.extent.length && lost(rules.cropped(s.extent, own)) > 0) {
        own = config.reuse == ReuseRule::codes ? std::min(own, std::max(0, whole_window)) : 0;
    }
    return own < rules.lowest_crop(s.extent) ? 0 : own;
}

int32_t Cache::keep(uint32_t sequence, int32_t own, int32_t n_tokens) const {
    return state_->kept(state_->at(sequence), own, n_tokens - state_->rules.recent);
}

int32_t Cache::reuse(uint32_t sequence, std::span<const int32_t> ids, int32_t own, uint64_t salt, int32_t common) {
    State& state = *state_;
    const Rules& rules = state.rules;
    for (Sequence& s : state.sequences) {
        state.offer_blocks(s);
    }
    Sequence& s = state.at(sequence);
    const int32_t most = std::min(int32_t(ids.size()), rules.longest) - 1;
    const int32_t whole_window = int32_t(ids.size()) - rules.recent;  // a start up to here leaves a window to compute
    if (most <= 0) {
        state.crop(s, 0);
        return 0;
    }
    own = state.kept(s, std::min({own, most, int32_t(common_prefix(ids, s.prefix.ids))}), whole_window);

    Names names{block_names(ids.first(size_t(most)), salt), {}};
    names.pages = page_names(names.blocks, rules.blocks_a_page());
    const Extent clean = longest_start(state, names, most, false);
    const Extent aged = longest_start(state, names, std::min(most, whole_window), true);
    Extent best = clean;
    if (state.config.reuse == ReuseRule::codes && aged.length > clean.length) {
        best = aged;
    }
    std::vector<int32_t> stops = std::move(s.prefix.stops);
    remember(stops, round_down(most));
    remember(stops, round_down(std::min(common, most)));
    if (aged.length > clean.length) {
        remember(stops, aged.length);  // two texts part here, and a third may
    }

    if (best.length <= own) {
        state.crop(s, own);
    } else {
        hold(state.coded, names.pages, rules.coded(best));
        hold(state.exact, names.blocks, rules.sinks(best));
        hold(state.exact, names.blocks, rules.exact(best));
        hold(state.window, names.blocks, rules.windows(best));
        state.crop(s, 0);
        take_over(state.coded, s.coded, names.pages, rules.coded(best));
        take_over(state.exact, s.exact, names.blocks, rules.sinks(best));
        take_over(state.exact, s.exact, names.blocks, rules.exact(best));
        take_over(state.window, s.window, names.blocks, rules.windows(best));
        s.extent = best;
        s.prefix.ids.assign(ids.begin(), ids.begin() + best.length);
        s.prefix.clean = best == clean ? kAllClean : best.length;
        state.settle(s);
        state.counters.found_tokens += uint64_t(best.length - own);
        state.counters.aged_early_tokens +=
            best == clean ? 0 : uint64_t(best.length - std::max(rules.edge(best.length), rules.sink));
    }
    if (s.prefix.salt.value_or(salt) != salt) {
        s.prefix.clean = 0;  // what it began with was computed under another salt
    }
    for (const Sequence& other : state.sequences) {
        if (&other != &s) {
            remember(stops, parting(ids, other.announced));
        }
    }
    s.begun = true;
    s.prefix.salt = salt;
    s.prefix.stops = std::move(stops);
    s.prefix.prompt.assign(ids.begin(), ids.end());
    s.announced.clear();
    return s.extent.length;
}

}  // namespace crumb

#include "cache/extent.h"

#include <algorithm>

namespace crumb {
namespace {

// Window blocks are kept this much longer than they are needed, so that the small rollbacks of speculative decoding
// find their windows complete.
constexpr int32_t kWindowSlack = 64;

BlockRange range(int64_t begin, int64_t end) { return {int32_t(begin), int32_t(std::max(begin, end))}; }

}  // namespace

int32_t coded_edge(int32_t position, int recent) { return round_down(std::max(0, position + 1 - recent)); }

Rules::Rules(const CacheConfig& config)
    : sink(config.sink),
      recent(config.recent),
      longest(int32_t(config.tokens_per_sequence)),
      page(config.recipe.page_tokens) {
    for (const CacheLayer& layer : config.layers) {
        if (layer.windowed()) {
            window = std::max(window, layer.window);
        }
    }
}

// Pages wholly below `sink` are never read through codes. The page of exact_begin keeps the codes of its aged rows.
BlockRange Rules::coded(const Extent& e) const {
    return range(sink / page, std::max<int64_t>(e.coded_end / page, pages_for(e.exact_begin)));
}

BlockRange Rules::sinks(const Extent& e) const { return range(0, std::min(blocks_for(sink), blocks_for(e.length))); }

BlockRange Rules::exact(const Extent& e) const {
    return range(std::max<int64_t>(blocks_for(sink), e.exact_begin / kPageTokens), blocks_for(e.length));
}

BlockRange Rules::windows(const Extent& e) const {
    return window == 0 ? BlockRange{} : range(e.window_begin / kPageTokens, blocks_for(e.length));
}

BlockRange Rules::demoted(const Extent& from, const Extent& to) const {
    return range(std::max(sink, from.coded_end) / page, to.coded_end / page);
}

// The token at position n sees from n + 1 - window on.
int32_t Rules::lowest_crop(const Extent& e) const { return e.window_begin == 0 ? 0 : e.window_begin + window - 1; }

Extent Rules::appended(Extent e, int32_t tokens) const {
    e.length += tokens;
    e.coded_end = std::max(e.coded_end, encoded(e.length - 1));
    return e;
}

Extent Rules::cropped(Extent e, int32_t length) const {
    if (length == 0) {
        return {};
    }
    e.length = length;
    e.coded_end = std::min(e.coded_end, round_down(length, page));
    e.exact_begin = length <= blocks_for(sink) * kPageTokens ? 0 : std::min(e.exact_begin, length);
    return e;
}

Extent Rules::trimmed(Extent e) const {
    const int32_t unwanted = std::min(edge(e.length), e.coded_end);
    if (unwanted > blocks_for(sink) * kPageTokens) {
        e.exact_begin = std::max(e.exact_begin, unwanted);
    }
    if (window > 0) {
        e.window_begin = std::max(e.window_begin, round_down(std::max(0, e.length + 1 - window - kWindowSlack)));
    }
    return e;
}

bool Rules::possible(const Extent& e) const {
    const auto within = [](int32_t position, int32_t end) { return 0 <= position && position <= end; };
    if (!within(e.length, longest) || !within(e.coded_end, e.length) || !within(e.exact_begin, e.length) ||
        !within(e.window_begin, e.length)) {
        return false;
    }
    const bool coded =
        e.coded_end % page == 0 && encoded(e.length - 1) <= e.coded_end && e.coded_end <= encoded(longest - 1);
    const bool exact = round_down(e.exact_begin, page) <= e.coded_end &&
                       (e.exact_begin == 0 || e.exact_begin > blocks_for(sink) * kPageTokens);
    const bool windows =
        e.window_begin % kPageTokens == 0 && (window > 0 ? lowest_crop(e) <= e.length : e.window_begin == 0);
    return coded && exact && windows && trimmed(e) == e;
}

// Between steps, after trimming, with n = length:
//   coded   coded_end <= encoded(longest - 1), and one page more: that of aged rows, or, until the step after the one that
//           encoded it again, the page they were taken from
//   exact   n - min(edge(n), coded_end) <= recent + 63, because edge(n) >= edge(n - 1) and coded_end >= edge(n - 1),
//   and
//           edge(t) >= t + 1 - recent - 63
//   window  n - window_begin <= window + slack + 62
// A step of s tokens adds blocks_for(s) <= s / 64 + 1 at most; the 1 is counted here, the rest once for all sequences.
MostBlocks most_blocks(const Rules& rules) {
    const int64_t all = blocks_for(rules.longest);
    const int64_t coded = rules.encoded(rules.longest - 1) / rules.page - rules.sink / rules.page;
    const int64_t exact = blocks_for(rules.sink) + blocks_for(int64_t(rules.recent) + 63) + 1;
    const int64_t window = blocks_for(int64_t(rules.window) + kWindowSlack + 62) + 1;
    return {coded > 0 ? coded + 1 : 0, std::min(exact, all), rules.window == 0 ? 0 : std::min(window, all)};
}

}  // namespace crumb

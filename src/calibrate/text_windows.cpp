#include "calibrate/text_windows.h"

#include <crumb/calibrate.h>
#include <crumb/error.h>

#include <algorithm>

namespace crumb {

TextWindows text_windows(std::span<const std::vector<int32_t>> texts, const WindowRule& rule) {
    const size_t begin = rule.begin ? 1 : 0, skip = size_t(rule.skip);
    const size_t share = std::max<size_t>(kShortestWindow, rule.tokens / std::max<size_t>(texts.size(), 1));
    CRUMB_ASSERT(size_t(rule.window) > begin);
    const size_t room = std::min(size_t(rule.window), share) - begin;
    TextWindows windows;
    size_t left = rule.tokens, longest = 0;
    for (const auto& text : texts) {
        longest = std::max(longest, text.size());
    }
    for (size_t at = 0; at < longest && left > skip; at += room) {
        for (size_t i = 0; i < texts.size(); ++i) {
            const std::vector<int32_t>& text = texts[i];
            if (at >= text.size()) {
                continue;
            }
            std::vector<int32_t> window(begin, rule.begin.value_or(0));
            const size_t end = std::min(text.size(), at + room);
            window.insert(window.end(), text.begin() + std::ptrdiff_t(at), text.begin() + std::ptrdiff_t(end));
            window.resize(std::min(window.size(), left));
            if (window.size() <= skip) {
                continue;
            }
            left -= window.size();
            windows.tokens.push_back(std::move(window));
            windows.folds.push_back(int((at / room + i) % kFolds));
        }
    }
    return windows;
}

}  // namespace crumb

// Texts are read in turn, in windows that are as long as they may be and short enough for every text to have its share.
#include "calibrate/text_windows.h"

#include <gtest/gtest.h>

#include <numeric>

namespace crumb {
namespace {

// Tokens of text i are 100000 i and up, so that a window says where it is from.
std::vector<std::vector<int32_t>> texts_of(std::initializer_list<size_t> lengths) {
    std::vector<std::vector<int32_t>> texts;
    for (const size_t length : lengths) {
        texts.emplace_back(length);
        std::iota(texts.back().begin(), texts.back().end(), int32_t(100000 * texts.size()));
    }
    return texts;
}

std::vector<size_t> lengths(const TextWindows& windows) {
    std::vector<size_t> result;
    for (const auto& window : windows.tokens) {
        result.push_back(window.size());
    }
    return result;
}

constexpr int32_t kBegin = 7;

}  // namespace

TEST(TextWindows, AreTakenInTurnUntilThereAreEnough) {
    const auto texts = texts_of({5000, 5000});
    const TextWindows windows = text_windows(texts, {.tokens = 3500, .window = 1000, .skip = 64, .begin = kBegin});
    EXPECT_EQ(lengths(windows), (std::vector<size_t>{1000, 1000, 1000, 500}));
    EXPECT_EQ(windows.folds, (std::vector<int>{0, 1, 1, 0}));
    for (size_t i = 0; i < windows.tokens.size(); ++i) {
        EXPECT_EQ(windows.tokens[i][0], kBegin);
        EXPECT_EQ(windows.tokens[i][1], int32_t(100000 * (1 + i % 2) + 999 * (i / 2))) << i;  // none twice, none left out
    }
}

TEST(TextWindows, AreShorterWhereTokensAreFew) {
    const auto texts = texts_of({9000, 9000, 9000});
    const TextWindows windows = text_windows(texts, {.tokens = 3000, .window = 4096, .skip = 64, .begin = {}});
    EXPECT_EQ(lengths(windows), (std::vector<size_t>{1000, 1000, 1000}));
    EXPECT_EQ(windows.tokens[2][0], 300000);
}

TEST(TextWindows, AreNotShorterThanTheLeast) {
    const auto texts = texts_of({9000, 9000, 9000, 9000});
    const TextWindows windows = text_windows(texts, {.tokens = 600, .window = 4096, .skip = 64, .begin = {}});
    EXPECT_EQ(lengths(windows), (std::vector<size_t>{256, 256, 88}));
}

TEST(TextWindows, OfTextsThatAreShorterThanAWindow) {
    const auto texts = texts_of({100, 3000, 50, 0});
    const TextWindows windows = text_windows(texts, {.tokens = 100000, .window = 2048, .skip = 64, .begin = kBegin});
    EXPECT_EQ(lengths(windows), (std::vector<size_t>{101, 2048, 954}));  // 50 tokens would count for nothing
    EXPECT_TRUE(text_windows({}, {}).tokens.empty());
}

}  // namespace crumb

#include <crumb/error.h>
#include <crumb/text_sketch.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace crumb {
namespace {

std::vector<int32_t> random_text(size_t n, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> tokens(n);
    for (auto& token : tokens) { token = int32_t(random() % 50000); }
    return tokens;
}

TEST(TextSketch, KnowsItsOwnTextAtAnyAlignmentAndNoOther) {
    const auto text = random_text(32768, 1);
    TextSketch sketch;
    sketch.add(std::span(text).first(20000));
    sketch.add(std::span(text).subspan(20000));
    EXPECT_EQ(sketch.share(std::span(text).subspan(777, 8192)), 1.0);
    EXPECT_EQ(sketch.share(random_text(8192, 2)), 0.0);

    auto half = random_text(8192, 3);
    std::copy_n(text.begin() + 5001, 4096, half.begin() + 3000);
    EXPECT_NEAR(*sketch.share(half), 0.5, 0.1);
    EXPECT_FALSE(sketch.share(std::span(text).first(TextSketch::kRun - 1)));
    EXPECT_EQ(TextSketch().share(text), 0.0);
}

TEST(TextSketch, StaysBoundedAndStillKnowsItsText) {
    const auto text = random_text(3'000'000, 4);
    TextSketch sketch;
    sketch.add(text);
    EXPECT_EQ(sketch.hex().size(), 16 * TextSketch::kMost);
    EXPECT_EQ(sketch.share(std::span(text).subspan(1'000'000, 100'000)), 1.0);
    EXPECT_EQ(sketch.share(random_text(100'000, 5)), 0.0);
}

TEST(TextSketch, IsReadBackAndRefusesAnythingElse) {
    TextSketch sketch;
    sketch.add(random_text(5000, 6));
    EXPECT_FALSE(sketch.empty());
    EXPECT_EQ(TextSketch::parse(sketch.hex()), sketch);
    EXPECT_TRUE(TextSketch::parse("").empty());
    for (const char* bad : {"0", "000000000000004", "000000000000004g", "00000000000000401", "+000000000000040"}) {
        EXPECT_THROW(TextSketch::parse(bad), Error) << bad;
    }
}

}  // namespace
}  // namespace crumb

#include <crumb/page.h>

#include <gtest/gtest.h>

#include <random>
#include <vector>

using namespace crumb;

TEST(PageMap, RoundTrip) {
    std::mt19937 random(1);
    for (int planes = 32; planes <= 1024; planes += 32) {
        std::vector<uint8_t> codes(64 * planes), back(64 * planes);
        for (auto& c : codes) { c = random() % 4; }
        std::vector<std::byte> page(16 * planes);
        pack_keys(planes, codes, page.data());
        unpack_keys(planes, page.data(), back);
        EXPECT_EQ(codes, back);
        pack_values(planes, codes, page.data());
        unpack_values(planes, page.data(), back);
        EXPECT_EQ(codes, back);
    }
}

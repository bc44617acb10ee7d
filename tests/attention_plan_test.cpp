// Tiles and ranges of a step.
#include <crumb/attention.h>
#include <gtest/gtest.h>

namespace crumb {
namespace {

TEST(AttentionPlan, RangesGrowWithTheEnd) {
    EXPECT_EQ(range_blocks(0), 16);
    EXPECT_EQ(range_blocks(1), 16);
    EXPECT_EQ(range_blocks(65536), 16);
    EXPECT_EQ(range_blocks(65537), 32);
    EXPECT_EQ(range_blocks(131072), 32);
    EXPECT_EQ(range_blocks(131073), 64);
    for (int64_t end = 1; end < 2'000'000'000; end = end * 3 / 2 + 1) {
        const int64_t blocks = (end + 63) / 64, size = range_blocks(int32_t(end));
        EXPECT_LE((blocks + size - 1) / size, kMaxRanges) << end;
    }
}

QueryRow row(uint32_t sequence, int position, int begin = 0) { return {sequence, 0, position, begin, 0, position + 1}; }

TEST(AttentionPlan, TilesAreAdjacentRowsOfOneSequence) {
    std::vector<QueryRow> rows;
    for (int t = 0; t < 40; t++) rows.push_back(row(0, t));
    rows.push_back(row(1, 7));
    for (int t = 65530; t < 65540; t++) rows.push_back(row(2, t));  // ranges double after 65536 tokens
    const AttentionPlan plan(rows, 4);
    std::vector<std::pair<uint32_t, uint32_t>> tiles;
    uint32_t ranges = 0, partials = 0;
    for (const AttentionTile& tile : plan.tiles()) {
        tiles.emplace_back(tile.first_row, tile.n_rows);
        EXPECT_EQ(tile.first_task, ranges);
        EXPECT_EQ(tile.first_partial, partials);
        ranges += tile.n_ranges;
        partials += tile.n_ranges * tile.n_rows;
    }
    const std::vector<std::pair<uint32_t, uint32_t>> want = {{0, 16}, {16, 16}, {32, 8}, {40, 1}, {41, 6}, {47, 4}};
    EXPECT_EQ(tiles, want);
    EXPECT_EQ(plan.n_tasks(), ranges);
    EXPECT_EQ(plan.n_partials(), partials);
    EXPECT_EQ(plan.tiles()[4].range_blocks, 16u);
    EXPECT_EQ(plan.tiles()[4].n_ranges, 64u);
    EXPECT_EQ(plan.tiles()[5].range_blocks, 32u);
    EXPECT_EQ(plan.tiles()[5].n_ranges, 33u);
}

TEST(AttentionPlan, WindowsBeginAtTheirFirstBlock) {
    const AttentionPlan plan({row(0, 10000, 4095), row(0, 10001, 4096)}, 0);
    ASSERT_EQ(plan.tiles().size(), 1u);
    EXPECT_EQ(plan.tiles()[0].first_block, 63u);
    EXPECT_EQ(plan.tiles()[0].end_block, 157u);
    EXPECT_EQ(plan.tiles()[0].n_ranges, 7u);
}

TEST(AttentionPlan, RowsWithoutTokensHaveARange) {
    const AttentionPlan plan({{0, 0, 0, 0, 0, 0}, {1, 1, 9, 9, 0, 9}}, 0);
    ASSERT_EQ(plan.tiles().size(), 2u);
    for (const AttentionTile& tile : plan.tiles()) EXPECT_EQ(tile.n_ranges, 1u);
    EXPECT_TRUE(AttentionPlan({}, 0).tiles().empty());
}

// AMX is supported, or refused by the operating system, or not there; the best level is one that is supported.
TEST(Isa, TilesThatAreRefusedAreNotSupported) {
    EXPECT_FALSE(supported(Isa::amx) && tiles_refused());
    EXPECT_TRUE(supported(best_isa()));
    EXPECT_TRUE(!tiles_refused() || best_isa() == Isa::avx512);
}

}  // namespace
}  // namespace crumb

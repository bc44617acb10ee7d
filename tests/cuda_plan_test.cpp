// The work list of the decode kernel: every item of every segment exactly once, in ascending order, in shares of equal size.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "attention/cuda/plan.h"
#include "cuda/emulator.h"

namespace crumb::cuda {

namespace {

constexpr u32 kCoded = 36, kExact = 64;

bool sees_coded(const QueryRow& row, int sink, int j) {
    return row.begin <= j && j < row.end && j >= sink && j < row.coded_end;
}
bool sees_exact(const QueryRow& row, int sink, int j) {
    return row.begin <= j && j < row.end && !sees_coded(row, sink, j);
}

TEST(CudaPlan, TilesListWhatTheirRowsSee) {
    std::mt19937 random(3);
    const auto below = [&](int n) { return int(random() % uint32_t(n)); };
    for (int trial = 0; trial < 2000; trial++) {
        const int n = 1 + below(4), sink = below(3) * 40, length = 1 + below(500);
        std::vector<QueryRow> rows;
        for (int i = 0; i < n; i++) {
            const int end = below(length + 1), begin = below(3) ? 0 : below(length);
            rows.push_back({0, below(5) ? 0u : kNoToken, 0, begin, below(end + 70), end});
        }
        const int page = trial % 3 == 0 ? 128 : 64;
        const TileWork work = tile_work(rows.data(), n, sink, kCoded, kExact, page);
        std::vector<int> groups;
        for (int i = 0; i < work.n_exact(); i++) groups.push_back(work.exact_group(i));
        EXPECT_TRUE(std::is_sorted(groups.begin(), groups.end(), std::less_equal<>()));  // each once
        EXPECT_EQ(work.units, work.n_coded * kCoded + work.n_exact() * kExact);
        for (const QueryRow& row : rows) {
            if (row.token == kNoToken) continue;
            for (int j = 0; j < length; j++) {
                if (sees_coded(row, sink, j)) {
                    EXPECT_GE(j / page, work.coded_first);
                    EXPECT_LT(j / page, work.coded_first + work.n_coded);
                }
                EXPECT_TRUE(!sees_exact(row, sink, j) || std::binary_search(groups.begin(), groups.end(), j / 16)) << j;
            }
        }
    }
}

struct Step {
    std::vector<QueryRow> rows;
    int n_tiles, rows_per_tile, segments_per_tile, grid, warps;
};

void expect_complete(const Step& step, uint32_t seed) {
    std::vector<TileWork> tiles(step.n_tiles);
    std::vector<WorkRecord> records(step.grid * step.warps + step.n_tiles * step.segments_per_tile);
    std::vector<SegmentParts> listed(step.n_tiles * step.segments_per_tile, {-1, -1});
    std::vector<u32> ids(size_t(step.n_tiles) * 2000, 7);
    const PlanArgs args = {step.rows.data(), step.n_tiles, step.rows_per_tile, 64, step.segments_per_tile, step.grid, step.warps,
                           kCoded, kExact, kPageTokens, ids.data(), ids.data(), 2000, tiles.data(), records.data(), listed.data()};
    const int threads = 64;
    simt::emulate({3, threads, plan_shared_bytes(step.n_tiles, threads, step.grid), seed}, [&](std::byte* shared) { make_plan(args, shared); });

    const int n_segments = step.n_tiles * step.segments_per_tile;
    std::vector<int> done(n_segments, 0), first_block(n_segments, -1), last_block(n_segments, -1), parts(n_segments, 0);
    std::vector<u32> share;
    int segment = -1;
    for (int v = 0; v < step.grid * step.warps; v++) {
        u32 units = 0;
        for (int at = v; at >= 0 && records[at].segment >= 0; at = records[at].next) {
            const WorkRecord& record = records[at];
            const TileWork& tile = tiles[record.segment / step.segments_per_tile];
            const int n_items = tile.n_coded + tile.n_exact();
            EXPECT_GE(record.segment, segment);  // segments in order, and within a segment items in order
            segment = record.segment;
            EXPECT_EQ(record.first, done[segment]);
            EXPECT_LT(record.first, record.end);
            done[segment] = record.end;
            EXPECT_EQ(record.whole != 0, record.first == 0 && record.end == n_items);
            const int block = v / step.warps;
            if (first_block[segment] < 0) first_block[segment] = block;
            parts[segment] += last_block[segment] != block;
            last_block[segment] = block;
            const int coded = std::min(record.end, tile.n_coded) - std::min(record.first, tile.n_coded);
            units += coded * kCoded + (record.end - record.first - coded) * kExact;
        }
        if (units > 0) share.push_back(units);
    }
    for (int s = 0; s < n_segments; s++) {
        const TileWork& tile = tiles[s / step.segments_per_tile];
        EXPECT_EQ(done[s], tile.n_coded + tile.n_exact()) << "segment " << s;
    }
    // The blocks that a record names are those that have parts.
    for (int v = 0; v < step.grid * step.warps; v++) {
        for (int at = v; at >= 0 && records[at].segment >= 0; at = records[at].next) {
            const WorkRecord& record = records[at];
            EXPECT_EQ(record.first_block, first_block[record.segment]);
            EXPECT_EQ(record.last_block, last_block[record.segment]);
            EXPECT_EQ(record.last_block - record.first_block + 1, parts[record.segment]);
            EXPECT_EQ(record.first_block, listed[record.segment].first_block);
            EXPECT_EQ(record.last_block, listed[record.segment].last_block);
            EXPECT_EQ(record.coded_end, std::min(record.end, tiles[record.segment / step.segments_per_tile].n_coded));
        }
    }
    if (!share.empty()) {
        const auto [low, high] = std::minmax_element(share.begin(), share.end());
        EXPECT_LE(*high, *low + 2 * kExact + kCoded) << "shares are equal up to an item";
    }
}

TEST(CudaPlan, EveryItemOnceAndSharesAreEqual) {
    std::mt19937 random(9);
    const auto below = [&](int n) { return int(random() % uint32_t(n)); };
    for (int trial = 0; trial < 60; trial++) {
        Step step = {{}, 1 + below(40), 1 + below(3), 1 + below(8), 1 + below(9), 4 + below(9)};
        const int longest = below(2) ? 300 : 20000;
        for (int t = 0; t < step.n_tiles; t++) {
            const int end = below(5) ? 1 + below(longest) : 0;
            for (int i = 0; i < step.rows_per_tile; i++) {
                const bool there = end + i > 0 && (i == 0 || below(4) > 0);
                step.rows.push_back({u32(t), there ? 0 : kNoToken, 0, 0, std::max(0, end + i - 256) / 64 * 64, end + i});
            }
        }
        expect_complete(step, uint32_t(trial));
    }
}

TEST(CudaPlan, OneLongSequenceOnAWholeDevice) {
    for (const int end : {100, 8192, 131072 - 3}) {
        expect_complete({{{0, 0, end - 1, 0, (end - 256) / 64 * 64, end}}, 1, 1, 8, 132, 12}, 1);
        expect_complete({{{0, 0, end - 1, 0, (end - 256) / 64 * 64, end}}, 1, 1, 1, 132, 12}, 2);
    }
}

}  // namespace

}  // namespace crumb::cuda

// A row's result has the same bits whatever other rows are in the plan and however many threads run it.
#include "attention_world.h"

namespace crumb {
namespace {

using namespace test;

// Output rows, one a token.
std::vector<uint32_t> bits(const World& world, const World::Result& result, uint32_t token) {
    std::vector<uint32_t> row(world.out_stride());
    std::memcpy(row.data(), result.out.data() + token * world.out_stride(), row.size() * sizeof(float));
    return row;
}

void expect_same(const World& world, const World::Result& a, const World::Result& b, const std::vector<QueryRow>& rows,
                 const std::string& what) {
    for (const QueryRow& row : rows) EXPECT_EQ(bits(world, a, row.token), bits(world, b, row.token)) << what;
}

struct Ragged {
    int heads;
    World world{{heads, 2, 64, 80}, {{64, 96, SideInfo::scale_zero, true}, {80, 96, SideInfo::gain8, true}}, true};
    std::vector<QueryRow> rows;
    std::vector<QueryRow> few;  // so few tiles that they are split into ranges when there are threads

    explicit Ragged(int heads) : heads(heads) {
        heads > 6 ? world.set_queries(15, 1) : world.set_queries(8, 2);
        for (const auto& [length, n] : {std::pair{5, 5}, {2300, 37}, {70, 1}, {4200, 3}, {900, 20}}) {
            add_rows(rows, world.add_sequence(length), length, n, 64);
        }
        std::copy_if(rows.begin(), rows.end(), std::back_inserter(few),
                     [](const QueryRow& row) { return row.sequence == 3; });
        world.make_queries(int(rows.size()));
    }
};

class AttentionOrder : public testing::TestWithParam<int> {};  // query heads: amx reads windows of the many by tiles

INSTANTIATE_TEST_SUITE_P(Heads, AttentionOrder, testing::Values(6, 24));

TEST_P(AttentionOrder, RowsAloneAndInTiles) {
    const Ragged ragged(GetParam());
    for (const Isa isa : supported_isas()) {
        const World::Result together = ragged.world.run(isa, ragged.rows, 4);
        for (const QueryRow& row : ragged.rows) {
            expect_same(ragged.world, together, ragged.world.run(isa, {row}, 4), {row}, "alone");
        }
        for (const size_t step : {2, 3, 7, 16}) {
            for (size_t i = 0; i < ragged.rows.size(); i += step) {
                const size_t last = std::min(i + step, ragged.rows.size());
                const std::vector<QueryRow> some(ragged.rows.begin() + i, ragged.rows.begin() + last);
                expect_same(ragged.world, together, ragged.world.run(isa, some, 4), some, "in chunks");
            }
        }
    }
}

TEST_P(AttentionOrder, Threads) {
    const Ragged ragged(GetParam());
    for (const Isa isa : supported_isas()) {
        for (const std::vector<QueryRow>& rows : {ragged.rows, ragged.few}) {
            const World::Result one = ragged.world.run(isa, rows, 4, 1);
            for (int n_threads = 2; n_threads <= 4; n_threads++) {
                for (int repeat = 0; repeat < 3; repeat++) {
                    expect_same(ragged.world, one, ragged.world.run(isa, rows, 4, n_threads), rows,
                                std::to_string(n_threads) + " threads");
                }
            }
        }
    }
}

// Sums of integers have no order, and everything else is the same program.
TEST(AttentionLevels, TilesOfAmxGiveTheBitsOfAvx512) {
    if (!supported(Isa::amx)) GTEST_SKIP() << "this machine has no AMX";
    for (const auto& [planes_k, planes_v] : {std::pair{64, 64}, {96, 160}, {128, 96}, {256, 128}, {160, 32}}) {
        for (const int group : {1, 3, 5, 8, 12}) {
            World world({2 * group, 2, 64, 80}, {{64, planes_k, SideInfo::gain8, true}, {80, planes_v, SideInfo::scale_zero, true}}, true);
            std::vector<QueryRow> rows;
            for (const auto& [length, n] : {std::pair{400, 1}, {330, 19}, {130, 3}}) {
                add_rows(rows, world.add_sequence(length), length, n);
            }
            for (QueryRow& row : rows) row.coded_end = row.end;
            for (const float scale : {1.0f, 6.0f}) {
                world.make_queries(int(rows.size()), scale);
                for (const auto& [bits, parts] : {std::pair{8, 1}, {15, 1}, {8, 3}}) {
                    world.set_queries(bits, parts);
                    expect_same(world, world.run(Isa::avx512, rows, 0), world.run(Isa::amx, rows, 0), rows,
                                std::to_string(planes_k) + " and " + std::to_string(planes_v) + " planes, " + std::to_string(group) +
                                    " heads, " + std::to_string(bits) + " bits, " + std::to_string(parts) + " parts");
                }
            }
        }
    }
}

// As an engine does it: one work for all layers of two kinds, prepared once for more threads than come.
TEST_P(AttentionOrder, OneWorkForManyLayers) {
    const Ragged ragged(GetParam());
    World windowed({4, 1, 96, 96}, bf16_format(96, 96));
    std::vector<QueryRow> rows;
    add_rows(rows, windowed.add_sequence(600), 600, 5, 1 << 20, 100);
    windowed.make_queries(int(rows.size()));

    const Isa isa = best_isa();
    AttentionWork work;
    for (const std::vector<QueryRow>& some : {ragged.rows, ragged.few}) {
        work.prepare(AttentionPlan(some, 4), ragged.heads, 2, ragged.world.layer.format, 4);
        work.prepare(AttentionPlan(rows, 0), 4, 1, windowed.layer.format, 4);
        const World::Result want = ragged.world.run(isa, some, 4), want_windowed = windowed.run(isa, rows, 0);
        for (const int n_threads : {1, 4, 3, 2, 4}) {
            expect_same(ragged.world, want, ragged.world.run(isa, some, 4, n_threads, &work), some, "coded");
            expect_same(windowed, want_windowed, windowed.run(isa, rows, 0, n_threads, &work), rows, "window");
        }
    }
}

}  // namespace
}  // namespace crumb

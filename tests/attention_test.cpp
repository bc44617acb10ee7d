// The CPU kernels of every instruction set against the double-precision reference.
#include <limits>

#include "attention_world.h"

namespace crumb {
namespace {

using namespace test;

void expect_right(World& world, const std::vector<QueryRow>& rows, int sink, const std::string& what) {
    const AttentionMaps maps = world.maps;
    for (const auto& [bits, parts] : {std::pair{8, 0}, {15, 1}, {8, 2}, {8, 3}}) {
        if (64 * (parts - 1) >= world.layer.format.k.planes) continue;
        world.maps = maps;
        parts == 0 ? void(world.maps.query_bits = bits) : world.set_queries(bits, parts);
        const World::Result want = world.reference(rows, sink);
        for (const Isa isa : supported_isas()) {
            world.expect_near(world.run(isa, rows, sink), want,
                              what + ", " + name(isa) + ", " + std::to_string(bits) + " bits, " + std::to_string(parts) + " parts");
        }
    }
}

// One decode row and a chunk of rows in sequences of these lengths.
void expect_right_at(World& world, std::initializer_list<int> lengths, int chunk, int sink, int recent,
                     const std::string& what) {
    std::vector<QueryRow> rows;
    for (const int length : lengths) {
        const uint32_t sequence = world.add_sequence(length);
        add_rows(rows, sequence, length, std::min(length, chunk), recent);
    }
    world.make_queries(int(rows.size()), 1.5f);
    expect_right(world, rows, sink, what);
}

// Side tables of a head of 64 channels, `with[d]` of whose directions have digit d.
SideTables with_digits(std::initializer_list<int> with) {
    SideTables side;
    side.format = {.dim = 64, .info = SideInfo::gain8};
    side.digits.assign(64, 0);
    for (const int n : with) {
        side.digit.insert(side.digit.end(), n, uint8_t(side.format.planes > 0 ? side.digit.back() + 1 : 0));
        for (int i = 0; i < n; i++) side.digits[i]++;
        side.format.planes += n;
    }
    side.format.planes = (side.format.planes + kPlaneStep - 1) / kPlaneStep * kPlaneStep;
    side.digit.resize(side.format.planes, 0);
    side.decode.assign(size_t(side.format.planes) * 64, 0.0f);
    return side;
}

TEST(Attention, PartsOfQueriesFollowDigits) {
    const auto expect = [](std::initializer_list<int> with, std::vector<int> parts, int bits) {
        const SideTables side = with_digits(with);
        const std::vector<HeadTables> heads = {{side, side}};
        const AttentionMaps maps = attention_maps(heads);
        EXPECT_EQ(maps.heads[0].parts, parts);
        EXPECT_EQ(maps.query_bits, bits);
    };
    expect({64}, {64}, 8);
    expect({40}, {64}, 8);
    expect({64, 64}, {64, 128}, 8);
    expect({64, 64, 64}, {64, 128, 192}, 8);
    expect({64, 30, 20}, {64, 128}, 8);       // seconds and thirds in one group of 64
    expect({64, 50, 25}, {64, 160}, 8);       // thirds end in the tail
    expect({60, 10}, {96}, 8);                // seconds among the first group
    expect({64, 64, 64, 64}, {64, 128, 256}, 15);
}

PageFormat codes(int dim_k, int dim_v, SideInfo info, bool mean, int planes_k = 0, int planes_v = 0) {
    return {{dim_k, planes_k ? planes_k : padded_planes(dim_k, 1), info, mean},
            {dim_v, planes_v ? planes_v : padded_planes(dim_v, 1), info, mean}};
}

TEST(Attention, Lengths) {
    World world({4, 2, 64, 64}, codes(64, 64, SideInfo::scale_zero, false));
    expect_right_at(world, {1, 63, 64, 65, 319, 320, 384, 500, 2049}, 1, 64, 256, "decode");
    World chunked({2, 1, 64, 64}, codes(64, 64, SideInfo::scale_zero, false));
    expect_right_at(chunked, {1, 63, 64, 65, 300, 5000}, 20, 64, 256, "chunk");
}

TEST(Attention, GroupsOfHeads) {
    for (const int group : {1, 2, 3, 4, 6, 8, 16}) {
        World world({2 * group, 2, 64, 64}, codes(64, 64, SideInfo::gain8, false));
        expect_right_at(world, {700, 200}, 3, 4, 64, "group of " + std::to_string(group));
    }
}

TEST(Attention, HeadSizes) {
    for (const auto& [k, v] :
         {std::pair{32, 32}, {64, 64}, {80, 80}, {96, 96}, {112, 112}, {128, 128}, {256, 256}, {192, 128}, {48, 80}}) {
        World world({3, 1, k, v}, codes(k, v, SideInfo::gain16, false));
        expect_right_at(world, {420, 130}, 2, 4, 64, "head sizes " + std::to_string(k) + " and " + std::to_string(v));
    }
}

TEST(Attention, HeadSizesOfManyHeads) {
    for (const auto& [k, v] : {std::pair{32, 32}, {48, 80}, {112, 112}, {96, 48}}) {
        World world({32, 1, k, v}, codes(k, v, SideInfo::gain16, false));
        expect_right_at(world, {420, 130}, 2, 4, 64, "32 heads of " + std::to_string(k) + " and " + std::to_string(v));
    }
}

TEST(Attention, Planes) {
    for (const int planes : {32, 64, 96, 128, 160, 256}) {
        World world({2, 1, 64, 64}, codes(64, 64, SideInfo::gain8, false, planes, 288 - planes));
        expect_right_at(world, {420, 130}, 2, 4, 64, std::to_string(planes) + " planes of K");
    }
}

TEST(Attention, SideInformationAndMeans) {
    for (const SideInfo info : {SideInfo::scale_zero, SideInfo::gain16, SideInfo::gain8}) {
        for (const bool page_mean : {false, true}) {
            for (const bool mean : {false, true}) {
                World world({4, 2, 80, 64}, codes(80, 64, info, page_mean), mean);
                expect_right_at(world, {600, 70}, 3, 4, 64, "info " + std::to_string(int(info)));
            }
        }
    }
}

TEST(Attention, PagesOfRecipes) {
    struct Kind {
        const char* name;
        Data data;
    };
    const Kind kinds[] = {
        {"random", plain},
        {"offset", [](Random& random, int, int c) { return normal(random) + 20.0f * float(c % 3 - 1); }},
        {"constant", [](Random&, int, int) { return 0.75f; }},
        {"zero", [](Random&, int, int) { return 0.0f; }},
        {"outliers",
         [](Random& random, int t, int c) {
             return normal(random) * (c == 5 ? 50.0f : t % 17 == 3 ? 8.0f : 1.0f);
         }},
        {"large", [](Random& random, int, int) { return 1e4f * normal(random); }},
        {"tiny", [](Random& random, int, int) { return 1e-6f * normal(random); }},
    };
    for (const Recipe& recipe : recipes()) {
        if (recipe.k.map == Map::rotation || recipe.budgeted()) continue;  // as `hadamard`, and as other widths, to attention
        for (const Kind& kind : kinds) {
            const bool key_mean = recipe.k.centre == Centre::key_mean;
            World world({4, 2, 64, 64}, recipe, kind.data, kind.data, key_mean);
            expect_right_at(world, {330, 100}, 2, 64, 64, std::string(recipe.name) + ", " + kind.name + " data");
        }
    }
}

TEST(Attention, SinksOfEverySize) {
    for (const int sink : {0, 4, 64, 100, 1000}) {
        World world({2, 1, 64, 64}, codes(64, 64, SideInfo::scale_zero, true), true);
        expect_right_at(world, {40, 90, 130, 700}, 5, sink, 128, "sink " + std::to_string(sink));
    }
}

TEST(Attention, CodedEnds) {
    World world({2, 1, 64, 64}, codes(64, 64, SideInfo::scale_zero, false));
    const uint32_t sequence = world.add_sequence(400);
    std::vector<QueryRow> rows;
    for (const int coded_end : {0, 1, 3, 64, 65, 127, 300, 399, 400, 1000}) {
        rows.push_back({sequence, uint32_t(rows.size()), 399, 0, coded_end, 400});
        rows.push_back({sequence, uint32_t(rows.size()), 200, 0, coded_end, 201});
    }
    world.make_queries(int(rows.size()));
    for (const int sink : {0, 10, 64, 70}) expect_right(world, rows, sink, "sink " + std::to_string(sink));
}

TEST(Attention, SlidingWindows) {
    for (const int window : {1, 30, 64, 300}) {
        World world({4, 2, 64, 64}, bf16_format(64, 64));
        std::vector<QueryRow> rows;
        for (const int length : {20, 64, 700, 2500}) {
            add_rows(rows, world.add_sequence(length), length, std::min(length, 18), 1 << 20, window);
        }
        world.make_queries(int(rows.size()));
        expect_right(world, rows, 0, "window " + std::to_string(window));
    }
    World coded({4, 2, 64, 64}, codes(64, 64, SideInfo::gain8, false));
    std::vector<QueryRow> rows;
    add_rows(rows, coded.add_sequence(2500), 2500, 18, 100, 1000);
    coded.make_queries(int(rows.size()));
    expect_right(coded, rows, 64, "a window over codes");
}

// Every token is read through its code, the newest too, as in sliding-window layers of 8 bits.
TEST(Attention, SlidingWindowsOfEightBits) {
    for (const int dim : {64, 256}) {
        for (const int window : {1, 30, 512}) {
            World world({4, 1, dim, dim}, find_recipe("q8:paper"), plain, plain);
            std::vector<QueryRow> rows;
            for (const int length : {1, 70, 700, 2500}) {
                add_rows(rows, world.add_sequence(length), length, std::min(length, 18), 0, window);
            }
            for (QueryRow& row : rows) row.coded_end = row.end;
            world.make_queries(int(rows.size()));
            expect_right(world, rows, 0, "window " + std::to_string(window));
        }
    }
}

TEST(Attention, Bf16RecordsInTheCodedTable) {
    World world({4, 2, 64, 80}, bf16_format(64, 80));
    expect_right_at(world, {30, 500}, 3, 64, 64, "bf16");
}

TEST(Attention, SoftCapAlibiAndSinkLogits) {
    const std::vector<float> sinks = {0.5f, -3.0f, 8.0f, 0.0f, 1.0f, 100.0f};
    for (int options = 1; options < 8; options++) {
        World world({6, 2, 64, 64}, codes(64, 64, SideInfo::scale_zero, false), true);
        if (options & 1) world.layer.softcap = 5.0f;
        if (options & 2) world.layer.alibi_max_bias = 8.0f;
        if (options & 4) world.layer.sinks = sinks.data();
        expect_right_at(world, {50, 600}, 3, 4, 64, "options " + std::to_string(options));
    }
}

TEST(Attention, AlibiSlopesAreThoseOfLlama) {
    const double twelve[] = {0.5,
                             0.25,
                             0.125,
                             0.0625,
                             0.03125,
                             0.015625,
                             0.0078125,
                             0.00390625,
                             std::sqrt(0.5),
                             std::sqrt(0.125),
                             std::sqrt(0.03125),
                             std::sqrt(0.0078125)};
    for (int head = 0; head < 12; head++) EXPECT_DOUBLE_EQ(alibi_slope(8.0, 12, head), twelve[head]);
    EXPECT_DOUBLE_EQ(alibi_slope(8.0, 16, 15), 0.00390625);
}

TEST(Attention, BidirectionalRows) {
    World world({2, 1, 64, 64}, codes(64, 64, SideInfo::gain8, false));
    world.layer.alibi_max_bias = 4.0f;
    const uint32_t sequence = world.add_sequence(150);
    std::vector<QueryRow> rows;
    for (int t = 0; t < 150; t += 7) rows.push_back({sequence, uint32_t(rows.size()), t, 0, 64, 150});
    world.make_queries(int(rows.size()));
    expect_right(world, rows, 4, "rows that see later tokens");
}

TEST(Attention, LargeLogits) {
    World world({2, 1, 64, 64}, codes(64, 64, SideInfo::scale_zero, false));
    expect_right_at(world, {700, 4500}, 4, 64, 64, "logits of some ten");
    world.make_queries(8, 300.0f);
    std::vector<QueryRow> rows;
    add_rows(rows, 0, 700, 4, 64);
    add_rows(rows, 1, 4500, 4, 64);
    expect_right(world, rows, 64, "logits of some thousand, their maxima far apart from range to range");
}

TEST(Attention, RowsWithoutTokensAreZero) {
    World world({2, 1, 64, 64}, codes(64, 64, SideInfo::gain8, false));
    const uint32_t sequence = world.add_sequence(100);
    const std::vector<QueryRow> rows = {
        {sequence, 0, 0, 0, 0, 0}, {sequence, 1, 5, 7, 0, 6}, {sequence, 2, 99, 0, 64, 100}};
    world.make_queries(3);
    for (const Isa isa : supported_isas()) {
        const World::Result result = world.run(isa, rows, 4);
        for (size_t i = 0; i < 2 * world.out_stride(); i++) EXPECT_EQ(result.out[i], 0.0f);
    }
    expect_right(world, rows, 4, "rows without tokens");
}

// Few heads of a group, and as many as amx reads by tiles.
class AttentionOfNonsense : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Heads, AttentionOfNonsense, testing::Values(4, 48));

TEST_P(AttentionOfNonsense, QueriesThatAreNotFinite) {
    World world({GetParam(), 2, 64, 64}, codes(64, 64, SideInfo::scale_zero, false));
    std::vector<QueryRow> rows;
    add_rows(rows, world.add_sequence(700), 700, 9, 64);
    world.make_queries(int(rows.size()));
    for (const Isa isa : supported_isas()) {
        const World::Result clean = world.run(isa, rows, 64);
        const std::vector<float> q = world.q;
        const float inf = std::numeric_limits<float>::infinity();
        world.query(3, 1)[5] = std::numeric_limits<float>::quiet_NaN();
        world.query(4, 2)[0] = inf;
        world.query(6, 0)[63] = -inf;
        const World::Result result = world.run(isa, rows, 64);
        world.q = q;
        for (size_t i = 0; i < clean.out.size(); i++) {
            const size_t token = i / world.out_stride(), head = i % world.out_stride() / 64;
            if ((token == 3 && head == 1) || (token == 4 && head == 2) || (token == 6 && head == 0)) {
                EXPECT_TRUE(std::isnan(result.out[i])) << i;
            } else {
                EXPECT_EQ(result.out[i], clean.out[i]) << i;
            }
        }
    }
}

TEST(Attention, InfiniteQueriesHaveNoAnswerWhateverTheSigns) {
    World world({1, 1, 64, 64}, codes(64, 64, SideInfo::scale_zero, false));
    const uint32_t sequence = world.add_sequence(1);
    const std::vector<QueryRow> rows = {{sequence, 0, 0, 0, 0, 1}, {sequence, 1, 0, 0, 0, 1}};
    world.make_queries(2);
    world.query(0, 0)[9] = std::numeric_limits<float>::infinity();
    world.query(1, 0)[9] = -std::numeric_limits<float>::infinity();  // one of the two logits is minus infinity
    for (const Isa isa : supported_isas()) {
        for (const float x : world.run(isa, rows, 4).out) EXPECT_TRUE(std::isnan(x));
    }
}

TEST_P(AttentionOfNonsense, TokensThatARowDoesNotSeeCannotHurtIt) {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    World world({GetParam(), 2, 64, 64}, codes(64, 64, SideInfo::scale_zero, false));
    const uint32_t sequence = world.add_sequence(700);
    std::vector<QueryRow> rows;
    add_rows(rows, sequence, 690, 12, 64);  // positions 678 .. 689
    world.make_queries(int(rows.size()));
    const World::Result clean = world.reference(rows, 64);
    for (const float poison : {nan, inf}) {
        world.set_exact_value(sequence, 684, 7, poison);
        world.set_exact_key(sequence, 685, 3, poison);
        world.set_exact_value(sequence, 695, 0, poison);  // nobody sees these
        world.set_exact_key(sequence, 697, 0, poison);
        for (const Isa isa : supported_isas()) {
            World::Result result = world.run(isa, rows, 64);
            for (size_t i = 0; i < result.out.size(); i++) {
                const size_t position = 678 + i / world.out_stride(), channel = i % 64;
                if (position >= 685 || (position == 684 && channel == 7)) {
                    EXPECT_FALSE(poison != poison && std::isfinite(result.out[i])) << i;
                    result.out[i] = clean.out[i];
                }
            }
            world.expect_near(result, clean, "rows that do not see what is not finite");
        }
    }
}

}  // namespace
}  // namespace crumb

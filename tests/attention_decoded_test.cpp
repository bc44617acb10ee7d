// Attention over pages that it decodes, against the double-precision reference: everything that a layer or a row can be.
#include <fmt/format.h>

#include <limits>

#include "attention_world.h"

namespace crumb {
namespace {

using namespace test;

constexpr const char* kFormats[] = {"kivi32", "kivi128", "ott", "kitty", "kvarn", "omni", "omni:layer", "turbo2", "turbo3+",
                                    "had2", "int2", "quarot:paper"};  // planar: decoded because the layer asks for it

void expect_right(World& world, const std::vector<QueryRow>& rows, int sink, const std::string& what) {
    world.expect_near(world.run(best_isa(), rows, sink), world.reference(rows, sink), what);
}

void expect_right_at(World& world, std::initializer_list<int> lengths, int chunk, int sink, int recent,
                     const std::string& what) {
    std::vector<QueryRow> rows;
    for (const int length : lengths) {
        add_rows(rows, world.add_sequence(length), length, std::min(length, chunk), recent);
    }
    world.make_queries(int(rows.size()), 1.5f);
    expect_right(world, rows, sink, what);
}

World world_of(Shape shape, const char* name) {
    const Recipe& recipe = find_recipe(name);
    World world(shape, recipe, plain, plain, recipe.k.centre == Centre::key_mean);
    world.layer.decode_pages = true;
    return world;
}

TEST(DecodedAttention, LengthsAndChunks) {
    for (const char* name : kFormats) {
        World decode = world_of({4, 2, 64, 64}, name);
        expect_right_at(decode, {1, 64, 191, 192, 193, 320, 500}, 1, 64, 64, name);
        World chunk = world_of({2, 1, 64, 64}, name);
        expect_right_at(chunk, {65, 700}, 20, 64, 128, name);
    }
}

TEST(DecodedAttention, HeadSizesAndGroups) {
    for (const char* name : kFormats) {
        for (const auto& [k, v] : {std::pair{32, 32}, {80, 80}, {96, 96}, {112, 112}, {128, 128}, {256, 256}, {192, 128}}) {
            World world = world_of({3, 1, k, v}, name);
            expect_right_at(world, {300}, 2, 4, 64, fmt::format("{}, head sizes {} and {}", name, k, v));
        }
        for (const int group : {1, 2, 6, 16}) {
            World world = world_of({2 * group, 2, 64, 64}, name);
            expect_right_at(world, {300}, 2, 4, 64, fmt::format("{}, group of {}", name, group));
        }
    }
}

TEST(DecodedAttention, SinksAndCodedEnds) {
    for (const char* name : kFormats) {
        World world = world_of({2, 1, 64, 64}, name);
        const uint32_t sequence = world.add_sequence(400);
        std::vector<QueryRow> rows;
        for (const int coded_end : {0, 1, 64, 65, 127, 192, 300, 399, 400}) {
            rows.push_back({sequence, uint32_t(rows.size()), 399, 0, coded_end, 400});
            rows.push_back({sequence, uint32_t(rows.size()), 200, 0, std::min(coded_end, 201), 201});
        }
        world.make_queries(int(rows.size()));
        for (const int sink : {0, 10, 64, 70, 1000}) {
            expect_right(world, rows, sink, fmt::format("{}, sink {}", name, sink));
        }
    }
}

TEST(DecodedAttention, SoftCapAlibiSinkLogitsAndWindows) {
    const std::vector<float> sinks = {0.5f, -3.0f, 8.0f, 0.0f, 1.0f, 100.0f};
    for (int options = 1; options < 8; options++) {
        World world = world_of({6, 2, 64, 64}, "omni");
        if (options & 1) world.layer.softcap = 5.0f;
        if (options & 2) world.layer.alibi_max_bias = 8.0f;
        if (options & 4) world.layer.sinks = sinks.data();
        expect_right_at(world, {50, 400}, 3, 4, 64, fmt::format("options {}", options));
    }
    World windowed = world_of({4, 2, 64, 64}, "kivi128");
    std::vector<QueryRow> rows;
    add_rows(rows, windowed.add_sequence(900), 900, 18, 100, 300);
    windowed.make_queries(int(rows.size()));
    expect_right(windowed, rows, 64, "a window over codes");

    World both_ways = world_of({2, 1, 64, 64}, "kvarn");
    rows.clear();
    const uint32_t sequence = both_ways.add_sequence(150);
    for (int t = 0; t < 150; t += 7) rows.push_back({sequence, uint32_t(rows.size()), t, 0, 64, 150});
    both_ways.make_queries(int(rows.size()));
    expect_right(both_ways, rows, 4, "rows that see later tokens");
}

TEST(DecodedAttention, ARowHasTheSameBitsInAnyCompany) {
    for (const char* name : kFormats) {
        World world = world_of({4, 2, 64, 64}, name);
        std::vector<QueryRow> rows;
        add_rows(rows, world.add_sequence(500), 500, 40, 64);
        add_rows(rows, world.add_sequence(200), 200, 3, 64);
        world.make_queries(int(rows.size()));
        AttentionWork work;
        work.prepare(AttentionPlan(rows, 4), 4, 2, world.layer.format, 3);
        const World::Result one = world.run(best_isa(), rows, 4), three = world.run(best_isa(), rows, 4, 3, &work),
                            again = world.run(best_isa(), rows, 4, 3, &work);
        EXPECT_EQ(one.out, three.out) << name;
        EXPECT_EQ(one.out, again.out) << name;
        for (const QueryRow& row : {rows[0], rows[17], rows[39], rows[41]}) {
            const World::Result alone = world.run(best_isa(), {row}, 4);
            const size_t first = row.token * world.out_stride();
            EXPECT_TRUE(std::equal(alone.out.begin() + first, alone.out.begin() + first + world.out_stride(),
                                   one.out.begin() + first))
                << name;
        }
    }
}

TEST(DecodedAttention, TokensThatARowDoesNotSeeCannotHurtIt) {
    World world = world_of({4, 2, 64, 64}, "omni");
    const uint32_t sequence = world.add_sequence(400);
    std::vector<QueryRow> rows;
    add_rows(rows, sequence, 390, 6, 64);
    rows.push_back({sequence, uint32_t(rows.size()), 5, 7, 0, 6});  // sees nothing
    world.make_queries(int(rows.size()));
    const World::Result clean = world.reference(rows, 64);
    world.set_exact_value(sequence, 395, 0, std::numeric_limits<float>::quiet_NaN());
    world.set_exact_key(sequence, 396, 0, std::numeric_limits<float>::infinity());
    world.expect_near(world.run(best_isa(), rows, 64), clean, "rows that do not see what is not finite");
}

}  // namespace
}  // namespace crumb

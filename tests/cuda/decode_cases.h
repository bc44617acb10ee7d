// Cases of CUDA attention against double precision, for any machine: the emulator and a GPU run the same ones.
#pragma once

#include <gtest/gtest.h>

#include "attention_world.h"
#include "cuda/device_attend.h"

namespace crumb::cuda {

// Queries have 14 bits, so twice the budget of the CPU's kernels with queries of 15, or 9 to 15 by plane, against a budget for
// 10; weights have more than theirs.
inline constexpr float kDeviceBudget = 2;

class Cases {
  public:
    Cases(Machine& machine, std::span<const Kernels> kernels) : machine_(machine), kernels_(kernels) {}

    const PageFormat& format() const { return kernels_[0].format; }
    DeviceStep step = {.blocks = 3};

    test::World::Result run(const test::World& world, const std::vector<QueryRow>& rows, int sink) {
        return world.run_by(
            [&](const AttentionLayer& layer, const std::vector<QueryRow>& r, int s, std::span<const SequenceView> views,
                const AttentionIo& io) { attend_on(machine_, kernels_, step, layer, r, s, views, io, world.n_tokens()); },
            rows, sink);
    }

    void expect_right(test::World& world, const std::vector<QueryRow>& rows, int sink, const std::string& what) {
        if (step.prefill_bytes > 0) {
            world.bf16_products = true;
            world.expect_near(run(world, rows, sink), world.reference(rows, sink), what);
            return;
        }
        const StepShape shape = {.rows_per_tile = step.rows_per_tile, .n_head = world.layer.n_head, .n_head_kv = world.layer.n_head_kv};
        world.maps.query_bits = choose(kernels_, shape)->query_bits;
        world.grouped_kernels = true;
        test::World::Result want = world.reference(rows, sink);
        for (float& budget : want.budget) budget *= kDeviceBudget;
        world.expect_near(run(world, rows, sink), want, what);
    }

    test::World make_world(int n_head, int n_head_kv, bool means = false) const {
        test::World world({n_head, n_head_kv, format().k.dim, format().v.dim}, format(), means);
        return world;
    }

    // Rows at the ends of sequences, by the position rule.
    static std::vector<QueryRow> rows_at_end(const std::vector<int>& lengths, int per_sequence, int recent) {
        std::vector<QueryRow> rows;
        u32 token = 0;
        for (size_t s = 0; s < lengths.size(); s++) {
            for (int i = per_sequence - 1; i >= 0; i--) {
                const int position = lengths[s] - 1 - i;
                if (position < 0) continue;
                const int edge = 64 * (std::max(0, position + 1 - recent) / 64);
                rows.push_back({u32(s), token++, position, 0, edge, position + 1});
            }
        }
        return rows;
    }

    void ends(int n_head, int n_head_kv, const std::vector<int>& lengths, int per_sequence, float query, bool means) {
        test::World world = make_world(n_head, n_head_kv, means);
        for (int n : lengths) world.add_sequence(n);
        const auto rows = rows_at_end(lengths, per_sequence, 100);
        world.make_queries(int(rows.size()), query);
        step.rows_per_tile = per_sequence;
        expect_right(world, rows, 64, std::to_string(n_head) + "/" + std::to_string(n_head_kv) + " heads, " +
                                          std::to_string(per_sequence) + " rows");
    }

    // Pages that a recipe makes of data of all kinds.
    void data(const char* recipe, std::initializer_list<float> queries = {0.3f, 20.0f}) {
        const auto outliers = [](test::Random& random, int t, int c) {
            return test::normal(random) * (t % 37 == 5 ? 30.0f : c % 29 == 3 ? 10.0f : 1.0f);
        };
        const std::pair<const char*, test::Data> kinds[] = {
            {"random", test::plain},
            {"offset", [](test::Random& random, int, int c) { return test::normal(random) + 20.0f * float(c % 3 - 1); }},
            {"constant", [](test::Random&, int, int c) { return 0.5f * float(c % 5); }},
            {"outliers", outliers},
            {"zero", [](test::Random&, int, int) { return 0.0f; }},
            {"large", [](test::Random& random, int t, int) { return test::normal(random) * (t % 50 == 7 ? 30000.0f : 300.0f); }},
            {"tiny", [](test::Random& random, int, int) { return 1e-5f * test::normal(random); }},
        };
        for (const auto& [name, kind] : kinds) {
            for (const float query : queries) {
                test::World world({4, 1, format().k.dim, format().v.dim}, find_recipe(recipe), kind, kind);
                world.add_sequence(330);
                const auto rows = rows_at_end({330}, 2, 100);
                world.make_queries(2, query);
                step.rows_per_tile = 2;
                expect_right(world, rows, 64, std::string(recipe) + ", data: " + name);
            }
        }
    }

    void softcap_and_sinks(int per_sequence = 1) {
        test::World world = make_world(4, 2);
        const std::vector<float> sinks = {0.5f, -3.0f, 8.0f, 40.0f};
        world.add_sequence(500);
        world.make_queries(per_sequence, 3.0f);
        step.rows_per_tile = per_sequence;
        const auto rows = rows_at_end({500}, per_sequence, 100);
        world.layer.softcap = 5.0f;
        expect_right(world, rows, 64, "softcap");
        world.layer.sinks = sinks.data();
        expect_right(world, rows, 64, "softcap and sinks");
        world.layer.softcap = 0;
        expect_right(world, rows, 64, "sinks");
    }

    // Rows whose bounds lie anywhere, rows that see nothing, tiles that are not full.
    void bounds() {
        test::World world = make_world(6, 2);
        world.add_sequence(420);
        world.add_sequence(90);
        const std::vector<QueryRow> rows = {
            {0, 0, 300, 0, 128, 301}, {0, 1, 301, 0, 192, 302}, {0, 2, 302, 70, 190, 303},   {0, 3, 303, 200, 192, 304},
            {0, 4, 400, 7, 399, 400}, {0, 5, 419, 0, 320, 420}, {0, 6, 419, 419, 320, 420},  {0, 7, 419, 420, 320, 420},
            {1, 8, 40, 0, 0, 41},     {1, 9, 89, 0, 64, 90},    {1, 10, 10, 10, 0, 11},
        };
        world.make_queries(11);
        for (const auto& [sink, rows_per_tile] : {std::pair(0, 8), {20, 3}, {64, 1}, {128, 8}}) {
            step.rows_per_tile = rows_per_tile;
            expect_right(world, rows, sink, "bounds, sink " + std::to_string(sink));
        }
    }

    // Chunks of a prompt by the position rule, from the first token or later, in one slice and in many.
    void chunks(int n_head, int n_head_kv, const std::vector<std::pair<int, int>>& length_and_rows, float query, bool means) {
        test::World world = make_world(n_head, n_head_kv, means);
        std::vector<QueryRow> rows;
        u32 sequence = 0;
        for (const auto& [length, n] : length_and_rows) {
            world.add_sequence(length);
            for (QueryRow row : rows_at_end({length}, n, 100)) {
                row.sequence = sequence, row.token = u32(rows.size());
                rows.push_back(row);
            }
            step.rows_per_tile = std::max(step.rows_per_tile, n);
            sequence++;
        }
        world.make_queries(int(rows.size()), query);
        for (const size_t bytes : {size_t(1) << 30, size_t(1)}) {
            step.prefill_bytes = bytes;
            expect_right(world, rows, 64, std::to_string(n_head) + "/" + std::to_string(n_head_kv) + " heads, " +
                                              std::to_string(rows.size()) + " rows in chunks" + (bytes == 1 ? ", many slices" : ""));
        }
    }

    // What a row does not see cannot change it, however little of a number it is.
    void unseen() {
        test::World world = make_world(4, 2);
        world.add_sequence(330);
        world.make_queries(4);
        const auto rows = rows_at_end({330}, 4, 100);
        step.rows_per_tile = 4;
        const auto before = run(world, rows, 64);
        world.set_exact_value(0, 328, 3, NAN);
        world.set_exact_key(0, 329, 5, INFINITY);
        const auto after = run(world, rows, 64);
        const size_t two_rows = 2 * world.out_stride();
        EXPECT_EQ(std::vector<float>(before.out.begin(), before.out.begin() + two_rows),
                  std::vector<float>(after.out.begin(), after.out.begin() + two_rows));
        EXPECT_TRUE(std::isnan(after.out[2 * world.out_stride() + 3]));
    }

    // A query that is not finite ends, and gives NaN for its own head and row.
    void odd_queries() {
        test::World world = make_world(4, 2);
        world.add_sequence(330);
        const auto rows = rows_at_end({330}, 2, 100);
        step.rows_per_tile = 2;
        world.make_queries(2);
        const auto before = run(world, rows, 64);
        world.query(0, 1)[7] = NAN;
        world.query(1, 2)[0] = INFINITY;
        const auto after = run(world, rows, 64);
        for (int row = 0; row < 2; row++) {
            for (int head = 0; head < 4; head++) {
                const size_t at = row * world.out_stride() + size_t(head) * format().v.dim;
                if ((row == 0 && head == 1) || (row == 1 && head == 2)) {
                    EXPECT_TRUE(std::isnan(after.out[at]));
                } else {
                    EXPECT_EQ(before.out[at], after.out[at]) << row << " " << head;
                }
            }
        }
    }

    // Side information that is not finite (a forged page) ends too.
    void odd_pages() {
        test::World world = make_world(4, 2);
        world.add_sequence(330);
        world.layer.scale = INFINITY;
        world.make_queries(1);
        step.rows_per_tile = 1;
        run(world, rows_at_end({330}, 1, 100), 64);
    }

    // The same bits whatever the order of blocks, in fresh memory and in memory that a step has used.
    void same_bits(const std::vector<int>& lengths, std::initializer_list<int> grids) {
        test::World world = make_world(4, 2);
        for (int n : lengths) world.add_sequence(n);
        const auto rows = rows_at_end(lengths, 1, 100);
        world.make_queries(int(rows.size()));
        step.rows_per_tile = 1;
        for (const int blocks : grids) {
            step.blocks = blocks;
            step.times = 1;
            const auto once = run(world, rows, 64);
            step.times = 2;
            EXPECT_EQ(once.out, run(world, rows, 64).out) << blocks << " blocks";
            expect_right(world, rows, 64, std::to_string(blocks) + " blocks");
        }
        step.times = 1;
    }

  private:
    Machine& machine_;
    std::span<const Kernels> kernels_;
};

}  // namespace crumb::cuda

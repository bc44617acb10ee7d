// Attention in the shapes and at the lengths that have broken KV caches elsewhere, a row a case. What is refused instead of
// computed (MLA's 576 with 512) is tests/model/architecture_test.cpp's; other rows of the matrix are named in tests/MATRIX.md.
#include <tuple>

#include "attention_world.h"

namespace crumb {
namespace {

using namespace test;

struct Row {
    const char* name;
    Shape shape;
    float key_spike = 0;  // a bias of the keys in one channel
    float softcap = 0;
    int window = 0;       // of a second layer, which slides
    bool sinks = false;
};

void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

constexpr int kSink = 64, kRecent = 256;

void expect_right(World& world, const std::vector<QueryRow>& rows, int sink, const std::string& what) {
    world.make_queries(int(rows.size()));
    const World::Result want = world.reference(rows, sink);
    for (const Isa isa : supported_isas()) world.expect_near(world.run(isa, rows, sink), want, what + ", " + name(isa));
}

class Matrix : public testing::TestWithParam<Row> {};

TEST_P(Matrix, Shape) {
    const Row& row = GetParam();
    const std::vector<float> logits(size_t(row.shape.n_head), 1.5f);
    const Data keys = [&](Random& random, int, int c) { return normal(random) + (c == 3 ? row.key_spike : 0); };
    World world(row.shape, find_recipe("had2"), keys, plain, row.key_spike != 0);
    world.layer.softcap = row.softcap;
    if (row.sinks) world.layer.sinks = logits.data();
    std::vector<QueryRow> rows;
    for (const int length : {kSink + kRecent - 1, kSink + kRecent, kSink + kRecent + 1, 450}) {
        add_rows(rows, world.add_sequence(length), length, 2, kRecent);
    }
    expect_right(world, rows, kSink, "codes");
    if (row.window == 0) return;
    World sliding(row.shape, bf16_format(row.shape.dim_k, row.shape.dim_v));
    sliding.layer.softcap = row.softcap;
    if (row.sinks) sliding.layer.sinks = logits.data();
    rows.clear();
    for (const int length : {row.window - 1, row.window, row.window + 1, 2 * row.window}) {
        add_rows(rows, sliding.add_sequence(length), length, 1, 1 << 20, row.window);
    }
    expect_right(sliding, rows, 0, "window");
}

INSTANTIATE_TEST_SUITE_P(
    Rows, Matrix,
    testing::Values(Row{"q16_kv8_d128", {16, 8, 128, 128}}, Row{"q32_kv8_d128", {32, 8, 128, 128}}, Row{"q32_kv4_d128", {32, 4, 128, 128}},
                    Row{"q28_kv4_d128_key_bias", {28, 4, 128, 128}, 80}, Row{"q24_kv4_d256", {24, 4, 256, 256}},
                    Row{"q16_kv8_d256_softcap_window1024", {16, 8, 256, 256}, 0, 50, 1024},
                    Row{"q64_kv8_d64_sink_logits_window128", {64, 8, 64, 64}, 0, 0, 128, true}, Row{"q32_kv8_d80", {32, 8, 80, 80}},
                    Row{"q8_kv2_d96", {8, 2, 96, 96}}, Row{"q16_kv16_k192_v128", {16, 16, 192, 128}}, Row{"q8_kv1_d128", {8, 1, 128, 128}},
                    Row{"q8_kv8_d64", {8, 8, 64, 64}}),
    [](const auto& info) { return std::string(info.param.name); });

// K and V at every pair of rates, bits times two: neither is read with the numbers of the other. 16 bit for one of them and
// codes for the other is no recipe; both at 16 bit are.
class MatrixRate : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(MatrixRate, KeysAndValues) {
    const auto [k, v] = GetParam();
    const PageFormat format{{64, 32 * k, SideInfo::gain8, true}, {96, 48 * v + 48 * v % 32, SideInfo::gain8, true}};
    World world({7, 1, 64, 96}, format);
    std::vector<QueryRow> rows;
    for (const int length : {1, 319, 450}) { add_rows(rows, world.add_sequence(length), length, 2, 64); }
    expect_right(world, rows, kSink, "rates");
}

INSTANTIATE_TEST_SUITE_P(HalfBits, MatrixRate, testing::Combine(testing::Values(1, 2, 3, 4, 8), testing::Values(1, 2, 3, 4, 8)),
                         [](const auto& info) {
                             return "k" + std::to_string(std::get<0>(info.param)) + "_v" + std::to_string(std::get<1>(info.param));
                         });

// Long contexts are read, not only planned: one decode row at 8k, 32k and 128k.
class MatrixLength : public testing::TestWithParam<int> {};

TEST_P(MatrixLength, Decode) {
    World world({1, 1, 64, 64}, page_format(find_recipe("had2"), 64, 64));
    std::vector<QueryRow> rows;
    add_rows(rows, world.add_sequence(GetParam()), GetParam(), 1, kRecent);
    expect_right(world, rows, kSink, "long");
}

INSTANTIATE_TEST_SUITE_P(Lengths, MatrixLength, testing::Values(8192, 32768, 131072), testing::PrintToStringParamName());

}  // namespace
}  // namespace crumb

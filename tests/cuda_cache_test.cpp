// A cache whose layers lie in the memory of a device: the same steps leave the same bytes as on the CPU, and a sequence goes
// from one to the other. The device is memory that is touched through its interface and by what the words of a step say;
// rows are written by the device's own kernel, on the emulator.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <tuple>

#include "attention/cuda/rows.h"
#include "cache_model.h"
#include "cuda/emulator.h"
#include "fake_device.h"

using namespace crumb;
using namespace crumb::test;

namespace {

// K or V of a step as an engine has it: [token][head][dim], with a gap behind every token.
struct Rows {
    std::vector<float> values;
    size_t stride;
    Rows(const std::vector<StepToken>& tokens, int layer, Side side, int heads, int dim) : stride(size_t(heads * dim + 3)) {
        for (const StepToken& t : tokens) {
            for (int head = 0; head < heads; head++) {
                std::ranges::copy(row(t.token, layer, side, head, dim), std::back_inserter(values));
            }
            values.resize(values.size() + 3);
        }
    }
};

void encode(const Cache& cache, int layer, const EncodeBlock& job) {
    const CacheConfig& config = cache.config();
    const CacheLayer& shape = config.layers[layer];
    const PageFormat coded = config.formats[layer], exact = bf16_format(shape.dim_k, shape.dim_v);
    for (int head = 0; head < shape.n_head_kv; head++) {
        const auto page = [&](std::byte* base, const PageFormat& format, uint32_t block) {
            return base + (size_t(block) * size_t(shape.n_head_kv) + size_t(head)) * format.bytes();
        };
        std::vector<bf16> k, v;
        for (int t = 0; t < kPageTokens; t++) {
            for (int i = 0; i < shape.dim_k; i++) k.push_back(key_at(exact, page(cache.exact_base(layer), exact, job.source), t, i));
            for (int i = 0; i < shape.dim_v; i++) v.push_back(value_at(exact, page(cache.exact_base(layer), exact, job.source), t, i));
        }
        encode_page(config.recipe, coded, config.tables[layer][head], k, v, page(cache.coded_base(layer), coded, job.target), job.keep,
                    job.kept == kNoBlock ? nullptr : page(cache.coded_base(layer), coded, job.kept), nullptr);
    }
}

void device_step(Cache& cache, const std::vector<StepToken>& tokens) {
    ASSERT_TRUE(cache.begin(appends_of(tokens)));
    const StepLayout layout = cache.step_layout();
    std::vector<uint32_t> words(layout.words, 0xabababab);
    cache.write_step(layout, words);
    for (int layer = 0; layer < int(cache.config().layers.size()); layer++) {
        const CacheLayer& shape = cache.config().layers[layer];
        if (!shape.stores) continue;
        const Rows k(tokens, layer, Side::k, shape.n_head_kv, shape.dim_k), v(tokens, layer, Side::v, shape.n_head_kv, shape.dim_v);
        const bool windowed = shape.window > 0;
        const cuda::RowArgs args = {
            .k = k.values.data(), .v = v.values.data(), .k_token_stride = k.stride, .k_head_stride = size_t(shape.dim_k),
            .v_token_stride = v.stride, .v_head_stride = size_t(shape.dim_v),
            .stores = reinterpret_cast<const StoreRow*>(&words[windowed ? layout.window_stores : layout.stores]),
            .n_stores = layout.n_stores, .dim_k = shape.dim_k, .dim_v = shape.dim_v, .n_head_kv = shape.n_head_kv,
            .exact = reinterpret_cast<cuda::u8*>(cache.exact_base(layer)),
            .exact_stride = size_t(shape.n_head_kv) * bf16_format(shape.dim_k, shape.dim_v).bytes()};
        const int per_block = cuda::stores_per_block(layout.n_stores);
        simt::emulate({cuda::row_blocks(args), cuda::kRowThreads, cuda::row_shared_bytes(shape.dim_k, per_block)},
                      [&](std::byte* shared) { cuda::store_f32_rows(args, per_block, simt::block(), shared); });
        for (int j = 0; j < layout.n_jobs && !windowed; j++) {
            const EncodeBlock& job = reinterpret_cast<const EncodeBlock*>(&words[layout.jobs])[j];
            if (job.source != kNoBlock) encode(cache, layer, job);
        }
    }
}

// What the words say of rows and tables is what the plan of the CPU says.
void expect_rows(const Cache& cache, int layer) {
    const StepLayout layout = cache.step_layout();
    std::vector<uint32_t> words(layout.words);
    cache.write_step(layout, words);
    const auto fields = [](const QueryRow& r) { return std::tuple(r.sequence, r.position, r.token, r.begin, r.coded_end, r.end); };
    std::set<decltype(fields({}))> got, want;
    std::map<uint32_t, int> rows_of_sequence;
    for (const QueryRow& row : cache.plan(layer).rows()) {
        want.insert(fields(row));
        rows_of_sequence[row.sequence]++;
    }
    const auto look = [&](size_t at, int n, int rows_each, bool chunks) {
        const auto* rows = reinterpret_cast<const QueryRow*>(words.data() + at);
        for (int i = 0; i < n * rows_each; i++) {
            if (rows[i].token == 0xffffffff) continue;
            EXPECT_TRUE(got.insert(fields(rows[i])).second);
            EXPECT_EQ(rows[i].sequence, rows[i / rows_each * rows_each].sequence);
            EXPECT_EQ(chunks, cache.config().chunk_rows > 0 && rows_of_sequence[rows[i].sequence] >= cache.config().chunk_rows);
            const int coded = (rows[i].coded_end + 63) / 64, all = (rows[i].end + 63) / 64;
            if (chunks) { EXPECT_LE(std::max(coded, all), layout.chunk_blocks); }
        }
    };
    look(layout.rows[cache.plan_index(layer)], layout.n_tiles, layout.rows_per_tile, false);
    look(layout.chunk_rows[cache.plan_index(layer)], layout.n_chunks, layout.rows_per_chunk, true);
    EXPECT_EQ(got, want);
}

}  // namespace

TEST(CudaCache, TheSameStepsLeaveTheSameBytes) {
    for (const std::string recipe : {"had2", "planes:3"}) {
        for (const int window : {0, 100}) {
            const Scenario scenario{.recipe = recipe, .sink = 4, .recent = 64, .window = window, .step = 200};
            FakeDevice device;
            CacheConfig config = config_of(scenario);
            Cache host(config);
            config.devices.assign(config.layers.size(), &device);
            config.chunk_rows = window == 0 ? 0 : 40;
            Cache there(config);
            std::mt19937 random(7);
            Token next = 0;
            for (int i = 0; i < 12; i++) {
                std::vector<StepToken> tokens;
                for (uint32_t s = 0; s < 2; s++) {
                    const int n = std::min(1 + int(random() % 96), scenario.tokens - host.length(s));
                    const auto some = run_of(s, next, i % 3 == 2 ? std::min(1, n) : n);
                    next += Token(some.size());
                    tokens.insert(tokens.end(), some.begin(), some.end());
                }
                ASSERT_TRUE(step(host, tokens));
                device_step(there, tokens);
                expect_rows(there, 0);
                const StepLayout most = largest_layout(config, int(tokens.size()), 2);
                EXPECT_GE(most.words, there.step_layout().words);
                if (i % 4 == 3) {  // the crop leaves tokens in the window that are known through their codes only
                    const int32_t length = std::max(host.lowest_crop(0), host.length(0) - 90);
                    ASSERT_EQ(host.crop(0, length), there.crop(0, length));
                    ASSERT_EQ(host.fork(0, 2, length), there.fork(0, 2, length));
                }
                for (uint32_t s = 0; s < 3; s++) { ASSERT_EQ(save(host, s), save(there, s)) << recipe << " step " << i; }
            }
            EXPECT_GT(device.reads, 0);
        }
    }
}

TEST(CudaCache, ASequenceMovesBetweenDevices) {
    const Scenario scenario{.recipe = "had2", .sink = 4, .recent = 64, .window = 0, .step = 200};
    FakeDevice device;
    CacheConfig config = config_of(scenario);
    Cache host(config);
    config.devices.assign(config.layers.size(), &device);
    Cache there(config);
    ASSERT_TRUE(step(host, run_of(0, 0, 200)));
    restore(there, 1, save(host, 0));
    EXPECT_EQ(save(there, 1), save(host, 0));
    device_step(there, run_of(1, 200, 70));
    ASSERT_TRUE(step(host, run_of(0, 200, 70)));
    EXPECT_EQ(save(there, 1), save(host, 0));
    restore(host, 1, save(there, 1));
    EXPECT_EQ(save(host, 1), save(host, 0));
}

TEST(CudaCache, ADecodeStepKeepsItsLayout) {
    const Scenario scenario{.recipe = "had2", .sink = 4, .recent = 64, .step = 200};
    Cache cache(config_of(scenario));
    ASSERT_TRUE(step(cache, run_of(0, 0, 130)));
    ASSERT_TRUE(step(cache, run_of(0, 130, 1)));
    const StepLayout first = cache.step_layout();
    for (int i = 131; i < 300; i++) {
        ASSERT_TRUE(step(cache, run_of(0, Token(i), 1)));
        EXPECT_EQ(cache.step_layout(), first);
        EXPECT_TRUE(cache.step_layout().encodes_first);
    }
}

// The device's encoder, thread by thread on the emulator: the bytes of encode_page(), whatever the data.
#include <gtest/gtest.h>

#include "cuda/emulated_machine.h"
#include "cuda/encode_cases.h"
#include "recipe/cuda/encode.h"
#include "recipe/cuda/store.h"

namespace crumb::cuda {

namespace {

template <int kTokens, int kDirections>
void emulated_encode(const EncodeArgs& args, const EncodeJob* jobs, int n_jobs, Stream) {
    using E = Encode<kTokens, kDirections>;
    simt::emulate({2 * E::kSlices * args.n_head_kv * n_jobs, kEncodeThreads, E::shared_bytes(encode_shape(args)), emulated_seed++},
                  [&](std::byte* memory) { E::run(args, jobs, memory); });
}

// As the second of three layers; others have no KV heads. Jobs without a source come last.
template <int kTokens>
void emulated_layers(const EncodeArgs& args, const EncodeJob* jobs, int n_jobs, Stream) {
    using E = Encode<kTokens, 4>;
    EncodeArgs layers[3] = {args, args, args};
    layers[0].n_head_kv = layers[2].n_head_kv = 0;
    std::vector<EncodeJob> padded(jobs, jobs + n_jobs);
    padded.resize(padded.size() + 2, EncodeJob{kNoBlock, kNoBlock, 0, kNoBlock});
    const int most_heads = args.n_head_kv + 1, slots = 4;
    simt::emulate({3 * 2 * E::kSlices * most_heads * slots, kEncodeThreads, E::shared_bytes(encode_shape(args)), emulated_seed++},
                  [&](std::byte* memory) { E::run_layers(layers, most_heads, slots, padded.data(), int(padded.size()), memory); });
}

TEST(CudaEncode, BytesAreThoseOfTheCpu) {
    EmulatedMachine machine;
    for (const Recipe& recipe : encoder_recipes()) expect_same_pages(machine, emulated_encode<64, 4>, recipe, 64, 64, kAllRows);
}

TEST(CudaEncode, ManyLayersInOneLaunch) {
    EmulatedMachine machine;
    for (const char* name : {"had2", "quarot:paper"}) {
        expect_same_pages(machine, emulated_layers<64>, find_recipe(name), 64, 64, kAllRows);
        expect_same_pages(machine, emulated_layers<16>, find_recipe(name), 64, 64, kAllRows);
    }
}

TEST(CudaEncode, ParametersOfGroups) {
    EmulatedMachine machine;
    for (const char* name : kGroupedRecipes) expect_same_pages(machine, emulated_encode<64, 4>, find_recipe(name), 64, 64, kAllRows);
    const Rows kinds[] = {Rows::normal, Rows::huge, Rows::nonfinite};
    for (const char* name : kGroupedRecipes) expect_same_pages(machine, emulated_encode<64, 4>, find_recipe(name), 128, 96, kinds);
}

TEST(CudaEncode, TokensOfABlockSharedOut) {
    EmulatedMachine machine;
    const Rows kinds[] = {Rows::normal, Rows::uneven, Rows::nonfinite};
    for (const Recipe& recipe : encoder_recipes()) {
        expect_same_pages(machine, emulated_encode<16, 4>, recipe, 64, 96, kinds);
        expect_same_pages(machine, emulated_encode<8, 4>, recipe, 96, 64, kinds);
    }
}

TEST(CudaEncode, OtherHeadSizes) {
    EmulatedMachine machine;
    const Rows kinds[] = {Rows::normal, Rows::nonfinite};
    for (const Recipe& recipe : encoder_recipes()) expect_same_pages(machine, emulated_encode<64, 4>, recipe, 128, 80, kinds);
    for (const int i : {1, 6}) {
        expect_same_pages(machine, emulated_encode<64, 8>, encoder_recipes()[size_t(i)], 256, 144, kinds);
        expect_same_pages(machine, emulated_encode<8, 8>, encoder_recipes()[size_t(i)], 144, 256, kinds);
    }
}

TEST(CudaStore, RowsLieWhereRecordsHaveThem) {
    const int dim_k = 64, dim_v = 128, heads = 3;
    const PageFormat format = bf16_format(dim_k, dim_v);
    for (const int tokens : {7, 70}) {
        std::vector<std::byte> want(40 * heads * format.bytes(), std::byte(9)), got = want, chunk = want;
        std::vector<bf16> k, v;
        while (k.size() < size_t(tokens * heads * dim_k)) std::ranges::copy(rows_of(Rows::normal, dim_k, int(k.size())), std::back_inserter(k));
        while (v.size() < size_t(tokens * heads * dim_v)) std::ranges::copy(rows_of(Rows::normal, dim_v, int(v.size())), std::back_inserter(v));
        std::vector<u32> blocks, slots;
        for (int t = 0; t < tokens; t++) {
            blocks.push_back(u32(39 - t / 2)), slots.push_back(u32(61 + 3 * t));
            for (int h = 0; h < heads; h++) {
                std::byte* record = &want[(blocks[t] * heads + h) * format.bytes()];
                set_key(format, record, int(slots[t] % 64), std::span(k).subspan(size_t(t * heads + h) * dim_k, dim_k));
                set_value(format, record, int(slots[t] % 64), std::span(v).subspan(size_t(t * heads + h) * dim_v, dim_v));
            }
        }
        StoreArgs args = {&k[0].bits, &v[0].bits, blocks.data(), slots.data(), reinterpret_cast<u8*>(got.data()),
                          heads * format.bytes(), dim_k, dim_v, heads};
        simt::emulate({tokens * heads, kStoreThreads, 0}, [&](std::byte*) { store_rows(args); });
        EXPECT_EQ(got, want);
        args.exact = reinterpret_cast<u8*>(chunk.data());
        simt::emulate({(tokens + kStoreTokens - 1) / kStoreTokens * heads, kStoreThreads, store_shared_bytes(dim_k)},
                      [&](std::byte* shared) { store_chunk(args, tokens, shared); });
        EXPECT_EQ(chunk, want);
    }
}

TEST(CudaEncode, WordsAreTheInverseOfTheMap) {
    for (const int planes : {32, 64, 96, 128, 224, 512}) {
        std::vector<int> times_k(planes, 0), times_v(planes, 0);  // of 16 bytes
        for (int n = 0; n < planes; n++) {
            const int token = n % 16 * 4, item = n / 16;
            const KeyWords k = key_words(planes, token, item);
            const ValueWords v = value_words(planes, token, item);
            times_k[size_t(k.at)]++, times_v[size_t(v.at)]++;
            for (int i = 0; i < 64; i++) {
                const int e = i / 16, f = i / 4 % 4, b = i % 4;
                const auto at = [&](int word) { return CodeAt{16u * uint32_t(word) + uint32_t(4 * e + b), 2u * uint32_t(f)}; };
                EXPECT_EQ(key_code_at(planes, token + e, k.plane + k.field_step * f + b), at(k.at));
                const int t = v.token + b + (v.tail ? 4 * (f / 2) : 0), p = v.plane + e + 16 * (v.tail ? f % 2 : f);
                EXPECT_EQ(value_code_at(planes, t, p), at(v.at));
            }
        }
        EXPECT_EQ(times_k, std::vector<int>(planes, 1));
        EXPECT_EQ(times_v, times_k);
    }
}

}  // namespace

}  // namespace crumb::cuda

// Rows of K and V as an engine has them, FP32 with strides, into their places in BF16 records: what Cache::store() does on the
// CPU, with the same roundings. Codes are made later, of what is written here.
//
// A step of few rows needs no launch for them: blocks of map_query() take a row of a KV head each. In longer ones a thread block
// takes some stores of a KV head. K lies by channel in a record, so it is turned in shared memory: tokens of a
// channel are then written side by side.
#pragma once

#include <crumb/cache.h>

#include "base/cuda/simt.h"

namespace crumb::cuda {

using simt::u32;
using simt::u8;

inline constexpr int kRowThreads = 256;
inline constexpr int kChunkStores = 64;  // of a thread block in a long step; in a short one it takes one

struct RowArgs {
    const float *k = nullptr, *v = nullptr;  // row of head h of token t: + t * token stride + h * head stride floats
    size_t k_token_stride = 0, k_head_stride = 0, v_token_stride = 0, v_head_stride = 0;
    const StoreRow* stores = nullptr;
    int n_stores = 0;
    int dim_k = 0, dim_v = 0, n_head_kv = 0;
    u8* exact = nullptr;
    size_t exact_stride = 0;
};

// to_bf16() of half.h.
CRUMB_DEVICE u32 bf16_bits(float x) {
    const u32 u = simt::bits_of(x);
    return (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

constexpr bool few_rows(int n_stores) { return n_stores < kChunkStores; }
constexpr int stores_per_block(int n_stores) { return few_rows(n_stores) ? 1 : kChunkStores; }
inline int row_blocks(const RowArgs& a) {
    const int per_block = stores_per_block(a.n_stores);
    return (a.n_stores + per_block - 1) / per_block * a.n_head_kv;
}
constexpr size_t row_shared_bytes(int dim_k, int per_block) { return size_t(per_block) * size_t(dim_k + 2) * 2; }

// `index`: of the thread block, below row_blocks().
CRUMB_DEVICE void store_f32_rows(const RowArgs& a, int per_block, int index, std::byte* shared) {
    using namespace simt;
    wait_for_previous();
    launch_next();
    const int first = index / a.n_head_kv * per_block, head = index % a.n_head_kv;
    const int n = a.n_stores - first < per_block ? a.n_stores - first : per_block;
    const StoreRow* stores = a.stores + first;
    const size_t record_bytes = size_t(kPageTokens) * size_t(a.dim_k + a.dim_v) * 2;
    const auto record = [&](int i) {
        return reinterpret_cast<uint16_t*>(a.exact + size_t(stores[i].block) * a.exact_stride + size_t(head) * record_bytes);
    };
    uint16_t* const keys = reinterpret_cast<uint16_t*>(shared);  // [store][dim_k + 2]
    const int pitch = a.dim_k + 2;
    for (int j = thread(); j < n * a.dim_k; j += n_threads()) {
        const int i = j / a.dim_k, c = j % a.dim_k;
        const float* row = a.k + size_t(stores[i].token) * a.k_token_stride + size_t(head) * a.k_head_stride;
        keys[i * pitch + c] = uint16_t(bf16_bits(row[c]));
    }
    for (int j = thread(); j < n * a.dim_v; j += n_threads()) {
        const int i = j / a.dim_v, c = j % a.dim_v;
        if (stores[i].block == kNoBlock) { continue; }
        const float* row = a.v + size_t(stores[i].token) * a.v_token_stride + size_t(head) * a.v_head_stride;
        record(i)[kPageTokens * a.dim_k + int(stores[i].row) * a.dim_v + c] = uint16_t(bf16_bits(row[c]));
    }
    sync_block();
    for (int j = thread(); j < n * a.dim_k; j += n_threads()) {
        const int i = j % n, c = j / n;
        if (stores[i].block == kNoBlock) { continue; }
        record(i)[c * kPageTokens + int(stores[i].row)] = keys[i * pitch + c];
    }
}

}  // namespace crumb::cuda

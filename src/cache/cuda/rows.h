// Rows of K and V as an engine has them, FP32 with strides, into their places in BF16 records: what Cache::store() does on the
// CPU, with the same roundings. Codes are made later, of what is written here.
//
// A thread block takes some stores of a KV head. K lies by channel in a record, so it is turned in shared memory: tokens of a
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
    const float *k, *v;  // row of head h of token t: + t * token stride + h * head stride floats
    size_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    const StoreRow* stores;
    int n_stores;
    int dim_k, dim_v, n_head_kv;
    u8* exact;
    size_t exact_stride;
};

// to_bf16() of half.h.
CRUMB_DEVICE u32 bf16_bits(float x) {
    const u32 u = simt::bits_of(x);
    return (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

constexpr int stores_per_block(int n_stores) { return n_stores < kChunkStores ? 1 : kChunkStores; }
constexpr size_t row_shared_bytes(int dim_k, int per_block) { return size_t(per_block) * size_t(dim_k + 2) * 2; }

// Grid: n_stores / per_block, rounded up, x n_head_kv.
CRUMB_DEVICE void store_f32_rows(const RowArgs& a, int per_block, std::byte* shared) {
    using namespace simt;
    const int first = block() / a.n_head_kv * per_block, head = block() % a.n_head_kv;
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

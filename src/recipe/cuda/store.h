// New rows of K and V into their places in exact records. Codes are made of what is written here, later, when 64 tokens are
// complete and leave the window.
//
// Two kernels: of a decode step, whose tokens lie in different records, a block takes a (token, KV head); of a prompt's chunk,
// 64 tokens of a head, whose K is turned in shared memory so that tokens of a channel are written side by side.
#pragma once

#include <crumb/page.h>

#include "base/cuda/simt.h"

namespace crumb::cuda {

using simt::u32;
using simt::u8;

inline constexpr int kStoreThreads = 128;
inline constexpr int kStoreTokens = 64;  // of a block of store_chunk()
inline constexpr int kManyTokens = 512;  // from here on it pays

struct StoreArgs {
    const uint16_t* k;  // [n_tokens][n_head_kv][D_k] BF16
    const uint16_t* v;
    const u32* blocks;  // [n_tokens]
    const u32* slots;
    u8* exact;          // block i at exact + i * exact_stride, n_head_kv records each
    size_t exact_stride;
    int dim_k, dim_v, n_head_kv;
};

// Grid: n_tokens x n_head_kv.
CRUMB_DEVICE void store_rows(const StoreArgs& a) {
    using namespace simt;
    const int token = block() / a.n_head_kv, head = block() % a.n_head_kv;
    const size_t record_bytes = size_t(kPageTokens) * size_t(a.dim_k + a.dim_v) * 2;
    uint16_t* record = reinterpret_cast<uint16_t*>(a.exact + a.blocks[token] * a.exact_stride + head * record_bytes);
    const int slot = int(a.slots[token] % u32(kPageTokens));
    for (int c = thread(); c < a.dim_k; c += n_threads()) {
        record[c * kPageTokens + slot] = a.k[size_t(block()) * a.dim_k + c];
    }
    uint16_t* values = record + kPageTokens * a.dim_k + slot * a.dim_v;
    for (int c = thread(); c < a.dim_v; c += n_threads()) { values[c] = a.v[size_t(block()) * a.dim_v + c]; }
}

constexpr size_t store_shared_bytes(int dim_k) { return size_t(kStoreTokens) * size_t(dim_k + 2) * 2; }

// Grid: n_tokens / kStoreTokens, rounded up, x n_head_kv.
CRUMB_DEVICE void store_chunk(const StoreArgs& a, int n_tokens, std::byte* shared) {
    using namespace simt;
    const int first = block() / a.n_head_kv * kStoreTokens, head = block() % a.n_head_kv;
    const int n = n_tokens - first < kStoreTokens ? n_tokens - first : kStoreTokens;
    const size_t record_bytes = size_t(kPageTokens) * size_t(a.dim_k + a.dim_v) * 2;
    const auto record_of = [&](int t) {
        return reinterpret_cast<uint16_t*>(a.exact + a.blocks[first + t] * a.exact_stride + head * record_bytes);
    };
    const auto slot_of = [&](int t) { return int(a.slots[first + t] % u32(kPageTokens)); };
    uint16_t* const keys = reinterpret_cast<uint16_t*>(shared);  // [token][D_k + 2]
    const int pairs_k = a.dim_k / 2, pitch = a.dim_k + 2, eights_v = a.dim_v / 8;
    for (int i = thread(); i < n * pairs_k; i += n_threads()) {
        const int t = i / pairs_k, c = i % pairs_k;
        const u32* row = reinterpret_cast<const u32*>(a.k) + (size_t(first + t) * a.n_head_kv + head) * pairs_k;
        *reinterpret_cast<u32*>(keys + t * pitch + 2 * c) = row[c];
    }
    for (int i = thread(); i < n * eights_v; i += n_threads()) {
        const int t = i / eights_v, c = i % eights_v;
        const Words4* row = reinterpret_cast<const Words4*>(a.v) + (size_t(first + t) * a.n_head_kv + head) * eights_v;
        reinterpret_cast<Words4*>(record_of(t) + kPageTokens * a.dim_k + slot_of(t) * a.dim_v)[c] = row[c];
    }
    sync_block();
    const int t = thread() % kStoreTokens;
    if (t >= n) { return; }
    uint16_t* const to = record_of(t) + slot_of(t);
    for (int c = thread() / kStoreTokens; c < a.dim_k; c += n_threads() / kStoreTokens) { to[c * kPageTokens] = keys[t * pitch + c]; }
}

}  // namespace crumb::cuda

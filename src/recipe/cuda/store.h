// New rows of K and V into their places in exact records: a thread a channel of a (token, KV head). Codes are made of what
// is written here, later, when 64 tokens are complete and leave the window.
#pragma once

#include <crumb/page.h>

#include "base/cuda/simt.h"

namespace crumb::cuda {

using simt::u32;
using simt::u8;

inline constexpr int kStoreThreads = 128;

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

}  // namespace crumb::cuda

// Attention over one window without a cache, and its way back: ordinary operations on blocks of queries, so that no more
// than [keys, kBlock, heads] scores exist at a time. The way back computes the probabilities again.
//
// Noise on far rows is never added: at no noise the forward pass is plain causal attention, and the gradient with
// respect to the noise is what flows back through the far pairs alone. Pairs (query t, key j) of a block of queries fall
// into ranges of keys, and each pair is multiplied once:
//
//   keys     0 .. sink        near       as the cache reads exact rows there
//            .. t0 - recent   far        for all queries of the block t0 .. t1
//            .. t1 - recent   mixed      by a 0/1 table
//            .. t1            near       causal, by a table
//
// The tables depend on t - j only, so one of [n + kBlock, kBlock] serves all blocks.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "gradient_compute.h"

namespace crumb::llama {

class Reverse;

// What attention of one layer reads: F32, q [D_k, heads, n], k [D_k, KV heads, n], v [D_v, KV heads, n].
struct AttentionCall {
    ggml_tensor* q = nullptr;
    ggml_tensor* k = nullptr;
    ggml_tensor* v = nullptr;
    float scale = 1;
    int layer = 0;
    int window = 0;  // keys t - window .. t are seen; 0: all
};

// Query t reads the noise of rows sink <= j <= t - recent.
struct FarRule {
    int sink = 64;
    int recent = 256;
    bool operator==(const FarRule&) const = default;
};

// Rows that a window of n tokens has far queries for, and as many queries that have far rows.
int far_rows(int n_tokens, FarRule rule);

class WindowAttention {
  public:
    static constexpr int kBlock = 256;  // queries

    // `windows`: all values of AttentionCall::window there will be.
    WindowAttention(int n_tokens, FarRule rule, const std::vector<int>& windows);

    // [D_v * heads, n]
    ggml_tensor* forward(ggml_context* context, const AttentionCall& call) const;

    // Adds the gradients of q, k and v, and returns those of the noise on far rows, [D, n, KV heads]; none where a
    // sliding window is: its rows stay exact in the cache.
    struct FarGradient {
        ggml_tensor* k = nullptr;
        ggml_tensor* v = nullptr;
    };
    FarGradient back(Reverse& reverse, const AttentionCall& call, ggml_tensor* gradient) const;

  private:
    struct Block;
    Block block(const AttentionCall& call, int first) const;
    ggml_tensor* part(ggml_context* context, ggml_tensor* table, int row_zero, int first_key, int end_key,
                      int n_queries) const;

    const int n_;
    const FarRule rule_;
    ggml_context_ptr context_;
    std::map<int, ggml_tensor*> masks_;  // by window: 0 or -inf
    ggml_tensor* far_ = nullptr;         // 1 or 0
    ggml_tensor* near_ = nullptr;        // 1 - far
    std::unique_ptr<Kept> kept_;
};

}  // namespace crumb::llama

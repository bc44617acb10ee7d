#include "gradient_attention.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>

#include "ggml-backend.h"
#include "ggml.h"
#include "gradient_rules.h"

namespace crumb::llama {

namespace {

// [a, b, c] -> [a, c, b] without moving anything
ggml_tensor* swapped(ggml_context* c, ggml_tensor* t) { return ggml_permute(c, t, 0, 2, 1, 3); }

// Elements first .. end of the given dimension.
ggml_tensor* range(ggml_context* c, ggml_tensor* t, int dimension, int first, int end) {
    int64_t ne[3] = {t->ne[0], t->ne[1], t->ne[2]};
    ne[dimension] = end - first;
    return ggml_view_3d(c, t, ne[0], ne[1], ne[2], t->nb[1], t->nb[2], size_t(first) * t->nb[dimension]);
}

}  // namespace

int far_rows(int n_tokens, FarRule rule) { return std::max(0, n_tokens - rule.sink - rule.recent); }

// Queries begin .. end, which see keys first .. end; `first` is a multiple of 16, as ggml's fast product wants it.
struct WindowAttention::Block {
    int begin, end, first;
    int queries() const { return end - begin; }
    int keys() const { return end - first; }
};

WindowAttention::Block WindowAttention::block(const AttentionCall& call, int begin) const {
    Block block{begin, std::min(begin + kBlock, n_), 0};
    if (call.window > 0) {
        block.first = std::max(0, begin - call.window + 1) / 16 * 16;
    }
    return block;
}

WindowAttention::WindowAttention(int n_tokens, FarRule rule, const std::vector<int>& windows)
    : n_(n_tokens), rule_(rule), context_(new_descriptions(windows.size() + 3)) {
    const int width = n_ + kBlock;
    const auto table = [&] { return ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, width, kBlock); };
    for (const int window : windows) {
        if (!masks_.contains(window)) {
            masks_[window] = table();
        }
    }
    far_ = table();
    near_ = table();
    kept_ = std::make_unique<Kept>(context_.get());
    // row i, column c: query t = t0 + i and key j = t0 + c - n
    const auto fill = [&](ggml_tensor* tensor, auto value) {
        auto* data = static_cast<float*>(tensor->data);
        for (int i = 0; i < kBlock; ++i) {
            for (int c = 0; c < width; ++c) {
                data[size_t(i) * width + c] = value(i - (c - n_));  // t - j
            }
        }
    };
    for (const auto& [window, mask] : masks_) {
        fill(mask, [window = window](int back) {
            return back < 0 || (window > 0 && back >= window) ? -INFINITY : 0.0f;
        });
    }
    fill(far_, [&](int back) { return back >= rule_.recent ? 1.0f : 0.0f; });
    fill(near_, [&](int back) { return back >= rule_.recent ? 0.0f : 1.0f; });
}

// The table's values for keys first .. end and the queries of a block that begins at row_zero.
ggml_tensor* WindowAttention::part(ggml_context* c, ggml_tensor* table, int row_zero, int first, int end,
                                   int n_queries) const {
    return ggml_cont(c, ggml_view_2d(c, table, end - first, n_queries, table->nb[1],
                                     size_t(first - row_zero + n_) * sizeof(float)));
}

ggml_tensor* WindowAttention::forward(ggml_context* c, const AttentionCall& call) const {
    ggml_tensor* q = swapped(c, call.q);
    ggml_tensor* k = ggml_cont(c, swapped(c, call.k));                     // [D_k, n, KV]
    ggml_tensor* v = ggml_cont(c, ggml_permute(c, call.v, 1, 2, 0, 3));    // [n, D_v, KV]
    ggml_tensor* out = nullptr;
    for (int t = 0; t < n_; t += kBlock) {
        const Block b = block(call, t);
        ggml_tensor* scores = ggml_mul_mat(c, range(c, k, 1, b.first, b.end), ggml_cont(c, range(c, q, 1, t, b.end)));
        ggml_tensor* mask = part(c, masks_.at(call.window), t, b.first, b.end, b.queries());
        ggml_tensor* p = ggml_soft_max_ext(c, scores, mask, call.scale, 0);
        ggml_tensor* some = ggml_mul_mat(c, range(c, v, 0, b.first, b.end), p);  // [D_v, queries, heads]
        out = out ? ggml_concat(c, out, some, 1) : some;
    }
    return ggml_reshape_2d(c, ggml_cont(c, swapped(c, out)), out->ne[0] * out->ne[2], n_);
}

WindowAttention::FarGradient WindowAttention::back(Reverse& reverse, const AttentionCall& call,
                                                   ggml_tensor* gradient) const {
    ggml_context* c = reverse.context();
    const int64_t heads = call.q->ne[1], kv_heads = call.k->ne[1], group = heads / kv_heads;
    const int64_t dk = call.k->ne[0], dv = call.v->ne[0];
    ggml_tensor* q = swapped(c, call.q);
    ggml_tensor* k = ggml_cont(c, swapped(c, call.k));                                    // [D_k, n, KV]
    ggml_tensor* v = ggml_cont(c, swapped(c, call.v));                                    // [D_v, n, KV]
    ggml_tensor* k_columns = transposed(c, k);                                            // [n, D_k, KV]
    ggml_tensor* to_out = swapped(c, ggml_reshape_3d(c, gradient, dv, heads, n_));        // [D_v, n, heads]

    // sums over blocks, by rows of K and V
    struct Sums {
        ggml_tensor *near, *far;
    };
    const auto zeros = [&](ggml_tensor* like) { return ggml_fill(c, like, 0.0f); };
    Sums sum_k{zeros(k), zeros(k)}, sum_v{zeros(v), zeros(v)};
    const bool far_wanted = call.window == 0;
    const bool through_near_k = reverse.needs(call.k), through_near_v = reverse.needs(call.v);
    ggml_tensor* to_q = nullptr;

    for (int t = 0; t < n_; t += kBlock) {
        const Block b = block(call, t);
        ggml_tensor* qb = ggml_cont(c, range(c, q, 1, t, b.end));         // [D_k, queries, heads]
        ggml_tensor* gb = ggml_cont(c, range(c, to_out, 1, t, b.end));    // [D_v, queries, heads]
        ggml_tensor* mask = part(c, masks_.at(call.window), t, b.first, b.end, b.queries());
        ggml_tensor* scores = ggml_mul_mat(c, range(c, k, 1, b.first, b.end), qb);
        ggml_tensor* p = ggml_soft_max_ext(c, scores, mask, call.scale, 0);  // [keys, queries, heads]
        ggml_tensor* to_p = ggml_mul_mat(c, range(c, v, 1, b.first, b.end), gb);
        ggml_tensor* to_scores = ggml_soft_max_ext_back(c, to_p, p, call.scale, 0);
        if (reverse.needs(call.q)) {
            ggml_tensor* some = ggml_mul_mat(c, range(c, k_columns, 0, b.first, b.end), to_scores);
            to_q = to_q ? ggml_concat(c, to_q, some, 1) : some;
            reverse.compute_next(to_q);
        }

        // The query heads of a KV head are further queries. sums[rows] += (weights of pairs) x (rows of queries)
        const int64_t rows = b.queries() * group;
        ggml_tensor* q_columns = transposed(c, ggml_reshape_3d(c, qb, dk, rows, kv_heads));  // [rows, D_k, KV]
        ggml_tensor* g_columns = transposed(c, ggml_reshape_3d(c, gb, dv, rows, kv_heads));
        const auto pull = [&](ggml_tensor*& sum, ggml_tensor* columns, ggml_tensor* pairs, int first, int end,
                              ggml_tensor* table) {
            ggml_tensor* some = range(c, pairs, 0, first - b.first, end - b.first);
            if (table) {
                some = ggml_mul(c, ggml_cont(c, some), part(c, table, t, first, end, b.queries()));
            }
            // [keys, queries, heads] -> [keys, rows, KV]: nothing moves, rows of one KV head follow each other
            some = ggml_view_3d(c, some, end - first, rows, kv_heads, some->nb[1], some->nb[1] * rows, 0);
            ggml_tensor* product = ggml_mul_mat(c, columns, transposed(c, some));  // [D, keys, KV]
            sum = ggml_acc_inplace(c, sum, product, sum->nb[1], sum->nb[2], sum->nb[3], size_t(first) * sum->nb[1]);
            reverse.compute_next(sum);
        };
        const auto pull_both = [&](bool far, int first, int end, ggml_tensor* table) {
            first = std::max(first, b.first);
            end = std::min(end, b.end);
            if (first >= end) {
                return;
            }
            if (far || through_near_k) {
                pull(far ? sum_k.far : sum_k.near, q_columns, to_scores, first, end, table);
            }
            if (far || through_near_v) {
                pull(far ? sum_v.far : sum_v.near, g_columns, p, first, end, table);
            }
        };
        if (!far_wanted) {
            pull_both(false, b.first, b.end, nullptr);
            continue;
        }
        const int mixed = std::max(rule_.sink, t - rule_.recent + 1), near = std::max(rule_.sink, b.end - rule_.recent);
        pull_both(false, 0, rule_.sink, nullptr);
        pull_both(true, rule_.sink, mixed, nullptr);
        pull_both(true, mixed, near, far_);
        pull_both(false, mixed, near, near_);
        pull_both(false, near, b.end, nullptr);
    }
    const auto add = [&](ggml_tensor* input, const Sums& sums) {
        ggml_tensor* all = far_wanted ? ggml_add(c, sums.near, sums.far) : sums.near;
        reverse.add(input, ggml_cont(c, swapped(c, all)));
    };
    if (to_q) {
        reverse.add(call.q, ggml_cont(c, swapped(c, to_q)));
    }
    if (through_near_k) {
        add(call.k, sum_k);
    }
    if (through_near_v) {
        add(call.v, sum_v);
    }
    return far_wanted ? FarGradient{sum_k.far, sum_v.far} : FarGradient{};
}

}  // namespace crumb::llama

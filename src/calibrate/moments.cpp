// Streaming sums. One pass is enough for all of them but the surrogate of sst, whose weights w = k A k^T want the A =
// Q^T Q of all tokens. A differs between the beginning of a text and the rest (RoPE turns its slow channels a little
// further with each position), so that an A that grows with the text weighs tokens unequally: by fix_weights(), A comes
// from an earlier reading.
#include <crumb/calibrate.h>
#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "calibrate/gram.h"

namespace crumb {

namespace {

constexpr int kStep = 32;  // rows that are made double at a time, so that they stay in the first cache

// Calls f(rows [n][d], first row, n) for the rows of one head.
template <class F>
void for_rows(const HeadRows& source, int head, int n_tokens, int d, F f) {
    std::vector<double> rows(size_t(kStep) * d);
    for (int first = 0; first < n_tokens; first += kStep) {
        const int n = std::min(kStep, n_tokens - first);
        for (int t = 0; t < n; ++t) {
            const float* row = source.data + (first + t) * source.token_stride + head * source.head_stride;
            std::copy(row, row + d, rows.begin() + size_t(t) * d);
        }
        f(rows.data(), first, n);
    }
}

std::vector<double> mean_of(const std::vector<double>& sum, double count) {
    std::vector<double> mean(sum.size());
    std::transform(sum.begin(), sum.end(), mean.begin(), [&](double x) { return x / count; });
    return mean;
}

// Of a symmetric matrix of which `sum` has the upper triangle.
std::vector<double> symmetric_mean(const std::vector<double>& sum, int d, double count) {
    std::vector<double> mean(sum.size());
    for (int i = 0; i < d; ++i) {
        for (int j = i; j < d; ++j) {
            mean[i * d + j] = mean[j * d + i] = sum[i * d + j] / count;
        }
    }
    return mean;
}

std::string describe(const LayerShape& s) {
    return fmt::format("{} query and {} KV heads, K {} and V {} channels", s.n_head, s.n_head_kv, s.dim_k, s.dim_v);
}

}  // namespace

Moments::Moments(int skip, int n_threads) : skip_(skip), n_threads_(n_threads) {
    if (skip < 0) {
        fail("cannot skip {} tokens of each text; give 0 or more", skip);
    }
    CRUMB_ASSERT(n_threads > 0);
}

void Moments::begin_sequence(int fold) {
    CRUMB_ASSERT(fold >= 0 && fold < kFolds);
    ++sequence_;
    fold_ = fold;
}

Moments::Head Moments::empty_head(const LayerShape& shape) {
    const size_t kk = size_t(shape.dim_k) * shape.dim_k, vv = size_t(shape.dim_v) * shape.dim_v;
    Head head;
    head.k.resize(shape.dim_k);
    for (auto* sum : {&head.qq, &head.kk}) {
        sum->resize(kk);
    }
    for (auto* sum : {&head.vv, &head.wvv, &head.oo}) {
        sum->resize(vv);
    }
    return head;
}

void Moments::fix_weights() {
    for (auto& [index, layer] : layers_) {
        if (layer.tokens == 0) {
            fail("layer {} has seen no tokens beyond the first {}, so there are no weights", index, skip_);
        }
        const double count = double(layer.tokens) * (layer.shape.n_head / layer.shape.n_head_kv);
        for (Head& head : layer.heads) {
            std::vector<double> fixed = mean_of(head.qq, count);
            head = empty_head(layer.shape);
            head.fixed = std::move(fixed);
        }
        layer.pages.assign(layer.heads.size(), PageSums(layer.shape.dim_k, layer.shape.dim_v));
        layer.tokens = 0;
    }
}

void Moments::add(const LayerShape& shape, Head& head, int index, uint64_t tokens_before, const TokenBlock& block) {
    const int dk = shape.dim_k, dv = shape.dim_v, n = block.n_tokens, group = shape.n_head / shape.n_head_kv;
    for (int g = 0; g < group; ++g) {
        const int q_head = index * group + g;
        for_rows(block.q, q_head, n, dk,
                 [&](const double* rows, int, int m) { add_gram(rows, m, dk, head.qq.data()); });
        for_rows(block.output, q_head, n, dv,
                 [&](const double* rows, int, int m) { add_gram(rows, m, dv, head.oo.data()); });
    }
    const std::vector<double>& a = head.fixed.empty() ? head.qq : head.fixed;
    const double count = head.fixed.empty() ? double(tokens_before + n) * group : 1.0;
    std::vector<double> weights(n);
    for_rows(block.k, index, n, dk, [&](const double* rows, int first, int m) {
        add_gram(rows, m, dk, head.kk.data());
        for (int t = 0; t < m; ++t) {
            for (int i = 0; i < dk; ++i) {
                head.k[i] += rows[t * dk + i];
            }
        }
        quadratic_forms(rows, m, dk, a.data(), weights.data() + first);
    });
    for (double& w : weights) {
        w = std::max(w, 0.0) / count;
        head.w += w;
    }
    std::vector<double> weighted(size_t(kStep) * dv);
    for_rows(block.v, index, n, dv, [&](const double* rows, int first, int m) {
        add_gram(rows, m, dv, head.vv.data());
        for (int t = 0; t < m; ++t) {
            const double root = std::sqrt(weights[first + t]);
            for (int i = 0; i < dv; ++i) {
                weighted[t * dv + i] = root * rows[t * dv + i];
            }
        }
        add_gram(weighted.data(), m, dv, head.wvv.data());
    });
}

void Moments::observe(int index, const LayerShape& shape, const TokenBlock& block) {
    CRUMB_ASSERT(block.n_tokens >= 0 && shape.n_head > 0 && shape.n_head_kv > 0 && shape.dim_k > 0 && shape.dim_v > 0);
    if (shape.n_head % shape.n_head_kv != 0) {
        fail("layer {}: {} query heads do not share {} KV heads evenly, so it cannot be calibrated", index,
             shape.n_head, shape.n_head_kv);
    }
    Layer& layer = layers_[index];
    if (layer.heads.empty()) {
        layer.shape = shape;
        layer.heads.assign(shape.n_head_kv, empty_head(shape));
        layer.pages.assign(shape.n_head_kv, PageSums(shape.dim_k, shape.dim_v));
    }
    if (layer.shape != shape) {
        fail("layer {}: it had {}, and now {}; calibrate one model at a time", index, describe(layer.shape),
             describe(shape));
    }
    if (layer.sequence != sequence_) {
        layer.sequence = sequence_;
        layer.position = 0;
        for (PageSums& pages : layer.pages) {
            pages.begin_sequence();
        }
    }
    const int skipped = int(std::clamp<int64_t>(skip_ - int64_t(layer.position), 0, block.n_tokens));
    const uint64_t position = layer.position + uint64_t(skipped);
    layer.position += block.n_tokens;
    TokenBlock used = block;
    used.n_tokens -= skipped;
    if (used.n_tokens == 0) {
        return;
    }
    for (HeadRows* rows : {&used.q, &used.k, &used.v, &used.output}) {
        rows->data += skipped * rows->token_stride;
    }

    // Heads are apart, so threads share nothing.
    const int n_threads = std::min(n_threads_, shape.n_head_kv);
    const auto work = [&](int thread) {
        for (int h = thread; h < shape.n_head_kv; h += n_threads) {
            add(shape, layer.heads[h], h, layer.tokens, used);
            layer.pages[h].add(used.k, used.v, h, used.n_tokens, position, fold_);
        }
    };
    {
        std::vector<std::jthread> others;
        for (int thread = 1; thread < n_threads; ++thread) {
            others.emplace_back(work, thread);
        }
        work(0);
    }
    layer.tokens += used.n_tokens;
}

void Moments::require(std::span<const int> layers) const {
    std::string missing, counts;
    uint64_t tokens = 0;
    bool differ = false;
    for (const int index : layers) {
        const auto found = layers_.find(index);
        const uint64_t n = found == layers_.end() ? 0 : found->second.tokens;
        if (n == 0) {
            missing += fmt::format(" {}", index);
            continue;
        }
        differ |= tokens != 0 && tokens != n;
        tokens = n;
        counts += fmt::format(" {}: {}", index, n);
    }
    if (!missing.empty()) {
        fail("calibration saw no tokens in layers{} (of {} layers)", missing, layers.size());
    }
    if (differ) {
        fail("calibration saw different numbers of tokens in its layers (layer: tokens){}", counts);
    }
}

std::vector<int> Moments::layers() const {
    std::vector<int> list;
    for (const auto& [index, layer] : layers_) {
        list.push_back(index);
    }
    return list;
}

const Moments::Layer& Moments::find(int layer) const {
    const auto found = layers_.find(layer);
    if (found == layers_.end()) {
        fail("calibration did not see layer {}", layer);
    }
    return found->second;
}

const LayerShape& Moments::shape(int layer) const { return find(layer).shape; }

uint64_t Moments::tokens(int layer) const { return find(layer).tokens; }

const PageSums& Moments::pages(int index, int head) const { return find(index).pages[head]; }

HeadMoments Moments::head(int index, int head) const {
    const Layer& layer = find(index);
    CRUMB_ASSERT(head >= 0 && head < layer.shape.n_head_kv);
    if (layer.tokens == 0) {
        fail("calibration saw no tokens in layer {} beyond the {} that it skips", index, skip_);
    }
    const Head& h = layer.heads[head];
    const int dk = layer.shape.dim_k, dv = layer.shape.dim_v;
    const double n = double(layer.tokens), n_query = n * (layer.shape.n_head / layer.shape.n_head_kv);
    return {.key_mean = mean_of(h.k, n),
            .qq = symmetric_mean(h.qq, dk, n_query),
            .kk = symmetric_mean(h.kk, dk, n),
            .vv = symmetric_mean(h.vv, dv, n),
            .sst = symmetric_mean(h.wvv, dv, std::max(h.w, 1e-300)),
            .sst_true = symmetric_mean(h.oo, dv, n_query)};
}

}  // namespace crumb

// Scores and distances are computed for two queries and a tile of keys at a time: keys, and values behind the factor of
// W_O^T W_O, lie transposed, so that a vector holds as many keys. A tile meets 16 queries while it is in the first cache.
// Every sum over channels is in their order and every product rounded by itself: no instruction set changes a bit.
// |W_O (v - o)|^2 is |(v - o) L|^2, a sum of squares: the expanded form would lose it where a query attends to one key
// alone and o is almost v.
#include <crumb/error.h>
#include <crumb/local_metric.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "base/clones.h"
#include "base/exponential.h"
#include "calibrate/gram.h"

namespace crumb {

namespace {

constexpr int kTile = 64, kRows = 2, kBlock = 16;  // keys, queries at a time, queries that a tile meets
constexpr int kVectors = kTile / kLanes;
using Doubles = double __attribute__((vector_size(8 * kLanes)));

inline const Floats& vector_at(const float* x) { return *reinterpret_cast<const Floats*>(x); }
inline Floats& vector_at(float* x) { return *reinterpret_cast<Floats*>(x); }

// out[r][j] = sum_i x[r][i] tile[i][j]
CRUMB_CLONES void products(const float* x, const float* tile, int d, float* out, size_t out_stride) {
    Floats sums[kRows][kVectors] = {};
    for (int i = 0; i < d; ++i) {
#pragma GCC unroll kVectors
        for (int j = 0; j < kVectors; ++j) {
            const Floats keys = vector_at(tile + i * kTile + j * kLanes);
#pragma GCC unroll kRows
            for (int r = 0; r < kRows; ++r) {
                sums[r][j] += x[r * d + i] * keys;
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        std::memcpy(out + size_t(r) * out_stride, sums[r], sizeof sums[r]);
    }
}

// out[r][j] = sum_i (x[r][i] - tile[i][j])^2
CRUMB_CLONES void distances(const float* x, const float* tile, int d, float* out) {
    Floats sums[kRows][kVectors] = {};
    for (int i = 0; i < d; ++i) {
#pragma GCC unroll kVectors
        for (int j = 0; j < kVectors; ++j) {
            const Floats values = vector_at(tile + i * kTile + j * kLanes);
#pragma GCC unroll kRows
            for (int r = 0; r < kRows; ++r) {
                const Floats difference = x[r * d + i] - values;
                sums[r][j] += difference * difference;
            }
        }
    }
    std::memcpy(out, sums, sizeof sums);
}

// x[0 .. n): softmax of scale * x in place; n is a multiple of kTile.
CRUMB_CLONES void softmax(float* x, int n, float scale) {
    Floats top = vector_at(x);
    for (int at = kLanes; at < n; at += kLanes) {
        const Floats other = vector_at(x + at);
        top = other > top ? other : top;
    }
    const float largest = *std::max_element(&top[0], &top[0] + kLanes);
    Doubles sums = {};
    for (int at = 0; at < n; at += kTile) {
        Floats sum = {};
        for (int j = 0; j < kTile; j += kLanes) {
            Floats e = (vector_at(x + at + j) - largest) * scale;
            exponential(e);
            vector_at(x + at + j) = e;
            sum += e;
        }
        sums += __builtin_convertvector(sum, Doubles);
    }
    double lanes[kLanes];
    std::memcpy(lanes, &sums, sizeof lanes);
    const float factor = float(1.0 / folded(lanes));
    for (int at = 0; at < n; at += kLanes) {
        vector_at(x + at) *= factor;
    }
}

// Cholesky; directions that W_O does not see give columns of zeros.
std::vector<float> lower_factor(const std::vector<double>& a, int d) {
    std::vector<double> l(a.size());
    double largest = 0;
    for (int i = 0; i < d; ++i) {
        largest = std::max(largest, a[size_t(i) * d + i]);
    }
    for (int j = 0; j < d; ++j) {
        for (int i = j; i < d; ++i) {
            double sum = a[size_t(i) * d + j];
            for (int k = 0; k < j; ++k) {
                sum -= l[size_t(i) * d + k] * l[size_t(j) * d + k];
            }
            if (i == j) {
                l[size_t(j) * d + j] = sum > 1e-12 * largest ? std::sqrt(sum) : 0;
            } else {
                const double pivot = l[size_t(j) * d + j];
                l[size_t(i) * d + j] = pivot > 0 ? sum / pivot : 0;
            }
        }
    }
    return {l.begin(), l.end()};
}

// out = x L, L lower triangular
CRUMB_CLONES void times_factor(const float* x, const float* l, int d, float* out) {
    const int whole = d - d % kLanes;
    for (int j = 0; j < whole; j += kLanes) {
        Floats sum = {};
        for (int i = j; i < d; ++i) {
            sum += x[i] * vector_at(l + size_t(i) * d + j);
        }
        vector_at(out + j) = sum;
    }
    for (int j = whole; j < d; ++j) {
        out[j] = 0;
        for (int i = j; i < d; ++i) {
            out[j] += x[i] * l[size_t(i) * d + j];
        }
    }
}

}  // namespace

LocalMetric::LocalMetric(int sink, int recent, int n_threads) : sink_(sink), recent_(recent), n_threads_(n_threads) {
    CRUMB_ASSERT(sink >= 0 && recent >= 0 && n_threads > 0);
}

void LocalMetric::set_projection(int index, const LayerShape& shape, std::span<const float> projection) {
    const size_t d = shape.dim_v, width = d * shape.n_head;
    CRUMB_ASSERT(width > 0 && projection.size() % width == 0 && shape.n_head % shape.n_head_kv == 0);
    Layer& layer = layers_[index] = {};
    layer.shape = shape;
    layer.keys.resize(shape.n_head_kv);
    layer.values.resize(shape.n_head_kv);
    layer.heads.resize(shape.n_head);
    const size_t n = projection.size() / width;
    std::vector<double> rows(n * d);
    for (int h = 0; h < shape.n_head; ++h) {
        for (size_t e = 0; e < n; ++e) {
            std::copy_n(projection.begin() + std::ptrdiff_t(e * width + h * d), d, rows.begin() + std::ptrdiff_t(e * d));
        }
        Head& head = layer.heads[h];
        head.output.resize(d * d);
        add_gram(rows.data(), int(n), int(d), head.output.data());
        for (size_t i = 0; i < d; ++i) {
            for (size_t j = 0; j < i; ++j) {
                head.output[i * d + j] = head.output[j * d + i];
            }
        }
        head.factor = lower_factor(head.output, int(d));
    }
}

void LocalMetric::begin_sequence(int fold) {
    CRUMB_ASSERT(fold >= 0);
    fold_ = size_t(fold);
    n_folds_ = std::max(n_folds_, fold_ + 1);
    for (auto& [index, layer] : layers_) {
        layer.position = 0;
        for (auto* all : {&layer.keys, &layer.values}) {
            for (auto& rows : *all) {
                rows.clear();
            }
        }
    }
}

void LocalMetric::observe(int index, const LayerShape& shape, float scale, const TokenBlock& block) {
    const auto found = layers_.find(index);
    CRUMB_ASSERT(found != layers_.end());
    Layer& layer = found->second;
    if (layer.shape != shape) {
        fail("layer {}: attention has {} query heads of {} channels, and its output weights are for {} of {}: this kind "
             "of attention is not supported by --metric local, type --metric none",
             index, shape.n_head, shape.dim_v, layer.shape.n_head, layer.shape.dim_v);
    }
    const int64_t end = layer.position + block.n_tokens, tiles = (end + kTile - 1) / kTile;
    for (int h = 0; h < shape.n_head_kv; ++h) {
        auto& keys = layer.keys[h];
        keys.resize(size_t(tiles) * shape.dim_k * kTile);
        for (int t = 0; t < block.n_tokens; ++t) {
            const int64_t j = layer.position + t;
            const float* k = block.k.data + t * block.k.token_stride + h * block.k.head_stride;
            for (int i = 0; i < shape.dim_k; ++i) {
                keys[size_t(j / kTile * shape.dim_k + i) * kTile + size_t(j % kTile)] = k[i];
            }
            const float* v = block.v.data + t * block.v.token_stride + h * block.v.head_stride;
            layer.values[h].insert(layer.values[h].end(), v, v + shape.dim_v);
        }
    }
    if (end > sink_ + recent_) {
        for (Head& head : layer.heads) {
            head.folds.resize(n_folds_);
            head.folds[fold_].k.resize(size_t(shape.dim_k) * shape.dim_k);
        }
        layer.tokens.resize(n_folds_);
        const int n_threads = std::min(n_threads_, shape.n_head);
        const auto work = [&](int thread) {
            for (int h = thread; h < shape.n_head; h += n_threads) {
                add_head(layer, h, scale, block);
            }
        };
        std::vector<std::jthread> others;
        for (int thread = 1; thread < n_threads; ++thread) {
            others.emplace_back(work, thread);
        }
        work(0);
        layer.tokens[fold_] += uint64_t(end - std::max<int64_t>(layer.position, sink_ + recent_));
    }
    layer.position = end;
}

void LocalMetric::add_head(Layer& layer, int index, float scale, const TokenBlock& block) const {
    const Head& head = layer.heads[index];
    Sums& sums = layer.heads[index].folds[fold_];
    const int dk = layer.shape.dim_k, dv = layer.shape.dim_v, kv = index / (layer.shape.n_head / layer.shape.n_head_kv);
    const std::vector<float>&keys = layer.keys[kv], &values = layer.values[kv];
    const int64_t begin = layer.position, end = begin + block.n_tokens;

    // far values behind the factor, transposed in tiles as the keys are
    const int64_t far_end = end - recent_, far_tiles = (far_end + kTile - 1) / kTile;
    std::vector<float> seen(size_t(far_tiles) * dv * kTile), row(dv);
    for (int64_t j = 0; j < far_end; ++j) {
        times_factor(&values[size_t(j) * dv], head.factor.data(), dv, row.data());
        for (int i = 0; i < dv; ++i) {
            seen[size_t(j / kTile * dv + i) * kTile + size_t(j % kTile)] = row[i];
        }
    }

    std::vector<float> q(size_t(kBlock) * dk), o(size_t(kBlock) * dv), apart(kRows * kTile);
    std::vector<float> p(size_t(kBlock) * ((end + kTile - 1) / kTile) * kTile);
    std::vector<double> weighted(size_t(kBlock) * dk);
    for (int64_t t = std::max<int64_t>(begin, sink_ + recent_); t < end; t += kBlock) {
        const int rows = int(std::min<int64_t>(kBlock, end - t));
        for (int r = 0; r < rows; ++r) {
            const int64_t at = t + r - begin;
            std::copy_n(block.q.data + at * block.q.token_stride + index * block.q.head_stride, dk, &q[size_t(r) * dk]);
            times_factor(block.output.data + at * block.output.token_stride + index * block.output.head_stride,
                         head.factor.data(), dv, &o[size_t(r) * dv]);
        }
        const size_t n = size_t((t + rows + kTile - 1) / kTile * kTile);
        for (size_t tile = 0; tile * kTile < n; ++tile) {
            for (int r = 0; r < rows; r += kRows) {
                products(&q[size_t(r) * dk], &keys[tile * dk * kTile], dk, &p[size_t(r) * n + tile * kTile], n);
            }
        }
        for (int r = 0; r < rows; ++r) {
            float* x = &p[size_t(r) * n];
            std::fill(x + t + r + 1, x + n, -INFINITY);
            softmax(x, int(n), scale);
        }
        double weights[kBlock] = {}, squares[kBlock] = {};
        for (int64_t tile = sink_ / kTile; tile * kTile <= t + rows - 1 - recent_; ++tile) {
            for (int pair = 0; pair < rows; pair += kRows) {
                distances(&o[size_t(pair) * dv], &seen[size_t(tile) * dv * kTile], dv, apart.data());
                for (int r = pair; r < std::min(pair + kRows, rows); ++r) {
                    const float* const at = &p[size_t(r) * n];
                    const float* const distance = &apart[size_t(r - pair) * kTile];
                    const int64_t first = std::max<int64_t>(tile * kTile, sink_);
                    const int64_t last = std::min<int64_t>(tile * kTile + kTile - 1, t + r - recent_);
                    for (int64_t j = first; j <= last; ++j) {
                        const double square = double(at[j]) * at[j];
                        squares[r] += square;
                        weights[r] += square * distance[j % kTile];
                    }
                }
            }
        }
        for (int r = 0; r < rows; ++r) {
            sums.v += squares[r];
            const double root = scale * std::sqrt(weights[r]);
            for (int i = 0; i < dk; ++i) {
                weighted[size_t(r) * dk + i] = root * q[size_t(r) * dk + i];
            }
        }
        add_gram(weighted.data(), rows, dk, sums.k.data());
    }
}

std::vector<Metric> LocalMetric::metrics() const {
    const auto tokens = [](const Layer& layer, size_t fold) {
        return fold < layer.tokens.size() ? layer.tokens[fold] : 0;
    };
    std::string missing;
    for (const auto& [index, layer] : layers_) {
        if (std::all_of(layer.tokens.begin(), layer.tokens.end(), [](uint64_t n) { return n == 0; })) {
            missing += fmt::format(" {}", index);
        }
    }
    if (!missing.empty()) {
        fail("--metric local saw no token with {} + {} before it in layers{}: give longer windows (-c) and texts", sink_,
             recent_, missing);
    }
    std::vector<Metric> metrics;
    for (size_t fold = 0; fold < n_folds_; ++fold) {
        Metric metric;
        for (const auto& [index, layer] : layers_) {
            if (tokens(layer, fold) > 0) {
                metric[index] = mean_of(layer, fold);
            }
        }
        if (!metric.empty()) {
            metrics.push_back(std::move(metric));
        }
    }
    return metrics;
}

LayerMetric LocalMetric::mean_of(const Layer& layer, size_t fold) {
    const int dk = layer.shape.dim_k, group = layer.shape.n_head / layer.shape.n_head_kv;
    LayerMetric out;
    out.tokens = layer.tokens[fold];
    out.heads.resize(layer.shape.n_head_kv);
    for (int h = 0; h < layer.shape.n_head; ++h) {
        const Head& head = layer.heads[h];
        const Sums& sums = head.folds[fold];
        HeadMetric& to = out.heads[h / group];
        to.k.resize(sums.k.size());
        to.v.resize(head.output.size());
        for (int i = 0; i < dk; ++i) {
            for (int j = 0; j < dk; ++j) {
                const size_t upper = size_t(std::min(i, j)) * dk + std::max(i, j);
                to.k[size_t(i) * dk + j] += sums.k[upper] / double(out.tokens);
            }
        }
        for (size_t i = 0; i < head.output.size(); ++i) {
            to.v[i] += sums.v * head.output[i] / double(out.tokens);
        }
    }
    return out;
}

}  // namespace crumb

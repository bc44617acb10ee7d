// The methods whose parameters belong to groups, as one would write them down from the papers: real numbers in, real
// numbers out, no bytes. Only what is stored in 16 bits is rounded. Rows are [tokens][D], centred and rotated.
#pragma once

#include <crumb/half.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace crumb::plain {

using Rows = std::vector<std::vector<double>>;

inline double half(double x) { return to_float(to_fp16(float(x))); }

struct Rule {
    int bits = 2;
    bool integer_zero = false;
};

// Round to nearest between the least and the largest of some numbers.
inline void asymmetric(std::vector<double*> x, Rule rule, const std::vector<bool>& counts = {}) {
    const double levels = (1 << rule.bits) - 1;
    double low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < x.size(); i++) {
        if (counts.empty() || counts[i]) {
            low = std::min(low, *x[i]);
            high = std::max(high, *x[i]);
        }
    }
    const double scale = half(std::max((high - low) / levels, 0x1p-24));
    const double zero = rule.integer_zero ? std::round(-low / scale) : -low / scale;
    for (double* value : x) {
        *value = (std::clamp(std::round(*value / scale + zero), 0.0, levels) - zero) * scale;
    }
}

inline void by_channel(Rows& x, size_t group, Rule rule, const std::vector<int>& bits = {},
                       const std::vector<bool>& counts = {}) {
    for (size_t first = 0; first < x.size(); first += group) {
        for (size_t j = 0; j < x[0].size(); j++) {
            std::vector<double*> column;
            std::vector<bool> column_counts;
            for (size_t t = first; t < first + group; t++) {
                column.push_back(&x[t][j]);
                column_counts.push_back(counts.empty() || counts[t]);
            }
            asymmetric(column, {bits.empty() ? rule.bits : bits[j], rule.integer_zero}, column_counts);
        }
    }
}

inline void by_token(Rows& x, size_t group, Rule rule) {
    for (std::vector<double>& row : x) {
        for (size_t first = 0; first < row.size(); first += group) {
            std::vector<double*> part;
            for (size_t j = first; j < std::min(first + group, row.size()); j++) {
                part.push_back(&row[j]);
            }
            asymmetric(part, rule);
        }
    }
}

inline double norm(const std::vector<double>& row) {
    return std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0));
}

inline void divide_rows(Rows& x, const std::vector<double>& by) {
    for (size_t t = 0; t < x.size(); t++) {
        for (double& value : x[t]) {
            value /= by[t];
        }
    }
}

inline void multiply_rows(Rows& x, const std::vector<double>& by) {
    for (size_t t = 0; t < x.size(); t++) {
        for (double& value : x[t]) {
            value *= by[t];
        }
    }
}

inline Rows transposed(const Rows& x) {
    Rows y(x[0].size(), std::vector<double>(x.size()));
    for (size_t t = 0; t < x.size(); t++) {
        for (size_t j = 0; j < x[0].size(); j++) {
            y[j][t] = x[t][j];
        }
    }
    return y;
}

// ---- methods

inline void kivi_keys(Rows& x, size_t group) { by_channel(x, group, {}); }
inline void kivi_values(Rows& x, size_t group) { by_token(x, group, {}); }

inline void omni_keys(Rows& x, std::vector<double> norms = {}) {
    for (size_t t = norms.size(); t < x.size(); t++) {
        norms.push_back(norm(x[t]));
    }
    std::ranges::transform(norms, norms.begin(), [](double n) { return half(std::max(n, 0x1p-24)); });
    divide_rows(x, norms);
    by_channel(x, 32, {.integer_zero = true});
    multiply_rows(x, norms);
}
inline void omni_values(Rows& x) { by_token(x, 32, {.integer_zero = true}); }

inline void turbo(Rows& x, const std::vector<double>& levels, bool keep_norm) {
    for (std::vector<double>& row : x) {
        const double rms = std::max(norm(row) / std::sqrt(double(row.size())), 0x1p-24);
        std::vector<double> nearest;
        for (const double value : row) {
            nearest.push_back(*std::ranges::min_element(levels, {}, [&](double l) { return std::fabs(l - value / rms); }));
        }
        const double gain = keep_norm ? rms * std::sqrt(double(row.size())) / norm(nearest) : rms;
        std::ranges::transform(nearest, row.begin(), [&](double l) { return l * half(gain); });
    }
}

inline std::vector<size_t> smallest_tokens(const Rows& keys, size_t n) {
    std::vector<size_t> order(keys.size());
    std::iota(order.begin(), order.end(), size_t(0));
    const auto size = [&](size_t t) {
        return std::accumulate(keys[t].begin(), keys[t].end(), 0.0, [](double s, double x) { return s + std::fabs(x); });
    };
    std::ranges::stable_sort(order, {}, size);
    order.resize(n);
    return order;
}

inline void ott(Rows& keys, Rows& values) {
    const std::vector<size_t> out = smallest_tokens(keys, 3);
    const Rows k = keys, v = values;
    std::vector<bool> counts(keys.size(), true);
    for (const size_t t : out) {
        counts[t] = false;
    }
    by_channel(keys, 128, {}, {}, counts);
    by_token(values, 128, {});
    for (const size_t t : out) {
        std::ranges::transform(k[t], keys[t].begin(), half);
        std::ranges::transform(v[t], values[t].begin(), half);
    }
}

inline void kitty_keys(Rows& x) {
    const size_t dim = x[0].size();
    std::vector<size_t> order(dim);
    std::iota(order.begin(), order.end(), size_t(0));
    std::ranges::stable_sort(order, std::ranges::greater(), [&](size_t j) {
        double sum = 0;
        for (const std::vector<double>& row : x) {
            sum += std::fabs(row[j]);
        }
        return sum;
    });
    std::vector<int> bits(dim, 2);
    for (size_t i = 0; i < dim / 4; i++) {
        bits[order[i]] = 4;
    }
    by_channel(x, 128, {}, bits);
}

// KVarN's two-sided scales, in logarithms as its authors write them.
struct Scales {
    std::vector<double> tokens, channels;
};

inline std::vector<double> deviations(const Rows& x) {
    std::vector<double> all;
    for (const std::vector<double>& row : x) {
        const double mean = std::accumulate(row.begin(), row.end(), 0.0) / double(row.size());
        double squares = 0;
        for (const double value : row) {
            squares += (value - mean) * (value - mean);
        }
        all.push_back(std::clamp(std::sqrt(squares / double(row.size() - 1)), 1e-3, 1e3));
    }
    return all;
}

inline Rows scaled(const Rows& x, const std::vector<double>& log_tokens, const std::vector<double>& log_channels) {
    Rows y = x;
    for (size_t t = 0; t < x.size(); t++) {
        for (size_t j = 0; j < x[0].size(); j++) {
            y[t][j] *= std::exp(-log_tokens[t] - log_channels[j]);
        }
    }
    return y;
}

inline Scales kvarn_scales(const Rows& x, bool tokens_first) {
    std::vector<double> r(x.size(), 0.0), c(x[0].size(), 0.0), best_r, best_c;
    double best = INFINITY;
    const auto spread = [](const std::vector<double>& d) { return std::ranges::max(d) / std::ranges::min(d); };
    const auto grow = [](std::vector<double>& logs, const std::vector<double>& d) {
        for (size_t i = 0; i < logs.size(); i++) {
            logs[i] = std::clamp(logs[i] + std::log(d[i]), -0.3, 10.0);
        }
    };
    for (int i = 0; i <= 16; i++) {
        const Rows y = scaled(x, r, c);
        const double score = spread(deviations(transposed(y))) + spread(deviations(y));
        if (score < best * (1 - 1e-12)) {
            best = score;
            best_r = r, best_c = c;
        }
        if (tokens_first) {
            grow(r, deviations(y));
            grow(c, deviations(transposed(scaled(x, r, c))));
        } else {
            grow(c, deviations(transposed(y)));
            grow(r, deviations(scaled(x, r, c)));
        }
    }
    Scales scales;
    for (const double log : best_r) {
        scales.tokens.push_back(half(std::exp(log)));
    }
    for (const double log : best_c) {
        scales.channels.push_back(half(std::exp(log)));
    }
    return scales;
}

inline void kvarn_keys(Rows& x) {
    const Scales scales = kvarn_scales(x, true);
    divide_rows(x, scales.tokens);
    by_channel(x, 128, {});
    multiply_rows(x, scales.tokens);
}

inline void kvarn_values(Rows& x) {
    const Scales scales = kvarn_scales(x, false);
    Rows columns = transposed(x);
    divide_rows(columns, scales.channels);
    x = transposed(columns);
    by_token(x, x[0].size(), {});
    columns = transposed(x);
    multiply_rows(columns, scales.channels);
    x = transposed(columns);
}

}  // namespace crumb::plain

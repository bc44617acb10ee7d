// What a page means, in double precision: x_hat = mean + page mean + s sum_p B_p (digit_p - 1.5) + z ones, or mean + y by
// the inverse map where parameters belong to groups.
#include <crumb/error.h>
#include <crumb/recipe.h>

#include <algorithm>
#include <cstring>

#include "base/clones.h"
#include "recipe/directions.h"

namespace crumb {

namespace {

template <class T>
T read(const std::byte* at, int index) {
    T value;
    std::memcpy(&value, at + size_t(index) * sizeof(T), sizeof(T));
    return value;
}

TokenInfo info_at(const SideTables& tables, const std::byte* info, int token) {
    switch (tables.format.info) {
        case SideInfo::scale_zero:
            return {to_float(read<fp16>(info, token)), to_float(read<fp16>(info, kPageTokens + token))};
        case SideInfo::gain16:
            return {to_float(read<fp16>(info, token)), 0.0f};
        case SideInfo::gain8:
            return {gain8_value(read<uint8_t>(info, token)) * tables.gain_reference, 0.0f};
        case SideInfo::none:
        case SideInfo::channels:
            break;
    }
    CRUMB_ASSERT(false);
}

constexpr size_t kTogether = 4;  // tokens that share the loads of a map

using Floats = float __attribute__((vector_size(32), aligned(4), may_alias));
using Doubles = double __attribute__((vector_size(64), aligned(8), may_alias));

// sums[t][dim] = sum over p of x[t][p] rows[p][dim] for four tokens, in ascending p: the same bits everywhere.
CRUMB_CLONES void combine(size_t n, size_t dim, const double* x, const float* rows, double* sums) {
    for (size_t i = 0; i < dim; i += 8) {
        Doubles sum[kTogether] = {};
        for (size_t p = 0; p < n; ++p) {
            const Doubles row = __builtin_convertvector(*reinterpret_cast<const Floats*>(rows + p * dim + i), Doubles);
            for (size_t t = 0; t < kTogether; ++t) {
                sum[t] += row * x[t * n + p];
            }
        }
        for (size_t t = 0; t < kTogether; ++t) {
            *reinterpret_cast<Doubles*>(sums + t * dim + i) = sum[t];
        }
    }
}

void decode(const SideTables& tables, std::span<const uint8_t> codes, const std::byte* info, const std::byte* page_mean,
            std::span<float> rows) {
    const SideFormat& format = tables.format;
    const size_t dim = size_t(format.dim), planes = size_t(format.planes);
    CRUMB_ASSERT(rows.size() == kPageTokens * dim && tables.decode.size() == planes * dim);
    std::vector<double> digits(kTogether * planes), sums(kTogether * dim);
    for (size_t t = 0; t < kPageTokens; ++t) {
        const double* sum = &sums[t % kTogether * dim];
        if (t % kTogether == 0) {
            std::transform(&codes[t * planes], &codes[t * planes] + digits.size(), digits.begin(),
                           [](uint8_t code) { return code - 1.5; });
            combine(planes, dim, digits.data(), tables.decode.data(), sums.data());
        }
        const TokenInfo side = info_at(tables, info, int(t));
        for (size_t i = 0; i < dim; ++i) {
            double x = side.scale * sum[i];
            if (!tables.ones.empty()) {
                x += double(side.zero) * tables.ones[i];
            }
            if (format.mean) {
                x += double(read<int8_t>(page_mean, int(i))) * tables.mean_step[i];
            }
            if (!tables.mean.empty()) {
                x += tables.mean[i];
            }
            rows[t * dim + i] = float(x);
        }
    }
}

void decode_directions(const PageSide& side, const std::byte* page, std::span<float> rows) {
    const size_t dim = side.dim();
    CRUMB_ASSERT(rows.size() == size_t(side.tokens) * dim);
    std::vector<float> y(rows.size()), inverse;
    read_directions(side, page, y);
    for (size_t j = 0; j < dim; ++j) {
        const std::span<const float> row = inverse_row(side.tables, int(j));
        inverse.insert(inverse.end(), row.begin(), row.end());
    }
    std::vector<double> sums(kTogether * dim);
    for (size_t t = 0; t < size_t(side.tokens); t += kTogether) {
        const std::vector<double> x(&y[t * dim], &y[t * dim] + sums.size());
        combine(dim, dim, x.data(), inverse.data(), sums.data());
        for (size_t i = 0; i < sums.size(); ++i) {
            rows[t * dim + i] = float(sums[i] + (side.tables.mean.empty() ? 0.0 : side.tables.mean[i % dim]));
        }
    }
}

}  // namespace

TokenInfo key_info_at(const PageFormat& format, const SideTables& tables, const std::byte* page, int token) {
    return info_at(tables, page + format.key_info(), token);
}

TokenInfo value_info_at(const PageFormat& format, const SideTables& tables, const std::byte* page, int token) {
    return info_at(tables, page + format.value_info(), token);
}

void decode_keys(const PageFormat& format, const SideTables& tables, const std::byte* page, std::span<float> rows) {
    if (!format.coded()) {
        for (int t = 0; t < kPageTokens; ++t) {
            for (int i = 0; i < format.k.dim; ++i) {
                rows[size_t(t) * format.k.dim + i] = to_float(key_at(format, page, t, i));
            }
        }
        return;
    }
    if (!format.planar()) {
        return decode_directions(key_side(format, tables), page, rows);
    }
    std::vector<uint8_t> codes(size_t(kPageTokens) * format.k.planes);
    unpack_keys(format.k.planes, page + format.key_codes(), codes);
    decode(tables, codes, page + format.key_info(), page + format.key_mean(), rows);
}

void decode_values(const PageFormat& format, const SideTables& tables, const std::byte* page, std::span<float> rows) {
    if (!format.coded()) {
        for (int t = 0; t < kPageTokens; ++t) {
            for (int i = 0; i < format.v.dim; ++i) {
                rows[size_t(t) * format.v.dim + i] = to_float(value_at(format, page, t, i));
            }
        }
        return;
    }
    if (!format.planar()) {
        return decode_directions(value_side(format, tables), page, rows);
    }
    std::vector<uint8_t> codes(size_t(kPageTokens) * format.v.planes);
    unpack_values(format.v.planes, page + format.value_codes(), codes);
    decode(tables, codes, page + format.value_info(), page + format.value_mean(), rows);
}

}  // namespace crumb

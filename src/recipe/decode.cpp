// What a page means, in double precision: x_hat = mean + page mean + s sum_p B_p (digit_p - 1.5) + z ones, or mean + y by
// the inverse map where parameters belong to groups.
#include <crumb/error.h>
#include <crumb/recipe.h>

#include <algorithm>
#include <cstring>

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

void decode(const SideTables& tables, std::span<const uint8_t> codes, const std::byte* info, const std::byte* page_mean,
            std::span<float> rows) {
    const SideFormat& format = tables.format;
    const size_t dim = size_t(format.dim), planes = size_t(format.planes);
    CRUMB_ASSERT(rows.size() == kPageTokens * dim && tables.decode.size() == planes * dim);
    std::vector<double> sums(dim);
    for (int t = 0; t < kPageTokens; ++t) {
        const TokenInfo side = info_at(tables, info, t);
        std::ranges::fill(sums, 0.0);
        for (size_t p = 0; p < planes; ++p) {
            for (size_t i = 0; i < dim; ++i) {
                sums[i] += double(tables.decode[p * dim + i]) * (codes[t * planes + p] - 1.5);
            }
        }
        for (size_t i = 0; i < dim; ++i) {
            double x = side.scale * sums[i];
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
    std::vector<float> y(rows.size());
    read_directions(side, page, y);
    std::vector<std::span<const float>> inverse;
    for (size_t j = 0; j < dim; ++j) {
        inverse.push_back(inverse_row(side.tables, int(j)));
    }
    std::vector<double> x(dim);
    for (size_t t = 0; t < size_t(side.tokens); ++t) {
        std::ranges::fill(x, 0.0);
        for (size_t j = 0; j < dim; ++j) {
            for (size_t i = 0; i < dim; ++i) {
                x[i] += double(y[t * dim + j]) * inverse[j][i];
            }
        }
        for (size_t i = 0; i < dim; ++i) {
            rows[t * dim + i] = float(x[i] + (side.tables.mean.empty() ? 0.0 : side.tables.mean[i]));
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

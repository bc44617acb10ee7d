// Fills a page: the inner loops of lanes/ give codes by direction and side information; here they become planes and
// bytes, and what is taken over from an older page is taken over.
#include "recipe/encode.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "recipe/group_encoder.h"
#include "recipe/levels.h"

namespace crumb {

namespace {

using lanes::Coded;
using lanes::Kernels;
using lanes::Tile;

struct Side {
    const SideRecipe& recipe;
    const SideTables& tables;
    std::span<const bf16> rows;
    size_t codes, info, mean;  // offsets
    decltype(&pack_keys) pack;
    decltype(&unpack_keys) unpack;
    decltype(&key_code_at) code_at;
};

void quantise(const Kernels& kernels, const Side& side, Tile& y, Coded& coded) {
    const int dim = side.tables.format.dim;
    if (side.recipe.quantiser == Quantiser::minmax) {
        const int clipped = dim - std::min(int(side.recipe.clip * float(dim)), dim - 1);
        kernels.minmax(y, dim, side.recipe.bits, clipped, side.recipe.shrink, coded);
    } else {
        kernels.gain(y, dim,
                     {.sigma = side.tables.sigma.data(),
                      .step = side.tables.step.data(),
                      .digits = side.tables.digits.data(),
                      .reference = side.tables.gain_reference,
                      .gain8 = side.tables.format.info == SideInfo::gain8},
                     coded);
    }
}

void map_and_quantise(const Kernels& kernels, const Side& side, Tile& x, Coded& coded) {
    if (side.tables.encode.empty()) {
        quantise(kernels, side, x, coded);
        return;
    }
    Tile y;
    kernels.map(x, side.tables.format.dim, side.tables.encode.data(), y);
    quantise(kernels, side, y, coded);
}

void write_codes(const Side& side, const Coded& coded, std::byte* page, int keep, const std::byte* kept) {
    const int planes = side.tables.format.planes;
    uint8_t codes[kPageTokens * 4 * lanes::kMaxDim];
    const std::span<uint8_t> used(codes, size_t(kPageTokens) * planes);
    if (keep > 0) {
        side.unpack(planes, kept + side.codes, used);
    }
    for (int p = 0; p < planes; ++p) {
        const uint16_t direction = side.tables.direction[p];
        const int shift = 2 * side.tables.digit[p];
        for (int t = keep; t < kPageTokens; ++t) {
            used[size_t(t) * planes + p] = direction == kNoDirection ? 0 : coded.code[direction][t] >> shift & 3;
        }
    }
    side.pack(planes, used, page + side.codes);
}

// `stride` bytes a token at `offset`, from `values` or, below `keep`, from the older page.
void write_info(size_t offset, const uint16_t* values, size_t stride, std::byte* page, int keep,
                const std::byte* kept) {
    if (keep > 0) {
        std::memmove(page + offset, kept + offset, keep * stride);
    }
    for (int t = keep; t < kPageTokens; ++t) {
        std::memcpy(page + offset + t * stride, &values[t], stride);
    }
}

EncodeCounts encode_side(const Kernels& kernels, const Side& side, std::byte* page, int keep, const std::byte* kept) {
    const SideFormat& format = side.tables.format;
    const int dim = format.dim;
    CRUMB_ASSERT(side.rows.size() == size_t(kPageTokens) * dim);

    Tile x;
    Coded coded;
    const float* mean = side.tables.mean.empty() ? nullptr : side.tables.mean.data();
    EncodeCounts counts;
    counts.rows = uint64_t(kPageTokens - keep);
    counts.nonfinite = kernels.load(side.rows.data(), dim, mean, keep, x);
    if (format.mean) {
        CRUMB_ASSERT(side.tables.mean_step.size() == size_t(dim));
        CRUMB_ASSERT(std::ranges::min(side.tables.mean_step) >= kStepFloor);
        int8_t page_mean[lanes::kMaxDim];
        if (keep > 0) {
            std::memcpy(page_mean, kept + side.mean, dim);
        } else {
            kernels.page_mean(x, dim, side.tables.mean_step.data(), page_mean);
        }
        kernels.subtract(x, dim, side.tables.mean_step.data(), page_mean);
        std::memcpy(page + side.mean, page_mean, dim);
    }
    map_and_quantise(kernels, side, x, coded);

    counts.saturated = uint64_t(std::count(coded.saturated + keep, coded.saturated + kPageTokens, true));
    write_codes(side, coded, page, keep, kept);
    switch (format.info) {
        case SideInfo::scale_zero:
            write_info(side.info, coded.scale, sizeof(fp16), page, keep, kept);
            write_info(side.info + kPageTokens * sizeof(fp16), coded.zero, sizeof(fp16), page, keep, kept);
            break;
        case SideInfo::gain16:
            write_info(side.info, coded.scale, sizeof(fp16), page, keep, kept);
            break;
        case SideInfo::gain8:
            write_info(side.info, coded.scale, 1, page, keep, kept);
            break;
        case SideInfo::none:
        case SideInfo::channels:
            CRUMB_ASSERT(false);
    }
    return counts;
}

// Tokens [first, first + n) of a page, which are the first n of the tile that the inner loops work on.
EncodeCounts encode_side_rows(const Kernels& kernels, const Side& side, int first, std::byte* page) {
    const SideFormat& format = side.tables.format;
    const int dim = format.dim, n = int(side.rows.size()) / dim;
    CRUMB_ASSERT(format.planar() && !format.mean && first >= 0 && first + n <= kPageTokens);
    std::vector<bf16> rows(size_t(kPageTokens) * dim);
    std::ranges::copy(side.rows, rows.begin());
    Tile x;
    Coded coded;
    const float* mean = side.tables.mean.empty() ? nullptr : side.tables.mean.data();
    EncodeCounts counts = {.rows = uint64_t(n)};
    counts.nonfinite = kernels.load(rows.data(), dim, mean, 0, x);
    map_and_quantise(kernels, side, x, coded);
    counts.saturated = uint64_t(std::count(coded.saturated, coded.saturated + n, true));

    for (int p = 0; p < format.planes; ++p) {
        const uint16_t direction = side.tables.direction[p];
        const int digit = 2 * side.tables.digit[p];
        for (int t = 0; t < n; ++t) {
            const CodeAt at = side.code_at(format.planes, first + t, p);
            const int code = direction == kNoDirection ? 0 : coded.code[direction][t] >> digit & 3;
            std::byte& byte = page[side.codes + at.byte];
            byte = (byte & ~(std::byte{3} << at.shift)) | std::byte(code << at.shift);
        }
    }
    const size_t stride = format.info == SideInfo::gain8 ? 1 : sizeof(fp16);
    for (int t = 0; t < n; ++t) {
        std::memcpy(page + side.info + size_t(first + t) * stride, &coded.scale[t], stride);
        if (format.info == SideInfo::scale_zero) {
            std::memcpy(page + side.info + size_t(kPageTokens + first + t) * stride, &coded.zero[t], stride);
        }
    }
    return counts;
}

Side keys_of(const Recipe& recipe, const PageFormat& format, const HeadTables& tables, std::span<const bf16> k) {
    return {recipe.k, tables.k, k, format.key_codes(), format.key_info(), format.key_mean(), pack_keys, unpack_keys, key_code_at};
}

Side values_of(const Recipe& recipe, const PageFormat& format, const HeadTables& tables, std::span<const bf16> v) {
    return {recipe.v, tables.v, v, format.value_codes(), format.value_info(), format.value_mean(), pack_values, unpack_values,
            value_code_at};
}

// Centred and mapped, token by token.
MappedRows mapped_rows(const Kernels& kernels, const SideTables& tables, std::span<const bf16> rows, int keep,
                       uint64_t& nonfinite) {
    const size_t dim = size_t(tables.format.dim), tokens = rows.size() / dim;
    const float* mean = tables.mean.empty() ? nullptr : tables.mean.data();
    MappedRows result = {std::vector<float>(rows.size()), std::vector<uint8_t>(tokens)};
    Tile x, y;
    for (size_t first = 0; first < tokens; first += kPageTokens) {
        const int kept = std::clamp(keep - int(first), 0, kPageTokens);
        nonfinite += kernels.load(rows.data() + first * dim, int(dim), mean, kept, x);
        if (!tables.encode.empty()) {
            kernels.map(x, int(dim), tables.encode.data(), y);
        }
        const Tile& mapped = tables.encode.empty() ? x : y;
        for (size_t t = 0; t < kPageTokens; ++t) {
            for (size_t j = 0; j < dim; ++j) {
                const float value = mapped.at[j][t];
                result.saturated[first + t] |= std::fabs(value) > lanes::kLargestMapped;
                result.y[(first + t) * dim + j] = std::clamp(value, -lanes::kLargestMapped, lanes::kLargestMapped);
            }
        }
    }
    return result;
}

EncodeCounts encode_group_page(const Kernels& kernels, const Recipe& recipe, const PageFormat& format,
                               const HeadTables& tables, std::span<const bf16> k, std::span<const bf16> v,
                               std::byte* page, int keep, const std::byte* kept, const float* layer_norms) {
    EncodeCounts counts = {.rows = 2 * uint64_t(format.tokens - keep)};
    std::vector<uint16_t> outliers;
    // Both sides are read before one is written: `kept` may be `page`.
    std::vector<std::byte> result(format.bytes());
    counts.saturated += encode_groups(recipe.k, key_side(format, tables.k),
                                      mapped_rows(kernels, tables.k, k, keep, counts.nonfinite), keep, kept, layer_norms,
                                      true, outliers, result.data());
    counts.saturated += encode_groups(recipe.v, value_side(format, tables.v),
                                      mapped_rows(kernels, tables.v, v, keep, counts.nonfinite), keep, kept, nullptr,
                                      false, outliers, result.data());
    std::ranges::copy(result, page);
    return counts;
}

void copy_rows(const PageFormat& format, std::span<const bf16> k, std::span<const bf16> v, std::byte* page, int keep,
               const std::byte* kept) {
    const size_t dim_k = size_t(format.k.dim), dim_v = size_t(format.v.dim);
    if (keep > 0) {
        std::memmove(page, kept, format.bytes());
    }
    for (int t = keep; t < kPageTokens; ++t) {
        set_key(format, page, t, k.subspan(t * dim_k, dim_k));
        set_value(format, page, t, v.subspan(t * dim_v, dim_v));
    }
}

}  // namespace

EncodeCounts& EncodeCounts::operator+=(const EncodeCounts& other) {
    rows += other.rows;
    nonfinite += other.nonfinite;
    saturated += other.saturated;
    return *this;
}

EncodeCounts encode_page(const Kernels& kernels, const Recipe& recipe, const PageFormat& format,
                         const HeadTables& tables, std::span<const bf16> k, std::span<const bf16> v, std::byte* page,
                         int keep, const std::byte* kept, const float* layer_norms) {
    CRUMB_ASSERT(keep >= 0 && keep <= format.tokens && (keep == 0 || kept));
    if (!format.coded()) {
        copy_rows(format, k, v, page, keep, kept);
        return {.rows = 2 * uint64_t(kPageTokens - keep)};
    }
    CRUMB_ASSERT(tables.k.format == format.k && tables.v.format == format.v);
    if (!format.planar()) {
        CRUMB_ASSERT(k.size() == size_t(format.tokens * format.k.dim));
        CRUMB_ASSERT(v.size() == size_t(format.tokens * format.v.dim));
        return encode_group_page(kernels, recipe, format, tables, k, v, page, keep, kept, layer_norms);
    }
    EncodeCounts counts = encode_side(kernels, keys_of(recipe, format, tables, k), page, keep, kept);
    counts += encode_side(kernels, values_of(recipe, format, tables, v), page, keep, kept);
    return counts;
}

EncodeCounts encode_page(const Recipe& recipe, const PageFormat& format, const HeadTables& tables,
                         std::span<const bf16> k, std::span<const bf16> v, std::byte* page, int keep,
                         const std::byte* kept, const float* layer_norms) {
    return encode_page(lanes::best(), recipe, format, tables, k, v, page, keep, kept, layer_norms);
}

EncodeCounts encode_rows(const Recipe& recipe, const PageFormat& format, const HeadTables& tables, std::span<const bf16> k,
                         std::span<const bf16> v, int first, std::byte* page) {
    CRUMB_ASSERT(format.planar() && tables.k.format == format.k && tables.v.format == format.v);
    CRUMB_ASSERT(k.size() / size_t(format.k.dim) == v.size() / size_t(format.v.dim));
    if (k.size() == size_t(kPageTokens) * size_t(format.k.dim)) {
        return encode_page(recipe, format, tables, k, v, page);
    }
    EncodeCounts counts = encode_side_rows(lanes::best(), keys_of(recipe, format, tables, k), first, page);
    counts += encode_side_rows(lanes::best(), values_of(recipe, format, tables, v), first, page);
    return counts;
}

void add_key_energy(const SideTables& tables, std::span<const bf16> k, std::span<float> energy) {
    const size_t dim = size_t(tables.format.dim);
    const std::vector<float> none(dim);
    const std::vector<float>& mean = tables.mean.empty() ? none : tables.mean;
    for (size_t t = 0; t < energy.size(); ++t) {
        for (size_t i = 0; i < dim; ++i) {
            const float x = to_float(k[t * dim + i]);
            const float finite = std::isnan(x) ? 0.0f : std::clamp(x, -lanes::kLargestMapped, lanes::kLargestMapped);
            energy[t] += (finite - mean[i]) * (finite - mean[i]);
        }
    }
}

}  // namespace crumb

// Places that a page names are taken no further than the page: it may come from a file.
#include "recipe/directions.h"

#include <crumb/error.h>

#include <algorithm>

namespace crumb {

namespace {

size_t area_bytes(const SideTables& tables) { return size_t(16) * tables.format.planes; }

// Adds the high digits of boosted directions to their codes. Returns the middle of every direction's code range.
std::vector<float> add_boosted(const PageSide& side, const std::byte* info, std::span<uint8_t> codes) {
    const SideFormat& format = side.tables.format;
    const InfoLayout at = info_layout(format, side.tokens);
    std::vector<float> middle;
    for (const uint8_t n : side.tables.digits) {
        middle.push_back(0.5f * (float(1 << 2 * n) - 1));
    }
    for (int b = 0; b < format.boosted; ++b) {
        const size_t j = std::min(size_t(load_at<uint8_t>(info + at.boosted, size_t(b))), side.dim() - 1);
        const std::byte* digits = info + at.boosted_codes + size_t(b) * side.tokens / 4;
        middle[j] = 7.5f;
        for (int t = 0; t < side.tokens; ++t) {
            codes[size_t(t) * side.dim() + j] |= uint8_t((unsigned(digits[t / 4]) >> 2 * (t % 4) & 3) << 2);
        }
    }
    return middle;
}

void read_channels(const PageSide& side, const std::byte* info, std::span<uint8_t> codes, std::span<float> y) {
    const InfoLayout at = info_layout(side.tables.format, side.tokens);
    const std::vector<float> middle = add_boosted(side, info, codes);
    const size_t dim = side.dim();
    std::vector<float> scale(dim), zero(dim);
    for (int t = 0; t < side.tokens; ++t) {
        const int group = side.tables.format.group;
        for (size_t j = 0; j < dim && t % group == 0; ++j) {
            scale[j] = half_at(info + at.scale, size_t(t / group) * dim + j);
            zero[j] = half_at(info + at.zero, size_t(t / group) * dim + j);
        }
        const size_t row = size_t(t) * dim;
        for (size_t j = 0; j < dim; ++j) {
            y[row + j] = scale[j] * (float(codes[row + j]) - middle[j]) + zero[j];
        }
    }
}

void read_tokens(const PageSide& side, const std::byte* info, std::span<const uint8_t> codes, std::span<float> y) {
    const SideFormat& format = side.tables.format;
    const InfoLayout at = info_layout(format, side.tokens);
    const size_t dim = side.dim(), width = format.group == 0 ? dim : size_t(format.group);
    for (size_t first = 0, group = 0; first < dim; first += width, ++group) {
        const size_t last = std::min(first + width, dim);
        for (size_t t = 0; t < size_t(side.tokens); ++t) {
            const size_t place = group * side.tokens + t;
            const float scale = half_at(info + at.scale, place);
            const float zero = format.lookup ? 0.0f : half_at(info + at.zero, place);
            for (size_t n = t * dim + first; n < t * dim + last; ++n) {
                const float code = format.lookup ? side.tables.levels[codes[n]]
                                                 : float(codes[n]) - (float(1 << 2 * side.tables.digits[n % dim]) - 1) / 2;
                y[n] = scale * code + zero;
            }
        }
    }
}

void multiply_gains(const PageSide& side, const std::byte* info, std::span<float> y) {
    const SideFormat& format = side.tables.format;
    const InfoLayout at = info_layout(format, side.tokens);
    const size_t dim = side.dim();
    for (size_t t = 0; t < size_t(side.tokens) && format.token_gain; ++t) {
        const float gain = half_at(info + at.token_gain, t);
        for (size_t j = 0; j < dim; ++j) {
            y[t * dim + j] *= gain;
        }
    }
    for (size_t j = 0; j < dim && format.channel_gain; ++j) {
        const float gain = half_at(info + at.channel_gain, j);
        for (size_t t = 0; t < size_t(side.tokens); ++t) {
            y[t * dim + j] *= gain;
        }
    }
}

}  // namespace

PageSide key_side(const PageFormat& format, const SideTables& tables) {
    return {tables, format.tokens, format.key_codes(), format.key_info(), pack_keys, unpack_keys};
}

PageSide value_side(const PageFormat& format, const SideTables& tables) {
    return {tables, format.tokens, format.value_codes(), format.value_info(), pack_values, unpack_values};
}

void write_codes(const PageSide& side, std::span<const uint8_t> codes, std::byte* page) {
    const SideTables& tables = side.tables;
    const size_t dim = side.dim(), planes = size_t(tables.format.planes);
    std::vector<uint8_t> digits(kPageTokens * planes);
    for (int area = 0; area < side.tokens / kPageTokens; ++area) {
        const std::span<const uint8_t> rows = codes.subspan(area * kPageTokens * dim, kPageTokens * dim);
        for (size_t p = 0; p < planes; ++p) {
            const uint16_t direction = tables.direction[p];
            for (size_t t = 0; t < kPageTokens && direction != kNoDirection; ++t) {
                const uint8_t* code = &rows[t * dim + direction];
                digits[t * planes + p] = tables.digit[p] == kSharedDigit ? uint8_t(code[0] >> 2 | code[1] >> 2 << 1)
                                                                         : uint8_t(*code >> 2 * tables.digit[p] & 3);
            }
        }
        side.pack(int(planes), digits, page + side.codes + size_t(area) * area_bytes(tables));
    }
}

void read_codes(const PageSide& side, const std::byte* page, std::span<uint8_t> codes) {
    const SideTables& tables = side.tables;
    const size_t dim = side.dim(), planes = size_t(tables.format.planes);
    CRUMB_ASSERT(codes.size() == size_t(side.tokens) * dim);
    std::vector<uint8_t> digits(kPageTokens * planes);
    std::ranges::fill(codes, uint8_t(0));
    for (int area = 0; area < side.tokens / kPageTokens; ++area) {
        const std::span<uint8_t> rows = codes.subspan(area * kPageTokens * dim, kPageTokens * dim);
        side.unpack(int(planes), page + side.codes + size_t(area) * area_bytes(tables), digits);
        for (size_t p = 0; p < planes; ++p) {
            const uint16_t direction = tables.direction[p];
            for (size_t t = 0; t < kPageTokens && direction != kNoDirection; ++t) {
                const uint8_t digit = digits[t * planes + p];
                uint8_t* code = &rows[t * dim + direction];
                if (tables.digit[p] == kSharedDigit) {
                    code[0] |= uint8_t((digit & 1) << 2);
                    code[1] |= uint8_t((digit >> 1) << 2);
                } else {
                    *code |= uint8_t(digit << 2 * tables.digit[p]);
                }
            }
        }
    }
}

void read_directions(const PageSide& side, const std::byte* page, std::span<float> y) {
    const SideFormat& format = side.tables.format;
    CRUMB_ASSERT(y.size() == size_t(side.tokens) * side.dim());
    std::vector<uint8_t> codes(y.size());
    read_codes(side, page, codes);
    const std::byte* info = page + side.info;
    if (format.info == SideInfo::channels) {
        read_channels(side, info, codes, y);
    } else {
        read_tokens(side, info, codes, y);
    }
    multiply_gains(side, info, y);
    const InfoLayout at = info_layout(format, side.tokens);
    for (size_t o = 0; o < size_t(format.outliers); ++o) {
        const size_t t = std::min<size_t>(load_at<uint16_t>(info + at.outlier_tokens, o), size_t(side.tokens) - 1);
        for (size_t j = 0; j < side.dim(); ++j) {
            y[t * side.dim() + j] = half_at(info + at.outlier_rows, o * side.dim() + j);
        }
    }
}

void key_directions(const PageFormat& format, const SideTables& tables, const std::byte* page, std::span<float> y) {
    read_directions(key_side(format, tables), page, y);
}

void value_directions(const PageFormat& format, const SideTables& tables, const std::byte* page, std::span<float> y) {
    read_directions(value_side(format, tables), page, y);
}

std::span<const float> inverse_row(const SideTables& tables, int direction) {
    const size_t dim = size_t(tables.format.dim);
    const auto found = std::ranges::find(tables.direction, uint16_t(direction));  // the low digit comes first
    CRUMB_ASSERT(found != tables.direction.end());
    return std::span(tables.decode).subspan(size_t(found - tables.direction.begin()) * dim, dim);
}

}  // namespace crumb

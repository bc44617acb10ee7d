// Products of floats with a BF16 page by AMX, in FP32 sums. A tile product meets pairs along the inner dimension: rows
// of a page are interleaved two by two, and a row of floats goes as two rows, the nearest BF16 and the nearest of what
// is left, which keeps 16 to 17 of 24 bits. Half the time of FP32 arithmetic for 1 to 6 rows, a fourth for 8 and more.
// An infinite number that is seen becomes NaN, and numbers below 2^-126 are 0. Internal to the unit (see kernel.h).
#pragma once

#include "attention/cpu/kernel.h"
#include "attention/cpu/matrices.h"
#include "attention/cpu/tiles.h"

#if defined(__AMX_BF16__)

namespace crumb::cpu {
namespace {

constexpr int kPairRows = 8;  // of a, as two parts each: a tile has 16

template <int Sum, int Left, int Right>
inline void multiply_bf16_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
}

// Rows of floats as the nearest BF16 and the nearest of what is left: 16 of 24 bits. To [16][depth], left parts from
// row 8.
inline void split_rows(int n, int depth, const float* a, size_t a_stride, uint16_t* to) {
    for (int r = 0; r < n; r++) {
        for (int i = 0; i < depth; i += kLanes) {
            const Floats x = load<Floats>(a + r * a_stride + i);
            const Floats high = as_floats((reinterpret_cast<Words>(x) + 0x8000u) & 0xffff0000u);
            const auto high_bf16 = _mm512_cvtneps_pbh(high), low_bf16 = _mm512_cvtneps_pbh(x - high);
            store(to + r * depth + i, high_bf16);
            store(to + (r + kPairRows) * depth + i, low_bf16);
        }
    }
}

// Pairs of rows of a page as dwords, [depth / 2][16 Vectors], rows that are not in `rows` as zeros. Of 32 columns the
// first 16 dwords hold those whose bit 2 is clear.
template <int Vectors>
inline void pair_rows(int depth, int width, const uint16_t* b, uint64_t rows, uint16_t* to) {
    for (int d = 0; d < depth; d += 2, b += 2 * width, to += 32 * Vectors) {
        const __mmask32 first = rows >> d & 1 ? ~0u : 0u, second = rows >> d >> 1 & 1 ? ~0u : 0u;
        if constexpr (Vectors == 1) {
            const Words x = __builtin_convertvector(load<Halves>(b), Words),
                        y = __builtin_convertvector(load<Halves>(b + width), Words);
            store(to, (first ? x : Words{}) | (second ? y << 16 : Words{}));
        } else {
#pragma GCC unroll 2
            for (int c = 0; c < 16 * Vectors; c += 32) {
                const __m512i x = _mm512_maskz_loadu_epi16(first, b + c),
                              y = _mm512_maskz_loadu_epi16(second, b + width + c);
                store(to + 2 * c, _mm512_unpacklo_epi16(x, y));
                store(to + 2 * c + 32, _mm512_unpackhi_epi16(x, y));
            }
        }
    }
}

template <int Vectors>
inline void add_columns(int n, const float* sums, float* out, size_t out_stride) {
    const auto sum_of = [&](int r, int v) {
        return load<Floats>(sums + (r * Vectors + v) * 16) + load<Floats>(sums + ((r + kPairRows) * Vectors + v) * 16);
    };
    const auto add = [&](int r, int v, Floats x) {
        float* to = out + r * out_stride + v * 16;
        store(to, load<Floats>(to) + x);
    };
    for (int r = 0; r < n; r++) {
        if constexpr (Vectors == 1) {
            add(r, 0, sum_of(r, 0));
        } else {
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; v += 2) {
                const Floats even = sum_of(r, v), odd = sum_of(r, v + 1);
                add(r, v, __builtin_shufflevector(even, odd, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
                add(r, v + 1,
                    __builtin_shufflevector(even, odd, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
            }
        }
    }
}

struct ExactPage {
    const uint16_t* numbers;
    int depth, width;
    uint64_t rows;
    uint16_t* pairs;
    bool keeps_pairs;  // for rows that come later; else two steps of them are enough
};

// 16 Vectors columns from `column` on. The rows that come first pair those of the page, a step ahead of their products.
template <int Vectors>
inline void multiply_columns(int n, const uint16_t* left, const ExactPage& page, int column, bool is_first, float* out,
                             size_t out_stride) {
    constexpr auto kAll = std::make_integer_sequence<int, Vectors>();
    constexpr int kStep = 32;
    const size_t left_bytes = size_t(page.depth) * 2;
    const auto pairs = [&](int d) {
        return page.pairs +
               (page.keeps_pairs ? page.depth * column + d * 16 * Vectors : d % (2 * kStep) * 16 * Vectors);
    };
    const auto pair = [&](int d) {
        if (!is_first || d >= page.depth) return;
        const int some = page.depth - d < kStep ? page.depth - d : kStep;
        pair_rows<Vectors>(some, page.width, page.numbers + d * page.width + column, page.rows >> d % 64, pairs(d));
    };
    for_each_sum(kAll, [](auto sum) { clear_tile<sum>(); });
    pair(0);
    int d = 0;
    for (; d + kStep <= page.depth; d += kStep) {
        pair(d + kStep);
        load_tile<kLeft>(left + d, left_bytes);
        for_each_sum(kAll, [&](auto sum) {
            load_tile<kRight>(pairs(d) + 32 * sum, Vectors * 64);
            multiply_bf16_tiles<sum, kLeft, kRight>();
        });
    }
    if (d < page.depth) {
        load_tile<kLeftTail>(left + d, left_bytes);
        for_each_sum(kAll, [&](auto sum) {
            load_tile<kRightTail>(pairs(d) + 32 * sum, Vectors * 64);
            multiply_bf16_tiles<sum, kLeftTail, kRightTail>();
        });
    }
    alignas(64) float sums[16 * Vectors * 16];
    for_each_sum(kAll, [&](auto sum) { store_tile<sum>(sums + 16 * sum, Vectors * 64); });
    add_columns<Vectors>(n, sums, out + column, out_stride);
}

// By what all rows have in common, so that a row's bits do not depend on who is beside it.
inline bool reads_windows_by_tiles(const Item& item) {
    return unpacking_pays(item.n_heads * item.q_rows, item.exact.k.dim);
}

void multiply_page(const Item& item, int n, int depth, int width, const float* a, size_t a_stride, const uint16_t* b,
                   uint64_t rows, float* out, size_t out_stride, float* memory) {
    if (!reads_windows_by_tiles(item)) {
        multiply_page(n, depth, width, a, a_stride, b, rows, out, out_stride, memory);
        return;
    }
    const ExactPage page{b, depth, width, rows, reinterpret_cast<uint16_t*>(memory), n > kPairRows};
    alignas(64) uint16_t left[2 * kPairRows * kMaxDim];
    for (int r = 0; r < n; r += kPairRows, a += kPairRows * a_stride, out += kPairRows * out_stride) {
        const int some = n - r < kPairRows ? n - r : kPairRows;
        split_rows(some, depth, a, a_stride, left);
        int c = 0;
        for (; c + 64 <= width; c += 64) multiply_columns<4>(some, left, page, c, r == 0, out, out_stride);
        if (c + 32 <= width) multiply_columns<2>(some, left, page, c, r == 0, out, out_stride), c += 32;
        if (c < width) multiply_columns<1>(some, left, page, c, r == 0, out, out_stride);
    }
}

}  // namespace
}  // namespace crumb::cpu

#else

namespace crumb::cpu {
namespace {

inline bool reads_windows_by_tiles(const Item&) { return false; }

void multiply_page(const Item&, int n, int depth, int width, const float* a, size_t a_stride, const uint16_t* b,
                   uint64_t rows, float* out, size_t out_stride, float* memory) {
    multiply_page(n, depth, width, a, a_stride, b, rows, out, out_stride, memory);
}

}  // namespace
}  // namespace crumb::cpu

#endif

// Dot products with unpacked pages by AMX: a tile product is 16 rows times 16 columns over 64 bytes, eight times what
// vpdpbusd does in its time. What unpacking writes is the second operand as it lies there: K [planes / 4][64 tokens]
// [4 planes], V [16 quads][planes][4 tokens]; rows of queries and of weights are the first. Sums are of integers, so
// they are those of codes.h. Internal to the unit (see kernel.h).
//
// Instructions are spelled out: the tile loads of GCC 12 do not tell the compiler that they read memory, and its
// _tile_loadconfig() names 8 of the 64 bytes that are read.
#pragma once

#include "attention/cpu/codes.h"
#include "attention/cpu/kernel.h"

#if defined(__AMX_INT8__)

namespace crumb::cpu {
namespace {

// Four sums, and both operands of products over 64 bytes and over the 32 of a tail.
constexpr int kSums = 4, kLeft = 4, kRight = 5, kLeftTail = 6, kRightTail = 7;

// The shapes of this thread's tiles, as long as it lives. Tiles in use make switches of context dearer.
class Tiles {
  public:
    explicit Tiles(bool needed) : needed_(needed) {
        if (needed_) {
            struct alignas(64) {
                uint8_t palette = 1, start_row = 0, reserved[14] = {};
                uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 32, 64};
                uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
            } const shapes;
            static_assert(sizeof shapes == 64);
            asm volatile("ldtilecfg %0" ::"m"(shapes));
        }
    }
    ~Tiles() {
        if (needed_) asm volatile("tilerelease");
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

  private:
    bool needed_;
};

template <int Tile>
inline void load_tile(const void* from, size_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(Tile), "r"(from), "r"(stride) : "memory");
}

template <int Tile>
inline void store_tile(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(Tile), "r"(to), "r"(stride) : "memory");
}

template <int Tile>
inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// Sum += int8 rows of `Left` times digits of `Right`.
template <int Sum, int Left, int Right>
inline void multiply_tiles() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
}

template <int... Sum, class F>
inline void for_each_sum(std::integer_sequence<int, Sum...>, F f) {
    (f(std::integral_constant<int, Sum>()), ...);
}

// Rows beyond n are read and not written: 16 rows of q are memory.
void score_rows(int, const Unpacked& keys, const int8_t* q, size_t stride, int32_t* out) {
    constexpr size_t kRow = kTokens * 4;
    constexpr auto kAll = std::make_integer_sequence<int, kSums>();
    const std::byte* digits = keys.digits;
    for_each_sum(kAll, [](auto sum) { clear_tile<sum>(); });
    for (int group = 0; group < keys.groups(); group++, digits += 16 * kRow, q += kGroup) {
        load_tile<kLeft>(q, stride);
        for_each_sum(kAll, [&](auto sum) {
            load_tile<kRight>(digits + sum * 64, kRow);
            multiply_tiles<sum, kLeft, kRight>();
        });
    }
    if (keys.tail()) {
        load_tile<kLeftTail>(q, stride);
        for_each_sum(kAll, [&](auto sum) {
            load_tile<kRightTail>(digits + sum * 64, kRow);
            multiply_tiles<sum, kLeftTail, kRightTail>();
        });
    }
    for_each_sum(kAll, [&](auto sum) { store_tile<sum>(out + sum * 16, kRow); });
}

// Sums First and First + 1, of 32 planes: the products, and their way to the outputs.
template <int First>
inline void multiply_planes(const Unpacked& values, int plane) {
    for_each_sum(std::make_integer_sequence<int, 2>(), [&](auto i) {
        clear_tile<First + i>();
        load_tile<kRight>(values.digits + (plane + 16 * i) * 4, size_t(values.planes) * 4);
        multiply_tiles<First + i, kLeft, kRight>();
    });
}

template <int First>
inline void add_planes(int n, const WeightRows& rows, int plane) {
    alignas(64) int32_t sums[16 * 32];
    store_tile<First>(sums, 128);
    store_tile<First + 1>(sums + 16, 128);
    for (int r = 0; r < n; r++) {
        const Floats scale = splat(rows.scale[r]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            float* to = rows.out + r * rows.out_stride + plane + v * kLanes;
            store(to, multiply_add(to_floats(load<Ints>(sums + (2 * r + v) * 16)), scale, load<Floats>(to)));
        }
    }
}

// 16 rows of weights are memory. The products of the next planes run while sums become floats.
void weigh_rows(int n, const Unpacked& values, const WeightRows& rows) {
    load_tile<kLeft>(rows.bytes, kTokens);
    multiply_planes<0>(values, 0);
    for (int plane = 0; plane < values.planes; plane += 64) {
        const bool both = plane + 32 < values.planes;
        if (both) multiply_planes<2>(values, plane + 32);
        add_planes<0>(n, rows, plane);
        if (plane + 64 < values.planes) multiply_planes<0>(values, plane + 64);
        if (both) add_planes<2>(n, rows, plane + 32);
    }
}

// ---- BF16 pages: out[n][width] += a[n][depth] b[depth][width], in FP32 sums

constexpr int kPairRows = 8;  // of a, as two parts each: a tile has 16

template <int Sum, int Left, int Right>
inline void multiply_bf16_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
}

// Rows of floats as the nearest BF16 and the nearest of what is left: 16 of 24 bits. To [16][depth], left parts from row 8.
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
            const Words x = __builtin_convertvector(load<Halves>(b), Words), y = __builtin_convertvector(load<Halves>(b + width), Words);
            store(to, (first ? x : Words{}) | (second ? y << 16 : Words{}));
        } else {
#pragma GCC unroll 2
            for (int c = 0; c < 16 * Vectors; c += 32) {
                const __m512i x = _mm512_maskz_loadu_epi16(first, b + c), y = _mm512_maskz_loadu_epi16(second, b + width + c);
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
                add(r, v + 1, __builtin_shufflevector(even, odd, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
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
        return page.pairs + (page.keeps_pairs ? page.depth * column + d * 16 * Vectors : d % (2 * kStep) * 16 * Vectors);
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

void multiply_page(int n, int depth, int width, const float* a, size_t a_stride, const uint16_t* b, uint64_t rows, float* out,
                   size_t out_stride, float* memory) {
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

struct Tiles {
    explicit Tiles(bool) {}
};

}  // namespace
}  // namespace crumb::cpu

#endif

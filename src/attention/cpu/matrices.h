// Products of small matrices, maps of queries and outputs, and BF16 pages. Internal to the unit (see kernel.h).
#pragma once

#include "attention/cpu/simd.h"

namespace crumb::cpu {
namespace {

// kRows x kVectors accumulators, kVectors operands and a broadcast fit the register file.
#if defined(__AVX512F__)
constexpr int kRows = 6, kVectors = 4;
#elif defined(__AVX2__)
constexpr int kRows = 6, kVectors = 2;
#elif defined(__aarch64__)
constexpr int kRows = 6, kVectors = 4;
#else
constexpr int kRows = 6, kVectors = 2;
#endif

// out[Rows][Vectors] += a[Rows][depth] b[depth][Vectors]. T: float, or uint16_t for BF16.
template <int Rows, int Vectors, class T>
void multiply_block(int depth, const float* a, size_t a_stride, const T* b, size_t b_stride, float* out,
                    size_t out_stride) {
    Floats sum[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) {
            sum[r][v] = load<Floats>(out + r * out_stride + v * kLanes);
        }
    }
    for (int i = 0; i < depth; i++) {
        Floats x[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) {
            x[v] = load_floats(b + i * b_stride + v * kLanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            const Floats y = splat(a[r * a_stride + i]);
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; v++) {
                sum[r][v] = multiply_add(y, x[v], sum[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) {
            store(out + r * out_stride + v * kLanes, sum[r][v]);
        }
    }
}

// Few rows have registers left for more columns, and need them to hide the latency of a multiplication.
template <int Rows, class T, int Vectors = Rows <= 2 ? 2 * kVectors : kVectors>
void multiply_rows(int depth, int width, const float* a, size_t a_stride, const T* b, size_t b_stride, float* out,
                   size_t out_stride) {
    int c = 0;
    for (; c + Vectors * kLanes <= width; c += Vectors * kLanes) {
        multiply_block<Rows, Vectors>(depth, a, a_stride, b + c, b_stride, out + c, out_stride);
    }
    if constexpr (Vectors > 1) {
        if (c < width) {
            multiply_rows<Rows, T, Vectors / 2>(depth, width - c, a, a_stride, b + c, b_stride, out + c, out_stride);
        }
    }
}

// out[n][width] += a[n][depth] b[depth][width]; width is a multiple of 16.
template <class T, int Rows = kRows>
void multiply(int n, int depth, int width, const float* a, size_t a_stride, const T* b, size_t b_stride, float* out,
              size_t out_stride) {
    int r = 0;
    for (; r + Rows <= n; r += Rows) {
        multiply_rows<Rows, T>(depth, width, a + r * a_stride, a_stride, b, b_stride, out + r * out_stride, out_stride);
    }
    if constexpr (Rows > 1) {
        if (r < n) {
            multiply<T, Rows - 1>(n - r, depth, width, a + r * a_stride, a_stride, b, b_stride, out + r * out_stride,
                                  out_stride);
        }
    }
}

// out[n][width] += a[n][depth] b[depth][width] of a BF16 page, whose rows count as zeros where `rows` has no bit;
// kAllRows for more than 64. Memory of depth times width floats.
constexpr uint64_t kAllRows = ~uint64_t(0);

void multiply_page(int n, int depth, int width, const float* a, size_t a_stride, const uint16_t* b, uint64_t rows,
                   float* out, size_t out_stride, float* memory) {
    if (n <= kRows && rows == kAllRows) {
        multiply(n, depth, width, a, a_stride, b, width, out, out_stride);
        return;
    }
    for (int d = 0; d < depth; d++) {
        for (int c = 0; c < width; c += kLanes) {
            const bool counts = rows == kAllRows || (rows >> d & 1) != 0;
            store(memory + d * width + c, counts ? load_floats(b + d * width + c) : Floats{});
        }
    }
    multiply(n, depth, width, a, a_stride, memory, width, out, out_stride);
}

// The dot product of n floats, n a multiple of 16.
float dot_product(int n, const float* a, const float* b) {
    Floats sum = {};
    for (int i = 0; i < n; i += kLanes) {
        sum = multiply_add(load<Floats>(a + i), load<Floats>(b + i), sum);
    }
    return sum_lanes(sum);
}

void scale_row(float* row, int width, float factor) {
    for (int c = 0; c < width; c += kLanes) {
        store(row + c, load<Floats>(row + c) * factor);
    }
}

void add_scaled(float* row, int width, float factor, const float* more) {
    for (int c = 0; c < width; c += kLanes) {
        store(row + c, multiply_add(splat(factor), load<Floats>(more + c), load<Floats>(row + c)));
    }
}

// A value that is not finite must not reach rows that do not see its token: there its weight is 0, and 0 * NaN is NaN.
template <class T>
bool all_finite(const T* x, int n) {
    Words exponent = {};
    for (int i = 0; i < n; i += kLanes) {
        const Words e = reinterpret_cast<Words>(load_floats(x + i)) & 0x7f800000u;
        exponent = e > exponent ? e : exponent;
    }
    for (int i = 0; i < kLanes; i++) {
        if (exponent[i] == 0x7f800000u) {
            return false;
        }
    }
    return true;
}

}  // namespace
}  // namespace crumb::cpu

// Vectors of as many floats as the instruction set of this translation unit has, by the compiler's vector extensions.
// Only what these lack or compile badly is spelled out per instruction set. Internal to the unit (see kernel.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace crumb::cpu {
namespace {

// kRows x kVectors accumulators, kVectors operands and a broadcast fit the register file.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 6, kVectors = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 6, kVectors = 2;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRows = 6, kVectors = 4;
#else
constexpr int kLanes = 4, kRows = 6, kVectors = 2;
#endif

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using Bytes = uint8_t __attribute__((vector_size(kLanes)));
using SignedBytes = int8_t __attribute__((vector_size(kLanes)));

template <class V>
inline V load(const void* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
}

template <class V>
inline void store(void* p, V v) {
    __builtin_memcpy(p, &v, sizeof(V));
}

inline Floats splat(float x) { return x - Floats{}; }

inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

inline Floats as_floats(Words x) { return reinterpret_cast<Floats>(x); }

inline Floats select(Ints mask, Floats a, Floats b) { return mask ? a : b; }

// a * b + c, in one rounding where the instruction set has it.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

template <int Distance, class V, int... I>
inline V rotate(V v, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(v, v, (I + Distance) % kLanes...);
}

// Lane i becomes lane i + Distance.
template <int Distance, class V>
inline V rotate(V v) {
    return rotate<Distance>(v, std::make_integer_sequence<int, kLanes>());
}

template <int Distance = kLanes / 2>
inline float sum_lanes(Floats v) {
    v = v + rotate<Distance>(v);
    if constexpr (Distance > 1) {
        return sum_lanes<Distance / 2>(v);
    }
    return v[0];
}

// NaN lanes do not count.
template <int Distance = kLanes / 2>
inline float max_lanes(Floats v) {
    const Floats other = rotate<Distance>(v);
    v = select(v > other, v, other);
    if constexpr (Distance > 1) {
        return max_lanes<Distance / 2>(v);
    }
    return v[0];
}

inline Words lane_numbers() {
    Words v;
    for (int i = 0; i < kLanes; i++) {
        v[i] = uint32_t(i);
    }
    return v;
}

// FP16 that is finite, as numbers: also sub-normal ones when the host has switched those off.
inline Floats from_fp16(Words half) {
    const Words exponent = half & 0x7c00u, sign = (half & 0x8000u) << 16;
    const Words normal = ((half & 0x7fffu) << 13) + (112u << 23);
    const Floats small = to_floats(reinterpret_cast<Ints>(half & 0x3ffu)) * 0x1p-24f;
    const Words magnitude = reinterpret_cast<Words>(select(exponent == 0u, small, as_floats(normal)));
    return as_floats(magnitude | sign);
}

// e^x for x <= 0: NaN stays NaN, relative error below 2e-7; 0 below -60, which no sum of floats notices next to e^0,
// and which keeps sub-normal numbers, a hundred times slower, out of the products. x = n ln 2 + r, with ln 2 in two
// parts, and the polynomial of Cephes' expf for e^r.
inline Floats exp_negative(Floats x) {
    const Floats shifted = multiply_add(x, splat(1.44269504f), splat(0x1.8p23f));
    const Floats n = shifted - 0x1.8p23f;
    const Floats r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), x));
    Floats p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + 1.0f;
    const Words power = (reinterpret_cast<Words>(shifted) + 127u) << 23;  // the low bits of `shifted` are n
    return select(x < -60.0f, Floats{}, p * as_floats(power));
}

}  // namespace
}  // namespace crumb::cpu

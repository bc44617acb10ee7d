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

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using SignedHalves = int16_t __attribute__((vector_size(4 * kLanes)));
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

// Floats, and BF16 as floats.
inline Floats load_floats(const float* p) { return load<Floats>(p); }
inline Floats load_floats(const uint16_t* p) {
    return as_floats(__builtin_convertvector(load<Halves>(p), Words) << 16);
}

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

// The larger; b where one of them is NaN.
inline Floats maximum(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return select(a > b, a, b);
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
    v = maximum(rotate<Distance>(v), v);
    if constexpr (Distance > 1) {
        return max_lanes<Distance / 2>(v);
    }
    return v[0];
}

inline bool any_greater(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
#elif defined(__aarch64__)
    return vmaxvq_u32(vcgtq_f32(a, b)) != 0;
#else
    const auto pairs = reinterpret_cast<long long __attribute__((vector_size(4 * kLanes)))>(a > b);
    return (pairs[0] | pairs[1]) != 0;
#endif
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

// 2^x for x < 127: NaN stays NaN, relative error below 3e-7; 0 below -100, which no sum of floats notices next to what
// has a weight, and which keeps sub-normal numbers, a hundred times slower, out of the products. x = n + f with n whole
// and f in [0, 1), and the polynomial of degree 5 with the least relative error that is 1 at 0 for 2^f.
inline Floats exp2(Floats x) {
#if defined(__AVX512F__)
    const Floats f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
#else
    const Floats bounded = select(x < -120.0f, splat(-120.0f), x);
#if defined(__AVX2__)
    const Floats n = _mm256_floor_ps(bounded);
#elif defined(__aarch64__)
    const Floats n = vrndmq_f32(bounded);
#else
    const Floats nearest = (bounded + 0x1.8p23f) - 0x1.8p23f;
    const Floats n = nearest - select(nearest > bounded, splat(1.0f), Floats{});
#endif
    const Floats f = bounded - n;
#endif
    Floats p = splat(0.00186713007f);
    p = multiply_add(p, f, splat(0.00901703032f));
    p = multiply_add(p, f, splat(0.0557999131f));
    p = multiply_add(p, f, splat(0.24016445f));
    p = multiply_add(p, f, splat(0.693151312f));
    p = multiply_add(p, f, splat(1.0f));
#if defined(__AVX512F__)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(-100.0f), _CMP_NLT_UQ), p, x);
#else
    const Words exponent = reinterpret_cast<Words>(n + (0x1.8p23f + 127.0f));  // its low bits are n + 127
    return select(x < -100.0f, Floats{}, p * as_floats(exponent << 23));
#endif
}

// Integers 0 .. 127 that floats of that range are nearest to, as 64 bytes.
inline void store_bytes(uint8_t* to, const Floats* x) {
#if defined(__AVX512F__)
    __m512i v[4];
    for (int i = 0; i < 4; i++) v[i] = _mm512_cvtps_epi32(x[i]);
    const __m512i bytes = _mm512_packus_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
#elif defined(__AVX2__)
    for (int half = 0; half < 2; half++, to += 32, x += 4) {
        __m256i v[4];
        for (int i = 0; i < 4; i++) v[i] = _mm256_cvtps_epi32(x[i]);
        const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(bytes, order));
    }
#else
    for (int i = 0; i < 64 / kLanes; i++) {  // the low byte of 1.5 2^23 + x is x
        store(to + i * kLanes, __builtin_convertvector(reinterpret_cast<Words>(x[i] + 0x1.8p23f) & 0xffu, Bytes));
    }
#endif
}

}  // namespace
}  // namespace crumb::cpu

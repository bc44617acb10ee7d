// Dot products of four bytes a lane, digits of codes times int8: the instruction that carries attention over codes.
// Internal to the unit (see kernel.h).
//
//   vpdpbusd    AVX-512 VNNI, AVX-VNNI   u8 x s8 into 32-bit sums
//   sdot        NEON dot product         s8 x s8 into 32-bit sums: digits must be below 128
//   vpmaddubsw  AVX2, and two 16-bit multiplications in the portable unit: sums of 16 bits, of which
//               kDotSteps are safe (3 x 127 x 2 x 42 < 2^15), and which are widened once a chain
#pragma once

#include "attention/cpu/simd.h"

namespace crumb::cpu {
namespace {

inline Words broadcast(const void* four_bytes) {
    uint32_t x;
    __builtin_memcpy(&x, four_bytes, sizeof x);
    return x - Words{};
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)

using Dot = Ints;
constexpr int kDotSteps = 1 << 20;

inline Dot dot(Dot sum, Words digits, Words factors) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Dot>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(digits),
                                                     reinterpret_cast<__m512i>(factors)));
#elif defined(__AVXVNNI__)
    return reinterpret_cast<Dot>(_mm256_dpbusd_avx_epi32(
        reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(digits), reinterpret_cast<__m256i>(factors)));
#else
    return vdotq_s32(sum, vreinterpretq_s8_u32(digits), vreinterpretq_s8_u32(factors));
#endif
}

inline Ints total(Dot sum) { return sum; }

#else

using Dot = SignedHalves;
constexpr int kDotSteps = 42;

inline Dot dot(Dot sum, Words digits, Words factors) {
#if defined(__AVX2__)
    return sum + reinterpret_cast<Dot>(
                     _mm256_maddubs_epi16(reinterpret_cast<__m256i>(digits), reinterpret_cast<__m256i>(factors)));
#else
    const Dot even = reinterpret_cast<Dot>(digits & 0x00ff00ffu),
              odd = reinterpret_cast<Dot>(digits >> 8 & 0x00ff00ffu);
    const Dot pairs = reinterpret_cast<Dot>(factors);
    return sum + even * ((pairs << 8) >> 8) + odd * (pairs >> 8);
#endif
}

inline Ints total(Dot sum) {
#if defined(__AVX2__)
    return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(sum), _mm256_set1_epi16(1)));
#else
    const Ints pairs = reinterpret_cast<Ints>(sum);
    return ((pairs << 16) >> 16) + (pairs >> 16);
#endif
}

#endif

// Field f of every byte, as a digit 0 .. 3.
inline Words field(Words bytes, int f) { return bytes >> (2 * f) & 0x03030303u; }

// The same where it stands, counting 4^f, if dot() takes bytes up to 192 and does not mind the larger sums.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
inline Words field_in_place(Words bytes, int f) { return bytes & (0x03030303u << (2 * f)); }
inline float field_unit(int f) { return 1.0f / float(1 << (2 * f)); }
#else
inline Words field_in_place(Words bytes, int f) { return field(bytes, f); }
inline float field_unit(int) { return 1.0f; }
#endif

}  // namespace
}  // namespace crumb::cpu

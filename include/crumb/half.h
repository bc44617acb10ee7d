// BF16 and FP16 as storage: conversions to and from float, round to nearest even, the same on every compiler and CPU
// (clang 14 has no _Float16 on x86-64, and GCC's __bf16 has no conversions). NaN stays NaN. to_fp16 saturates at 65504,
// infinities too, because an infinite scale would poison a whole page.
//
// Always inlined: a file compiled for AVX-512 must not leave a copy behind that the linker gives to everyone.
#pragma once

#include <bit>
#include <cstdint>

namespace crumb {

struct bf16 {
    uint16_t bits = 0;
};

struct fp16 {
    uint16_t bits = 0;
};

[[gnu::always_inline]] inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

[[gnu::always_inline]] inline bf16 to_bf16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) { return {uint16_t((u >> 16) | 0x40u)}; }
    return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

[[gnu::always_inline]] inline float to_float(fp16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 1023u;
    if (exponent == 31) { return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13)); }
    if (exponent != 0) { return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13)); }
    const float magnitude = float(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

[[gnu::always_inline]] inline fp16 to_fp16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) { return {uint16_t(sign | 0x7e00u)}; }
    if (magnitude >= 0x477fe000u) { return {uint16_t(sign | 0x7bffu)}; }  // at least 65504
    if (magnitude < 0x38800000u) {                                        // sub-normal: multiples of 2^-24
        const float scaled = std::bit_cast<float>(magnitude) * 0x1p24f + 0x1p23f;
        return {uint16_t(sign | (std::bit_cast<uint32_t>(scaled) & 0x7ffu))};
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return {uint16_t(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace crumb

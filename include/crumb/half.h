// BF16 and FP16 as storage: conversions to and from float, round to nearest even, the same on every compiler and CPU
// (clang 14 has no _Float16 on x86-64, and GCC's __bf16 has no conversions). NaN stays NaN; FP16 overflow saturates at
// 65504 where `to_fp16` is used for side info, because an infinite scale would poison a whole page.
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

inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

inline bf16 to_bf16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) { return {uint16_t((u >> 16) | 0x40u)}; }
    return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

inline float to_float(fp16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 1023u;
    if (exponent == 31) { return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13)); }
    if (exponent != 0) { return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13)); }
    const float magnitude = float(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

inline fp16 to_fp16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) { return {uint16_t(sign | 0x7e00u)}; }
    if (magnitude >= 0x477fe000u) { return {uint16_t(sign | 0x7bffu)}; }  // at least 65504
    if (magnitude < 0x38800000u) {                                        // sub-normal: multiples of 2^-24
        const float scaled = std::bit_cast<float>(magnitude) * 0x1p24f + 0x1p23f;
        return {uint16_t(sign | (std::bit_cast<uint32_t>(scaled) & 0x7ffu))};
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    const uint32_t half = (rounded - 0x38000000u) >> 13;
    return {uint16_t(sign | (half > 0x7bffu ? 0x7bffu : half))};
}

}  // namespace crumb

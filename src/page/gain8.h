// Gains as 8-bit logarithms in sixteenths of an octave, without a logarithm: the exponent is the float's own, the
// sixteenth is found by comparison. So every machine stores the same byte and reads the same float. Constant expressions,
// which device code may call too.
#pragma once

#include <crumb/page.h>

#include <bit>

namespace crumb {

constexpr float gain8_value_of(uint8_t code) {
    // 2^(i / 16), rounded to float.
    constexpr float power[16] = {
        1.0f,        1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f, 1.29683959f, 1.35425556f,
        1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f, 1.68179286f, 1.75625217f, 1.8340081f,  1.91520655f,
    };
    const int sixteenths = int(code) - 128;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(power[sixteenths & 15]) + (uint32_t(sixteenths >> 4) << 23));
}

constexpr Gain8 gain8_of(float gain) {
    // 2^((i + 1/2) / 16), rounded to float.
    constexpr float border[16] = {
        1.0218972f,  1.06714046f, 1.1143868f, 1.1637249f,  1.21524739f, 1.26905096f, 1.32523668f, 1.38390994f,
        1.44518077f, 1.50916445f, 1.5759809f, 1.64575553f, 1.71861935f, 1.79470909f, 1.87416768f, 1.95714414f,
    };
    if (!(gain > 0x1p-126f)) {
        return {0, true};
    }
    const uint32_t bits = std::bit_cast<uint32_t>(gain);
    const float mantissa = std::bit_cast<float>((bits & 0x7fffffu) | 0x3f800000u);
    int code = 128 + 16 * (int(bits >> 23) - 127);
    for (int i = 0; i < 16; ++i) {
        code += mantissa >= border[i];
    }
    if (code < 0) {
        return {0, true};
    }
    if (code > 255) {
        return {255, true};
    }
    return {uint8_t(code), false};
}

}  // namespace crumb

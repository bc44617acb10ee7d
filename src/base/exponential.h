// e^x of many numbers at once, for functions that CRUMB_CLONES compiles: additions and multiplications alone, so that
// every instruction set gives the same bits.
#pragma once

#include <cstdint>

namespace crumb {

inline constexpr int kLanes = 16;

using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));

// x = e^x for x <= 88: 2^n e^r with |r| <= ln(2) / 2, e^r by its series to r^6, within 2 units of the last place; 0 below
// -87. What is no number stays none.
[[gnu::always_inline]] inline void exponential(Floats& x) {
    constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kRound = 12582912.0f;
    const Floats rounded = x * kLog2e + kRound;
    const Floats n = rounded - kRound, r = x - n * kLn2High - n * kLn2Low;
    Floats series = r * (1.0f / 720) + (1.0f / 120);
    for (const float coefficient : {1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        series = series * r + coefficient;
    }
    const Ints power = (Ints(rounded) - Ints(Floats{} + kRound) + 127) << 23;
    const Floats none = x != x ? x : Floats{};
    x = x > -87.0f ? series * Floats(power) : none;
}

// The sum of 16 numbers, halves added to halves.
template <typename T>
[[gnu::always_inline]] inline T folded(T (&lanes)[kLanes]) {
    for (int n = kLanes / 2; n > 0; n /= 2) {
        for (int l = 0; l < n; l++) {
            lanes[l] += lanes[l + n];
        }
    }
    return lanes[0];
}

}  // namespace crumb

// The slope of a head in ALiBi, as llama.cpp has it: powers of 2^(-max_bias / n) for the first n heads, n the largest
// power of two that is at most n_head, and odd powers of the root of that for the rest. The logit loses slope *
// distance.
#pragma once

#include <bit>
#include <cmath>

namespace crumb {

inline double alibi_slope(double max_bias, int n_head, int head) {
    const int n = int(std::bit_floor(unsigned(n_head)));
    return head < n ? std::exp2(-max_bias / n * (head + 1)) : std::exp2(-max_bias / 2 / n * (2 * (head - n) + 1));
}

}  // namespace crumb

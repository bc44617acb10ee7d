// Conversions against a slow oracle: exhaustive over all 65536 halves, and over the borders between neighbours.
#include <crumb/half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

using namespace crumb;

namespace {

// By the definition of the format: sign, `exponent_bits` of exponent, the rest mantissa.
double value_by_definition(uint16_t bits, int exponent_bits) {
    const int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (bits & 0x7fff) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) {
        return mantissa ? std::nan("") : sign * INFINITY;
    }
    if (exponent == 0) {
        return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    }
    return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

bool is_nan(double x) { return std::isnan(x); }

// Every finite half, the borders to its neighbour and the floats next to them; each must go to the nearest half, at the
// border to the even one.
template <class Half, class Convert>
void expect_nearest(int exponent_bits, Half largest, Convert convert) {
    for (uint32_t magnitude = 0; magnitude < largest.bits; ++magnitude) {
        const float low = float(value_by_definition(uint16_t(magnitude), exponent_bits));
        const double high = value_by_definition(uint16_t(magnitude + 1), exponent_bits);
        const float border = float((double(low) + high) / 2);  // exact: floats have more bits
        const uint16_t even = uint16_t(magnitude + (magnitude & 1));
        for (uint16_t sign : {0x0000, 0x8000}) {
            const float s = sign ? -1.0f : 1.0f;
            ASSERT_EQ(convert(s * low).bits, sign | magnitude);
            ASSERT_EQ(convert(s * std::nextafterf(border, 0.0f)).bits, sign | magnitude);
            ASSERT_EQ(convert(s * border).bits, sign | even);
            ASSERT_EQ(convert(s * std::nextafterf(border, INFINITY)).bits, sign | (magnitude + 1));
        }
    }
}

}  // namespace

TEST(Half, Fp16ReadsAsDefined) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const double expected = value_by_definition(uint16_t(bits), 5), got = to_float(fp16{uint16_t(bits)});
        ASSERT_TRUE(is_nan(expected) ? is_nan(got) : expected == got) << bits;
        ASSERT_EQ(std::signbit(got), (bits & 0x8000) != 0) << bits;
    }
}

TEST(Half, Bf16ReadsAsDefined) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const double expected = value_by_definition(uint16_t(bits), 8), got = to_float(bf16{uint16_t(bits)});
        ASSERT_TRUE(is_nan(expected) ? is_nan(got) : expected == got) << bits;
        ASSERT_EQ(std::signbit(got), (bits & 0x8000) != 0) << bits;
    }
}

TEST(Half, Fp16RoundsToNearestEven) {
    expect_nearest(5, fp16{0x7bff}, [](float x) { return to_fp16(x); });
}

TEST(Half, Bf16RoundsToNearestEven) {
    expect_nearest(8, bf16{0x7f7f}, [](float x) { return to_bf16(x); });
}

TEST(Half, Fp16Saturates) {
    for (float x : {65504.0f, 65519.0f, 65520.0f, 1e6f, std::numeric_limits<float>::max(), INFINITY}) {
        EXPECT_EQ(to_fp16(x).bits, 0x7bff) << x;
        EXPECT_EQ(to_fp16(-x).bits, 0xfbff) << x;
    }
}

TEST(Half, Bf16OverflowsToInfinity) {
    EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
    EXPECT_EQ(to_bf16(-INFINITY).bits, 0xff80);
}

TEST(Half, NanStaysNan) {
    for (uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
        const float nan = std::bit_cast<float>(bits);
        EXPECT_TRUE(std::isnan(to_float(to_fp16(nan)))) << bits;
        EXPECT_TRUE(std::isnan(to_float(to_bf16(nan)))) << bits;
    }
}

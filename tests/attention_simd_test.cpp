// The elementary functions of the kernels, with the instruction set that the tests are compiled for.
#include <crumb/half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/cpu/simd.h"

namespace crumb::cpu {
namespace {

float exp2(float x) { return exp2(splat(x))[0]; }

TEST(AttentionSimd, Exp2IsAccurate) {
    double worst = 0;
    for (float x = 100; x > -100; x -= 0.0007f) {
        worst = std::max(worst, std::abs(exp2(x) / std::exp2(double(x)) - 1));
    }
    EXPECT_LT(worst, 3e-7);
    EXPECT_EQ(exp2(0.0f), 1.0f);
    EXPECT_EQ(exp2(-7.0f), 0x1p-7f);
}

TEST(AttentionSimd, Exp2OfExtremes) {
    EXPECT_EQ(exp2(-100.01f), 0.0f);
    EXPECT_EQ(exp2(-1e30f), 0.0f);
    EXPECT_EQ(exp2(std::numeric_limits<float>::lowest()), 0.0f);
    EXPECT_EQ(exp2(-std::numeric_limits<float>::infinity()), 0.0f);
    EXPECT_TRUE(std::isnan(exp2(std::numeric_limits<float>::quiet_NaN())));
}

TEST(AttentionSimd, Fp16IsExact) {
    for (uint32_t half = 0; half < 0x10000; half++) {
        if ((half & 0x7c00u) == 0x7c00u) continue;  // infinite and NaN do not occur in pages
        EXPECT_EQ(from_fp16(Words{} + half)[0], to_float(fp16{uint16_t(half)})) << half;
    }
}

TEST(AttentionSimd, Lanes) {
    Floats x = {};
    for (int i = 0; i < kLanes; i++) x[i] = float(i * i);
    float sum = 0;
    for (int i = 0; i < kLanes; i++) sum += x[i];
    EXPECT_EQ(sum_lanes(x), sum);
    EXPECT_EQ(max_lanes(x), float((kLanes - 1) * (kLanes - 1)));
    EXPECT_EQ(rotate<1>(x)[0], 1.0f);
    EXPECT_EQ(splat(-0.0f)[0], 0.0f);
    EXPECT_TRUE(std::signbit(splat(-0.0f)[0]));
}

}  // namespace
}  // namespace crumb::cpu

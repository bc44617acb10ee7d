// The min/max quantiser. Of a token's mapped values, after the clip, with both ends of the range shrunk: scale = FP16 of (max - min) / (n - 1), zero = FP16
// of the middle of the code range min + scale (n - 1) / 2, with the rounded scale, and code = floor((y - zero) / scale
// + n / 2) within 0 .. n - 1, n = 2^bits. So a code reads as zero + scale (code - (n - 1) / 2).
#include "recipe/lanes/lanes.h"

namespace crumb::lanes::CRUMB_LEVEL {

namespace {

float larger(float a, float b) { return a > b ? a : b; }
float smaller(float a, float b) { return a < b ? a : b; }

// The rank-th largest |y| of every token: each value sinks through a sorted list of the largest so far.
void order_statistic(const Tile& y, int dim, int rank, float* threshold) {
    float largest[kMaxDim][kLanes];
    for (int r = 0; r < rank; ++r) {
        for (int t = 0; t < kLanes; ++t) {
            largest[r][t] = 0.0f;
        }
    }
    for (int j = 0; j < dim; ++j) {
        float sinking[kLanes];
        for (int t = 0; t < kLanes; ++t) {
            sinking[t] = __builtin_fabsf(y.at[j][t]);
        }
        for (int r = 0; r < rank; ++r) {
            for (int t = 0; t < kLanes; ++t) {
                const float kept = larger(largest[r][t], sinking[t]);
                sinking[t] = smaller(largest[r][t], sinking[t]);
                largest[r][t] = kept;
            }
        }
    }
    for (int t = 0; t < kLanes; ++t) {
        threshold[t] = largest[rank - 1][t];
    }
}

}  // namespace

void minmax(Tile& y, int dim, int bits, int clipped, float shrink, Coded& __restrict out) {
    clamp_mapped(y, dim, out.saturated);

    float threshold[kLanes];
    order_statistic(y, dim, clipped, threshold);

    float low[kLanes], high[kLanes];
    for (int t = 0; t < kLanes; ++t) {
        low[t] = threshold[t], high[t] = -threshold[t];
    }
    for (int j = 0; j < dim; ++j) {
        for (int t = 0; t < kLanes; ++t) {
            const float clamped = smaller(larger(y.at[j][t], -threshold[t]), threshold[t]);
            y.at[j][t] = clamped;
            low[t] = smaller(low[t], clamped);
            high[t] = larger(high[t], clamped);
        }
    }

    const int levels = 1 << bits;
    float scale[kLanes], zero[kLanes];
    for (int t = 0; t < kLanes; ++t) {
        low[t] *= shrink, high[t] *= shrink;
        const fp16 s = to_fp16(larger((high[t] - low[t]) / float(levels - 1), kTiny));
        scale[t] = to_float(s);
        const fp16 z = to_fp16(low[t] + scale[t] * (0.5f * float(levels - 1)));
        zero[t] = to_float(z);
        out.scale[t] = s.bits;
        out.zero[t] = z.bits;
    }
    for (int j = 0; j < dim; ++j) {
        for (int t = 0; t < kLanes; ++t) {
            const float position = (y.at[j][t] - zero[t]) / scale[t] + float(levels / 2);
            out.code[j][t] = uint8_t(int(smaller(larger(position, 0.0f), float(levels - 1))));
        }
    }
}

}  // namespace crumb::lanes::CRUMB_LEVEL

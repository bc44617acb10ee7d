// From BF16 rows to mapped values: load, centre, page mean, linear map.
#include "recipe/lanes/lanes.h"

namespace crumb::lanes::CRUMB_LEVEL {

namespace {

float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

uint64_t load(const bf16* rows, int dim, const float* mean, int first, Tile& x) {
    uint64_t nonfinite = 0;
    for (int i = 0; i < dim; ++i) {
        const float centre = mean ? mean[i] : 0.0f;
        for (int t = 0; t < kLanes; ++t) {
            const bf16 element = rows[t * dim + i];
            const bool is_finite = (element.bits & 0x7f80) != 0x7f80, is_nan = (element.bits & 0x7fff) > 0x7f80;
            nonfinite += t >= first && !is_finite;
            x.at[i][t] = (is_nan ? 0.0f : clamp(to_float(element), -kLargestInput, kLargestInput)) - centre;
        }
    }
    return nonfinite;
}

void page_mean(const Tile& x, int dim, const float* step, int8_t* mean) {
    for (int i = 0; i < dim; ++i) {
        float sum = 0.0f;
        for (int t = 0; t < kLanes; ++t) {
            sum += x.at[i][t];
        }
        mean[i] = int8_t(__builtin_floorf(clamp(sum * (1.0f / kLanes) / step[i], -127.0f, 127.0f) + 0.5f));
    }
}

void subtract(Tile& x, int dim, const float* step, const int8_t* mean) {
    for (int i = 0; i < dim; ++i) {
        const float m = float(mean[i]) * step[i];
        for (int t = 0; t < kLanes; ++t) {
            x.at[i][t] -= m;
        }
    }
}

// Blocks of directions and tokens whose sums stay in registers.
void map(const Tile& x, int dim, const float* matrix, Tile& y) {
    constexpr int kDirections = 4, kTokens = 32;
    for (int j = 0; j < dim; j += kDirections) {
        for (int t = 0; t < kLanes; t += kTokens) {
            float sum[kDirections][kTokens] = {};
            for (int i = 0; i < dim; ++i) {
                for (int d = 0; d < kDirections; ++d) {
                    const float factor = matrix[i * dim + j + d];
                    for (int e = 0; e < kTokens; ++e) {
                        sum[d][e] = __builtin_fmaf(x.at[i][t + e], factor, sum[d][e]);
                    }
                }
            }
            for (int d = 0; d < kDirections; ++d) {
                for (int e = 0; e < kTokens; ++e) {
                    y.at[j + d][t + e] = sum[d][e];
                }
            }
        }
    }
}

}  // namespace

void clamp_mapped(Tile& y, int dim, bool* saturated) {
    float largest[kLanes] = {};
    for (int j = 0; j < dim; ++j) {
        for (int t = 0; t < kLanes; ++t) {
            const float magnitude = __builtin_fabsf(y.at[j][t]);
            largest[t] = largest[t] > magnitude ? largest[t] : magnitude;
            y.at[j][t] = clamp(y.at[j][t], -kLargestMapped, kLargestMapped);
        }
    }
    for (int t = 0; t < kLanes; ++t) {
        saturated[t] = largest[t] > kLargestMapped;
    }
}

extern const Kernels kernels = {CRUMB_LEVEL_NAME, load, page_mean, subtract, map, minmax, gain};

}  // namespace crumb::lanes::CRUMB_LEVEL

// The encoder written down plainly, one token after another, in scalar FP32: what every backend must reproduce bit by
// bit.
#pragma once

#include <crumb/recipe.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace crumb {

struct ScalarSide {
    std::vector<int> codes;          // [64][D] by direction
    std::vector<float> scale, zero;  // [64] as stored
    std::vector<int> page_mean;      // [D], or empty
    uint64_t nonfinite = 0, saturated = 0;
};

namespace scalar {

inline float clamp(float x, float limit) { return std::min(std::max(x, -limit), limit); }

inline void minmax(const SideRecipe& recipe, std::vector<float>& y, int* codes, float& scale, float& zero) {
    const int dim = int(y.size()), levels = 1 << recipe.bits, index = std::min(int(recipe.clip * float(dim)), dim - 1);
    std::vector<float> magnitudes;
    for (float x : y) {
        magnitudes.push_back(std::fabs(x));
    }
    std::nth_element(magnitudes.begin(), magnitudes.begin() + index, magnitudes.end());
    for (float& x : y) {
        x = clamp(x, magnitudes[index]);
    }
    const float low = recipe.shrink * *std::min_element(y.begin(), y.end());
    const float high = recipe.shrink * *std::max_element(y.begin(), y.end());
    scale = to_float(to_fp16(std::max((high - low) / float(levels - 1), 0x1p-24f)));
    zero = to_float(to_fp16(low + scale * (0.5f * float(levels - 1))));
    for (int j = 0; j < dim; ++j) {
        codes[j] = int(std::clamp(std::floor((y[j] - zero) / scale + float(levels / 2)), 0.0f, float(levels - 1)));
    }
}

inline float stored_gain(const SideTables& tables, float gain, bool& saturated) {
    if (tables.format.info == SideInfo::gain16) {
        saturated = gain > 65504.0f;
        return to_float(to_fp16(gain));
    }
    const double code = std::floor(16 * std::log2(double(gain / tables.gain_reference)) + 128.5);
    saturated = code < 0 || code > 255;
    return float(std::exp2((std::clamp(code, 0.0, 255.0) - 128) / 16)) * tables.gain_reference;
}

inline void gain(const SideTables& tables, const std::vector<float>& y, int* codes, float& scale, bool& saturated) {
    std::vector<int> live;
    for (int j = 0; j < int(y.size()); ++j) {
        if (tables.digits[j] > 0) {
            live.push_back(j);
        }
    }
    const auto u = [&](int j) { return y[j] / tables.step[j]; };
    const auto levels = [&](int j) { return float(1 << 2 * tables.digits[j]); };
    const auto weight = [&](int j) { return tables.step[j] * tables.step[j]; };
    const auto code = [&](int j, float inverse) {
        return std::clamp(std::floor(std::fma(u(j), inverse, levels(j) / 2)), 0.0f, levels(j) - 1);
    };
    const auto centred = [&](int j, float inverse) { return code(j, inverse) - (levels(j) - 1) / 2; };

    float energy = 0;
    for (int j : live) {
        const float normal = y[j] / tables.sigma[j];
        energy = std::fma(normal, normal, energy);
    }
    const float rms = std::sqrt(energy / float(live.size()));

    float least = INFINITY;
    for (float start : {0.6f, 0.75f, 0.9f, 1.05f, 1.25f, 1.5f}) {
        const float inverse = 1.0f / std::max(start * rms, 0x1p-24f);
        float fit = 0, norm = 0, error = 0;
        for (int j : live) {
            const float c = centred(j, inverse);
            fit = std::fma(weight(j) * c, u(j), fit);
            norm = std::fma(weight(j) * c, c, norm);
        }
        bool out_of_range = false;
        const float g = stored_gain(tables, std::max(fit / norm, 0x1p-24f), out_of_range);
        for (int j : live) {
            const float miss = std::fma(-centred(j, 1.0f / g), g, u(j));
            error = std::fma(weight(j) * miss, miss, error);
        }
        if (error < least) {
            least = error;
            scale = g;
            saturated = out_of_range;
        }
    }
    for (int j : live) {
        codes[j] = int(code(j, 1.0f / scale));
    }
}

}  // namespace scalar

inline ScalarSide encode_scalar(const SideRecipe& recipe, const SideTables& tables, std::span<const bf16> rows) {
    const int dim = tables.format.dim;
    ScalarSide out;
    std::vector<float> x(rows.size());
    for (size_t n = 0; n < rows.size(); ++n) {
        const float element = to_float(rows[n]);
        out.nonfinite += !std::isfinite(element);
        x[n] = std::isnan(element) ? 0.0f : scalar::clamp(element, 1e30f);
        if (!tables.mean.empty()) {
            x[n] -= tables.mean[n % dim];
        }
    }
    for (int i = 0; tables.format.mean && i < dim; ++i) {
        float sum = 0;
        for (int t = 0; t < kPageTokens; ++t) {
            sum += x[size_t(t) * dim + i];
        }
        const float step = tables.mean_step[i];
        const int code = int(std::floor(scalar::clamp(sum / 64.0f / step, 127.0f) + 0.5f));
        out.page_mean.push_back(code);
        for (int t = 0; t < kPageTokens; ++t) {
            x[size_t(t) * dim + i] -= float(code) * step;
        }
    }

    out.codes.assign(rows.size(), 0);
    out.scale.assign(kPageTokens, 0.0f);
    out.zero.assign(kPageTokens, 0.0f);
    for (int t = 0; t < kPageTokens; ++t) {
        std::vector<float> y(x.begin() + t * dim, x.begin() + (t + 1) * dim);
        if (!tables.encode.empty()) {
            for (int j = 0; j < dim; ++j) {
                float sum = 0;
                for (int i = 0; i < dim; ++i) {
                    sum = std::fma(x[size_t(t) * dim + i], tables.encode[size_t(i) * dim + j], sum);
                }
                y[j] = sum;
            }
        }
        bool saturated = false;
        for (float& value : y) {
            saturated |= std::fabs(value) > 65504.0f;
            value = scalar::clamp(value, 65504.0f);
        }
        bool gain_saturated = false;
        if (recipe.quantiser == Quantiser::minmax) {
            scalar::minmax(recipe, y, &out.codes[size_t(t) * dim], out.scale[t], out.zero[t]);
        } else {
            scalar::gain(tables, y, &out.codes[size_t(t) * dim], out.scale[t], gain_saturated);
        }
        out.saturated += saturated || gain_saturated;
    }
    return out;
}

}  // namespace crumb

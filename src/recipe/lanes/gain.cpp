// The gain quantiser: static steps, one gain a token. For each of six starts around the token's rms: codes, the gain
// that fits them best (least squares), its stored form, codes again; the start with the least error wins, the first of
// equals. A code reads as gain step (code - (n - 1) / 2), n = 4^digits; directions without digits are not stored.
//
// Everything is in units of the static step, u = y / step, with errors weighted by step^2. Sums are fma chains over
// directions ascending.
#include <crumb/page.h>

#include "recipe/lanes/lanes.h"

namespace crumb::lanes::CRUMB_LEVEL {

namespace {

constexpr float kStarts[] = {0.6f, 0.75f, 0.9f, 1.05f, 1.25f, 1.5f};

float larger(float a, float b) { return a > b ? a : b; }
float smaller(float a, float b) { return a < b ? a : b; }

float code_of(float u, float inverse_gain, float levels) {
    const float position = __builtin_fmaf(u, inverse_gain, 0.5f * levels);
    return float(int(smaller(larger(position, 0.0f), levels - 1.0f)));
}

struct Stored {
    uint16_t bits;
    float gain;
    bool saturated;
};

Stored stored(float gain, const GainTables& tables) {
    if (tables.gain8) {
        const Gain8 g = to_gain8(gain / tables.reference);
        return {g.code, gain8_value(g.code) * tables.reference, g.saturated};
    }
    const fp16 g = to_fp16(larger(gain, kTiny));
    return {g.bits, to_float(g), gain > 65504.0f};
}

}  // namespace

void gain(Tile& y, int dim, const GainTables& tables, Coded& out) {
    clamp_mapped(y, dim, out.saturated);

    float levels[kMaxDim], weight[kMaxDim];
    int live = 0;
    float energy[kLanes] = {};
    for (int j = 0; j < dim; ++j) {
        levels[j] = float(1 << (2 * tables.digits[j]));
        if (tables.digits[j] == 0) {
            continue;
        }
        ++live;
        weight[j] = tables.step[j] * tables.step[j];
        for (int t = 0; t < kLanes; ++t) {
            const float normal = y.at[j][t] / tables.sigma[j];
            energy[t] = __builtin_fmaf(normal, normal, energy[t]);
            y.at[j][t] /= tables.step[j];
        }
    }

    float best_gain[kLanes], best_error[kLanes];
    bool best_saturated[kLanes];
    for (float start : kStarts) {
        float inverse[kLanes], fit[kLanes] = {}, norm[kLanes] = {}, error[kLanes] = {}, gains[kLanes];
        for (int t = 0; t < kLanes; ++t) {
            inverse[t] = 1.0f / larger(start * __builtin_sqrtf(energy[t] / float(live)), kTiny);
        }
        for (int j = 0; j < dim; ++j) {
            if (tables.digits[j] == 0) {
                continue;
            }
            for (int t = 0; t < kLanes; ++t) {
                const float c = code_of(y.at[j][t], inverse[t], levels[j]) - 0.5f * (levels[j] - 1.0f),
                            wc = weight[j] * c;
                fit[t] = __builtin_fmaf(wc, y.at[j][t], fit[t]);
                norm[t] = __builtin_fmaf(wc, c, norm[t]);
            }
        }
        Stored candidate[kLanes];
        for (int t = 0; t < kLanes; ++t) {
            candidate[t] = stored(fit[t] / norm[t], tables);
            gains[t] = candidate[t].gain;
            inverse[t] = 1.0f / gains[t];
        }
        for (int j = 0; j < dim; ++j) {
            if (tables.digits[j] == 0) {
                continue;
            }
            for (int t = 0; t < kLanes; ++t) {
                const float c = code_of(y.at[j][t], inverse[t], levels[j]) - 0.5f * (levels[j] - 1.0f);
                const float miss = __builtin_fmaf(-c, gains[t], y.at[j][t]);
                error[t] = __builtin_fmaf(weight[j] * miss, miss, error[t]);
            }
        }
        for (int t = 0; t < kLanes; ++t) {
            if (start == kStarts[0] || error[t] < best_error[t]) {
                best_error[t] = error[t];
                best_gain[t] = gains[t];
                best_saturated[t] = candidate[t].saturated;
                out.scale[t] = candidate[t].bits;
            }
        }
    }

    for (int t = 0; t < kLanes; ++t) {
        out.saturated[t] |= best_saturated[t];
    }
    for (int j = 0; j < dim; ++j) {
        for (int t = 0; t < kLanes; ++t) {
            out.code[j][t] = tables.digits[j] == 0 ? 0 : uint8_t(code_of(y.at[j][t], 1.0f / best_gain[t], levels[j]));
        }
    }
}

}  // namespace crumb::lanes::CRUMB_LEVEL

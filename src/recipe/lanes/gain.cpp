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

// A direction that is coded.
struct Direction {
    int index;
    float levels;
    float middle;  // of the codes
    float weight;
};

float code_of(float u, float inverse_gain, const Direction& d) {
    const float position = __builtin_fmaf(u, inverse_gain, 0.5f * d.levels);
    return float(int(smaller(larger(position, 0.0f), d.levels - 1.0f)));
}

// Steps from y to u, the coded directions and the rms of every token.
int normalise(Tile& y, int dim, const GainTables& tables, Direction* live, float* rms) {
    int n = 0;
    float energy[kLanes] = {};
    for (int j = 0; j < dim; ++j) {
        if (tables.digits[j] == 0) {
            continue;
        }
        const float levels = float(1 << (2 * tables.digits[j])), step = tables.step[j], sigma = tables.sigma[j];
        live[n++] = {j, levels, 0.5f * (levels - 1.0f), step * step};
        for (int t = 0; t < kLanes; ++t) {
            const float normal = y.at[j][t] / sigma;
            energy[t] = __builtin_fmaf(normal, normal, energy[t]);
            y.at[j][t] /= step;
        }
    }
    for (int t = 0; t < kLanes; ++t) {
        rms[t] = __builtin_sqrtf(energy[t] / float(n));
    }
    return n;
}

// The gain that fits the codes of gain 1 / inverse best.
void least_squares(const Tile& u, const Direction* live, int n, const float* inverse, float* gain) {
    float fit[kLanes] = {}, norm[kLanes] = {};
    for (int i = 0; i < n; ++i) {
        const Direction d = live[i];
        for (int t = 0; t < kLanes; ++t) {
            const float c = code_of(u.at[d.index][t], inverse[t], d) - d.middle, weighted = d.weight * c;
            fit[t] = __builtin_fmaf(weighted, u.at[d.index][t], fit[t]);
            norm[t] = __builtin_fmaf(weighted, c, norm[t]);
        }
    }
    for (int t = 0; t < kLanes; ++t) {
        gain[t] = larger(fit[t] / norm[t], kTiny);
    }
}

void squared_error(const Tile& u, const Direction* live, int n, const float* gain, float* error) {
    float inverse[kLanes];
    for (int t = 0; t < kLanes; ++t) {
        inverse[t] = 1.0f / gain[t];
        error[t] = 0.0f;
    }
    for (int i = 0; i < n; ++i) {
        const Direction d = live[i];
        for (int t = 0; t < kLanes; ++t) {
            const float c = code_of(u.at[d.index][t], inverse[t], d) - d.middle;
            const float miss = __builtin_fmaf(-c, gain[t], u.at[d.index][t]);
            error[t] = __builtin_fmaf(d.weight * miss, miss, error[t]);
        }
    }
}

// Replaces gains by what is stored of them.
void round_to_stored(const GainTables& tables, float* gain, uint16_t* bits, bool* saturated) {
    for (int t = 0; t < kLanes; ++t) {
        if (tables.gain8) {
            const Gain8 stored = to_gain8(gain[t] / tables.reference);
            bits[t] = stored.code;
            saturated[t] = stored.saturated;
            gain[t] = gain8_value(stored.code) * tables.reference;
        } else {
            const fp16 stored = to_fp16(gain[t]);
            bits[t] = stored.bits;
            saturated[t] = gain[t] > kLargestMapped;
            gain[t] = to_float(stored);
        }
    }
}

}  // namespace

void gain(Tile& y, int dim, const GainTables& tables, Coded& __restrict out) {
    clamp_mapped(y, dim, out.saturated);

    Direction live[kMaxDim];
    float rms[kLanes];
    const int n = normalise(y, dim, tables, live, rms);

    float best[kLanes], least[kLanes];
    bool out_of_range[kLanes];
    for (float start : kStarts) {
        float inverse[kLanes], gain[kLanes], error[kLanes];
        uint16_t bits[kLanes];
        bool saturated[kLanes];
        for (int t = 0; t < kLanes; ++t) {
            inverse[t] = 1.0f / larger(start * rms[t], kTiny);
        }
        least_squares(y, live, n, inverse, gain);
        round_to_stored(tables, gain, bits, saturated);
        squared_error(y, live, n, gain, error);
        for (int t = 0; t < kLanes; ++t) {
            if (start == kStarts[0] || error[t] < least[t]) {
                least[t] = error[t];
                best[t] = gain[t];
                out.scale[t] = bits[t];
                out_of_range[t] = saturated[t];
            }
        }
    }

    float inverse[kLanes];
    for (int t = 0; t < kLanes; ++t) {
        out.saturated[t] |= out_of_range[t];
        inverse[t] = 1.0f / best[t];
    }
    for (int i = 0; i < n; ++i) {
        const Direction d = live[i];
        for (int t = 0; t < kLanes; ++t) {
            out.code[d.index][t] = uint8_t(code_of(y.at[d.index][t], inverse[t], d));
        }
    }
}

}  // namespace crumb::lanes::CRUMB_LEVEL

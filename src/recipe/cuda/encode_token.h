// The quantisers that give every token parameters of its own, as in src/recipe/lanes: range (minmax) and gain. The lanes that share a
// token hold its mapped values in registers; minima, maxima and counts have no order and go over the lanes by shuffles. The gain's sums
// run over directions ascending: in one thread for a token's length, in one for each of its starts after that.
#pragma once

#include <math.h>

#include "page/gain8.h"
#include "recipe/cuda/encode_args.h"

namespace crumb::cuda {

// a / b rounded to nearest, with inverse = 1 / b rounded to nearest: two corrections by exact remainders (Markstein 1990). Of an a below
// 2^-100 the last bit may be lost: steps are at least 2^-24, so it is 2^-76 where gains and scales are 2^-24 or more, and shows nowhere.
// With an inverse of 0 it is 0.
CRUMB_DEVICE float quotient(float a, float b, float inverse) {
    float q = a * inverse;
    q = simt::fma_exact(simt::fma_exact(-q, b, a), inverse, q);
    return simt::fma_exact(simt::fma_exact(-q, b, a), inverse, q);
}

inline constexpr int kStarts = 6;
inline constexpr float kTiny = 0x1p-24f, kLargestMapped = 65504.0f;

// What the gain's loops need of a direction. Values are in units of all its levels (powers of 4, so that nothing is rounded): a code is
// 1 / levels apart from the next. A direction without digits has weight, inverses and so values of 0, and adds nothing to any sum.
struct alignas(16) Direction {
    float weight;         // (step levels)^2
    float floor;          // x + floor, rounded down, keeps whole codes of x; its last bits are the code
    float middle;         // of codes
    float inverse_sigma;
    float sigma, step, inverse_step;  // of the mapped value; step times levels
    float live;           // 1 or 0
};

CRUMB_DEVICE Direction direction_of(float sigma, float step, int digits) {
    if (digits == 0) { return {0, 0x1p21f, 0.375f, 0, 1, 1, 0, 0}; }
    const float levels = float(1 << (2 * digits)), part = 1.0f / levels, wide = step * levels;
    return {step * step * (levels * levels), 0x1p23f * part, 0.5f - 0.5f * part, 1.0f / sigma, sigma, wide, 1.0f / wide, 1};
}

// kTokens tokens by kLanes neighbouring lanes each, up to kLanes * kMost directions.
template <int kTokens, int kLanes, int kMost, int kPitch, int kCodePitch>
struct TokenQuantiser {
    static constexpr int kStartsEach = kTokens == 64 ? 3 : 1;  // of a thread

    const EncodeSide& side;
    const EncodeTables& tables;
    int dim;
    float* y;                     // [D][kPitch]
    u8* codes;                    // [D][kCodePitch]
    float* starts;                // [errors, gains, stored gains][kStarts][kTokens]
    const Direction* directions;  // [D]
    float* rms;                   // [kTokens]
    u32 *scale, *zero, *saturated;  // [kTokens]
    float v[kMost] = {};          // of the thread's token: directions part(), part() + kLanes ...

    CRUMB_DEVICE static int token() { return simt::thread() / kLanes; }
    CRUMB_DEVICE static int part() { return simt::thread() % kLanes; }

    // f(k, j) for direction j, the k-th of the thread's. Head sizes are multiples of 16.
    template <class F>
    CRUMB_DEVICE void for_each(F f) const {
#pragma unroll
        for (int k = 0; k < kMost; k++) {
            if (k * kLanes % 16 == 0 && k * kLanes >= dim) { break; }
            const int j = k * kLanes + part();
            if (kLanes <= 16 || j < dim) { f(k, j); }
        }
    }

    template <class J>
    CRUMB_DEVICE static float over_lanes(float x, J join) {
#pragma unroll
        for (int o = 1; o < kLanes; o *= 2) { x = join(x, simt::shuffle_xor(x, o)); }
        return x;
    }

    CRUMB_DEVICE void load() {
        for_each([&](int k, int j) { v[k] = y[j * kPitch + token()]; });
    }

    // The clipped-th largest |y|. Bits of |y| order as numbers do: the range of what the threshold can be is halved until
    // just that many reach its lower end, of which the smallest is it, or, where several are equal, until one is left.
    CRUMB_DEVICE float threshold() const {
        using namespace simt;
        float most = 0;
#pragma unroll
        for (int k = 0; k < kMost; k++) { most = max_of(most, fabsf(v[k])); }
        const float largest = over_lanes(most, max_of);
        if (side.clipped <= 1) { return largest; }
        constexpr u32 kOctaves = 2u << 23;  // it is seldom smaller than a quarter of the largest
        const float wanted = float(side.clipped);
        u32 low = 0, high = bits_of(largest) + 1, middle = high > kOctaves ? high - kOctaves : high / 2;
        bool found = false;
#pragma unroll 1
        for (int step = 0; step < 34 && any(!found && low + 1 < high); step++) {
            const float from = float_of(middle);
            float n = 0;
#pragma unroll
            for (int k = 0; k < kMost; k++) { n += reaches(fabsf(v[k]), from); }
            const float reached = over_lanes(n, [](float a, float b) { return a + b; });
            if (!found && low + 1 < high) {
                (reached >= wanted ? low : high) = middle;
                found = reached == wanted;
                middle = low + (high - low) / 2;
            }
        }
        const float from = float_of(low);
        float least = largest;
#pragma unroll
        for (int k = 0; k < kMost; k++) { least = min_of(least, fabsf(v[k]) >= from ? fabsf(v[k]) : largest); }
        return over_lanes(least, min_of);
    }

    CRUMB_DEVICE void minmax() {
        using namespace simt;
        load();
        const float limit = threshold(), levels = float(1 << side.bits);
        float low = limit, high = -limit;
        for_each([&](int k, int) { low = min_of(low, v[k]), high = max_of(high, v[k]); });
        low = max_of(over_lanes(low, min_of), -limit), high = min_of(over_lanes(high, max_of), limit);
        const u32 s = to_half(max_of((high - low) / (levels - 1.0f), kTiny));
        const float step = half_low(s), inverse = 1.0f / step;
        const u32 z = to_half(low + step * (0.5f * (levels - 1.0f)));
        const float middle = half_low(z);
        if (part() == 0) { scale[token()] = s, zero[token()] = z; }
        for_each([&](int k, int j) {
            const float clipped = min_of(max_of(v[k], -limit), limit);
            const float position = quotient(clipped - middle, step, inverse) + 0.5f * levels;
            codes[j * kCodePitch + token()] = u8(bits_of(add_down(min_of(max_of(position, 0.0f), levels - 1.0f), 0x1p23f)));
        });
    }

    // The code of u with a gain, a whole number of levels above d.floor.
    CRUMB_DEVICE static float place_of(float u, float inverse, const Direction& d) {
        constexpr float kBelowOne = 1.0f - 0x1p-24f;
        return simt::add_down(simt::min_of(simt::fma_unit(u, inverse, 0.5f), kBelowOne), d.floor);
    }
    CRUMB_DEVICE static float code_of(float u, float inverse, const Direction& d) { return place_of(u, inverse, d) - d.floor - d.middle; }

    CRUMB_DEVICE void gain() {
        using namespace simt;
        load();
        for_each([&](int k, int j) { y[j * kPitch + token()] = quotient(v[k], directions[j].sigma, directions[j].inverse_sigma); });
        sync_block();
        if (thread() < kTokens) {
            float energy = 0, n = 0;
#pragma unroll 8
            for (int j = 0; j < dim; j++) {
                const float normal = y[j * kPitch + thread()];
                energy = fma_exact(normal, normal, energy);
                n += directions[j].live;
            }
            rms[thread()] = sqrtf(energy / n);
        }
        for_each([&](int k, int j) { v[k] = quotient(v[k], directions[j].step, directions[j].inverse_step); });
        sync_block();
        for_each([&](int k, int j) { y[j * kPitch + token()] = v[k]; });
        sync_block();
        if (thread() < kStarts / kStartsEach * kTokens) { try_starts(thread() % kTokens, thread() / kTokens * kStartsEach); }
        sync_block();
        const float *const errors = starts + token(), *const gains = errors + kStarts * kTokens;
        int best = 0;
        float least = errors[0];
#pragma unroll
        for (int i = 1; i < kStarts; i++) {
            const float error = errors[i * kTokens];
            if (error < least) { best = i, least = error; }
        }
        const float inverse = 1.0f / gains[best * kTokens];
        if (part() == 0) {
            const u32 bits = bits_of(gains[(kStarts + best) * kTokens]);
            scale[token()] = bits & 0xffffu;
            saturated[token()] |= bits >> 16;
        }
        for_each([&](int k, int j) { codes[j * kCodePitch + token()] = u8(bits_of(place_of(v[k], inverse, directions[j]))); });
    }

    // Starts first, first + 1 ... of a token: errors, gains and what would be stored of them, out of range in bit 16.
    CRUMB_DEVICE void try_starts(int t, int first) const {
        using namespace simt;
        constexpr float kStart[kStarts] = {0.6f, 0.75f, 0.9f, 1.05f, 1.25f, 1.5f};
        constexpr int n = kStartsEach;
        const float* const u = y + t;
        float inverse[n], gain[n], fit[n] = {}, norm[n] = {}, error[n] = {};
        u32 bits[n];
#pragma unroll
        for (int i = 0; i < n; i++) {
            float start = kStart[i];
#pragma unroll
            for (int at = n; at < kStarts; at += n) { start = first == at ? kStart[at + i] : start; }
            inverse[i] = 1.0f / max_of(start * rms[t], kTiny);
        }
#pragma unroll 8
        for (int j = 0; j < dim; j++) {
            const Direction d = directions[j];
            const float x = u[j * kPitch];
#pragma unroll
            for (int i = 0; i < n; i++) {
                const float c = code_of(x, inverse[i], d), weighted = d.weight * c;
                fit[i] = fma_exact(weighted, x, fit[i]);
                norm[i] = fma_exact(weighted, c, norm[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < n; i++) {
            gain[i] = round_to_stored(max_of(fit[i] / norm[i], kTiny), bits[i]);
            inverse[i] = 1.0f / gain[i];
        }
#pragma unroll 8
        for (int j = 0; j < dim; j++) {
            const Direction d = directions[j];
            const float x = u[j * kPitch];
#pragma unroll
            for (int i = 0; i < n; i++) {
                const float c = code_of(x, inverse[i], d), miss = fma_exact(-c, gain[i], x);
                error[i] = fma_exact(d.weight * miss, miss, error[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < n; i++) {
            float* const to = starts + (first + i) * kTokens + t;
            to[0] = error[i], to[kStarts * kTokens] = gain[i], to[2 * kStarts * kTokens] = float_of(bits[i]);
        }
    }

    CRUMB_DEVICE float round_to_stored(float gain, u32& bits) const {
        if (side.format.info == SideInfo::gain8) {
            const Gain8 stored = gain8_of(gain / tables.gain_reference);
            bits = stored.code | u32(stored.saturated) << 16;
            return gain8_value_of(stored.code) * tables.gain_reference;
        }
        const u32 stored = simt::to_half(gain);
        bits = stored | u32(gain > kLargestMapped) << 16;
        return simt::half_low(stored);
    }
};

}  // namespace crumb::cuda

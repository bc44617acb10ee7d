// Codes and parameters of groups, of mapped values in shared memory: K by direction and group of tokens, with the length of a token as
// its gain or none; V by token and group of directions. What src/recipe/group_encoder.cpp computes, in its order where there is one: the
// length is a sum in double precision over directions ascending.
#pragma once

#include <crumb/page.h>
#include <math.h>

#include "base/cuda/simt.h"

namespace crumb::cuda {

using simt::u32;
using simt::u8;

// A side of a page of 64 tokens; y and codes [D][pitch] by direction, saturated [64] by token.
struct GroupEncoder {
    const SideFormat& format;
    int bits, keep;
    bool integer_zero;
    float* y;
    u8* codes;
    u32* saturated;
    int pitch;
    u8* info;        // of the page
    const u8* kept;  // of the page from which tokens below `keep` are taken over

    static constexpr float kTiny = 0x1p-24f, kLargest = 65504.0f;

    CRUMB_DEVICE void keys() const {
        using namespace simt;
        const int groups = kPageTokens / format.group, gains_at = 2 * groups * format.dim;
        if (format.token_gain) {
            for (int t = thread(); t < kPageTokens; t += n_threads()) { write(gains_at + t, t < keep ? half(kept, gains_at + t) : gain_of(t)); }
            sync_block();
            for (int i = thread(); i < format.dim * kPageTokens; i += n_threads()) {
                const int t = i % kPageTokens;
                if (t >= keep) { y[i / kPageTokens * pitch + t] /= half_low(half(info, gains_at + t)); }
            }
            sync_block();
        }
        for (int i = thread(); i < groups * format.dim; i += n_threads()) {
            const int first = i / format.dim * format.group, end = first + format.group;
            const float* const row = y + i % format.dim * pitch;
            const bool taken_over = keep > first;
            Affine a;
            if (taken_over) {
                a = {half(kept, i), half(kept, groups * format.dim + i)};
            } else {
                float low = row[first], high = low;
                for (int t = first + 1; t < end; t++) { widen(row[t], low, high); }
                a = fit(low, high);
            }
            write(i, a.scale), write(groups * format.dim + i, a.zero);
            for (int t = first > keep ? first : keep; t < end; t++) {
                const float p = position(row[t], a);
                if (taken_over && (p < 0 || p >= float(1 << bits))) { or_shared(saturated + t, 1); }
                codes[i % format.dim * pitch + t] = code_at(p);
            }
        }
    }

    CRUMB_DEVICE void values() const {
        using namespace simt;
        const int width = format.group == 0 ? format.dim : format.group, groups = (format.dim + width - 1) / width;
        for (int i = thread(); i < groups * kPageTokens; i += n_threads()) {
            const int t = i % kPageTokens, first = i / kPageTokens * width, end = first + width < format.dim ? first + width : format.dim;
            Affine a = {t < keep ? half(kept, i) : 0, t < keep ? half(kept, groups * kPageTokens + i) : 0};
            if (t >= keep) {
                float low = y[first * pitch + t], high = low;
                for (int j = first + 1; j < end; j++) { widen(y[j * pitch + t], low, high); }
                a = fit(low, high);
                for (int j = first; j < end; j++) { codes[j * pitch + t] = code_at(position(y[j * pitch + t], a)); }
            }
            write(i, a.scale), write(groups * kPageTokens + i, a.zero);
        }
    }

  private:
    struct Affine {
        u32 scale, zero;  // FP16
    };

    CRUMB_DEVICE static u32 half(const u8* at, int i) { return reinterpret_cast<const uint16_t*>(at)[i]; }
    CRUMB_DEVICE void write(int i, u32 bits_of_half) const { reinterpret_cast<uint16_t*>(info)[i] = uint16_t(bits_of_half); }
    CRUMB_DEVICE static void widen(float x, float& low, float& high) {
        low = x < low ? x : low;
        high = x > high ? x : high;
    }

    CRUMB_DEVICE u32 gain_of(int t) const {
        double squares = 0;
        for (int j = 0; j < format.dim; j++) {
            const double x = double(y[j * pitch + t]);
            squares += x * x;
        }
        const double length = sqrt(squares);
        if (length > double(kLargest)) { saturated[t] |= 1; }
        const float gain = float(length);
        return simt::to_half(gain > kTiny ? gain : kTiny);
    }

    CRUMB_DEVICE Affine fit(float low, float high) const {
        const float steps = float((1 << bits) - 1), wanted = (high - low) / steps;
        const u32 scale = simt::to_half(wanted > kTiny ? wanted : kTiny);
        const float s = simt::half_low(scale);
        if (integer_zero) { low = floorf(low / s + 0.5f) * s; }
        return {scale, simt::to_half(low + s * (0.5f * steps))};
    }

    CRUMB_DEVICE float position(float x, Affine a) const {
        return (x - simt::half_low(a.zero)) / simt::half_low(a.scale) + 0.5f * float(1 << bits);
    }
    CRUMB_DEVICE u8 code_at(float position) const {
        const float most = float((1 << bits) - 1);
        return u8(int(position < 0 ? 0.0f : position > most ? most : position));
    }
};

}  // namespace crumb::cuda

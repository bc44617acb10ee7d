// Codes and parameters of groups, of mapped values in shared memory: K by direction and group of tokens, with the length of a token as
// its gain or none; V by token and group of directions. What src/recipe/group_encoder.cpp computes, in its order where there is one: the
// length is a sum in double precision over directions ascending.
#pragma once

#include <crumb/page.h>
#include <math.h>

#include "recipe/cuda/encode_token.h"

namespace crumb::cuda {

using simt::u32;
using simt::u8;

// A side of a page of 64 tokens; y and codes [D][pitch] by direction, the others [64] by token.
struct GroupEncoder {
    const SideFormat& format;
    int bits, keep;
    bool integer_zero;
    float* y;
    u8* codes;
    u32* saturated;
    float *gains, *inverses;  // of tokens, filled in here
    int pitch;
    u8* info;        // of the page
    const u8* kept;  // of the page from which tokens below `keep` are taken over

    // 8 neighbouring lanes take the tokens of a direction.
    CRUMB_DEVICE void keys() const {
        using namespace simt;
        const int groups = kPageTokens / format.group, gains_at = 2 * groups * format.dim;
        if (format.token_gain) {
            for (int t = thread(); t < kPageTokens; t += n_threads()) {
                const u32 gain = t < keep ? half(kept, gains_at + t) : gain_of(t);
                write(gains_at + t, gain);
                gains[t] = half_low(gain), inverses[t] = 1.0f / gains[t];
            }
            sync_block();
        }
        for (int i = thread(); i < format.dim * 8; i += n_threads()) {
            const int j = i / 8, t = i % 8 * 8, first = t / format.group * format.group, at = t / format.group * format.dim + j;
            const Floats4 x0 = *reinterpret_cast<const Floats4*>(y + j * pitch + t), x1 = *reinterpret_cast<const Floats4*>(y + j * pitch + t + 4);
            float x[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
            if (format.token_gain) {
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    if (t + e >= keep) { x[e] = quotient(x[e], gains[t + e], inverses[t + e]); }
                }
            }
            float low = x[0], high = low;
#pragma unroll
            for (int e = 1; e < 8; e++) { low = min_of(low, x[e]), high = max_of(high, x[e]); }
            for (int o = 1; o < format.group / 8; o *= 2) { low = min_of(low, shuffle_xor(low, o)), high = max_of(high, shuffle_xor(high, o)); }
            const bool taken_over = keep > first;
            const Affine a = taken_over ? Affine{half(kept, at), half(kept, groups * format.dim + at)} : fit(low, high);
            if (t == first) { write(at, a.scale), write(groups * format.dim + at, a.zero); }
            const float scale = half_low(a.scale), inverse = 1.0f / scale;
            u32 words[2] = {};
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const float p = taken_over ? position(x[e], a) : position(x[e], a, inverse);
                if (taken_over && t + e >= keep && (p < 0 || p >= float(1 << bits))) { or_shared(saturated + t + e, 1); }
                words[e / 4] |= u32(code_at(p)) << (8 * (e % 4));
            }
            *reinterpret_cast<Words2*>(codes + j * pitch + t) = {words[0], words[1]};
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
#pragma unroll 8
                for (int j = first + 1; j < end; j++) { low = min_of(low, y[j * pitch + t]), high = max_of(high, y[j * pitch + t]); }
                a = fit(low, high);
                const float inverse = 1.0f / half_low(a.scale);
#pragma unroll 8
                for (int j = first; j < end; j++) { codes[j * pitch + t] = code_at(position(y[j * pitch + t], a, inverse)); }
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

    CRUMB_DEVICE u32 gain_of(int t) const {
        double squares = 0;
        for (int j = 0; j < format.dim; j++) {
            const double x = double(y[j * pitch + t]);
            squares += x * x;
        }
        const double length = sqrt(squares);
        if (length > double(kLargestMapped)) { saturated[t] |= 1; }
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

    CRUMB_DEVICE float middle() const { return 0.5f * float(1 << bits); }
    // Of parameters that are taken over, which may be any bits.
    CRUMB_DEVICE float position(float x, Affine a) const { return (x - simt::half_low(a.zero)) / simt::half_low(a.scale) + middle(); }
    // Of those that fit() gave.
    CRUMB_DEVICE float position(float x, Affine a, float inverse) const {
        return quotient(x - simt::half_low(a.zero), simt::half_low(a.scale), inverse) + middle();
    }
    CRUMB_DEVICE u8 code_at(float position) const {
        const float most = float((1 << bits) - 1);
        return u8(simt::bits_of(simt::add_down(simt::min_of(simt::max_of(position, 0.0f), most), 0x1p23f)));
    }
};

}  // namespace crumb::cuda

// From products of a query vector with the keys of a block to weights of its values. Logits are in powers of two, so
// that weights are 2^(logit - top). The top of a range is raised only by a logit that exceeds it by kSlack, so partials
// are almost never rescaled and no block needs its maximum. Internal to the unit (see kernel.h).
#pragma once

#include "attention/cpu/codes.h"
#include "attention/cpu/kernel.h"
#include "attention/cpu/matrices.h"

namespace crumb::cpu {
namespace {

constexpr float kLog2e = 1.44269504f;
constexpr float kSlack = 30.0f;               // 2^30 times 2^31 tokens are still far from the end of floats
constexpr float kNothing = -3.402823466e38f;  // the top of no logits: finite, so that differences are numbers
constexpr float kMinusInfinity = -__builtin_inff();

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline float* partial_of(const Item& item, float* partials, int n) { return partials + n * item.partial_stride; }
inline float* vectors_of(const Item& item, float* partial) { return partial + item.coded.v.planes + item.exact.v.dim; }

// Adds to one of the vectors of a partial.
inline void add_lanes(float* vectors, PartialVector which, Floats x) {
    float* at = vectors + 16 * which;
    store(at, load<Floats>(at) + x);
}
inline float lanes_sum(const float* vectors, PartialVector which) {
    return sum_lanes(load<Floats>(vectors + 16 * which));
}

// ---- side information of a page, as numbers

struct alignas(64) Info {
    float scale[kTokens];
    float zero[kTokens];
};

inline void unpack_halves(const std::byte* halves, float* to) {
    for (int t = 0; t < kTokens; t += kLanes) {
        store(to + t, from_fp16(__builtin_convertvector(load<Halves>(halves + 2 * t), Words)));
    }
}

inline void unpack_info(const Side& side, const std::byte* page, Info& info) {
    const std::byte* scales = page + side.scales;
    if (side.info == SideInfo::gain8) {
        for (int t = 0; t < kTokens; t++) {
            info.scale[t] = side.gains[uint8_t(scales[t])];
        }
        scale_row(info.scale, kTokens, side.gain_reference);
    } else {
        unpack_halves(scales, info.scale);
    }
    if (side.info == SideInfo::scale_zero) {
        unpack_halves(scales + 2 * kTokens, info.zero);
    }
}

inline void unpack_mean(const Side& side, const std::byte* page, float* mean) {
    for (int c = 0; c < side.dim; c += kLanes) {
        const Ints codes = __builtin_convertvector(load<SignedBytes>(page + side.mean_codes + c), Ints);
        store(mean + c, to_floats(codes) * load<Floats>(side.mean_step + c));
    }
}

// ---- logits and weights

inline Floats soft_capped(Floats x, float cap) {
    const Floats u = x * (1.0f / cap);
    const Floats negative = select(u < 0.0f, u, -u);
    const Floats e = exp2(negative * (2.0f * kLog2e));
    const Floats magnitude = (1.0f - e) / (1.0f + e) * cap;
    return select(u < 0.0f, -magnitude, magnitude);
}

// Soft-cap, ALiBi and mask of query n's logits against a block.
inline void adjust(const Item& item, int n, int block, uint64_t mask, Floats* logits) {
    const QueryRow& row = item.rows[n / item.n_heads];
    const Words lanes = lane_numbers();
#pragma GCC unroll 16
    for (int i = 0; i < kPageVectors; i++) {
        const int t = i * kLanes;
        Floats x = logits[i];
        if (item.softcap > 0.0f) {
            x = soft_capped(x, item.softcap * kLog2e);
        }
        if (item.slopes) {
            const Ints distance = row.position - block * kTokens - t - reinterpret_cast<Ints>(lanes);
            const float slope = item.slopes[n % item.n_heads] * kLog2e;
            x = multiply_add(splat(-slope), to_floats(distance < 0 ? -distance : distance), x);
        }
        if (~mask != 0) {
            const Words bits = uint32_t(mask >> t) & (1u << lanes);
            x = select(bits == 0u, splat(kMinusInfinity), x);
        }
        logits[i] = x;
    }
}

template <class Op>
inline Floats reduce(const Floats* x, Op op) {
    Floats result = op(x[0], x[1]);
#pragma GCC unroll 16
    for (int i = 2; i < kPageVectors; i++) {
        result = op(result, x[i]);
    }
    return result;
}

inline Floats largest(const Floats* x) {
    return reduce(x, [](Floats a, Floats b) { return maximum(a, b); });
}
inline Floats sum(const Floats* x) {
    return reduce(x, [](Floats a, Floats b) { return a + b; });
}

// Logits become weights; sums so far are rescaled if the top has to rise.
inline void exponents(const Item& item, const Scratch& scratch, float* partials, int n, Floats* x) {
    float* partial = partial_of(item, partials, n);
    float* vectors = vectors_of(item, partial);
    float top = vectors[16 * kTop];
    const Floats most = largest(x);
    if (__builtin_expect(any_greater(most, splat(top + kSlack)), 0)) {
        const float risen = max_lanes(most), factor = exp2(splat(top - risen))[0];
        scale_row(partial, int(vectors + 16 * kTop - partial), factor);
        for (int i = 0; i < kMeanBlocks; i++) {
            scratch.page_sums[n * kMeanBlocks + i] *= factor;
        }
        vectors[16 * kTop] = top = risen;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kPageVectors; i++) {
        x[i] = exp2(x[i] - top);
    }
}

// One unit of weights as bytes up to 127, from the largest by lanes.
inline float byte_unit(Floats largest) { return max_lanes(maximum(largest, splat(1e-35f))) * (1.0f / 127.0f); }

inline void to_bytes(const float* weights, float unit, uint8_t* bytes) {
    const Floats inverse = splat(1.0f / unit);
    Floats scaled[kPageVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kPageVectors; i++) {
        scaled[i] = load<Floats>(weights + i * kLanes) * inverse;
    }
    store_bytes(bytes, scaled);
}

}  // namespace
}  // namespace crumb::cpu

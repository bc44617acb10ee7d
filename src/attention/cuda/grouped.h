// Pages whose parameters belong to groups, in a warp: K by channel and group of tokens, with a gain a token or none, V by
// token and group of channels.
//
// K: a field of codes masked in place is a subnormal FP16, code 4^f 2^-24: no conversion. Scales of a group of tokens multiply
// the query, which carries 4^-f. Zeros, and what centres digits, are one more product of the words as they lie, q . zero -
// 1.5 q . scale: a lane's first word in rows r with even columns, its second in rows r + 8 with odd ones. The query is at most
// 1, so nothing overflows whatever the scales are; what is below 2^-24 is cut, in fields of 4^-3 at 2^-18 of its largest element.
// V: as in coded.h, with weights of every group of channels of their own: probability x scale of the group. Their sums, which centre
// digits, are rows of one product: group i is row i.
//
// The prototype of this design, with another byte map: 95 % of an H200's read roof at D = 128, 4 heads, 3.06 bits.
#pragma once

#include "attention/cuda/coded.h"

namespace crumb::cuda {

template <KernelFormat F, int NT>
class Grouped : Columns<F, NT> {
    using C = Columns<F, NT>;
    using D = DecodeFormat<F, NT>;
    using C::kTiles, C::column, C::lane_, C::acc_, C::top_, C::sum_, C::unset_;
    static constexpr int kPairs = D::kPairsOfTiles;  // of column tiles: a product has 8 columns
    static constexpr int kSteps = D::kPlanesK / 16;
    static constexpr int kAreas = F.tokens / kPageTokens;
    static constexpr int kParts = F.value_groups(), kTilesOfPart = kTiles / kParts;
    // Whether a field may keep those below it: their weights are the same.
    static constexpr bool kNested = kTilesOfPart % 4 == 0;
    static constexpr int kGroup = F.k.group;  // tokens
    static constexpr u32 kScales = u32(F.tokens / kGroup * D::kDimK * 2);  // bytes of K's scales, and of its zeros
    static constexpr u32 kValueScales = u32(kParts * F.tokens * 2);
    static_assert(kGroup % 32 == 0 && kTiles % kParts == 0);

  public:
    CRUMB_DEVICE explicit Grouped(const PagePlanes&) {}

    // shared: kSharedWords of this warp.
    CRUMB_DEVICE void begin(const u32* query, u32* shared, float*, Softcap softcap, int sink, const HeadConstants&) {
        using namespace simt;
        const int l = C::begin();
#pragma unroll
        for (int i = 0; i < D::kCodeWords / 64; i++) {
            const Words2 w = reinterpret_cast<const Words2*>(query)[32 * i + l];
            if constexpr (D::kQueryInRegisters) {
                query_[i] = w;
            } else {
                reinterpret_cast<Words2*>(shared)[32 * i + l] = w;
            }
        }
        shared_ = shared;
        C::begin_columns(query, shared, softcap, sink);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            for (float& z : zeros_[n]) { z = 0; }
        }
    }

    // A page in shared memory, the sequence's `index`-th.
    CRUMB_DEVICE void page(const u8* p, int index) {
#pragma unroll 1
        for (int area = 0; area < kAreas; area++) { tokens(p, area, F.tokens * index + kPageTokens * area); }
    }

    // Sums into an entry, in shared or global memory.
    CRUMB_DEVICE void finish(float* entry) {
        using namespace simt;
        const int r = lane() / 4, q = lane() % 4;
        sync_warp();  // the entry may lie where pages were
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float* column = entry + (4 * n + q) * D::kStride;
            const float own = fma_exact(float(acc_[n][kTiles][0]), 256.0f, float(acc_[n][kTiles][1]));  // of group r
            float sum = sum_[n];
#pragma unroll
            for (int o = 4; o < 32; o *= 2) { sum += shuffle_xor(sum, o); }
#pragma unroll
            for (int part = 0; part < kParts; part++) {
                float zeros = zeros_[n][part];
#pragma unroll
                for (int o = 4; o < 32; o *= 2) { zeros += shuffle_xor(zeros, o); }
                const float base = fma_exact(-256.0f * 1.5f, shuffle(own, 4 * part + q), zeros);
#pragma unroll
                for (int t = kTilesOfPart * part; t < kTilesOfPart * (part + 1); t++) {
                    const int f = t % 4;
                    const float unit = 256.0f / float(1 << (2 * f));
                    float value[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        int high = acc_[n][t][2 * i], low = acc_[n][t][2 * i + 1];
                        if (kNested && f > 0) { high -= acc_[n][t - 1][2 * i], low -= acc_[n][t - 1][2 * i + 1]; }
                        value[i] = fma_exact(fma_exact(float(high), 256.0f, float(low)), unit, base);
                    }
                    *reinterpret_cast<Floats2*>(column + 16 * t + 2 * r) = {value[0], value[1]};
                }
            }
#pragma unroll
            for (int t = 0; t < kTiles; t++) { *reinterpret_cast<Floats2*>(column + D::kPlanesV + 16 * t + 2 * r) = {0, 0}; }
            if (r == 0) {
                float* scalars = column + D::kWidth;
                scalars[kTop] = unset_ >> n & 1 ? kUnset : top_[n], scalars[kSum] = sum, scalars[kCodedSum] = sum, scalars[kZeroSum] = 0;
            }
        }
        sync_warp();
    }

  private:
    CRUMB_DEVICE simt::Words2 query(int i) const {
        if constexpr (D::kQueryInRegisters) { return query_[i]; }
        return reinterpret_cast<const simt::Words2*>(shared_)[32 * i + lane_];
    }
    CRUMB_DEVICE simt::Words2 base(int n, int step) const { return query(n * kSteps + step); }
    CRUMB_DEVICE simt::Words2 scaled(int pair, int step) const { return query((NT + pair) * kSteps + step); }

    // 64 tokens, the first of them the sequence's `first`-th.
    CRUMB_DEVICE void tokens(const u8* p, int area, int first) {
        using namespace simt;
        const int r = lane_ / 4, q = lane_ % 4;
        float x[NT][8];
        logits(p, area, r, q, x);
        u32 hidden = 0;
        this->mask(first, r, x, [&](int i) { hidden |= 1u << i; });

        const u8* const info = p + D::kAt.value_info + 2 * (kPageTokens * area + 4 * r);
        const float magic = 8388608.0f + 16.0f + 32.0f * float(r);
        Pair weights[kParts][NT][2];
        float sums[NT], zeros[NT][kParts];
        const auto make = [&](u32 (&any_bits)[NT], float (&sum)[NT]) {
            float weight[NT][8];
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    weight[n][i] = exp2_fast(x[n][i]);
                    sum[n] += weight[n][i];
                }
            }
#pragma unroll
            for (int part = 0; part < kParts; part++) {
                float scale[8], zero[8];
                parameters(info, part, hidden, scale, zero);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    u32 fixed[8];
                    zeros[n][part] = 0;
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        fixed[i] = bits_of(fma_exact(weight[n][i], scale[i], magic));
                        any_bits[n] |= fixed[i];
                        zeros[n][part] = fma_exact(weight[n][i], zero[i], zeros[n][part]);
                    }
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const u32 four[4] = {fixed[4 * half], fixed[4 * half + 1], fixed[4 * half + 2], fixed[4 * half + 3]};
                        weights[part][n][half] = weight_operand(four, q);
                    }
                }
            }
        };
        this->weigh(x, sums, make, [&](const bool (&out_of_range)[NT]) { raise_tops(info, hidden, x, out_of_range); });
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int part = 0; part < kParts; part++) { zeros_[n][part] += zeros[n][part]; }
        }
        values(p, area, r, q, weights);
    }

    // Scales and zeros of the lane's tokens in a group of V's channels.
    CRUMB_DEVICE static void parameters(const u8* info, int part, u32 hidden, float (&scale)[8], float (&zero)[8]) {
        using namespace simt;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u8* const at = info + 2 * (F.tokens * part + 32 * half);
            const Words2 s = *reinterpret_cast<const Words2*>(at), z = *reinterpret_cast<const Words2*>(at + kValueScales);
            scale[4 * half] = half_low(s.x), scale[4 * half + 1] = half_high(s.x);
            scale[4 * half + 2] = half_low(s.y), scale[4 * half + 3] = half_high(s.y);
            zero[4 * half] = half_low(z.x), zero[4 * half + 1] = half_high(z.x);
            zero[4 * half + 2] = half_low(z.y), zero[4 * half + 3] = half_high(z.y);
        }
        if (hidden == 0) { return; }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (hidden >> i & 1) { scale[i] = zero[i] = 0; }
        }
    }

    CRUMB_DEVICE void raise_tops(const u8* info, u32 hidden, float (&x)[NT][8], const bool (&out_of_range)[NT]) {
        using namespace simt;
        float most[8] = {};
#pragma unroll 1
        for (int part = 0; part < kParts; part++) {
            float scale[8], zero[8];
            parameters(info, part, hidden, scale, zero);
#pragma unroll
            for (int i = 0; i < 8; i++) { most[i] = max_of(most[i], scale[i]); }
        }
        float factors[NT];
        this->rescale(x, most, out_of_range, factors);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            for (float& z : zeros_[n]) { z *= factors[n]; }
        }
    }

    // The query times the scales of a group of tokens; what all of its logits have of zeros and centres.
    CRUMB_DEVICE void enter_group(const u8* scales, int q) {
        using namespace simt;
        const u8* const at = scales + 8 * q;
        float sum[NT][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            const Words2 a = *reinterpret_cast<const Words2*>(at + 32 * step), m = *reinterpret_cast<const Words2*>(at + kScales + 32 * step);
#pragma unroll
            for (int k = 0; k < kPairs; k++) {
                const Words2 w = scaled(k, step);
                group_[k][step] = {multiply_half(w.x, a.x), multiply_half(w.y, a.y)};
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const Words2 w = base(n, step);
                mma_f16(sum[n], a.x, a.y, m.x, m.y, w.x, w.y);
            }
        }
#pragma unroll
        for (int n = 0; n < NT; n++) { seed_[n] = sum[n][0] + sum[n][3]; }
    }

    // Relative to top_.
    CRUMB_DEVICE void logits(const u8* p, int area, int r, int q, float (&x)[NT][8]) {
        using namespace simt;
        const u8* const codes = p + kPageTokens / 4 * D::kPlanesK * area;
        const u8* const info = p + D::kAt.key_info;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = kPageTokens * area + 32 * half;
            if (half == 0 || kGroup == 32) {
                if (kGroup <= kPageTokens || token % kGroup == 0) { enter_group(info + token / kGroup * (2 * D::kDimK), q); }
            }
            float sum[kPairs][2][4] = {};  // two products of 16 tokens
#pragma unroll
            for (int g = 0; g < D::kGroupsK; g++) {
                const Words4 c = *reinterpret_cast<const Words4*>(codes + key_load(D::kPlanesK, half, g, r, q));
                const u32 w[4] = {c.x, c.y, c.z, c.w};
                u32 low[4], high[4];  // planes 4 q + {0, 1} and {2, 3} as halves
#pragma unroll
                for (int e = 0; e < 4; e++) { low[e] = permute_bytes(w[e], 0, 0x4140), high[e] = permute_bytes(w[e], 0, 0x4342); }
#pragma unroll
                for (int f = 0; f < 4; f++) {
                    const u32 mask = 0x00030003u << (2 * f);
#pragma unroll
                    for (int t = 0; t < 2; t++) {
#pragma unroll
                        for (int k = 0; k < kPairs; k++) {
                            const Words2 b = group_[k][4 * g + f];
                            mma_f16(sum[k][t], low[2 * t] & mask, low[2 * t + 1] & mask, high[2 * t] & mask, high[2 * t + 1] & mask, b.x, b.y);
                        }
                    }
                }
            }
            float gain[4] = {1, 1, 1, 1};
            if constexpr (F.k.token_gain) {
                const Words2 s = *reinterpret_cast<const Words2*>(info + 2 * kScales + 2 * (token + 4 * r));
                gain[0] = half_low(s.x), gain[1] = half_high(s.x), gain[2] = half_low(s.y), gain[3] = half_high(s.y);
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const QueryColumn& own = column(n);
                const float unit = own.unit, offset = own.offset - top_[n], seed = seed_[n];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float dot = fma_exact(sum[n / 2][e / 2][2 * (e % 2) + n % 2], 16777216.0f, seed);
                    x[n][4 * half + e] = fma_exact(dot, gain[e] * unit, offset);
                }
            }
        }
        this->cap(x);
    }

    CRUMB_DEVICE void values(const u8* p, int area, int r, int q, const Pair (&weights)[kParts][NT][2]) {
        using namespace simt;
        const u8* const codes = p + D::kAt.value_codes + kPageTokens / 4 * D::kPlanesV * area;
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            const u32 ones = r == part ? 0x01010101u : 0u;
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const Pair b = weights[part][n][half];
                    mma_u8u8(acc_[n][kTiles], ones, 0, ones, 0, b.first, b.second);
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int g = 0; g < D::kGroupsV; g++) {
                const Words2 c = *reinterpret_cast<const Words2*>(codes + value_load(D::kPlanesV, half, g, 0, r, q));
                const Words2 d = *reinterpret_cast<const Words2*>(codes + value_load(D::kPlanesV, half, g, 1, r, q));
#pragma unroll
                for (int f = 0; f < 4; f++) {
                    const auto masked = [&](u32 word) { return kNested ? fields_to(word, f) : field(word, f); };
                    const u32 a0 = masked(c.x), a1 = masked(c.y), a2 = masked(d.x), a3 = masked(d.y);
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        const Pair b = weights[(4 * g + f) / kTilesOfPart][n][half];
                        mma_u8u8(acc_[n][4 * g + f], a0, a1, a2, a3, b.first, b.second);
                    }
                }
            }
        }
    }

    const u32* shared_;
    simt::Words2 query_[D::kQueryInRegisters ? (NT + kPairs) * kSteps : 1];
    simt::Words2 group_[kPairs][kSteps];  // the query of the group of tokens
    float seed_[NT];
    float zeros_[NT][kParts];  // weights times zeros
};

}  // namespace crumb::cuda

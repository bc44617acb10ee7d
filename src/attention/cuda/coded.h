// Pages of codes in a warp: integer products on codes in place, softmax, integer sums.
//
// K: codes are masked with nothing undone, so field f counts 4^f, and the query's integers make up for it: with 4 columns
// even fields carry 4 times the integer, fields (0, 1) and (2, 3) have accumulators of their own, 16 apart; with more there
// is one accumulator and an integer of 9 to 15 bits by field. Digits are centred by a multiple of a token's scale.
// V: probability x scale as 15-bit fixed point relative to 2^top: x = 2^23 + dither + p s keeps the integer in bits
// 8..22, and the dither (8 levels over the rows) makes the cut unbiased. `top` is raised, rarely, when p s would leave the
// range. The integers' own sum, from one more product with ones, centres the digits: the exact sum would not do
// (measured on the CPU: an error of 0.17 of the norm where softmax is flat, 0.02 with the rounded one).
// Whatever the numbers are, a page takes two attempts at most; what is not finite ends as NaN in its own column.
//
// Measured for the prototype of this design, another byte map and no means: 420 instructions a page at D = P = 128 and 4
// heads, 32 of them products; 95 % of an H200's read roof.
#pragma once

#include "attention/cuda/columns.h"

namespace crumb::cuda {

using simt::u8;

// Side information of the lane's tokens 32 half + 4 r + e, from e = 0 on.
template <SideInfo I>
CRUMB_DEVICE void load_scales(const u8* info, int half, int r, float reference_log2, float* scale, float* zero) {
    using namespace simt;
    if constexpr (I == SideInfo::gain8) {
        const u32 codes = *reinterpret_cast<const u32*>(info + 32 * half + 4 * r);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float code = float(codes >> (8 * e) & 0xffu);
            scale[e] = exp2_fast(fma_exact(code, 0.0625f, reference_log2 - 8.0f));
        }
    } else {
        const Words2 s = *reinterpret_cast<const Words2*>(info + 2 * (32 * half + 4 * r));
        scale[0] = half_low(s.x), scale[1] = half_high(s.x);
        scale[2] = half_low(s.y), scale[3] = half_high(s.y);
    }
    if constexpr (I == SideInfo::scale_zero) {
        const Words2 z = *reinterpret_cast<const Words2*>(info + 128 + 2 * (32 * half + 4 * r));
        zero[0] = half_low(z.x), zero[1] = half_high(z.x);
        zero[2] = half_low(z.y), zero[3] = half_high(z.y);
    }
}

// Static numbers of a KV head that the kernel needs itself.
struct HeadConstants {
    float k_reference_log2, v_reference_log2;  // gain8
    const float* v_mean_step;                  // [D_v], page means
};

template <KernelFormat F, int NT>
class Coded : Columns<F, NT> {
    using C = Columns<F, NT>;
    using D = DecodeFormat<F, NT>;
    using C::kTiles, C::column, C::lane_, C::softcap_, C::acc_, C::top_, C::sum_, C::unset_;
    static constexpr int kMeanGroups = (D::kDimV + 127) / 128;
    static constexpr int kWords = D::kCodeWords / 32;
    // Most pages want nothing but sums (Columns::plain). They have a path of their own, without a branch between logits and weights: 4 to 10 %
    // faster with 8 and 12 columns. Not measured with more planes.
    static constexpr bool kPlainPath = D::kPlanesK <= 128 && D::kPlanesV <= 128;
    static constexpr bool kValuesAhead = D::kGroupsV <= 2 && NT == 1 && !F.any_planes;  // registers for more there are not

  public:
    CRUMB_DEVICE explicit Coded(const PagePlanes& planes) : page_(planes) {}

    // shared, means: kSharedWords and kMeanFloats of this warp.
    CRUMB_DEVICE void begin(const u32* query, u32* shared, float* means, Softcap softcap, int sink, const HeadConstants& head) {
        using namespace simt;
        const int l = C::begin();
        if constexpr (D::kQueryInRegisters) {
#pragma unroll
            for (int i = 0; i < D::kTailAt / 128; i++) {
                const Words4 w = reinterpret_cast<const Words4*>(query)[32 * i + l];
                query_[4 * i] = w.x, query_[4 * i + 1] = w.y, query_[4 * i + 2] = w.z, query_[4 * i + 3] = w.w;
            }
#pragma unroll
            for (int i = 0; i < D::kTailK * NT; i++) {
                const Words2 w = reinterpret_cast<const Words2*>(query + D::kTailAt)[32 * i + l];
                query_[D::kTailAt / 32 + 2 * i] = w.x, query_[D::kTailAt / 32 + 2 * i + 1] = w.y;
            }
        } else {
            for (int i = l; i < D::kCodeWords / 4; i += kWarp) {
                reinterpret_cast<Words4*>(shared)[i] = reinterpret_cast<const Words4*>(query)[i];
            }
        }
        for (int i = l; i < D::kMeanWords / 4; i += kWarp) {
            reinterpret_cast<Words4*>(shared + D::kSharedMeanAt)[i] = reinterpret_cast<const Words4*>(query + D::kMeanAt)[i];
        }
        C::begin_columns(query, shared, softcap, sink);
        shared_ = shared;
        shared_means_ = means;
        head_ = head;
        for (float& z : zeros_) { z = 0; }
        if constexpr (D::kMeansInShared) {
            for (int i = l; i < D::kMeanFloats; i += kWarp) { means[i] = 0; }
            sync_warp();
        } else if constexpr (F.v.mean) {
            for (auto& column : means_) {
                for (float& x : column) { x = 0; }
            }
        }
    }

    // A page in shared memory, block `index` of the sequence.
    CRUMB_DEVICE void page(const u8* p, int index) {
        using namespace simt;
        const int r = lane_ / 4, q = lane_ % 4;
        float x[NT][8], scale[8], zero[8];
        ValueCodes first = {};  // on their way while weights are made
        const auto look = [&] {
            logits(p, r, q, x);
            if constexpr (kValuesAhead) { first = value_codes(p, 0, r, q); }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                load_scales<F.v.info>(p + page_.at.value_info, half, r, head_.v_reference_log2, scale + 4 * half, zero + 4 * half);
            }
        };

        const float magic = 8388608.0f + 16.0f + 32.0f * float(r);
        u32 fixed[NT][8];
        float sums[NT], zeros[NT];
        const auto make = [&](u32 (&any_bits)[NT], float (&sum)[NT]) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                zeros[n] = 0;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float weight = exp2_fast(x[n][i]);
                    sum[n] += weight;
                    fixed[n][i] = bits_of(fma_exact(weight, scale[i], magic));
                    any_bits[n] |= fixed[n][i];
                    if constexpr (F.v.info == SideInfo::scale_zero) { zeros[n] = fma_exact(weight, zero[i], zeros[n]); }
                }
            }
        };
        bool weighed = false;
        if (kPlainPath && this->plain(kPageTokens * index)) {
            look();
            weighed = this->weigh_plain(sums, make);
        }
        if (!weighed) {
            look();
            this->cap(x);
            this->mask(kPageTokens * index, r, x, [&](int i) { scale[i] = zero[i] = 0; });
            this->weigh(x, sums, make, [&](const bool (&out_of_range)[NT]) {
                float factors[NT];
                this->rescale(x, scale, out_of_range, factors);
                scale_sums(factors);
            });
        }
#pragma unroll
        for (int n = 0; n < NT; n++) { zeros_[n] += zeros[n]; }
        values(p, first, r, q, fixed);
        if constexpr (F.v.mean) {
            if (page_.mean_v) { add_page_mean(p, sums); }
        }
    }

    // Sums into an entry, in shared or global memory.
    CRUMB_DEVICE void finish(float* entry) {
        using namespace simt;
        const int r = lane() / 4, q = lane() % 4;
        sync_warp();  // the entry may lie where pages were
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float sum = sum_[n], zeros = zeros_[n];
#pragma unroll
            for (int o = 4; o < 32; o *= 2) {
                sum += shuffle_xor(sum, o);
                zeros += shuffle_xor(zeros, o);
            }
            float* column = entry + (4 * n + q) * D::kStride;
            const float centre = 1.5f * fma_exact(float(acc_[n][kTiles][0]), 256.0f, float(acc_[n][kTiles][1]));
#pragma unroll
            for (int t = 0; t < kTiles; t++) {
                const int f = t % 4;
                const bool nested = f > 0 && !(t >= D::kTailPlaneV / 16 && has_tail(page_.planes_v));
                const float unit = 256.0f / float(1 << (2 * f));
                float value[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int high = acc_[n][t][2 * i], low = acc_[n][t][2 * i + 1];
                    if (nested) { high -= acc_[n][t - 1][2 * i], low -= acc_[n][t - 1][2 * i + 1]; }
                    value[i] = fma_exact(fma_exact(float(high), 256.0f, float(low)), unit, -256.0f * centre);
                }
                *reinterpret_cast<Floats2*>(column + 16 * t + 2 * r) = {value[0], value[1]};
            }
            if (r == 0) {
                float* scalars = column + D::kWidth;
                scalars[kTop] = unset_ >> n & 1 ? kUnset : top_[n], scalars[kSum] = sum, scalars[kCodedSum] = sum, scalars[kZeroSum] = zeros;
            }
        }
#pragma unroll
        for (int g = 0; g < kMeanGroups; g++) {
            const int channel = 128 * g + 4 * lane();
            if (channel >= D::kDimV) { continue; }
            Floats4 step = {};
            if (page_.mean_v) { step = reinterpret_cast<const Floats4*>(head_.v_mean_step)[channel / 4]; }
#pragma unroll
            for (int c = 0; c < D::kColumns; c++) {
                Floats4& to = *reinterpret_cast<Floats4*>(entry + c * D::kStride + D::kPlanesV + channel);
                if constexpr (D::kMeansInShared) {
                    const Floats4 m = shared_mean(c, g);
                    to = {m.x * step.x, m.y * step.y, m.z * step.z, m.w * step.w};
                } else if constexpr (F.v.mean) {
                    const float* m = means_[c] + 4 * g;
                    to = {m[0] * step.x, m[1] * step.y, m[2] * step.z, m[3] * step.w};
                } else {
                    to = {};
                }
            }
        }
        sync_warp();
    }

  private:
    CRUMB_DEVICE simt::Words4 query_words(int n, int group) const {
        if constexpr (D::kQueryInRegisters) {
            const u32* w = query_ + 4 * (n * D::kGroupsK + group);
            return {w[0], w[1], w[2], w[3]};
        } else {
            return reinterpret_cast<const simt::Words4*>(shared_)[32 * (n * D::kGroupsK + group) + lane_];
        }
    }

    CRUMB_DEVICE simt::Words2 query_tail(int n) const {
        if constexpr (D::kQueryInRegisters) {
            const u32* w = query_ + D::kTailAt / 32 + 2 * n;
            return {w[0], w[1]};
        } else {
            return reinterpret_cast<const simt::Words2*>(shared_ + D::kTailAt)[32 * n + lane_];
        }
    }

    CRUMB_DEVICE simt::Words4 query_mean(int n, int group) const {
        return reinterpret_cast<const simt::Words4*>(shared_ + D::kSharedMeanAt)[32 * (n * (D::kDimK / 64) + group) + lane_];
    }

    // Relative to top_.
    CRUMB_DEVICE void logits(const u8* p, int r, int q, float (&x)[NT][8]) {
        using namespace simt;
        float offset[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) { offset[n] = column(n).offset - top_[n]; }
        if (F.k.mean && page_.mean_k) {
            int dot[NT][2][4] = {};
#pragma unroll
            for (int g = 0; g < D::kDimK / 64; g++) {  // all rows of A are the page mean
                const Words4 m = *reinterpret_cast<const Words4*>(p + page_.at.key_mean + 64 * g + 16 * q);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const Words4 w = query_mean(n, g);
                    mma_s8s8(dot[n][0], m.x, m.x, m.y, m.y, w.x, w.y);
                    mma_s8s8(dot[n][1], m.z, m.z, m.w, m.w, w.z, w.w);
                }
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                offset[n] = fma_exact(float(256 * (dot[n][0][0] + dot[n][1][0]) + dot[n][0][1] + dot[n][1][1]), column(n).mean_unit, offset[n]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float scale[4], zero[4];
            load_scales<F.k.info>(p + page_.at.key_info, half, r, head_.k_reference_log2, scale, zero);
            // Two products of 16 tokens. A fine query: fields 2, 3 apart from fields 0, 1, which count a sixteenth.
            int high[NT][2][4] = {}, low[NT][2][4] = {};
            const auto multiply = [&](const Words4& c, int g) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const Words4 w = query_words(n, g);
                    int (&first)[2][4] = D::kFineQuery ? low[n] : high[n];
                    mma_u8s8(first[0], field(c.x, 0), field(c.y, 0), field(c.x, 1), field(c.y, 1), w.x, w.y);
                    mma_u8s8(first[1], field(c.z, 0), field(c.w, 0), field(c.z, 1), field(c.w, 1), w.x, w.y);
                    mma_u8s8(high[n][0], field(c.x, 2), field(c.y, 2), field(c.x, 3), field(c.y, 3), w.z, w.w);
                    mma_u8s8(high[n][1], field(c.z, 2), field(c.w, 2), field(c.z, 3), field(c.w, 3), w.z, w.w);
                }
            };
            const auto codes_of = [&](int g) { return *reinterpret_cast<const Words4*>(p + key_load(page_.planes_k, half, g, r, q)); };
            if constexpr (F.any_planes && D::kGroupsK > 2) {  // a loop: codes are asked for one group ahead
                const int groups = full_groups(page_.planes_k);
                Words4 next = codes_of(0);  // of a tail, if there is no group
#pragma unroll 1
                for (int g = 0; g < groups; g++) {
                    const Words4 c = next;
                    if (g + 1 < groups) { next = codes_of(g + 1); }
                    multiply(c, g);
                }
            } else {
#pragma unroll
                for (int g = 0; g < D::kGroupsK; g++) {
                    multiply(codes_of(g), g);  // the query is 0 where the page has no such group: a branch would wait for every load
                }
            }
            if constexpr (D::kTailK) {
                if (has_tail(page_.planes_k)) {
                    const Words4 c = *reinterpret_cast<const Words4*>(p + key_tail_load(page_.planes_k, half, r, q));
                    const Pair x0 = key_tail_fields(c.x, q), x1 = key_tail_fields(c.y, q);
                    const Pair y0 = key_tail_fields(c.z, q), y1 = key_tail_fields(c.w, q);
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        const Words2 w = query_tail(n);
                        int (&tail)[2][4] = D::kFineQuery ? low[n] : high[n];
                        mma_u8s8(tail[0], x0.first, x1.first, x0.second, x1.second, w.x, w.y);
                        mma_u8s8(tail[1], y0.first, y1.first, y0.second, y1.second, w.x, w.y);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const QueryColumn& own = column(n);
                const float unit = own.unit, ones = own.ones, centre = own.centre;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int t = e / 2, i = 2 * (e % 2);
                    const int total = D::kFineQuery ? 256 * (high[n][t][i] + 16 * low[n][t][i]) + high[n][t][i + 1] + 16 * low[n][t][i + 1]
                                                    : 256 * high[n][t][i] + high[n][t][i + 1];
                    const float step = scale[e] * unit;
                    float base = offset[n];
                    if constexpr (F.k.info == SideInfo::scale_zero) { base = fma_exact(zero[e], ones, base); }
                    x[n][4 * half + e] = fma_exact(float(total), step, fma_exact(-centre, step, base));
                }
            }
        }
    }

    // By what their columns' accumulators were scaled with.
    CRUMB_DEVICE void scale_sums(const float (&factors)[NT]) {
        using namespace simt;
#pragma unroll
        for (int n = 0; n < NT; n++) { zeros_[n] *= factors[n]; }
        if constexpr (F.v.mean) {
#pragma unroll
            for (int c = 0; c < D::kColumns; c++) {
                const float factor = shuffle(factors[c / 4], c % 4);
#pragma unroll
                for (int g = 0; g < kMeanGroups; g++) {
                    if constexpr (D::kMeansInShared) {
                        if (128 * g + 4 * lane() < D::kDimV) {
                            Floats4& m = shared_mean(c, g);
                            m = {m.x * factor, m.y * factor, m.z * factor, m.w * factor};
                        }
                    } else {
                        for (int i = 0; i < 4; i++) { means_[c][4 * g + i] *= factor; }
                    }
                }
            }
        }
    }

    // Codes of 32 tokens in full groups of planes, as a lane reads them.
    struct ValueCodes {
        simt::Words2 first[D::kGroupsV > 0 ? D::kGroupsV : 1], second[D::kGroupsV > 0 ? D::kGroupsV : 1];
    };
    CRUMB_DEVICE ValueCodes value_codes(const u8* p, int half, int r, int q) const {
        using namespace simt;
        ValueCodes codes;
        const u8* at = p + page_.at.value_codes;
#pragma unroll
        for (int g = 0; g < D::kGroupsV; g++) {
            if (g >= full_groups(page_.planes_v)) { continue; }
            codes.first[g] = *reinterpret_cast<const Words2*>(at + value_load(page_.planes_v, half, g, 0, r, q));
            codes.second[g] = *reinterpret_cast<const Words2*>(at + value_load(page_.planes_v, half, g, 1, r, q));
        }
        return codes;
    }

    CRUMB_DEVICE void values(const u8* p, const ValueCodes& first, int r, int q, const u32 (&fixed)[NT][8]) {
        using namespace simt;
        const u8* codes = p + page_.at.value_codes;
        constexpr u32 kOnes = 0x01010101u;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Pair b[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const u32 four[4] = {fixed[n][4 * half], fixed[n][4 * half + 1], fixed[n][4 * half + 2], fixed[n][4 * half + 3]};
                b[n] = weight_operand(four, q);
                mma_u8u8(acc_[n][kTiles], kOnes, kOnes, kOnes, kOnes, b[n].first, b[n].second);
            }
            const ValueCodes own = kValuesAhead && half == 0 ? first : value_codes(p, half, r, q);
#pragma unroll
            for (int g = 0; g < D::kGroupsV; g++) {
                if (g >= full_groups(page_.planes_v)) { continue; }
                const Words2 c = own.first[g], d = own.second[g];
#pragma unroll
                for (int f = 0; f < 4; f++) {
                    const u32 a0 = fields_to(c.x, f), a1 = fields_to(c.y, f), a2 = fields_to(d.x, f), a3 = fields_to(d.y, f);
#pragma unroll
                    for (int n = 0; n < NT; n++) { mma_u8u8(acc_[n][4 * g + f], a0, a1, a2, a3, b[n].first, b[n].second); }
                }
            }
            if constexpr (D::kTailV) {
                if (has_tail(page_.planes_v)) {
                    const Words2 c = *reinterpret_cast<const Words2*>(codes + value_tail_load(page_.planes_v, half, r, q));
#pragma unroll
                    for (int s = 0; s < 2; s++) {
                        const Pair x0 = value_tail_fields(c.x, s, q), x1 = value_tail_fields(c.y, s, q);
#pragma unroll
                        for (int n = 0; n < NT; n++) {
                            mma_u8u8(acc_[n][D::kTailPlaneV / 16 + s], x0.first, x1.first, x0.second, x1.second, b[n].first,
                                     b[n].second);
                        }
                    }
                }
            }
        }
    }

    // The page's weight times its mean: a lane has 4 channels of all columns.
    CRUMB_DEVICE void add_page_mean(const u8* p, const float (&sums)[NT]) {
        using namespace simt;
        float total[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            total[n] = sums[n];
#pragma unroll
            for (int o = 4; o < 32; o *= 2) { total[n] += shuffle_xor(total[n], o); }
        }
        float weight[D::kColumns];
#pragma unroll
        for (int c = 0; c < D::kColumns; c++) { weight[c] = shuffle(total[c / 4], c % 4); }
#pragma unroll
        for (int g = 0; g < kMeanGroups; g++) {
            const int channel = 128 * g + 4 * lane();
            if (channel >= D::kDimV) { continue; }
            const u32 word = *reinterpret_cast<const u32*>(p + page_.at.value_mean + channel);
            float mean[4];
#pragma unroll
            for (int i = 0; i < 4; i++) { mean[i] = float(int8_t(word >> (8 * i))); }
#pragma unroll
            for (int c = 0; c < D::kColumns; c++) {
                if constexpr (D::kMeansInShared) {
                    Floats4& m = shared_mean(c, g);
                    m = {fma_exact(weight[c], mean[0], m.x), fma_exact(weight[c], mean[1], m.y),
                         fma_exact(weight[c], mean[2], m.z), fma_exact(weight[c], mean[3], m.w)};
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++) { means_[c][4 * g + i] = fma_exact(weight[c], mean[i], means_[c][4 * g + i]); }
                }
            }
        }
    }

    CRUMB_DEVICE simt::Floats4& shared_mean(int column, int group) const {
        return *reinterpret_cast<simt::Floats4*>(shared_means_ + column * D::kDimV + 128 * group + 4 * simt::lane());
    }

    const PageLayout<F> page_;
    u32 query_[D::kQueryInRegisters ? kWords : 1];
    const u32* shared_;
    float* shared_means_;
    HeadConstants head_;
    float zeros_[NT];
    float means_[F.v.mean && !D::kMeansInShared ? D::kColumns : 1][4 * kMeanGroups];
};

}  // namespace crumb::cuda

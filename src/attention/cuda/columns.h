// Columns of queries in a warp, whatever the pages are: what they see, their sums of rounded weights as integers relative to
// 2^top. A column belongs to the lanes of one q; see coded.h.
#pragma once

#include <math.h>

#include "attention/cuda/decode_format.h"

namespace crumb::cuda {

using simt::u8;

template <KernelFormat F, int NT>
class Columns {
  protected:
    using D = DecodeFormat<F, NT>;
    static constexpr int kTiles = D::kPlanesV / 16;

    CRUMB_DEVICE int begin() {
        using namespace simt;
        lane_ = int(shuffle(u32(lane()), lane()));  // or it would be read again, slowly, for every page
        sync_warp();
        return lane_;
    }

    // shared: kSharedWords of this warp.
    CRUMB_DEVICE void begin_columns(const u32* query, u32* shared, Softcap softcap, int sink) {
        using namespace simt;
        for (int i = lane_; i < 2 * D::kColumns; i += kWarp) {
            reinterpret_cast<Words4*>(shared + D::kSharedColumnAt)[i] = reinterpret_cast<const Words4*>(query + D::kColumnAt)[i];
        }
        sync_warp();
        columns_ = reinterpret_cast<const QueryColumn*>(shared + D::kSharedColumnAt);
        sink_ = sink;
        softcap_ = softcap;
        pages_ = 0;
        unset_ = (1u << NT) - 1;
        all_from_ = sink, all_to_ = 0x7fffffff;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const QueryColumn& c = column(n);
            all_from_ = c.begin > all_from_ ? c.begin : all_from_;
            all_to_ = c.coded_end < all_to_ ? c.coded_end : all_to_;
            all_to_ = c.end < all_to_ ? c.end : all_to_;
            if (softcap.cap > 0) { all_to_ = 0; }  // no page is plain()
            top_[n] = 0, sum_[n] = 0;
#pragma unroll
            for (int t = 0; t <= kTiles; t++) {
                for (int i = 0; i < 4; i++) { acc_[n][t][i] = 0; }
            }
        }
    }

    CRUMB_DEVICE const QueryColumn& column(int n) const { return columns_[4 * n + lane_ % 4]; }

    // Of logits relative to top_.
    CRUMB_DEVICE void cap(float (&x)[NT][8]) const {
        using namespace simt;
        if (softcap_.cap > 0) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int i = 0; i < 8; i++) { x[n][i] = fma_exact(softcap_.cap, tanh_exact((x[n][i] + top_[n]) * softcap_.inverse), -top_[n]); }
            }
        }
    }

    // Tokens that a column does not see weigh nothing; what no column sees may be anything, even NaN.
    // hide(i): the lane's token i. Tokens [first, first + 64).
    template <class Hide>
    CRUMB_DEVICE void mask(int first, int r, float (&x)[NT][8], Hide hide) const {
        using namespace simt;
        if (!any(all_from_ > first || all_to_ < first + kPageTokens)) { return; }
        int from[NT], to[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const QueryColumn& c = column(n);
            from[n] = c.begin > sink_ ? c.begin : sink_;
            to[n] = c.coded_end < c.end ? c.coded_end : c.end;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int j = first + 32 * (i / 4) + 4 * r + i % 4;
            u32 seen = 0;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const bool sees = from[n] <= j && j < to[n];
                if (!sees) { x[n][i] = -float_of(0x7f800000u); }
                seen |= sees;
            }
            seen |= shuffle_xor(seen, 1);
            seen |= shuffle_xor(seen, 2);
            if (!seen) { hide(i); }
        }
    }

    // Whether the page of 64 tokens from `first` on wants nothing but sums: all columns see all of it and have tops, nothing is capped,
    // accumulators have room.
    CRUMB_DEVICE bool plain(int first) const {
        return !simt::any(unset_ != 0 || ((pages_ + 1) & 255) == 0 || all_from_ > first || all_to_ < first + kPageTokens);
    }

    // Something left [2^23, 2^24).
    CRUMB_DEVICE static bool out_of_range(u32 any_bits, float sum) { return (any_bits & ~0x4b7fffffu) != 0 || !(sum < 1e30f); }

    // Weights of a plain page, or false and nothing has changed: some are out of range.
    template <class Make>
    CRUMB_DEVICE bool weigh_plain(float (&sums)[NT], Make make) {
        using namespace simt;
        u32 any_bits[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) { sums[n] = 0, any_bits[n] = 0; }
        make(any_bits, sums);
        bool wanted = false;
#pragma unroll
        for (int n = 0; n < NT; n++) { wanted |= out_of_range(any_bits[n], sums[n]); }
        if (any(wanted)) { return false; }
        pages_++;
#pragma unroll
        for (int n = 0; n < NT; n++) { sum_[n] += sums[n]; }
        return true;
    }

    // Weights of 64 tokens, at most twice: where the first are out of range, or a column has no top yet, tops rise in between. So no
    // numbers can keep a warp here. make(any_bits, sums): the bits of all fixed-point weights of a column, the sum of its weights;
    // raise(out_of_range): rescale(), and whatever goes with the sums.
    template <class Make, class Raise>
    CRUMB_DEVICE void weigh(const float (&x)[NT][8], float (&sums)[NT], Make make, Raise raise) {
        using namespace simt;
#pragma unroll 1
        for (int attempt = 0;; attempt++) {
            bool wanted = attempt == 0 && (++pages_ & 255) == 0;  // make room in the accumulators
            u32 any_bits[NT];
            bool left[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) { sums[n] = 0, any_bits[n] = 0; }
            make(any_bits, sums);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                left[n] = out_of_range(any_bits[n], sums[n]);
                wanted |= left[n];
            }
            if (attempt == 0 && any(unset_ != 0)) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    for (int i = 0; i < 8; i++) { left[n] |= (unset_ >> n & 1) && x[n][i] > -float_of(0x7f800000u); }
                    wanted |= left[n];
                }
            }
            if (attempt == 1 || !any(wanted)) { break; }
            raise(left);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) { sum_[n] += sums[n]; }
    }

    // Raises the top of columns by whole octaves: sums scale by powers of two, accumulators shift. 256 pages add at most
    // 2^30 to an accumulator, so a shift by one where some exceed 2^29 keeps all below 2^31. Only columns that need it
    // change, so that a column's bits do not depend on its neighbours.
    CRUMB_DEVICE void rescale(float (&x)[NT][8], const float (&scale)[8], const bool (&out_of_range)[NT], float (&factors)[NT]) {
        using namespace simt;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            int largest = 0;
#pragma unroll
            for (int t = 0; t <= kTiles; t++) {
                for (int i = 0; i < 4; i++) { largest |= acc_[n][t][i]; }
            }
            u32 needs = u32(out_of_range[n]) | u32(largest >= 1 << 29) << 1;
#pragma unroll
            for (int o = 4; o < 32; o *= 2) { needs |= shuffle_xor(needs, o); }
            float want = kUnset;  // log2 of the largest p s
#pragma unroll
            for (int i = 0; i < 8; i++) { want = max_of(want, x[n][i] + max_of(log2_fast(scale[i]), -60.0f)); }
#pragma unroll
            for (int o = 4; o < 32; o *= 2) { want = max_of(want, shuffle_xor(want, o)); }
            factors[n] = 1;
            const bool unset = unset_ >> n & 1;
            float step = ceilf(want) - 21.0f;  // the largest p s becomes 2^20 .. 2^21 of 2^23
            if (!(needs & 1 && want > kUnset)) { step = 0; }
            if (!unset) { step = max_of(step, needs & 2 ? 1.0f : 0.0f); }
            if (needs & 1 && want > kUnset) { unset_ &= ~(1u << n); }
            top_[n] += step;
#pragma unroll
            for (int i = 0; i < 8; i++) { x[n][i] -= step; }
            if (unset || !(step > 0)) { continue; }
            const int shift = step < 60 ? int(step) : 60;
            factors[n] = exp2_fast(-step);
            sum_[n] *= factors[n];
#pragma unroll
            for (int t = 0; t <= kTiles; t++) {
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const int64_t both = ((int64_t(acc_[n][t][i]) << 8) + acc_[n][t][i + 1]) >> shift;
                    acc_[n][t][i] = int(both >> 8), acc_[n][t][i + 1] = int(both & 255);
                }
            }
        }
    }

    const QueryColumn* columns_;
    Softcap softcap_;
    int sink_, all_from_, all_to_;  // tokens that all columns of the lane see
    int acc_[NT][kTiles + 1][4];    // the last one: sums of the weights themselves
    float top_[NT], sum_[NT];
    u32 unset_;  // bit n: no token has set top_[n]
    int pages_, lane_;
};

}  // namespace crumb::cuda

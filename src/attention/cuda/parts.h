// Adding up what several warps or blocks have of a segment. A part is an entry: for every column kWidth sums, relative to
// 2^top, then the scalars, kTop first.
#pragma once

#include "attention/cuda/decode_format.h"

namespace crumb::cuda {

// Floats x .. x + 3 of a column's entry over several parts, relative to 2^top.
struct PartialSum {
    float top = kUnset;
    simt::Floats4 sum = {};

    // next(): the next part, or null after the last. Tops and sums of kBatch parts are loaded at once, so that a wait
    // serves them all.
    template <class D, class Next>
    CRUMB_DEVICE static PartialSum of(int column, int x, Next next) {
        using namespace simt;
        constexpr int kBatch = 6;
        PartialSum s;
        const float* entry = next();
#pragma unroll 1
        while (entry) {
            float tops[kBatch];
            Floats4 sums[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; b++) {
                tops[b] = kUnset, sums[b] = {};
                if (entry) {
                    tops[b] = entry[column * D::kStride + D::kWidth + kTop];
                    sums[b] = *reinterpret_cast<const Floats4*>(entry + column * D::kStride + x);
                    entry = next();
                }
            }
            float top = s.top;
#pragma unroll
            for (int b = 0; b < kBatch; b++) { top = max_of(top, tops[b]); }
            const float old = exp2_fast(s.top - top);
            s.top = top;
            s.sum = {s.sum.x * old, s.sum.y * old, s.sum.z * old, s.sum.w * old};
#pragma unroll
            for (int b = 0; b < kBatch; b++) { s.add(exp2_fast(tops[b] - top), sums[b]); }
        }
        return s;
    }

    CRUMB_DEVICE void add(float factor, const simt::Floats4& more) {
        using namespace simt;
        sum = {fma_exact(factor, more.x, sum.x), fma_exact(factor, more.y, sum.y), fma_exact(factor, more.z, sum.z),
               fma_exact(factor, more.w, sum.w)};
    }
};

}  // namespace crumb::cuda

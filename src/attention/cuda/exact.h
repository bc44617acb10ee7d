// 16 exact tokens in a warp, straight from a BF16 record (K [D_k][64], V [64][D_v]): rows of K's product are tokens 2 r and
// 2 r + 1, so a 32-bit load holds both; V's rows are channels, and a lane's four tokens 4 q .. 4 q + 3 come as 16 bytes of
// channels each. Query and probability are BF16 pairs (high, low part), 16 bits of precision at no further product.
#pragma once

#include "attention/cuda/decode_format.h"

namespace crumb::cuda {

template <KernelFormat F, int NT>
class Exact {
    using D = DecodeFormat<F, NT>;
    static constexpr int kTiles = D::kDimV / 16;
    static constexpr int kSteps = D::kDimK / 16;
    static constexpr int kGroups = D::kDimV / 64;  // of V's channels
    static constexpr int kAhead = D::kExactAhead ? kGroups : 0;  // the query is in registers then, too

    struct Rows {  // 64 channels of the lane's four tokens
        simt::Words4 token[4];
    };

  public:
    CRUMB_DEVICE void begin(const u32* query, Softcap softcap, int sink) {
        query_ = reinterpret_cast<const simt::Words2*>(query + D::kExactAt) + simt::lane();
        if constexpr (kAhead > 0) {
#pragma unroll
            for (int s = 0; s < kSteps; s++) { held_[s] = query_[32 * s]; }
        }
        softcap_ = softcap;
        sink_ = sink;
        const QueryColumn* columns = reinterpret_cast<const QueryColumn*>(query + D::kColumnAt);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const QueryColumn c = columns[4 * n + simt::lane() % 4];
            begin_[n] = c.begin, coded_end_[n] = c.coded_end, end_[n] = c.end;
            top_[n] = kUnset, sum_[n] = 0;
#pragma unroll
            for (int t = 0; t < kTiles; t++) {
                for (int i = 0; i < 4; i++) { acc_[n][t][i] = 0; }
            }
        }
    }

    // Asks for the first item: tokens 16 group .. of the sequence; `record` is their block's page of this KV head.
    CRUMB_DEVICE void first(const u8* record, int group) {
        if constexpr (kAhead > 0) {
            load_keys(record, group);
            load_values(record, group);
        }
    }

    // An item, and the next one is asked for as soon as there is room for it; null: there is none.
    CRUMB_DEVICE void item(const u8* record, int group, const u8* next, int next_group) {
        using namespace simt;
        const int q = lane() % 4, r = lane() / 4;
        float c[NT][4];
        keys(record, group, c);
        if (kAhead > 0 && next) { load_keys(next, next_group); }

        float x[NT][2];
        bool unseen = false;
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                x[n][i] = c[n][2 * i] + c[n][2 * i + 1];
                if (softcap_.cap > 0) { x[n][i] = softcap_.cap * tanh_exact(x[n][i] * softcap_.inverse); }
                const bool sees = visible(kExactTokens * group + 2 * r + i, begin_[n], coded_end_[n], end_[n]);
                unseen |= !sees;
                if (!sees) { x[n][i] = -float_of(0x7f800000u); }
            }
        }
        raise(x);
        u32 b[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float weight = exp2_fast(x[n][i] - top_[n]);
                const float high = float_of(bf16_pair(0, weight) & 0xffff0000u);
                sum_[n] += weight;
                b[n][i] = transpose(bf16_pair(high, weight - high));
            }
        }
        if (any(unseen)) {
            values_masked(record, group, q, b);
        } else {
            const bool all[NT] = {};
            values<false>(record, q, b, group, 0, 0, 0, all);
        }
        if (kAhead > 0 && next) { load_values(next, next_group); }
    }

    // Adds to an entry, or makes it.
    CRUMB_DEVICE void finish(float* entry, bool has_coded) {
        using namespace simt;
        const int r = lane() / 4, q = lane() % 4;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float sum = sum_[n];
#pragma unroll
            for (int o = 4; o < 32; o *= 2) { sum += shuffle_xor(sum, o); }
            float* column = entry + (4 * n + q) * D::kStride;
            float* scalars = column + D::kWidth;
            // All that is there is asked for before anything is written: it may lie in global memory.
            Floats4 old = {kUnset, 0, 0, 0};
            float planes[D::kPlanesV / 8] = {};
            Floats2 channels[kTiles] = {};
            if (has_coded) {
                old = *reinterpret_cast<const Floats4*>(scalars);
#pragma unroll
                for (int p = 0; p < D::kPlanesV / 8; p++) { planes[p] = column[8 * p + r]; }
#pragma unroll
                for (int t = 0; t < kTiles; t++) { channels[t] = *reinterpret_cast<const Floats2*>(column + channel(t, r)); }
            }
            const float top = old.x > top_[n] ? old.x : top_[n];
            const float old_factor = exp2_fast(old.x - top), factor = exp2_fast(top_[n] - top);
            const float coded = old.z * old_factor, zeros = old.w * old_factor, total = fma_exact(sum, factor, old.y * old_factor);
            sync_warp();
#pragma unroll
            for (int p = 0; p < D::kPlanesV / 8; p++) { column[8 * p + r] = planes[p] * old_factor; }
#pragma unroll
            for (int t = 0; t < kTiles; t++) {
                *reinterpret_cast<Floats2*>(column + channel(t, r)) = {
                    fma_exact(acc_[n][t][0] + acc_[n][t][1], factor, channels[t].x * old_factor),
                    fma_exact(acc_[n][t][2] + acc_[n][t][3], factor, channels[t].y * old_factor)};
            }
            if (r == 0) { scalars[kTop] = top, scalars[kSum] = total, scalars[kCodedSum] = coded, scalars[kZeroSum] = zeros; }
        }
        sync_warp();
    }

  private:
    // Where the lane's two channels of a tile lie in an entry.
    CRUMB_DEVICE static int channel(int t, int r) { return D::kPlanesV + 64 * (t / 4) + 8 * r + 2 * (t % 4); }

    CRUMB_DEVICE bool visible(int j, int begin, int coded_end, int end) const {
        return begin <= j && j < end && (j < sink_ || j >= coded_end);
    }

    static constexpr int kTokensOfBlock = kPageTokens / kExactTokens;

    CRUMB_DEVICE static const u32* keys_at(const u8* record, int group) {
        const int slot = kExactTokens * (group % kTokensOfBlock), r = simt::lane() / 4, q = simt::lane() % 4;
        return reinterpret_cast<const u32*>(record) + (2 * q * kPageTokens + slot) / 2 + r;
    }
    CRUMB_DEVICE static const u8* values_at(const u8* record, int group) {
        const int slot = kExactTokens * (group % kTokensOfBlock), r = simt::lane() / 4, q = simt::lane() % 4;
        return record + size_t(kPageTokens) * D::kDimK * 2 + size_t(slot + 4 * q) * D::kDimV * 2 + 16 * r;
    }

    CRUMB_DEVICE void load_keys(const u8* record, int group) {
        const u32* k = keys_at(record, group);
#pragma unroll
        for (int s = 0; s < kSteps; s++) { keys_[s] = load(k, s); }
    }
    CRUMB_DEVICE void load_values(const u8* record, int group) {
        const u8* v = values_at(record, group);
#pragma unroll
        for (int g = 0; g < kAhead; g++) { values_[g] = load(v, g); }
    }

    // 16 channels of K.
    CRUMB_DEVICE static simt::Words4 load(const u32* k, int s) {
        const auto word = [&](int i) { return simt::load_once(k + (16 * s + 8 * (i / 2) + i % 2) * (kPageTokens / 2)); };
        return {word(0), word(1), word(2), word(3)};
    }

    CRUMB_DEVICE void keys(const u8* record, int group, float (&c)[NT][4]) const {
        using namespace simt;
        const u32* k = keys_at(record, group);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            for (int i = 0; i < 4; i++) { c[n][i] = 0; }
        }
#pragma unroll 8
        for (int s = 0; s < kSteps; s++) {
            const Words4 w = kAhead > 0 ? keys_[kAhead > 0 ? s : 0] : load(k, s);
            const u32 a0 = permute_bytes(w.x, w.y, 0x5410), a1 = permute_bytes(w.x, w.y, 0x7632);
            const u32 a2 = permute_bytes(w.z, w.w, 0x5410), a3 = permute_bytes(w.z, w.w, 0x7632);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const Words2 b = kAhead > 0 ? held_[kAhead > 0 ? s : 0] : query_[32 * (n * kSteps + s)];
                mma_bf16(c[n], a0, a1, a2, a3, b.x, b.y);
            }
        }
    }

    CRUMB_DEVICE void raise(const float (&x)[NT][2]) {
        using namespace simt;
        bool high = false;
#pragma unroll
        for (int n = 0; n < NT; n++) { high |= x[n][0] - top_[n] > 8.0f || x[n][1] - top_[n] > 8.0f; }
        if (!any(high)) { return; }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float y = max_of(x[n][0], x[n][1]);
#pragma unroll
            for (int o = 4; o < 32; o *= 2) { y = max_of(y, shuffle_xor(y, o)); }
            if (!(y - top_[n] > 8.0f)) { continue; }  // only columns that need it
            const float factor = exp2_fast(top_[n] - y);
            top_[n] = y;
            sum_[n] *= factor;
#pragma unroll
            for (int t = 0; t < kTiles; t++) {
                for (int i = 0; i < 4; i++) { acc_[n][t][i] *= factor; }
            }
        }
    }

    CRUMB_DEVICE static Rows load(const u8* v, int group) {
        Rows rows;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            rows.token[e] = simt::load_once(reinterpret_cast<const simt::Words4*>(v + e * D::kDimV * 2 + 128 * group));
        }
        return rows;
    }

    // With kMasked: tokens that a row with these bounds does not see count as 0, and only columns named by `mine` change.
    template <bool kMasked>
    CRUMB_DEVICE void values(const u8* record, int q, const u32 (&b)[NT][2], int group, int begin, int coded_end, int end,
                             const bool (&mine)[NT]) {
        using namespace simt;
        const u8* v = values_at(record, group);
        u32 keep[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            keep[e] = !kMasked || visible(kExactTokens * group + 4 * q + e, begin, coded_end, end) ? ~0u : 0u;
        }
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            const Rows rows = kAhead > 0 ? values_[kAhead > 0 ? g : 0] : load(v, g);
            u32 w[4][4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const Words4& x = rows.token[e];
                w[e][0] = x.x & keep[e], w[e][1] = x.y & keep[e], w[e][2] = x.z & keep[e], w[e][3] = x.w & keep[e];
            }
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const u32 a0 = permute_bytes(w[0][t], w[2][t], 0x5410), a1 = permute_bytes(w[0][t], w[2][t], 0x7632);
                const u32 a2 = permute_bytes(w[1][t], w[3][t], 0x5410), a3 = permute_bytes(w[1][t], w[3][t], 0x7632);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    if constexpr (kMasked) {
                        float d[4] = {acc_[n][4 * g + t][0], acc_[n][4 * g + t][1], acc_[n][4 * g + t][2], acc_[n][4 * g + t][3]};
                        mma_bf16(d, a0, a1, a2, a3, b[n][0], b[n][1]);
                        for (int i = 0; i < 4; i++) { acc_[n][4 * g + t][i] = mine[n] ? d[i] : acc_[n][4 * g + t][i]; }
                    } else {
                        mma_bf16(acc_[n][4 * g + t], a0, a1, a2, a3, b[n][0], b[n][1]);
                    }
                }
            }
        }
    }

    // A value that is not finite must not reach a row that does not see it (0 x NaN is NaN): one turn for every kind of
    // row among the columns.
    CRUMB_DEVICE void values_masked(const u8* record, int group, int q, const u32 (&b)[NT][2]) {
        using namespace simt;
        int last[3] = {-1, -1, -1};
#pragma unroll 1
        for (int c = 0; c < D::kColumns; c++) {
            int bounds[3] = {0, 0, 0};
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const u32 one = shuffle(u32(begin_[n]), c % 4), two = shuffle(u32(coded_end_[n]), c % 4);
                const u32 three = shuffle(u32(end_[n]), c % 4);
                if (c / 4 == n) { bounds[0] = int(one), bounds[1] = int(two), bounds[2] = int(three); }
            }
            if (bounds[0] == last[0] && bounds[1] == last[1] && bounds[2] == last[2]) { continue; }
            bool mine[NT], first = true;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                mine[n] = begin_[n] == bounds[0] && coded_end_[n] == bounds[1] && end_[n] == bounds[2];
                if (any(mine[n] && 4 * n + q < c)) { first = false; }  // these bounds had their turn
            }
            for (int i = 0; i < 3; i++) { last[i] = bounds[i]; }
            if (first) { values<true>(record, q, b, group, bounds[0], bounds[1], bounds[2], mine); }
        }
    }

    const simt::Words2* query_;
    Softcap softcap_;
    int sink_;
    int begin_[NT], coded_end_[NT], end_[NT];
    float acc_[NT][kTiles][4];
    float top_[NT], sum_[NT];
    simt::Words2 held_[kAhead > 0 ? kSteps : 1];
    simt::Words4 keys_[kAhead > 0 ? kSteps : 1];
    Rows values_[kAhead > 0 ? kAhead : 1];
};

}  // namespace crumb::cuda

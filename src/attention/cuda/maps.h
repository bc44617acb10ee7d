// The maps on both sides of decode, one block a segment: queries become what pages are read with (q' = B q, quantised), sums
// become outputs (o = B^T o' + channels). FP32 multiply-adds; the sum over k is cut in kParts, added in order.
#pragma once

#include <math.h>

#include "attention/cuda/decode_format.h"
#include "attention/cuda/plan.h"

namespace crumb::cuda {

inline constexpr int kParts = 4;
inline constexpr float kCodedQueryTop = 8100.0f;   // 14 bits: 4 times it fits 16
inline constexpr float kMeanQueryTop = 32000.0f;
inline constexpr float kLog2e = 1.44269504f;

// Static tables of a KV head on the device; null where the format has none.
struct HeadArrays {
    const float* k_decode_t;   // [D_k][P_k]: B transposed
    const float* k_ones;       // [D_k]
    const float* k_mean;       // [D_k]
    const float* k_mean_step;  // [D_k]
    const float* v_decode;     // [P_v][D_v]
    const float* v_ones;       // [D_v]
    const float* v_mean;       // [D_v]
};

struct MapArgs {
    const QueryRow* rows;  // [n_tiles][rows_per_tile]
    int rows_per_tile;
    int n_head_kv, group, column_blocks;  // group: query heads of a KV head
    int sink;
    float scale;           // of the logits
    const float* q;        // row `token` of head h at q + token * q_token_stride + h * q_head_stride
    size_t q_token_stride, q_head_stride;
    const HeadArrays* heads;  // [n_head_kv]
    u32* queries;             // [segment][kQueryWords]
    const TileWork* tiles;
    const float* merged;      // [segment][kEntryFloats]
    const float* sinks;       // [n_head] or null
    float* out;               // row `token` at out + token * out_stride: [n_head][D_v]
    size_t out_stride;
};

// Which row and head a column of a segment stands for. Columns that are not there repeat the first, with a zero query.
struct Column {
    int row, head;
    bool used;
};

CRUMB_BOTH Column column_of(int index, int columns_per_block, int column_block, int rows, int group, int kv_head) {
    const int c = column_block * columns_per_block + index, n = rows * group;
    if (c < n) { return {c / group, kv_head * group + c % group, true}; }
    return {column_block * columns_per_block / group, kv_head * group, false};
}

template <PageFormat F, int NT>
class Maps {
    using D = DecodeFormat<F, NT>;
    static constexpr int kWide = D::kPlanesK > 512 ? 2 : kParts;

  public:
    static constexpr size_t kQueryShared =
        4 * (size_t(D::kColumns) * D::kDimK + size_t(kWide) * D::kColumns * D::kPlanesK + size_t(D::kColumns) * D::kDimK);
    static constexpr size_t kOutputShared = 4 * (size_t(D::kColumns) * D::kStride + size_t(kParts) * D::kColumns * D::kDimV);

    CRUMB_DEVICE static void query(const MapArgs& a, std::byte* shared) {
        using namespace simt;
        const int segment = block(), column_block = segment % a.column_blocks, head_of = segment / a.column_blocks;
        const int kv_head = head_of % a.n_head_kv, tile = head_of / a.n_head_kv;
        const QueryRow* rows = a.rows + size_t(tile) * a.rows_per_tile;
        const HeadArrays& head = a.heads[kv_head];
        float* const q = reinterpret_cast<float*>(shared);             // [column][D_k], times scale and log2 e
        float* const mapped = q + D::kColumns * D::kDimK;              // [part][column][P_k]
        int* const steps = reinterpret_cast<int*>(mapped + kWide * D::kColumns * D::kPlanesK);  // [column][D_k]
        u32* const record = a.queries + size_t(segment) * D::kQueryWords;
        wait_for_previous();
        launch_next();
        for (int i = thread(); i < D::kColumns * D::kDimK; i += n_threads()) {
            const Column c = column_of(i / D::kDimK, D::kColumns, column_block, a.rows_per_tile, a.group, kv_head);
            const u32 token = rows[c.row].token;
            q[i] = !c.used || token == kNoToken
                       ? 0.0f
                       : a.q[token * a.q_token_stride + c.head * a.q_head_stride + i % D::kDimK] * (a.scale * kLog2e);
        }
        sync_block();
        constexpr int kDepth = D::kDimK / kWide;
        for (int i = thread(); i < kWide * D::kPlanesK; i += n_threads()) {
            const int p = i % D::kPlanesK, part = i / D::kPlanesK;
            float sum[D::kColumns] = {};
#pragma unroll 8
            for (int k = part * kDepth; k < (part + 1) * kDepth; k++) {
                const float b = head.k_decode_t[k * D::kPlanesK + p];
#pragma unroll
                for (int c = 0; c < D::kColumns; c++) { sum[c] = fma_exact(b, q[c * D::kDimK + k], sum[c]); }
            }
            for (int c = 0; c < D::kColumns; c++) { mapped[(part * D::kColumns + c) * D::kPlanesK + p] = sum[c]; }
        }
        sync_block();
        for (int c = warp(); c < D::kColumns; c += n_threads() / kWarp) {
            const Column column = column_of(c, D::kColumns, column_block, a.rows_per_tile, a.group, kv_head);
            quantise(head, rows[column.row], q + c * D::kDimK, mapped, c, steps,
                     reinterpret_cast<QueryColumn*>(record + D::kColumnAt));
        }
        sync_block();
        write_words(record, reinterpret_cast<const int*>(mapped), steps, q);
    }

    CRUMB_DEVICE static void output(const MapArgs& a, std::byte* shared) {
        using namespace simt;
        const int segment = block(), column_block = segment % a.column_blocks, head_of = segment / a.column_blocks;
        const int kv_head = head_of % a.n_head_kv, tile = head_of / a.n_head_kv;
        const QueryRow* rows = a.rows + size_t(tile) * a.rows_per_tile;
        const HeadArrays& head = a.heads[kv_head];
        float* const sums = reinterpret_cast<float*>(shared);
        float* const mapped = sums + D::kColumns * D::kStride;  // [part][column][D_v]
        wait_for_previous();
        launch_next();
        const bool any = a.tiles[tile].units > 0;
        const float* merged = a.merged + size_t(segment) * D::kEntryFloats;
        for (int i = thread(); i < D::kEntryFloats; i += n_threads()) { sums[i] = any ? merged[i] : 0.0f; }
        sync_block();
        constexpr int kDepth = D::kPlanesV / kParts;
        for (int i = thread(); i < kParts * D::kDimV; i += n_threads()) {
            const int d = i % D::kDimV, part = i / D::kDimV;
            float sum[D::kColumns] = {};
#pragma unroll 8
            for (int p = part * kDepth; p < (part + 1) * kDepth; p++) {
                const float b = head.v_decode[p * D::kDimV + d];
#pragma unroll
                for (int c = 0; c < D::kColumns; c++) { sum[c] = fma_exact(b, sums[c * D::kStride + p], sum[c]); }
            }
            for (int c = 0; c < D::kColumns; c++) { mapped[(part * D::kColumns + c) * D::kDimV + d] = sum[c]; }
        }
        sync_block();
        for (int i = thread(); i < D::kColumns * D::kDimV; i += n_threads()) {
            const int c = i / D::kDimV, d = i % D::kDimV;
            const Column column = column_of(c, D::kColumns, column_block, a.rows_per_tile, a.group, kv_head);
            const u32 token = rows[column.row].token;
            if (!column.used || token == kNoToken) { continue; }
            const float* own = sums + c * D::kStride;
            float value = 0;
            for (int part = 0; part < kParts; part++) { value += mapped[(part * D::kColumns + c) * D::kDimV + d]; }
            value += own[D::kPlanesV + d];
            if (head.v_ones) { value = fma_exact(own[D::kWidth + kZeroSum], head.v_ones[d], value); }
            if (head.v_mean) { value = fma_exact(own[D::kWidth + kCodedSum], head.v_mean[d], value); }
            const float share = share_of(own[D::kWidth + kTop], own[D::kWidth + kSum], a.sinks, column.head);
            a.out[token * a.out_stride + size_t(column.head) * D::kDimV + d] = share == 0 ? 0.0f : value * share;
        }
    }

  private:
    // What a unit of the sums is worth: 1 / the sum of weights, a sink logit among them. 0 where nothing was seen.
    CRUMB_DEVICE static float share_of(float top, float sum, const float* sinks, int head) {
        using namespace simt;
        if (sum == 0) { return 0; }
        if (!sinks) { return 1.0f / sum; }
        const float sink = sinks[head] * kLog2e, most = max_of(top, sink);
        const float factor = exp2_fast(top - most);
        return factor / fma_exact(sum, factor, exp2_fast(sink - most));
    }

    CRUMB_DEVICE static float largest(float x) {
#pragma unroll
        for (int o = 16; o > 0; o /= 2) { x = simt::max_of(x, simt::shuffle_xor(x, o)); }
        return x;
    }
    CRUMB_DEVICE static float total(float x) {
#pragma unroll
        for (int o = 16; o > 0; o /= 2) { x += simt::shuffle_xor(x, o); }
        return x;
    }
    CRUMB_DEVICE static int total(int x) {
#pragma unroll
        for (int o = 16; o > 0; o /= 2) { x += int(simt::shuffle_xor(u32(x), o)); }
        return x;
    }

    // Whether plane p carries 4 times the integer.
    CRUMB_DEVICE static bool quadruple(int p) { return p >= 64 * D::kGroupsK || p / 16 % 2 == 0; }

    // One warp, one column: integers over the first part of `mapped` and in `steps`, scalars.
    CRUMB_DEVICE static void quantise(const HeadArrays& head, const QueryRow& row, const float* q,
                                      float* mapped, int c, int* steps, QueryColumn* columns) {
        using namespace simt;
        float top = 0, odd = 0;  // odd: NaN if something is not finite
        for (int p = lane(); p < D::kPlanesK; p += kWarp) {
            float x = 0;
            for (int part = 0; part < kWide; part++) { x += mapped[(part * D::kColumns + c) * D::kPlanesK + p]; }
            mapped[c * D::kPlanesK + p] = x;
            top = max_of(top, fabsf(x));
            odd += 0.0f * x;
        }
        top = largest(top);
        odd = total(odd);
        const float inverse = top > 1e-30f && odd == 0 ? kCodedQueryTop / top : 0.0f;
        int centre = 0;
        for (int p = lane(); p < D::kPlanesK; p += kWarp) {
            const float x = odd == 0 ? mapped[c * D::kPlanesK + p] : 0.0f;
            const int v = int(rintf(x * (quadruple(p) ? 4.0f * inverse : inverse)));
            centre += quadruple(p) ? 24 * v : 96 * v;  // 1.5 x 16 and 1.5 x 64: what a step counts
            reinterpret_cast<int*>(mapped)[c * D::kPlanesK + p] = v;
        }
        centre = total(centre);

        float ones = 0, offset = 0, mean_top = 0;
        for (int d = lane(); d < D::kDimK; d += kWarp) {
            if (head.k_ones) { ones = fma_exact(q[d], head.k_ones[d], ones); }
            if (head.k_mean) { offset = fma_exact(q[d], head.k_mean[d], offset); }
            if constexpr (F.k.mean) { mean_top = max_of(mean_top, fabsf(q[d] * head.k_mean_step[d])); }
        }
        ones = total(ones);
        offset = total(offset);
        if constexpr (F.k.mean) {
            mean_top = largest(mean_top);
            const float mean_inverse = mean_top > 1e-30f && odd == 0 ? kMeanQueryTop / mean_top : 0.0f;
            for (int d = lane(); d < D::kDimK; d += kWarp) {
                const float x = odd == 0 ? q[d] * head.k_mean_step[d] : 0.0f;
                steps[c * D::kDimK + d] = int(rintf(x * mean_inverse));
            }
        }
        if (lane() == 0) {
            QueryColumn column;
            column.unit = odd == 0 ? top * (1.0f / (64.0f * kCodedQueryTop)) : odd;
            column.ones = ones, column.offset = offset;
            column.mean_unit = mean_top * (1.0f / kMeanQueryTop);
            column.centre = centre;
            const bool there = row.token != kNoToken;
            column.begin = there ? row.begin : 0, column.coded_end = there ? row.coded_end : 0, column.end = there ? row.end : 0;
            columns[c] = column;
        }
    }

    CRUMB_DEVICE static u32 byte_of(int v, bool high) {
        const int top = (v + 128) >> 8;
        return u32(high ? top : v - 256 * top) & 0xffu;
    }
    CRUMB_DEVICE static u32 four_bytes(const int* v, bool high) {
        return byte_of(v[0], high) | byte_of(v[1], high) << 8 | byte_of(v[2], high) << 16 | byte_of(v[3], high) << 24;
    }

    CRUMB_DEVICE static void write_words(u32* record, const int* codes, const int* steps, const float* q) {
        using namespace simt;
        constexpr int kGroups = D::kGroupsK > 0 ? D::kGroupsK : 1;
        for (int i = thread(); i < D::kColumnAt; i += n_threads()) {
            u32 word;
            if (i < D::kTailAt) {
                const int f = i % 4, l = i / 4 % 32, g = i / 128 % kGroups, n = i / 128 / kGroups;
                word = four_bytes(codes + (4 * n + l / 8) * D::kPlanesK + 64 * g + 16 * f + 4 * (l % 4), l / 4 % 2 == 0);
            } else if (i < D::kMeanAt) {
                const int t = i - D::kTailAt, w = t % 2, l = t / 2 % 32, n = t / 64;
                word = four_bytes(codes + (4 * n + l / 8) * D::kPlanesK + 64 * D::kGroupsK + 16 * w + 4 * (l % 4), l / 4 % 2 == 0);
            } else if (i < D::kExactAt) {
                const int t = i - D::kMeanAt, w = t % 4, l = t / 4 % 32, g = t / 128 % (D::kDimK / 64), n = t / 128 / (D::kDimK / 64);
                word = four_bytes(steps + (4 * n + l / 8) * D::kDimK + 64 * g + 16 * (l % 4) + 4 * w, l / 4 % 2 == 0);
            } else {
                const int t = i - D::kExactAt, w = t % 2, l = t / 2 % 32, s = t / 64 % (D::kDimK / 16), n = t / 64 / (D::kDimK / 16);
                const float* x = q + (4 * n + l / 8) * D::kDimK + 16 * s + 8 * w + 2 * (l % 4);
                const u32 high = bf16_pair(x[0], x[1]);
                word = l / 4 % 2 == 0 ? high : bf16_pair(x[0] - float_of(high << 16), x[1] - float_of(high & 0xffff0000u));
            }
            record[i] = word;
        }
    }
};

}  // namespace crumb::cuda

// Blocks of a chunk as BF16 tiles, in the order in which a warpgroup's products take them (warpgroup.h). Codes are mapped back
// by tensor cores, K_hat - mean = s (digits - 1.5) B + z ones + page mean; rows of the cache are turned over. Once a chunk,
// so that a page is unpacked once for all its rows: 6 % of the time of 2048 rows behind 32k tokens on an H200.
//
// A pair of entries: K [D / 64][128 tokens] tile rows, then V [2 entries][D] tile rows, 64 tokens each. The static mean of K
// is left out, to be added to the logits in FP32. A value that is not finite becomes 0, and its token's key NaN: rows that see
// the token become NaN, rows that do not stay as they were.
#pragma once

#include "attention/cuda/coded.h"
#include "attention/cuda/maps.h"
#include "attention/cuda/prefill_plan.h"
#include "attention/cuda/warpgroup.h"

namespace crumb::cuda {

inline constexpr int kUnpackThreads = 256, kUnpackBlocks = 2;  // of a multiprocessor

struct UnpackArgs {
    const u8* coded;
    size_t coded_stride;
    const u8* exact;
    size_t exact_stride;
    const u32* coded_ids;  // [sequence][ids_stride]
    const u32* exact_ids;
    size_t ids_stride;
    const ChunkWork* chunks;
    int n_head_kv, parts;  // blocks a chunk and head
    int from, slice_entries;  // entries [from, from + slice_entries) of every chunk
    const HeadArrays* heads;
    const HeadConstants* constants;
    u8* tiles;  // [chunk][KV head][slice_entries / 2] pairs
};

template <int kDim>
inline constexpr u32 kKeyPairBytes = u32(kDim / 64 * 128 * kTileRowBytes);
template <int kDim>
inline constexpr u32 kPairBytes = 2 * kKeyPairBytes<kDim>;

template <PageFormat F>
class Unpack {
    static_assert(F.k.dim == F.v.dim && F.k.dim % 64 == 0);
    static constexpr int kDim = F.k.dim, kPlanesK = F.k.planes, kPlanesV = F.v.planes;
    static constexpr PageOffsets kAt = page_offsets(F);
    // BF16 maps [channel][plane]. Rows are that far apart that neither K's 8-byte reads of rows 4 r nor V's 4-byte reads
    // of rows r meet a bank twice.
    static constexpr u32 kStrideK = 2 * kPlanesK + 8, kStrideV = 2 * kPlanesV + 16;
    static constexpr u32 kMapV = (kDim * kStrideK + 15) / 16 * 16, kChannels = (kMapV + kDim * kStrideV + 15) / 16 * 16;
    enum { kOnesK, kOnesV, kMeanV, kStepK, kStepV, kArrays };  // [kDim] floats

  public:
    static constexpr u32 kShared = kChannels + kArrays * kDim * 4 + 16;

    // Block: n_head_kv * chunk + head, times parts of a slice.
    CRUMB_DEVICE static void run(const UnpackArgs& a, std::byte* memory) {
        using namespace simt;
        u8* const shared = reinterpret_cast<u8*>(memory);
        const int part = block() % a.parts, head = block() / a.parts % a.n_head_kv, chunk = block() / a.parts / a.n_head_kv;
        const HeadArrays& tables = a.heads[head];
        wait_for_previous();
        launch_next();
        const ChunkWork work = a.chunks[chunk];
        const int end = least(work.n_entries(), a.from + a.slice_entries);
        u8* const pairs = a.tiles + size_t(chunk * a.n_head_kv + head) * (a.slice_entries / 2) * kPairBytes<kDim>;
        const auto pair_of = [&](int entry) { return pairs + (entry - a.from) / 2 * kPairBytes<kDim>; };
        int entry = a.from + part;
        if (entry < end && entry < work.n_sink + work.n_coded) { load_maps(tables, a.constants[head], shared); }
        const auto id_of = [&](int e) {
            const u32* const ids = work.coded(e) ? a.coded_ids : a.exact_ids;
            return e < end ? ids[work.sequence * a.ids_stride + u32(work.block_of(e))] : 0u;
        };
        u32 id = id_of(entry);
#pragma unroll 1
        for (; entry < end; entry += a.parts) {
            const u32 next = id_of(entry + a.parts);
            u8* const pair = pair_of(entry);
            if (work.coded(entry)) {
                const u8* const page = a.coded + id * a.coded_stride + size_t(head) * kAt.bytes;
                const int job = warp() % 8;  // halves of K's or V's tokens and channels
                if (job < 4) {
                    keys(page, shared, job % 2, job / 2, a.constants[head], pair, entry % 2);
                } else {
                    values(page, shared, job % 2, job / 2 % 2, a.constants[head], pair, entry % 2);
                }
            } else {
                const u8* const record = a.exact + id * a.exact_stride + size_t(head) * kDim * kPageTokens * 4;
                turn(record, pair, entry % 2, reinterpret_cast<u32*>(shared + kShared - 16));
            }
            id = next;
        }
        if (entry == end && end % 2 == 1 && end == work.n_entries()) { clear(pair_of(end), 1); }
    }

  private:
    CRUMB_DEVICE static const float* channels(const u8* shared, int array) {
        return reinterpret_cast<const float*>(shared + kChannels) + array * kDim;
    }

    CRUMB_DEVICE static void load_maps(const HeadArrays& t, const HeadConstants& constants, u8* shared) {
        using namespace simt;
        for (int i = thread(); i < kDim * kPlanesK / 4; i += n_threads()) {
            *reinterpret_cast<Words2*>(shared + i / (kPlanesK / 4) * kStrideK + i % (kPlanesK / 4) * 8) = reinterpret_cast<const Words2*>(t.k_unmap)[i];
        }
        for (int i = thread(); i < kDim * kPlanesV / 4; i += n_threads()) {
            *reinterpret_cast<Words2*>(shared + kMapV + i / (kPlanesV / 4) * kStrideV + i % (kPlanesV / 4) * 8) =
                reinterpret_cast<const Words2*>(t.v_unmap)[i];
        }
        const float* const arrays[kArrays] = {t.k_ones, t.v_ones, t.v_mean, t.k_mean_step, constants.v_mean_step};
        for (int k = 0; k < kArrays; k++) {
            for (int i = thread(); i < kDim; i += n_threads()) {
                reinterpret_cast<float*>(shared + kChannels)[k * kDim + i] = arrays[k] ? arrays[k][i] : 0.0f;
            }
        }
        sync_block();
    }

    // A pair of digits, codes in bits 0, 1 and 16, 17 of x << shift >> 5: a quarter of their distance from 1.5.
    CRUMB_DEVICE static u32 digits(u32 x, int f) {
        const u32 bits = 2 * f <= 5 ? x << (5 - 2 * f) : x >> (2 * f - 5);
        return simt::add_bf16((bits & 0x00600060u) | 0x3f803f80u, 0xbfb0bfb0u);  // 1 + code / 4 - 1.375
    }

    CRUMB_DEVICE static simt::u32 pack(float a, float b) { return simt::bf16_pair(a, b); }

    // 32 tokens of K, kDim / 2 channels. Rows of A are tokens.
    CRUMB_DEVICE static void keys(const u8* page, const u8* shared, int half, int part, const HeadConstants& constants, u8* pair, int side) {
        using namespace simt;
        const int r = lane() / 4, q = lane() % 4;
        float scale[4], zero[4] = {};
        load_scales<F.k.info>(page + kAt.key_info, half, r, constants.k_reference_log2, scale, zero);
        Words4 codes[full_groups(kPlanesK) + has_tail(kPlanesK)];
#pragma unroll
        for (int g = 0; g < full_groups(kPlanesK); g++) { codes[g] = *reinterpret_cast<const Words4*>(page + key_load(kPlanesK, half, g, r, q)); }
        if constexpr (has_tail(kPlanesK)) {
            codes[full_groups(kPlanesK)] = *reinterpret_cast<const Words4*>(page + key_tail_load(kPlanesK, half, r, q));
        }
#pragma unroll 1
        for (int c0 = part * (kDim / 2); c0 < (part + 1) * (kDim / 2); c0 += 32) {
            float sum[2][4][4] = {};
            const auto multiply = [&](const u32 (&a)[2][4], int plane) {
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    const Words2 map = *reinterpret_cast<const Words2*>(shared + u32(c0 + 4 * r + b) * kStrideK + 2 * plane);
#pragma unroll
                    for (int m = 0; m < 2; m++) { mma_bf16(sum[m][b], a[m][0], a[m][1], a[m][2], a[m][3], map.x, map.y); }
                }
            };
            const auto operand = [&](const u32 (&w)[4], int f, u32 (&a)[2][4]) {
#pragma unroll
                for (int m = 0; m < 2; m++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        a[m][i] = digits(permute_bytes(w[2 * m + i], 0, 0x4140), f);
                        a[m][2 + i] = digits(permute_bytes(w[2 * m + i], 0, 0x4342), f);
                    }
                }
            };
            u32 a[2][4];
#pragma unroll
            for (int g = 0; g < full_groups(kPlanesK); g++) {
                const Words4 c = codes[g];
                const u32 w[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
                for (int f = 0; f < 4; f++) {
                    operand(w, f, a);
                    multiply(a, 64 * g + 16 * f + 4 * q);
                }
            }
            if constexpr (has_tail(kPlanesK)) {
                const Words4 c = codes[full_groups(kPlanesK)];
                const Pair x[4] = {key_tail_fields(c.x, q), key_tail_fields(c.y, q), key_tail_fields(c.z, q), key_tail_fields(c.w, q)};
                const u32 low[4] = {x[0].first, x[1].first, x[2].first, x[3].first};
                const u32 high[4] = {x[0].second, x[1].second, x[2].second, x[3].second};
                operand(low, 0, a);
                multiply(a, 64 * full_groups(kPlanesK) + 4 * q);
                operand(high, 0, a);
                multiply(a, 64 * full_groups(kPlanesK) + 16 + 4 * q);
            }
            // Columns 2 q, 2 q + 1 of product b are channels 8 q + b and 8 q + 4 + b.
            const int channel = c0 + 8 * q;
            const float* const ones = channels(shared, kOnesK) + channel;
            const float* const step = channels(shared, kStepK) + channel;
            float add[8] = {};
            if constexpr (F.k.mean) {
#pragma unroll
                for (int i = 0; i < 8; i++) { add[i] = float(int8_t(page[kAt.key_mean + u32(channel + i)])) * step[i]; }
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float unit = 4 * scale[e];
                float x[8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    x[i] = fma_exact(sum[e / 2][i % 4][2 * (e % 2) + i / 4], unit, fma_exact(zero[e], ones[i], add[i]));
                }
                u8* const to = pair + channel / 64 * (128 * kTileRowBytes) + tile_at(64 * side + 32 * half + 4 * r + e, channel % 64 / 8);
                *reinterpret_cast<Words4*>(to) = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
            }
        }
    }

    // 32 tokens of V, kDim / 2 channels. Rows of A are channels; column n of product b is token 32 half + 4 n + b.
    CRUMB_DEVICE static void values(const u8* page, const u8* shared, int half, int part, const HeadConstants& constants, u8* pair, int side) {
        using namespace simt;
        const int r = lane() / 4, q = lane() % 4;
        float scale[8], zero[8] = {};
        load_scales<F.v.info>(page + kAt.value_info, half, 2 * q, constants.v_reference_log2, scale, zero);
        load_scales<F.v.info>(page + kAt.value_info, half, 2 * q + 1, constants.v_reference_log2, scale + 4, zero + 4);
        const int u = 8 * half + r;
        Words2 codes[full_groups(kPlanesV) + has_tail(kPlanesV)][2];
#pragma unroll
        for (int g = 0; g < full_groups(kPlanesV) + has_tail(kPlanesV); g++) {
            const bool full = g < full_groups(kPlanesV);  // a block of the tail has quads 2 u and 2 u + 1, in fields 0, 1 and 2, 3
            const int block = full ? (u / 4 * full_groups(kPlanesV) + g) * 4 + u % 4 : 16 * full_groups(kPlanesV) + u / 2;
            const int swap = (full ? u : u / 2) & 2;
            const u8* const quad = page + kAt.value_codes + kBlockBytes * block + 8 * (q % 2);
            codes[g][0] = *reinterpret_cast<const Words2*>(quad + 16 * ((q / 2) ^ swap));
            codes[g][1] = *reinterpret_cast<const Words2*>(quad + 16 * ((q / 2 + 2) ^ swap));
        }
#pragma unroll 1
        for (int c0 = part * (kDim / 2); c0 < (part + 1) * (kDim / 2); c0 += 32) {
            float sum[2][4][4] = {};
            // w: planes 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of a field, 4 tokens each.
            const auto multiply = [&](const u32 (&w)[4], int f, int plane) {
                u32 a[2][4];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    const u8* const map = shared + kMapV + u32(c0 + 16 * m + r) * kStrideV + 2 * (plane + 2 * q);
                    a[m][0] = *reinterpret_cast<const u32*>(map), a[m][1] = *reinterpret_cast<const u32*>(map + 8 * kStrideV);
                    a[m][2] = *reinterpret_cast<const u32*>(map + 16), a[m][3] = *reinterpret_cast<const u32*>(map + 8 * kStrideV + 16);
                }
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    const u32 selector = 0x0400u + u32(b) * 0x0101u;  // byte b of both words; bytes 1 and 3 are masked away
                    const u32 b0 = digits(permute_bytes(w[0], w[1], selector), f), b1 = digits(permute_bytes(w[2], w[3], selector), f);
#pragma unroll
                    for (int m = 0; m < 2; m++) { mma_bf16(sum[m][b], a[m][0], a[m][1], a[m][2], a[m][3], b0, b1); }
                }
            };
#pragma unroll
            for (int g = 0; g < full_groups(kPlanesV) + has_tail(kPlanesV); g++) {
                const Words2 x = codes[g][0], y = codes[g][1];
                if (g < full_groups(kPlanesV)) {
                    const u32 w[4] = {x.x, x.y, y.x, y.y};
#pragma unroll
                    for (int f = 0; f < 4; f++) { multiply(w, f, 64 * g + 16 * f); }
                } else {
                    const int shift = 4 * (u % 2);
                    const u32 w[4] = {x.x >> shift, x.y >> shift, y.x >> shift, y.y >> shift};
                    multiply(w, 0, 64 * g);
                    multiply(w, 1, 64 * g + 16);
                }
            }
#pragma unroll
            for (int row = 0; row < 4; row++) {
                const int channel = c0 + 16 * (row / 2) + 8 * (row % 2) + r;
                const float ones = channels(shared, kOnesV)[channel];
                float add = channels(shared, kMeanV)[channel];
                if constexpr (F.v.mean) {
                    add = fma_exact(float(int8_t(page[kAt.value_mean + u32(channel)])),
                                    channels(shared, kStepV)[channel], add);
                }
                float x[8];
#pragma unroll
                for (int i = 0; i < 8; i++) {  // token 32 half + 8 q + i
                    x[i] = fma_exact(sum[row / 2][i % 4][2 * (row % 2) + i / 4], 4 * scale[i], fma_exact(zero[i], ones, add));
                }
                u8* const to = pair + kKeyPairBytes<kDim> + side * (kDim * kTileRowBytes) + tile_at(channel, 4 * half + q);
                *reinterpret_cast<Words4*>(to) = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
            }
        }
    }

    CRUMB_DEVICE static bool not_finite(u32 bf16) { return (bf16 & 0x7f80u) == 0x7f80u; }

    // Eight rows of two columns each as two pieces.
    CRUMB_DEVICE static void turn_eight(const u32 (&x)[8], u8* first, u8* second) {
        using namespace simt;
        u32 low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            low[i] = permute_bytes(x[2 * i], x[2 * i + 1], 0x5410), high[i] = permute_bytes(x[2 * i], x[2 * i + 1], 0x7632);
        }
        *reinterpret_cast<Words4*>(first) = {low[0], low[1], low[2], low[3]};
        *reinterpret_cast<Words4*>(second) = {high[0], high[1], high[2], high[3]};
    }

    // A record K [D][64], V [64][D]. odd: a bit for every token with a value that is not finite.
    CRUMB_DEVICE static void turn(const u8* record, u8* pair, int side, u32* odd) {
        using namespace simt;
        const u32* const keys = reinterpret_cast<const u32*>(record);
        const u32* const values = reinterpret_cast<const u32*>(record + 2 * kDim * kPageTokens);
        constexpr int kWarps = kUnpackThreads / kWarp, kTurns = kDim / 64;  // of 8 rows and 64 columns, a warp, either side
        u32 v[kTurns][8], k[kTurns][8];
#pragma unroll
        for (int i = 0; i < kTurns; i++) {
#pragma unroll
            for (int t = 0; t < 8; t++) { v[i][t] = values[(8 * warp() + t) * (kDim / 2) + 32 * i + lane()]; }
        }
#pragma unroll
        for (int i = 0; i < kTurns; i++) {
#pragma unroll
            for (int c = 0; c < 8; c++) { k[i][c] = keys[(8 * (kWarps * i + warp()) + c) * (kPageTokens / 2) + lane()]; }
        }
        sync_block();
        if (thread() < 2) { odd[thread()] = 0; }
        sync_block();
        u32 bad = 0;
#pragma unroll
        for (int i = 0; i < kTurns; i++) {
#pragma unroll
            for (int t = 0; t < 8; t++) {
                u32& x = v[i][t];
                if (not_finite(x) || not_finite(x >> 16)) {
                    bad |= 1u << t;
                    x &= (not_finite(x) ? 0u : 0xffffu) | (not_finite(x >> 16) ? 0u : 0xffff0000u);
                }
            }
            u8* const to = pair + kKeyPairBytes<kDim> + side * (kDim * kTileRowBytes);
            const int channel = 64 * i + 2 * lane();
            turn_eight(v[i], to + tile_at(channel, warp()), to + tile_at(channel + 1, warp()));
        }
        if (bad) { or_shared(odd + warp() / 4, bad << (warp() % 4 * 8)); }
        sync_block();
        bad = odd[lane() / 16] >> (2 * lane() % 32);
#pragma unroll
        for (int i = 0; i < kTurns; i++) {
            if (i == 0 && warp() == 0) { k[0][0] |= (bad & 1 ? 0x7fffu : 0u) | (bad & 2 ? 0x7fff0000u : 0u); }
            u8* const to = pair + i * (128 * kTileRowBytes);
            const int token = 64 * side + 2 * lane();
            turn_eight(k[i], to + tile_at(token, warp()), to + tile_at(token + 1, warp()));
        }
    }

    // The place of a pair's second entry where there is none: no row sees it, but zero times it is added.
    CRUMB_DEVICE static void clear(u8* pair, int side) {
        using namespace simt;
        for (int i = thread(); i < kDim * 8; i += n_threads()) {
            const int row = i / 8, piece = i % 8;
            *reinterpret_cast<Words4*>(pair + row / 64 * (128 * kTileRowBytes) + tile_at(64 * side + row % 64, piece)) = {};
            *reinterpret_cast<Words4*>(pair + kKeyPairBytes<kDim> + side * (kDim * kTileRowBytes) + tile_at(row, piece)) = {};
        }
    }
};

}  // namespace crumb::cuda

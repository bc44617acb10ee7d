// Blocks of a chunk as BF16 tiles, in the order in which a warpgroup's products take them (warpgroup.h). Codes are mapped back
// by tensor cores, K_hat - mean = s (digits - 1.5) B + z ones + page mean; rows of the cache are turned over. Once a chunk,
// so that a page is unpacked once for all its rows: 6 % of the time of 2048 rows behind 32k tokens on an H200.
//
// A pair of entries: K [D / 64][128 tokens] tile rows, then V [2 entries][D] tile rows, 64 tokens each. The static mean of K
// is left out, to be added to the logits in FP32. A value that is not finite becomes 0, and its token's key NaN: rows that see
// the token become NaN, rows that do not stay as they were.
#pragma once

#include "attention/cuda/coded.h"
#include "attention/cuda/grouped_tiles.h"
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
    PagePlanes planes;
};

template <int kDim>
inline constexpr u32 kKeyPairBytes = u32(kDim / 64 * 128 * kTileRowBytes);
template <int kDim>
inline constexpr u32 kPairBytes = 2 * kKeyPairBytes<kDim>;

template <KernelFormat F>
class Unpack {
    static_assert(F.k.dim == F.v.dim && F.k.dim % 64 == 0);
    static constexpr int kDim = F.k.dim;
    static constexpr int kAreas = F.tokens / kPageTokens;
    static constexpr int kMostK = up(F.k.planes, 64), kMostV = up(F.v.planes, 64);  // groups of planes, a tail is one too
    enum { kOnesK, kOnesV, kMeanV, kStepK, kStepV, kArrays };  // [kDim] floats
    using Layout = PageLayout<F>;

    // Shared memory: BF16 maps [channel][plane]. Rows are that far apart that neither K's 8-byte reads of rows 4 r nor V's
    // 4-byte reads of rows r meet a bank twice.
    static constexpr u32 stride_k(int planes) { return u32(2 * planes + 8); }
    static constexpr u32 stride_v(int planes) { return u32(2 * planes + 16); }
    static constexpr u32 map_v(const PagePlanes& p) { return (kDim * stride_k(p.k) + 15) / 16 * 16; }
    static constexpr u32 channels_at(const PagePlanes& p) { return (map_v(p) + kDim * stride_v(p.v) + 15) / 16 * 16; }

  public:
    static constexpr u32 shared_bytes(const PagePlanes& planes) { return channels_at(planes) + kArrays * kDim * 4 + 16; }

    // Block: n_head_kv * chunk + head, times parts of a slice.
    CRUMB_DEVICE static void run(const UnpackArgs& a, std::byte* memory) {
        using namespace simt;
        u8* const shared = reinterpret_cast<u8*>(memory);
        const int part = block() % a.parts, head = block() / a.parts % a.n_head_kv, chunk = block() / a.parts / a.n_head_kv;
        const HeadArrays& tables = a.heads[head];
        const Unpack unpack(a.planes, shared, a.constants[head]);
        wait_for_previous();
        launch_next();
        const ChunkWork work = a.chunks[chunk];
        const int end = least(work.n_entries(), a.from + a.slice_entries);
        u8* const pairs = a.tiles + size_t(chunk * a.n_head_kv + head) * (a.slice_entries / 2) * kPairBytes<kDim>;
        const auto pair_of = [&](int entry) { return pairs + (entry - a.from) / 2 * kPairBytes<kDim>; };
        int entry = a.from + part;
        if (entry < end && entry < work.n_sink + work.n_coded) { unpack.load_maps(tables); }
        const auto id_of = [&](int e) {
            const bool coded = work.coded(e);
            const u32* const ids = coded ? a.coded_ids : a.exact_ids;
            return e < end ? ids[work.sequence * a.ids_stride + u32(work.block_of(e)) / (coded ? kAreas : 1)] : 0u;
        };
        u32 id = id_of(entry);
#pragma unroll 1
        for (; entry < end; entry += a.parts) {
            const u32 next = id_of(entry + a.parts);
            u8* const pair = pair_of(entry);
            if (work.coded(entry)) {
                const u8* const page = a.coded + id * a.coded_stride + size_t(head) * unpack.page_.at.bytes;
                const int job = warp() % 8;  // halves of K's or V's tokens and channels
                if constexpr (F.grouped()) {
                    unpack.grouped(page, work.block_of(entry) % kAreas, job, pair, entry % 2);
                } else if (job < 4) {
                    unpack.keys(page, job % 2, job / 2, pair, entry % 2);
                } else {
                    unpack.values(page, job % 2, job / 2 % 2, pair, entry % 2);
                }
            } else {
                const u8* const record = a.exact + id * a.exact_stride + size_t(head) * kDim * kPageTokens * 4;
                turn(record, pair, entry % 2, reinterpret_cast<u32*>(unpack.channels_ + kArrays * kDim));
            }
            id = next;
        }
        if (entry == end && end % 2 == 1 && end == work.n_entries()) { clear(pair_of(end), 1); }
    }

  private:
    CRUMB_DEVICE Unpack(const PagePlanes& planes, u8* shared, const HeadConstants& constants)
        : page_(planes), constants_(constants), shared_(shared) {
        const PagePlanes p = {page_.planes_k, page_.planes_v, page_.mean_k, page_.mean_v};
        stride_k_ = stride_k(p.k), stride_v_ = stride_v(p.v), values_ = shared + map_v(p);
        channels_ = reinterpret_cast<float*>(shared + channels_at(p));
    }

    CRUMB_DEVICE const float* channels(int array) const { return channels_ + array * kDim; }

    CRUMB_DEVICE void load_maps(const HeadArrays& t) const {
        using namespace simt;
        const auto load = [&](const u32* table, int planes, u8* to, u32 stride) {  // 4 planes at a time
            for (int i = thread(); i < kDim * planes / 4; i += n_threads()) {
                *reinterpret_cast<Words2*>(to + u32(i / (planes / 4)) * stride + u32(i % (planes / 4) * 8)) = reinterpret_cast<const Words2*>(table)[i];
            }
        };
        load(t.k_unmap, page_.planes_k, shared_, stride_k_);
        load(t.v_unmap, page_.planes_v, values_, stride_v_);
        const float* const arrays[kArrays] = {t.k_ones, t.v_ones, t.v_mean, t.k_mean_step, constants_.v_mean_step};
        for (int k = 0; k < kArrays; k++) {
            for (int i = thread(); i < kDim; i += n_threads()) { channels_[k * kDim + i] = arrays[k] ? arrays[k][i] : 0.0f; }
        }
        sync_block();
    }

    CRUMB_DEVICE void grouped(const u8* page, int area, int job, u8* pair, int side) const {
        using namespace simt;
        const auto write = [](u8* to, const float (&x)[8]) {
            *reinterpret_cast<Words4*>(to) = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
        };
        const int half = job % 2, part = job / 2 % 2;
        if (job < 4) {
            GroupedTiles<F>::keys(page, area, half, part, shared_, stride_k_, [&](int token, int channel, const float (&x)[8]) {
                write(pair + channel / 64 * (128 * kTileRowBytes) + tile_at(64 * side + 32 * half + token, channel % 64 / 8), x);
            });
        } else {
            GroupedTiles<F>::values(page, area, half, part, values_, stride_v_, [&](int channel, int token, float (&x)[8]) {
                const float mean = channels(kMeanV)[channel];
                for (float& y : x) { y += mean; }
                write(pair + kKeyPairBytes<kDim> + side * (kDim * kTileRowBytes) + tile_at(channel, 4 * half + token / 8), x);
            });
        }
    }

    // A pair of digits, codes in bits 0, 1 and 16, 17 of x << shift >> 5: a quarter of their distance from 1.5.
    CRUMB_DEVICE static u32 digits(u32 x, int f) {
        const u32 bits = 2 * f <= 5 ? x << (5 - 2 * f) : x >> (2 * f - 5);
        return simt::add_bf16((bits & 0x00600060u) | 0x3f803f80u, 0xbfb0bfb0u);  // 1 + code / 4 - 1.375
    }

    CRUMB_DEVICE static simt::u32 pack(float a, float b) { return simt::bf16_pair(a, b); }

    // 32 tokens of K, kDim / 2 channels. Rows of A are tokens.
    CRUMB_DEVICE void keys(const u8* page, int half, int part, u8* pair, int side) const {
        using namespace simt;
        const int r = lane() / 4, q = lane() % 4;
        float scale[4], zero[4] = {};
        load_scales<F.k.info>(page + page_.at.key_info, half, r, constants_.k_reference_log2, scale, zero);
        const int groups = full_groups(page_.planes_k);
        const bool tail = has_tail(page_.planes_k);
        Words4 codes[kMostK];  // the tail's are the last
#pragma unroll
        for (int g = 0; g < kMostK; g++) {
            if (g < groups) { codes[g] = *reinterpret_cast<const Words4*>(page + key_load(page_.planes_k, half, g, r, q)); }
        }
        if (tail) { codes[kMostK - 1] = *reinterpret_cast<const Words4*>(page + key_tail_load(page_.planes_k, half, r, q)); }
#pragma unroll 1
        for (int c0 = part * (kDim / 2); c0 < (part + 1) * (kDim / 2); c0 += 32) {
            float sum[2][4][4] = {};
            const auto multiply = [&](const u32 (&a)[2][4], int plane) {
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    const Words2 map = *reinterpret_cast<const Words2*>(shared_ + u32(c0 + 4 * r + b) * stride_k_ + 2 * plane);
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
            for (int g = 0; g < kMostK; g++) {
                if (g >= groups) { continue; }
                const Words4 c = codes[g];
                const u32 w[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
                for (int f = 0; f < 4; f++) {
                    operand(w, f, a);
                    multiply(a, 64 * g + 16 * f + 4 * q);
                }
            }
            if (tail) {
                const Words4 c = codes[kMostK - 1];
                const Pair x[4] = {key_tail_fields(c.x, q), key_tail_fields(c.y, q), key_tail_fields(c.z, q), key_tail_fields(c.w, q)};
                const u32 low[4] = {x[0].first, x[1].first, x[2].first, x[3].first};
                const u32 high[4] = {x[0].second, x[1].second, x[2].second, x[3].second};
                operand(low, 0, a);
                multiply(a, 64 * groups + 4 * q);
                operand(high, 0, a);
                multiply(a, 64 * groups + 16 + 4 * q);
            }
            // Columns 2 q, 2 q + 1 of product b are channels 8 q + b and 8 q + 4 + b.
            const int channel = c0 + 8 * q;
            const float* const ones = channels(kOnesK) + channel;
            const float* const step = channels(kStepK) + channel;
            float add[8] = {};
            if (page_.mean_k) {
#pragma unroll
                for (int i = 0; i < 8; i++) { add[i] = float(int8_t(page[page_.at.key_mean + u32(channel + i)])) * step[i]; }
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
    CRUMB_DEVICE void values(const u8* page, int half, int part, u8* pair, int side) const {
        using namespace simt;
        const int r = lane() / 4, q = lane() % 4;
        float scale[8], zero[8] = {};
        load_scales<F.v.info>(page + page_.at.value_info, half, 2 * q, constants_.v_reference_log2, scale, zero);
        load_scales<F.v.info>(page + page_.at.value_info, half, 2 * q + 1, constants_.v_reference_log2, scale + 4, zero + 4);
        const int u = 8 * half + r;
        const int groups = full_groups(page_.planes_v);
        const bool tail = has_tail(page_.planes_v);
        Words2 codes[kMostV][2];  // the tail's are the last
        const auto load = [&](Words2 (&to)[2], int block, int swap) {
            const u8* const quad = page + page_.at.value_codes + kBlockBytes * block + 8 * (q % 2);
            to[0] = *reinterpret_cast<const Words2*>(quad + 16 * ((q / 2) ^ swap));
            to[1] = *reinterpret_cast<const Words2*>(quad + 16 * ((q / 2 + 2) ^ swap));
        };
#pragma unroll
        for (int g = 0; g < kMostV; g++) {
            if (g < groups) { load(codes[g], (u / 4 * groups + g) * 4 + u % 4, u & 2); }
        }
        // A block of the tail has quads 2 u and 2 u + 1, in fields 0, 1 and 2, 3.
        if (tail) { load(codes[kMostV - 1], 16 * groups + u / 2, (u / 2) & 2); }
#pragma unroll 1
        for (int c0 = part * (kDim / 2); c0 < (part + 1) * (kDim / 2); c0 += 32) {
            float sum[2][4][4] = {};
            // w: planes 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of a field, 4 tokens each.
            const auto multiply = [&](const u32 (&w)[4], int f, int plane) {
                u32 a[2][4];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    const u8* const map = values_ + u32(c0 + 16 * m + r) * stride_v_ + 2 * (plane + 2 * q);
                    a[m][0] = *reinterpret_cast<const u32*>(map), a[m][1] = *reinterpret_cast<const u32*>(map + 8 * stride_v_);
                    a[m][2] = *reinterpret_cast<const u32*>(map + 16), a[m][3] = *reinterpret_cast<const u32*>(map + 8 * stride_v_ + 16);
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
            for (int g = 0; g < kMostV; g++) {
                if (g >= groups) { continue; }
                const u32 w[4] = {codes[g][0].x, codes[g][0].y, codes[g][1].x, codes[g][1].y};
#pragma unroll
                for (int f = 0; f < 4; f++) { multiply(w, f, 64 * g + 16 * f); }
            }
            if (tail) {
                const int shift = 4 * (u % 2);
                const Words2(&c)[2] = codes[kMostV - 1];
                const u32 w[4] = {c[0].x >> shift, c[0].y >> shift, c[1].x >> shift, c[1].y >> shift};
                multiply(w, 0, 64 * groups);
                multiply(w, 1, 64 * groups + 16);
            }
#pragma unroll
            for (int row = 0; row < 4; row++) {
                const int channel = c0 + 16 * (row / 2) + 8 * (row % 2) + r;
                const float ones = channels(kOnesV)[channel];
                float add = channels(kMeanV)[channel];
                if (page_.mean_v) {
                    add = fma_exact(float(int8_t(page[page_.at.value_mean + u32(channel)])),
                                    channels(kStepV)[channel], add);
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

    const Layout page_;
    const HeadConstants& constants_;
    u8* shared_;   // K's map
    u8* values_;   // V's
    float* channels_;
    u32 stride_k_, stride_v_;
};

}  // namespace crumb::cuda

// Attention of many rows over the tiles of prefill_tiles.h. A block takes 128 columns, rows times query heads of a KV head:
// two warpgroups of 64, and a warp that copies pairs of tiles into a ring of shared memory for both. S = Q K^T of a
// pair runs on the tensor cores together with O += P V of the one before, while the other warpgroup is at its softmax.
//
// Logits are in units of log2, relative to a whole power of two that is raised only when a logit exceeds it by 8: sums are
// rarely rescaled, and exactly. Rows are masked where a pair holds tokens that not all rows see: edges depend on rows, tiles
// on blocks.
//
// A slice ends with sums in place of outputs, where the next one goes on; the last one divides.
#pragma once

#include <math.h>

#include "attention/cuda/prefill_tiles.h"

namespace crumb::cuda {

inline constexpr int kPrefillWarps = 12, kRowWarps = 8;  // of a block; of the third warpgroup, the first warp copies
inline constexpr float kRaise = 8.0f;

struct PrefillArgs {
    const QueryRow* rows;  // [n_chunks][rows_per_chunk]
    int n_chunks, rows_per_chunk, rows_per_tile, tiles_per_chunk;
    int n_head_kv, group;
    int sink;
    const ChunkWork* chunks;
    const PrefillTile* tiles;
    int from, slice_entries;
    bool first_slice, last_slice;
    const u8* pairs;  // [chunk][KV head][slice_entries / 2]
    float scale, softcap;  // of logits, softcap times log2(e)
    const float* q;
    size_t q_token_stride, q_head_stride;
    const HeadArrays* heads;
    const float* sinks;
    float* out;
    size_t out_stride;
    float* state;  // [chunk][row][head][2]: top, sum
};

template <int kDim, bool kSoftcap>
class Prefill {
    static constexpr int kPairTokens = 128;
    static constexpr int kStages = kDim == 64 ? 4 : 3;
    static constexpr int kLogitTiles = kPairTokens / 8, kOutTiles = kDim / 8, kSteps = kDim / 16;
    static constexpr u32 kBytes = kKeyPairBytes<kDim>;
    static constexpr u32 kBarriers = 2 * kStages * kBytes;

  public:
    static constexpr u32 kShared = kBarriers + 4 * kStages * 8;

    CRUMB_DEVICE static void run(const PrefillArgs& a, std::byte* memory) {
        using namespace simt;
        u8* const shared = reinterpret_cast<u8*>(memory);
        u64* const barriers = reinterpret_cast<u64*>(shared + kBarriers);
        if (warp() == 0) {
            for (int s = 0; s < 2 * kStages; s++) {
                copy_init(barriers + s);
                reach_init(barriers + 2 * kStages + s, kRowWarps);
            }
            copy_ready();
        }
        sync_block();
        wait_for_previous();
        launch_next();
        if (warp() < kRowWarps) {
            take_registers<240>();
            Consumer(a, shared, barriers).run();
        } else {
            give_registers<24>();
            if (warp() == kRowWarps) { copy(a, shared, barriers); }
        }
    }

  private:
    struct Item {
        int tile, head, chunk;
    };
    // The longest tiles come first; blocks take items in turns, forth and back.
    CRUMB_DEVICE static bool next_item(const PrefillArgs& a, int turn, Item& item) {
        using namespace simt;
        const int i = turn * n_blocks() + (turn % 2 ? n_blocks() - 1 - block() : block()), n = a.n_chunks * a.tiles_per_chunk;
        item.tile = n - 1 - i / a.n_head_kv, item.head = i % a.n_head_kv;
        item.chunk = item.tile / a.tiles_per_chunk;
        return i < n * a.n_head_kv;
    }

    CRUMB_DEVICE static void copy(const PrefillArgs& a, u8* shared, u64* barriers) {
        using namespace simt;
        u32 stage = 0, round = 0;
        Item item;
#pragma unroll 1
        for (int turn = 0; turn * n_blocks() < a.n_chunks * a.tiles_per_chunk * a.n_head_kv; turn++) {
            if (!next_item(a, turn, item)) { continue; }
            const PairList list(a.tiles[item.tile], a.from, a.from + a.slice_entries);
            const u8* const pairs = a.pairs + size_t(item.chunk * a.n_head_kv + item.head) * (a.slice_entries / 2) * kPairBytes<kDim>;
#pragma unroll 1
            for (int i = 0; i < list.size(); i++) {
                const u8* const pair = pairs + size_t(list.at(i) - a.from / 2) * kPairBytes<kDim>;
#pragma unroll
                for (u32 side = 0; side < 2; side++) {
                    const u32 slot = side * kStages + stage;
                    if (round > 0) { reach_wait(barriers + 2 * kStages + slot, (round - 1) & 1); }
                    copy_begin(barriers + slot, shared + slot * kBytes, pair + side * kBytes, kBytes, Reuse::soon);
                }
                if (++stage == kStages) { stage = 0, round++; }
            }
        }
    }

    class Consumer {
      public:
        CRUMB_DEVICE Consumer(const PrefillArgs& args, u8* shared, u64* barriers) : a(args), shared_(shared), barriers_(barriers) {}

        CRUMB_DEVICE void run() {
            using namespace simt;
            Item item;
#pragma unroll 1
            for (int turn = 0; turn * n_blocks() < a.n_chunks * a.tiles_per_chunk * a.n_head_kv; turn++) {
                if (next_item(a, turn, item)) { run(item); }
            }
        }

      private:
        CRUMB_DEVICE void run(const Item& item) {
            using namespace simt;
            begin(item);
            const PrefillTile& tile = a.tiles[item.tile];
            const PairList list(tile, a.from, a.from + a.slice_entries);
            const ChunkWork& work = a.chunks[item.chunk];
            const int n = list.size();
            Stage keys = stage_, values = stage_;
            float s[kLogitTiles][4];
            u32 p[kPairTokens / 16][4];
            if (n > 0) {
                logits(s, keys);
                products_wait<0>();
                products_hold(s);
                done(keys, 0);
                float factor[2];
                soften(s, tile, work, 2 * list.at(0), factor);
                rescale(factor);
                pack(s, p);
            }
#pragma unroll 1
            for (int i = 1; i < n; i++) {
                logits(s, keys);
                weigh(p, values);
                products_wait<1>();
                products_hold(s);
                done(keys, 0);
                float factor[2];
                const bool raised = soften(s, tile, work, 2 * list.at(i), factor);
                products_wait<0>();
                products_hold(o_);
                done(values, 1);
                if (raised) { rescale(factor); }
                pack(s, p);
            }
            if (n > 0) {
                weigh(p, values);
                products_wait<0>();
                products_hold(o_);
                done(values, 1);
            }
            stage_ = keys;
            finish(item);
        }

        struct Stage {
            u32 slot = 0, phase = 0;
        };

        CRUMB_DEVICE void done(Stage& stage, u32 side) {
            simt::reach(barriers_ + 2 * kStages + side * kStages + stage.slot);
            if (++stage.slot == kStages) { stage.slot = 0, stage.phase ^= 1; }
        }

        // S of a pair, as a group of products.
        CRUMB_DEVICE void logits(float (&s)[kLogitTiles][4], const Stage& stage) {
            simt::copy_wait(barriers_ + stage.slot, stage.phase);
            const u8* const keys = shared_ + stage.slot * kBytes;
            products_begin();
#pragma unroll
            for (int k = 0; k < kSteps; k++) {
                product<kPairTokens>(s, q_[k], keys + k / 4 * (kPairTokens * kTileRowBytes), k % 4 * 32, k > 0);
            }
            products_end();
        }

        // O += P V.
        CRUMB_DEVICE void weigh(const u32 (&p)[kPairTokens / 16][4], const Stage& stage) {
            simt::copy_wait(barriers_ + kStages + stage.slot, stage.phase);
            const u8* const values = shared_ + (kStages + stage.slot) * kBytes;
            products_begin();
#pragma unroll
            for (int k = 0; k < kPairTokens / 16; k++) {
                product<kDim>(o_, p[k], values + k / 4 * (kDim * kTileRowBytes), k % 4 * 32, true);
            }
            products_end();
        }

        CRUMB_DEVICE static void pack(const float (&s)[kLogitTiles][4], u32 (&p)[kPairTokens / 16][4]) {
#pragma unroll
            for (int k = 0; k < kPairTokens / 16; k++) {
#pragma unroll
                for (int i = 0; i < 4; i++) { p[k][i] = simt::bf16_pair(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]); }
            }
        }

        CRUMB_DEVICE void rescale(const float (&factor)[2]) {
#pragma unroll
            for (int j = 0; j < kOutTiles; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) { o_[j][i] *= factor[i / 2]; }
            }
        }

        // Logits become weights. Whether older sums must be multiplied by factor, in any row of the warp.
        CRUMB_DEVICE bool soften(float (&s)[kLogitTiles][4], const PrefillTile& tile, const ChunkWork& work, int entry, float (&factor)[2]) {
            using namespace simt;
            float unit = a.scale * kLog2e;
            if constexpr (kSoftcap) {
                const float inner = unit / a.softcap;
                unit = 1;
#pragma unroll
                for (int j = 0; j < kLogitTiles; j++) {
                    const bool coded = work.coded(entry + j / (kLogitTiles / 2));
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        s[j][i] = a.softcap * tanh_exact(fma_exact(s[j][i], inner, coded ? mean_[i / 2] / a.softcap : 0.0f));
                    }
                }
            }
            const int q = lane() % 4;
            float offset[2][2], tops[2][2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const bool coded = work.coded(entry + e);
                const bool there = entry + e < work.n_entries();
                const int from = there ? kPageTokens * work.block_of(entry + e) : 0, to = from + kPageTokens;
                const bool all = coded ? from >= tile.coded_from && to <= tile.coded_to
                                       : to <= tile.end_of_all && ((from >= tile.begin && to <= a.sink) || from >= tile.window);
                if (!all || !there) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        int begin = 0, end = 0, hole = 0, hole_end = 0;  // what the row sees, but for a hole
                        if (row_[h] && there) {
                            const QueryRow row = *row_[h];
                            begin = row.begin, end = row.end;
                            if (coded) {
                                begin = most(begin, a.sink), end = least(end, row.coded_end);
                            } else {
                                hole = a.sink, hole_end = row.coded_end;
                            }
                        }
#pragma unroll
                        for (int j = 0; j < kLogitTiles / 2; j++) {
#pragma unroll
                            for (int i = 0; i < 2; i++) {
                                const int token = from + 8 * j + 2 * q + i;
                                const bool sees = token >= begin && token < end && !(token >= hole && token < hole_end);
                                float& x = s[e * (kLogitTiles / 2) + j][2 * h + i];
                                x = sees ? x : -float_of(0x7f800000u);
                            }
                        }
                    }
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    offset[e][h] = coded && !kSoftcap ? mean_[h] : 0.0f;
                    float top = s[e * (kLogitTiles / 2)][2 * h];
#pragma unroll
                    for (int j = 0; j < kLogitTiles / 2; j++) {
                        top = max_of(top, max_of(s[e * (kLogitTiles / 2) + j][2 * h], s[e * (kLogitTiles / 2) + j][2 * h + 1]));
                    }
                    tops[e][h] = fma_exact(top, unit, offset[e][h]);
                }
            }
            bool raise = false;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = max_of(tops[0][h], tops[1][h]);
                top = max_of(top, shuffle_xor(top, 1));
                top = max_of(top, shuffle_xor(top, 2));
                factor[h] = 1;
                if (top > top_[h] + kRaise && top < float_of(0x7f800000u)) {
                    const float raised = ceilf(top);
                    factor[h] = exp2_fast(top_[h] - raised);
                    top_[h] = raised, raise = true;
                }
                sum_[h] *= factor[h];
                float sum = 0;
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float less = offset[e][h] - top_[h];
#pragma unroll
                    for (int j = 0; j < kLogitTiles / 2; j++) {
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            float& x = s[e * (kLogitTiles / 2) + j][2 * h + i];
                            x = exp2_fast(fma_exact(x, unit, less));
                            sum += x;
                        }
                    }
                }
                sum_[h] += sum;
            }
            return any(raise);
        }

        // Queries, and sums so far.
        CRUMB_DEVICE void begin(const Item& item) {
            using namespace simt;
            const int r = lane() / 4, q = lane() % 4;
            const float* const mean = a.heads[item.head].k_mean;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int column = 16 * warp() + r + 8 * h, row = item.tile % a.tiles_per_chunk * a.rows_per_tile + column / a.group;
                const bool used = column < a.rows_per_tile * a.group && row < a.rows_per_chunk;
                row_[h] = used ? a.rows + size_t(item.chunk) * a.rows_per_chunk + row : nullptr;
                if (used && row_[h]->token == kNoToken) { row_[h] = nullptr; }
                head_[h] = item.head * a.group + column % a.group;
                const float* const from = row_[h] ? a.q + row_[h]->token * a.q_token_stride + size_t(head_[h]) * a.q_head_stride : nullptr;
                float dot = 0;
#pragma unroll
                for (int k = 0; k < kSteps; k++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int channel = 16 * k + 8 * i + 2 * q;
                        Floats2 x = {};
                        if (from) { x = *reinterpret_cast<const Floats2*>(from + channel); }
                        q_[k][2 * i + h] = bf16_pair(x.x, x.y);
                        if (mean) { dot = fma_exact(x.x, mean[channel], fma_exact(x.y, mean[channel + 1], dot)); }
                    }
                }
                dot += shuffle_xor(dot, 1);
                dot += shuffle_xor(dot, 2);
                mean_[h] = dot * a.scale * kLog2e;
                top_[h] = kUnset, sum_[h] = 0;
                const bool resumed = !a.first_slice && row_[h];
                if (resumed) {
                    const Floats2 state = *reinterpret_cast<const Floats2*>(state_of(h));
                    top_[h] = state.x, sum_[h] = q == 0 ? state.y : 0.0f;
                }
                const float* const o = resumed ? out_of(h) : nullptr;
#pragma unroll
                for (int j = 0; j < kOutTiles; j++) {
                    Floats2 x = {};
                    if (o) { x = *reinterpret_cast<const Floats2*>(o + 8 * j + 2 * q); }
                    o_[j][2 * h] = x.x, o_[j][2 * h + 1] = x.y;
                }
            }
        }

        CRUMB_DEVICE float* out_of(int h) const { return a.out + row_[h]->token * a.out_stride + size_t(head_[h]) * kDim; }
        CRUMB_DEVICE float* state_of(int h) const {
            return a.state + 2 * (size_t(row_[h] - a.rows) * size_t(a.n_head_kv * a.group) + size_t(head_[h]));
        }

        CRUMB_DEVICE void finish(const Item&) {
            using namespace simt;
            const int q = lane() % 4;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float sum = sum_[h];
                sum += shuffle_xor(sum, 1);
                sum += shuffle_xor(sum, 2);
                if (!row_[h]) { continue; }
                float factor = 1;
                if (!a.last_slice) {
                    if (q == 0) { *reinterpret_cast<Floats2*>(state_of(h)) = {top_[h], sum}; }
                } else {
                    if (a.sinks) {
                        const float sink = a.sinks[head_[h]] * kLog2e, top = max_of(top_[h], sink);
                        factor = exp2_fast(top_[h] - top);
                        sum = fma_exact(sum, factor, exp2_fast(sink - top));
                    }
                    factor = sum == 0 ? 0.0f : factor / sum;
                }
                float* const o = out_of(h);
#pragma unroll
                for (int j = 0; j < kOutTiles; j++) {
                    *reinterpret_cast<Floats2*>(o + 8 * j + 2 * q) = {o_[j][2 * h] * factor, o_[j][2 * h + 1] * factor};
                }
            }
        }

        const PrefillArgs& a;
        u8* shared_;
        u64* barriers_;
        Stage stage_;
        u32 q_[kSteps][4];
        float o_[kOutTiles][4];
        float top_[2], sum_[2], mean_[2];
        const QueryRow* row_[2];
        int head_[2];
    };
};

}  // namespace crumb::cuda

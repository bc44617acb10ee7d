// Attention of many rows over the tiles of prefill_tiles.h. A block takes 128 columns, rows times query heads of a KV head:
// two warpgroups of 64. A third one feeds them: a warp copies pairs of tiles into a ring of shared memory, the others lay out
// the queries of the next 128 columns. S = Q K^T of a pair runs on the tensor cores together with O += P V of the one
// before, while the other warpgroup is at its softmax. (On an H200, making the two take turns by barriers cost 12
// to 17 %; without any copies the kernel was 3 to 8 % faster.)
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

inline constexpr int kPrefillWarps = 12, kRowWarps = 8, kQueryWarps = 3;  // of a block
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
    // Behind the ring: queries in BF16, [warp][step][lane][4] operands; of every column, what K's mean adds to its logits,
    // and its row of the output.
    static constexpr u32 kQueries = 2 * kStages * kBytes, kColumns = kQueries + kTileColumns * kDim * 2;
    static constexpr u32 kEntries = kColumns + kTileColumns * 8;
    static constexpr u32 kBarriers = kEntries + kStages * 8;  // of every stage, its first entry

    struct Column {
        float mean;
        u32 token;  // kNoToken: there is none
    };
    enum { kQueriesThere = 4 * kStages, kQueriesTaken, kAllBarriers };

  public:
    static constexpr u32 kShared = kBarriers + kAllBarriers * 8;

    CRUMB_DEVICE static void run(const PrefillArgs& a, std::byte* memory) {
        using namespace simt;
        u8* const shared = reinterpret_cast<u8*>(memory);
        u64* const barriers = reinterpret_cast<u64*>(shared + kBarriers);
        if (warp() == 0) {
            for (int s = 0; s < 2 * kStages; s++) {
                copy_init(barriers + s);
                reach_init(barriers + 2 * kStages + s, kRowWarps);
            }
            reach_lanes_init(barriers + kQueriesThere, kQueryWarps);
            reach_lanes_init(barriers + kQueriesTaken, kRowWarps);
            copy_ready();
        }
        sync_block();
        wait_for_previous();
        launch_next();
        if (warp() < kRowWarps) {
            take_registers<232>();
            Consumer(a, shared).run();
        } else {
            give_registers<40>();
            if (warp() == kRowWarps) { copy(a, shared, barriers); } else { load_queries(a, shared, barriers); }
        }
    }

  private:
    struct Item {
        int tile, head, chunk;
        CRUMB_DEVICE Item(const PrefillArgs& a, int i) {
            tile = a.n_chunks * a.tiles_per_chunk - 1 - i / a.n_head_kv, head = i % a.n_head_kv;
            chunk = tile / a.tiles_per_chunk;
        }
    };
    // What the block does in a turn: the longest tiles come first, blocks take items forth and back. -1: nothing.
    CRUMB_DEVICE static int item_of(const PrefillArgs& a, int turn) {
        using namespace simt;
        const int i = turn * n_blocks() + (turn % 2 ? n_blocks() - 1 - block() : block());
        return i < n_items(a) ? i : -1;
    }
    CRUMB_DEVICE static int n_items(const PrefillArgs& a) { return a.n_chunks * a.tiles_per_chunk * a.n_head_kv; }

    CRUMB_DEVICE static void copy(const PrefillArgs& a, u8* shared, u64* barriers) {
        using namespace simt;
        u32 stage = 0, round = 0;
#pragma unroll 1
        for (int turn = 0; turn * n_blocks() < n_items(a); turn++) {
            const int index = item_of(a, turn);
            if (index < 0) { continue; }
            const Item item(a, index);
            const PairList list(a.tiles[item.tile], a.from, a.from + a.slice_entries);
            const u8* const pairs = a.pairs + size_t(item.chunk * a.n_head_kv + item.head) * (a.slice_entries / 2) * kPairBytes<kDim>;
#pragma unroll 1
            for (int i = 0; i < list.size(); i++) {
                const int entry = 2 * list.at(i);
                const u8* const pair = pairs + size_t(entry - a.from) / 2 * kPairBytes<kDim>;
#pragma unroll
                for (u32 side = 0; side < 2; side++) {
                    const u32 slot = side * kStages + stage;
                    if (round > 0) { reach_wait(barriers + 2 * kStages + slot, (round - 1) & 1); }
                    if (side == 0 && lane() == 0) { reinterpret_cast<int*>(shared + kEntries)[stage] = entry; }
                    copy_begin(barriers + slot, shared + slot * kBytes, pair + side * kBytes, kBytes, Reuse::soon);
                }
                if (++stage == kStages) { stage = 0, round++; }
            }
        }
    }

    // The row of a column of a tile, by its number in its chunk, or -1.
    CRUMB_DEVICE static int row_of(const PrefillArgs& a, const Item& item, int column) {
        const int row = item.tile % a.tiles_per_chunk * a.rows_per_tile + column / a.group;
        return column < a.rows_per_tile * a.group && row < a.rows_per_chunk ? row : -1;
    }

    CRUMB_DEVICE static void load_queries(const PrefillArgs& a, u8* shared, u64* barriers) {
        using namespace simt;
        constexpr int kPairs = kDim / 64, kTogether = 4;  // pairs of channels of a lane; columns side by side
        u32* const queries = reinterpret_cast<u32*>(shared + kQueries);
        Column* const columns = reinterpret_cast<Column*>(shared + kColumns);
        u32 round = 0;
#pragma unroll 1
        for (int turn = 0; turn * n_blocks() < n_items(a); turn++) {
            const int index = item_of(a, turn);
            if (index < 0) { continue; }
            const Item item(a, index);
            if (round > 0) { reach_wait(barriers + kQueriesTaken, (round - 1) & 1); }
            round++;
            const float* const mean = a.heads[item.head].k_mean;
#pragma unroll 1
            for (int first = (warp() - kRowWarps - 1) * kTogether; first < kTileColumns; first += kQueryWarps * kTogether) {
                u32 tokens[kTogether];
                Floats2 x[kTogether][kPairs];
#pragma unroll
                for (int i = 0; i < kTogether; i++) {
                    const int row = row_of(a, item, first + i);
                    tokens[i] = row < 0 ? kNoToken : a.rows[size_t(item.chunk) * a.rows_per_chunk + row].token;
                }
#pragma unroll
                for (int i = 0; i < kTogether; i++) {
                    const size_t head = size_t(item.head * a.group + (first + i) % a.group);
                    const float* const from = a.q + tokens[i] * a.q_token_stride + head * a.q_head_stride;
#pragma unroll
                    for (int p = 0; p < kPairs; p++) {
                        x[i][p] = {};
                        if (tokens[i] != kNoToken) { x[i][p] = reinterpret_cast<const Floats2*>(from)[kPairs * lane() + p]; }
                    }
                }
#pragma unroll
                for (int i = 0; i < kTogether; i++) {
                    const int column = first + i, r = column % 8, h = column / 8 % 2;
                    float dot = 0;
#pragma unroll
                    for (int p = 0; p < kPairs; p++) {
                        const int pair = kPairs * lane() + p, q = pair % 4, k = pair / 8;  // of a row; 8 a step
                        queries[((column / 16 * kSteps + k) * 32 + 4 * r + q) * 4 + 2 * (pair / 4 % 2) + h] = bf16_pair(x[i][p].x, x[i][p].y);
                        if (mean) { dot = fma_exact(x[i][p].x, mean[2 * pair], fma_exact(x[i][p].y, mean[2 * pair + 1], dot)); }
                    }
                    if (mean) {
#pragma unroll
                        for (int o = 16; o > 0; o /= 2) { dot += shuffle_xor(dot, o); }
                    }
                    if (lane() == 0) { columns[column] = {dot * a.scale * kLog2e, tokens[i]}; }
                }
            }
            reach_lanes(barriers + kQueriesThere);
        }
    }

    class Consumer {
      public:
        CRUMB_DEVICE Consumer(const PrefillArgs& args, u8* shared) : a(args), shared_(shared), ring_(tile_address(shared)) {}

        CRUMB_DEVICE void run() {
            using namespace simt;
#pragma unroll 1
            for (int turn = 0; turn * n_blocks() < n_items(a); turn++) {
                index_ = item_of(a, turn);
                if (index_ >= 0) { run_item(); }
            }
        }

      private:
        CRUMB_DEVICE void run_item() {
            using namespace simt;
            begin();
            const int n = look();
            Stage keys = stage_, values = stage_;
            float s[kLogitTiles][4];
            u32 p[kPairTokens / 16][4];
            if (n > 0) {
                logits(s, keys);
                products_wait<0>();
                products_hold(s);
                const int entry = entry_of(keys);
                done(keys, 0);
                float factor[2];
                soften(s, entry, factor);
                rescale(factor);
                pack(s, p);
            }
#pragma unroll 1
            for (int i = 1; i < n; i++) {
                logits(s, keys);
                weigh(p, values);
                products_wait<1>();
                products_hold(s);
                const int entry = entry_of(keys);
                done(keys, 0);
                float factor[2];
                const bool raised = soften(s, entry, factor);
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
            finish();
        }

        struct Stage {
            u32 slot = 0, phase = 0;
        };

        CRUMB_DEVICE u64* barriers() const { return reinterpret_cast<u64*>(shared_ + kBarriers); }
        // Read by the lane that arrives when the stage is done with.
        CRUMB_DEVICE int entry_of(const Stage& stage) const {
            const int entry = simt::lane() == 0 ? reinterpret_cast<const int*>(shared_ + kEntries)[stage.slot] : 0;
            return int(simt::shuffle(simt::u32(entry), 0));
        }

        // The number of the item's pairs, and which entries all of its rows see through codes.
        CRUMB_DEVICE int look() {
            const Item item(a, index_);
            const PrefillTile& tile = a.tiles[item.tile];
            const ChunkWork& work = a.chunks[item.chunk];
            coded_from_ = work.n_sink, n_coded_ = work.n_coded;
            clean_from_ = up(tile.coded_from, kPageTokens) - work.coded_first + coded_from_;
            clean_to_ = tile.coded_to / kPageTokens - work.coded_first + coded_from_;
            return PairList(tile, a.from, a.from + a.slice_entries).size();
        }

        CRUMB_DEVICE void done(Stage& stage, u32 side) {
            simt::reach(barriers() + 2 * kStages + side * kStages + stage.slot);
            if (++stage.slot == kStages) { stage.slot = 0, stage.phase ^= 1; }
        }

        // S of a pair, as a group of products.
        CRUMB_DEVICE void logits(float (&s)[kLogitTiles][4], const Stage& stage) {
            simt::copy_wait(barriers() + stage.slot, stage.phase);
            const TileAddress keys = ring_ + stage.slot * kBytes;
            products_begin();
#pragma unroll
            for (int k = 0; k < kSteps; k++) {
                product<kPairTokens>(s, q_[k], keys + k / 4 * (kPairTokens * kTileRowBytes), k % 4 * 32, k > 0);
            }
            products_end();
        }

        // O += P V.
        CRUMB_DEVICE void weigh(const u32 (&p)[kPairTokens / 16][4], const Stage& stage) {
            simt::copy_wait(barriers() + kStages + stage.slot, stage.phase);
            const TileAddress values = ring_ + (kStages + stage.slot) * kBytes;
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

        // What rows do not see becomes minus infinity.
        CRUMB_DEVICE void hide(float (&s)[kLogitTiles][4], int entry) const {
            using namespace simt;
            const Item item(a, index_);
            const PrefillTile& tile = a.tiles[item.tile];
            const ChunkWork& work = a.chunks[item.chunk];
            const int q = lane() % 4;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const bool coded = work.coded(entry + e), there = entry + e < work.n_entries();
                const int from = there ? kPageTokens * work.block_of(entry + e) : 0, to = from + kPageTokens;
                const bool all = coded ? from >= tile.coded_from && to <= tile.coded_to
                                       : to <= tile.end_of_all && ((from >= tile.begin && to <= a.sink) || from >= tile.window);
                if (all && there) { continue; }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u64 sees = 0;  // a bit a token
                    if (token_[h] != kNoToken && there) {
                        const QueryRow row = a.rows[size_t(item.chunk) * a.rows_per_chunk + row_of(a, item, first_column() + 8 * h)];
                        const auto before = [&](int t) { return t <= from ? 0 : t >= to ? ~u64(0) : (u64(1) << (t - from)) - 1; };
                        const u64 codes = before(row.coded_end) & ~before(a.sink);
                        sees = before(row.end) & ~before(row.begin) & (coded ? codes : ~codes);
                    }
                    sees >>= 2 * q;
#pragma unroll
                    for (int j = 0; j < kLogitTiles / 2; j++) {
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            float& x = s[e * (kLogitTiles / 2) + j][2 * h + i];
                            x = sees >> (8 * j + i) & 1 ? x : -float_of(0x7f800000u);
                        }
                    }
                }
            }
        }

        // Logits become weights. Whether older sums must be multiplied by factor, in any row of the warp.
        CRUMB_DEVICE bool soften(float (&s)[kLogitTiles][4], int entry, float (&factor)[2]) {
            using namespace simt;
            float unit = a.scale * kLog2e;
            if constexpr (kSoftcap) {
                const float inner = unit / a.softcap;
                unit = 1;
#pragma unroll
                for (int j = 0; j < kLogitTiles; j++) {
                    const bool coded = u32(entry + j / (kLogitTiles / 2) - coded_from_) < u32(n_coded_);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        s[j][i] = a.softcap * tanh_exact(fma_exact(s[j][i], inner, coded ? mean_[i / 2] / a.softcap : 0.0f));
                    }
                }
            }
            if (entry < clean_from_ || entry + 2 > clean_to_) { hide(s, entry); }
            float offset[2][2], tops[2][2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    offset[e][h] = u32(entry + e - coded_from_) < u32(n_coded_) && !kSoftcap ? mean_[h] : 0.0f;
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
        CRUMB_DEVICE void begin() {
            using namespace simt;
            const Item item(a, index_);
            const int q = lane() % 4;
            reach_wait(barriers() + kQueriesThere, queries_phase_);
            queries_phase_ ^= 1;
            const Words4* const queries = reinterpret_cast<const Words4*>(shared_ + kQueries) + warp() * kSteps * kWarp + lane();
#pragma unroll
            for (int k = 0; k < kSteps; k++) {
                const Words4 w = queries[k * kWarp];
                q_[k][0] = w.x, q_[k][1] = w.y, q_[k][2] = w.z, q_[k][3] = w.w;
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const Column column = reinterpret_cast<const Column*>(shared_ + kColumns)[first_column() + 8 * h];
                mean_[h] = column.mean, token_[h] = column.token;
                top_[h] = kUnset, sum_[h] = 0;
            }
            reach_lanes(barriers() + kQueriesTaken);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const bool resumed = !a.first_slice && token_[h] != kNoToken;
                if (resumed) {
                    const Floats2 state = *reinterpret_cast<const Floats2*>(state_of(item, h));
                    top_[h] = state.x, sum_[h] = q == 0 ? state.y : 0.0f;
                }
                const float* const o = out_of(item, h);
#pragma unroll
                for (int j = 0; j < kOutTiles; j++) {
                    Floats2 x = {};
                    if (resumed) { x = *reinterpret_cast<const Floats2*>(o + 8 * j + 2 * q); }
                    o_[j][2 * h] = x.x, o_[j][2 * h + 1] = x.y;
                }
            }
        }

        CRUMB_DEVICE static int first_column() { return 16 * simt::warp() + simt::lane() / 4; }
        CRUMB_DEVICE int head_of(const Item& item, int h) const { return item.head * a.group + (first_column() + 8 * h) % a.group; }
        CRUMB_DEVICE float* out_of(const Item& item, int h) const {
            return a.out + token_[h] * a.out_stride + size_t(head_of(item, h)) * kDim;
        }
        CRUMB_DEVICE float* state_of(const Item& item, int h) const {
            const size_t row = size_t(item.chunk) * a.rows_per_chunk + row_of(a, item, first_column() + 8 * h);
            return a.state + 2 * (row * size_t(a.n_head_kv * a.group) + size_t(head_of(item, h)));
        }

        CRUMB_DEVICE void finish() {
            using namespace simt;
            const Item item(a, index_);
            const int q = lane() % 4;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float sum = sum_[h];
                sum += shuffle_xor(sum, 1);
                sum += shuffle_xor(sum, 2);
                if (token_[h] == kNoToken) { continue; }
                float factor = 1;
                if (!a.last_slice) {
                    if (q == 0) { *reinterpret_cast<Floats2*>(state_of(item, h)) = {top_[h], sum}; }
                } else {
                    if (a.sinks) {
                        const float sink = a.sinks[head_of(item, h)] * kLog2e, top = max_of(top_[h], sink);
                        factor = exp2_fast(top_[h] - top);
                        sum = fma_exact(sum, factor, exp2_fast(sink - top));
                    }
                    factor = sum == 0 ? 0.0f : factor / sum;
                }
                float* const o = out_of(item, h);
#pragma unroll
                for (int j = 0; j < kOutTiles; j++) {
                    *reinterpret_cast<Floats2*>(o + 8 * j + 2 * q) = {o_[j][2 * h] * factor, o_[j][2 * h + 1] * factor};
                }
            }
        }

        const PrefillArgs& a;
        u8* shared_;
        TileAddress ring_;
        Stage stage_;
        u32 q_[kSteps][4];
        float o_[kOutTiles][4];
        float top_[2], sum_[2], mean_[2];
        u32 token_[2];
        int index_;  // of the item
        u32 queries_phase_ = 0;
        int coded_from_, n_coded_, clean_from_, clean_to_;  // entries: of codes, of codes that all rows see
    };
};

}  // namespace crumb::cuda

// What a chunk of many query rows reads. A chunk is rows of one sequence; 128 columns of it (rows times query heads of a KV
// head) are a tile. What a chunk reads becomes tiles of BF16 numbers first (prefill_tiles.h), one an entry: a block read
// through its codes, or a block read exactly; a block that some rows read one way and some the other is two entries.
// Entries are numbered: exact blocks with sinks, blocks of codes, other exact blocks, each in order.
// Two neighbours are a pair, which is what the kernel takes in one go. A slice is kSliceEntries entries of every chunk: as
// many as there is memory for, whatever the context.
#pragma once

#include <crumb/attention.h>

#include "attention/cuda/plan.h"

namespace crumb::cuda {

inline constexpr int kTileColumns = 128;

// Numbers of blocks and of entries: [first, first + n).
struct ChunkWork {
    u32 sequence;
    int sink_first, n_sink;
    int coded_first, n_coded;
    int window_first, n_window;

    CRUMB_BOTH int n_entries() const { return n_sink + n_coded + n_window; }
    CRUMB_BOTH bool coded(int entry) const { return u32(entry - n_sink) < u32(n_coded); }
    CRUMB_BOTH int block_of(int entry) const {
        const int coded = entry - n_sink, window = coded - n_coded;
        return coded < 0 ? sink_first + entry : window < 0 ? coded_first + coded : window_first + window;
    }
};

enum { kSinks, kCodes, kWindow, kPieces };

// Entries of a tile, in three pieces, and the tokens that all of its rows see.
struct PrefillTile {
    int first[kPieces], end[kPieces];
    int coded_from, coded_to;       // read through codes by all rows
    int begin, end_of_all, window;  // exactly: begin <= j < sink or window <= j, j < end_of_all
};

struct PrefillPlanArgs {
    const QueryRow* rows;  // [n_chunks][rows_per_chunk]
    int n_chunks, rows_per_chunk, rows_per_tile;
    int sink;
    ChunkWork* chunks;  // [n_chunks]
    PrefillTile* tiles; // [n_chunks][tiles_per_chunk()]

    CRUMB_BOTH int tiles_per_chunk() const { return up(rows_per_chunk, rows_per_tile); }
};

// `first` and `end` are blocks as yet. Exact tokens behind the sinks, but in the same block, count as sinks.
CRUMB_BOTH PrefillTile prefill_tile(const QueryRow* rows, int n, int sink) {
    constexpr int kFar = 0x7fffffff;
    PrefillTile t = {{kFar, kFar, kFar}, {0, 0, 0}, sink, kFar, 0, kFar, 0};
    const int sinks_end = up(sink, kPageTokens) * kPageTokens;
    const auto take = [&](int piece, int from, int to) {
        if (from >= to) { return; }
        t.first[piece] = least(t.first[piece], from / kPageTokens);
        t.end[piece] = most(t.end[piece], up(to, kPageTokens));
    };
    for (int i = 0; i < n; i++) {
        const QueryRow& row = rows[i];
        if (row.token == kNoToken) { continue; }
        const int from = most(row.begin, sink), window = most(from, row.coded_end);
        take(kSinks, row.begin, least(row.end, sink));
        take(kSinks, window, least(row.end, sinks_end));
        take(kCodes, from, least(row.coded_end, row.end));
        take(kWindow, most(window, sinks_end), row.end);
        t.coded_from = most(t.coded_from, row.begin);
        t.coded_to = least(t.coded_to, least(row.coded_end, row.end));
        t.begin = most(t.begin, row.begin);
        t.end_of_all = least(t.end_of_all, row.end);
        t.window = most(t.window, most(row.begin, row.coded_end));
    }
    return t;
}

CRUMB_DEVICE int reduce_least(int x) {
    for (int o = 16; o > 0; o /= 2) { x = least(x, int(simt::shuffle_xor(u32(x), o))); }
    return x;
}
CRUMB_DEVICE int reduce_most(int x) { return -reduce_least(-x); }

// A block a chunk.
CRUMB_DEVICE void make_prefill_plan(const PrefillPlanArgs& a) {
    using namespace simt;
    wait_for_previous();
    launch_next();
    const int n_tiles = a.tiles_per_chunk();
    const QueryRow* const rows = a.rows + size_t(block()) * a.rows_per_chunk;
    PrefillTile* const tiles = a.tiles + size_t(block()) * n_tiles;
    for (int t = thread(); t < n_tiles; t += n_threads()) {
        const int first = t * a.rows_per_tile;
        tiles[t] = prefill_tile(rows + first, least(a.rows_per_tile, a.rows_per_chunk - first), a.sink);
    }
    sync_block();
    if (warp() == 0) {
        int first[kPieces] = {0x7fffffff, 0x7fffffff, 0x7fffffff}, n[kPieces] = {};
        for (int t = lane(); t < n_tiles; t += kWarp) {
            for (int i = 0; i < kPieces; i++) { first[i] = least(first[i], tiles[t].first[i]), n[i] = most(n[i], tiles[t].end[i]); }
        }
        for (int i = 0; i < kPieces; i++) {
            first[i] = reduce_least(first[i]), n[i] = reduce_most(n[i]);
            n[i] = first[i] < n[i] ? n[i] - first[i] : 0;
        }
        if (lane() == 0) {
            a.chunks[block()] = {rows[0].sequence, first[kSinks], n[kSinks], first[kCodes], n[kCodes], first[kWindow], n[kWindow]};
        }
    }
    sync_block();
    const ChunkWork work = a.chunks[block()];
    const int shift[kPieces] = {-work.sink_first, work.n_sink - work.coded_first, work.n_sink + work.n_coded - work.window_first};
    for (int t = thread(); t < n_tiles; t += n_threads()) {
        PrefillTile& tile = tiles[t];
        for (int i = 0; i < kPieces; i++) {
            const bool any = tile.first[i] < tile.end[i];
            tile.first[i] = any ? tile.first[i] + shift[i] : 0;
            tile.end[i] = any ? tile.end[i] + shift[i] : 0;
        }
    }
}

// Pairs of a tile within entries [from, to) of a slice, `from` even; numbered from 0.
struct PairList {
    int first[kPieces], n[kPieces];

    CRUMB_BOTH PairList(const PrefillTile& tile, int from, int to) {
        int next = 0;  // pieces may share a pair
        for (int i = 0; i < kPieces; i++) {
            const int a = most(tile.first[i], from), b = least(tile.end[i], to);
            first[i] = most(a / 2, next);
            n[i] = a < b ? most(0, up(b, 2) - first[i]) : 0;
            if (n[i] > 0) { next = first[i] + n[i]; }
        }
    }
    CRUMB_BOTH int size() const { return n[0] + n[1] + n[2]; }
    CRUMB_BOTH int at(int i) const {
        if (i < n[0]) { return first[0] + i; }
        if (i < n[0] + n[1]) { return first[1] + i - n[0]; }
        return first[2] + i - n[0] - n[1];
    }
};

}  // namespace crumb::cuda

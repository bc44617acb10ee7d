// Who works on what. Tiles of query rows meet the items that their rows see: pages of codes first, then groups of 16 exact
// tokens. A segment is a tile, a KV head and a block of columns; segments are laid end to end and measured in 128-byte
// units of memory traffic; warp w of W owns units [w T / W, (w + 1) T / W) and the items that start there. So every warp
// streams the same number of bytes whatever the lengths are. One kernel a step makes the list, for all layers.
#pragma once

#include <crumb/attention.h>

#include "base/cuda/simt.h"

namespace crumb::cuda {

using simt::u32;
using simt::u64;

inline constexpr u32 kNoToken = 0xffffffff;  // QueryRow::token of a row that pads a tile
inline constexpr int kRecordIds = 4;
inline constexpr int kItemTokens = 16;

// What the rows of a tile see.
struct TileWork {
    u32 sequence;
    int coded_first, n_coded;  // pages
    int a_first, n_a;          // groups of 16 exact tokens: sinks
    int b_first, n_b;          // and the window
    u32 units;                 // of one segment

    CRUMB_BOTH int n_exact() const { return n_a + n_b; }
    CRUMB_BOTH int exact_group(int i) const { return i < n_a ? a_first + i : b_first + i - n_a; }
};

// Items [first, end) of a segment, for one warp: all that it has to know, so that its first copies wait for this load alone.
struct alignas(128) WorkRecord {
    int segment;  // -1: nothing to do
    int first, end;
    int next;     // the warp's next record, or -1
    int whole;    // nobody else works on the segment
    int first_block, last_block;  // thread blocks that do
    int coded_end;        // items below are pages of codes
    TileWork tile;
    u32 ids[kRecordIds];  // blocks of the first items
};
static_assert(sizeof(WorkRecord) == 128);

// The thread blocks that have parts of a segment; what a single one has is already the sum.
struct SegmentParts {
    int first_block, last_block;
};

struct PlanArgs {
    const QueryRow* rows;  // [n_tiles][rows_per_tile], of one sequence a tile; token kNoToken: not there
    int n_tiles, rows_per_tile;
    int sink;
    int segments_per_tile;
    int grid, warps;  // of the decode kernel
    u32 coded_units, exact_units;
    int page_tokens;
    const u32* coded_ids;  // [sequence][ids_stride]
    const u32* exact_ids;
    size_t ids_stride;
    TileWork* tiles;       // [n_tiles]
    WorkRecord* records;   // [grid * warps + n_tiles * segments_per_tile]
    SegmentParts* parts;   // [n_tiles * segments_per_tile]; not written where a tile has no work

    // The block in which an item of a tile lies.
    CRUMB_BOTH const u32* block_at(const TileWork& work, int item) const {
        const bool coded = item < work.n_coded;
        const int block = coded ? work.coded_first + item : work.exact_group(item - work.n_coded) / (kPageTokens / kItemTokens);
        return (coded ? coded_ids : exact_ids) + work.sequence * ids_stride + u32(block);
    }
};

CRUMB_BOTH constexpr int least(int a, int b) { return a < b ? a : b; }
CRUMB_BOTH constexpr int most(int a, int b) { return a > b ? a : b; }
CRUMB_BOTH constexpr int up(int a, int b) { return (a + b - 1) / b; }

CRUMB_BOTH TileWork tile_work(const QueryRow* rows, int n, int sink, u32 coded_units, u32 exact_units, int page_tokens) {
    int begin = 0x7fffffff, end = 0, coded_begin = 0x7fffffff, coded_end = 0, window = 0x7fffffff;
    for (int i = 0; i < n; i++) {
        const QueryRow& row = rows[i];
        if (row.token == kNoToken || row.begin >= row.end) { continue; }
        begin = least(begin, row.begin);
        end = most(end, row.end);
        const int from = most(row.begin, sink), to = least(row.coded_end, row.end);
        if (from < to) {
            coded_begin = least(coded_begin, from);
            coded_end = most(coded_end, to);
        }
        window = least(window, most(from, row.coded_end));
    }
    TileWork work = {rows[0].sequence, 0, 0, 0, 0, 0, 0, 0};
    if (begin >= end) { return work; }
    if (coded_begin < coded_end) {
        work.coded_first = coded_begin / page_tokens;
        work.n_coded = up(coded_end, page_tokens) - work.coded_first;
    }
    if (begin < least(end, sink)) {
        work.a_first = begin / kItemTokens;
        work.n_a = up(least(end, sink), kItemTokens) - work.a_first;
    }
    work.b_first = most(window / kItemTokens, work.a_first + work.n_a);
    work.n_b = window < end ? most(0, up(end, kItemTokens) - work.b_first) : 0;
    work.units = u32(work.n_coded) * coded_units + u32(work.n_exact()) * exact_units;
    return work;
}

// The first item that starts at or behind a unit of its segment.
CRUMB_BOTH int item_at(const TileWork& work, u32 unit, u32 coded_units, u32 exact_units) {
    const u32 coded = u32(work.n_coded) * coded_units;
    if (unit <= coded) { return int((unit + coded_units - 1) / coded_units); }
    const u32 exact = (unit - coded + exact_units - 1) / exact_units;
    return work.n_coded + int(exact < u32(work.n_exact()) ? exact : u32(work.n_exact()));
}

// Units [bound(v), bound(v + 1)) are warp v's.
struct Shares {
    u32 total;
    int blocks;  // thread blocks that get some, `grid` of them are launched
    int warps;
    const u32* first;  // [grid + 2] first_of() of every block, once they are there

    CRUMB_BOTH u32 first_of(int block) const { return block >= blocks ? total : u32(u64(total) * u32(block) / u32(blocks)); }
    CRUMB_BOTH u32 bound(int v) const {
        const u32 from = first[v / warps], to = first[v / warps + 1];
        return from + u32(u64(to - from) * u32(v % warps) / u32(warps));
    }
    CRUMB_BOTH int owner(u32 unit) const {
        int low = 0, high = blocks - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first[middle] <= unit) { low = middle; } else { high = middle - 1; }
        }
        return low;
    }
};

// Every block gets at least one item, and few segments are not cut finer than it pays: a part costs its merge (about
// 0.05 us), a block digests about 350 units a microsecond.
CRUMB_BOTH Shares shares(u32 total, u32 segments, int grid, int warps, u32 largest_item) {
    u32 blocks = total / (largest_item > 0 ? largest_item : 1);
    u32 parts = 1;
    while (segments > 0 && parts * segments < u32(grid) && (parts + 1) * parts * segments < total / 18) { parts++; }
    if (segments * parts < u32(grid) && segments * parts < blocks) { blocks = segments * parts; }
    blocks = blocks < u32(grid) ? blocks : u32(grid);
    return {total, int(blocks > 0 ? blocks : 1), warps, nullptr};
}

// Work list of warp v. start[t]: units of all segments of tiles before t.
CRUMB_BOTH void list_work(const PlanArgs& a, const u32* start, const Shares& shares, int v) {
    const u32 from = shares.bound(v), to = shares.bound(v + 1);
    WorkRecord* slot = a.records + v;
    slot->segment = slot->next = -1;
    if (from >= to) { return; }
    int tile = 0, high = a.n_tiles - 1;
    while (tile < high) {
        const int middle = (tile + high + 1) / 2;
        if (start[middle] <= from) { tile = middle; } else { high = middle - 1; }
    }
    bool any = false;
    int within = -1;
    for (; tile < a.n_tiles && start[tile] < to; tile++, within = 0) {
        const TileWork work =
            tile_work(a.rows + size_t(tile) * a.rows_per_tile, a.rows_per_tile, a.sink, a.coded_units, a.exact_units, a.page_tokens);
        if (work.units == 0) { continue; }
        if (within < 0) { within = int((from - start[tile]) / work.units); }
        for (; within < a.segments_per_tile; within++) {
            const u32 at = start[tile] + u32(within) * work.units;
            if (at >= to) { break; }
            const int first = item_at(work, from > at ? from - at : 0, a.coded_units, a.exact_units);
            const int end = item_at(work, to - at, a.coded_units, a.exact_units);
            if (first >= end) { continue; }
            const int n_items = work.n_coded + work.n_exact();
            const u32 last_start = at + work.units - (work.n_exact() > 0 ? a.exact_units : a.coded_units);
            WorkRecord record = {};
            record.segment = tile * a.segments_per_tile + within;
            record.first = first;
            record.end = end;
            record.next = -1;
            record.whole = first == 0 && end == n_items;
            record.first_block = shares.owner(at);
            record.last_block = shares.owner(last_start);
            record.coded_end = least(end, work.n_coded);
            record.tile = work;
            if (first == 0) { a.parts[record.segment] = {record.first_block, record.last_block}; }
#pragma unroll
            for (int i = 0; i < kRecordIds; i++) { record.ids[i] = *a.block_at(work, least(first + i, end - 1)); }
            if (any) {  // a later segment of a warp starts in it, so the segment's own line is free
                slot->next = a.grid * a.warps + record.segment;
                slot = a.records + slot->next;
            }
            *slot = record;
            any = true;
        }
    }
}

// Every block repeats the sums over tiles and lists the work of some warps. Shared memory: n_tiles + threads words.
CRUMB_DEVICE void make_plan(const PlanArgs& a, std::byte* shared) {
    using namespace simt;
    u32* const start = reinterpret_cast<u32*>(shared);
    u32* const sums = start + a.n_tiles;
    wait_for_previous();
    launch_next();
    const int per_thread = up(a.n_tiles, n_threads()), first = least(thread() * per_thread, a.n_tiles);
    const int end = least(first + per_thread, a.n_tiles);
    u32 sum = 0, seen = 0;
    for (int t = first; t < end; t++) {
        const TileWork work =
            tile_work(a.rows + size_t(t) * a.rows_per_tile, a.rows_per_tile, a.sink, a.coded_units, a.exact_units, a.page_tokens);
        if (block() == 0) { a.tiles[t] = work; }
        start[t] = sum;
        sum += work.units * u32(a.segments_per_tile);
        seen += work.units > 0;
    }
    // Sums over threads, of units and of tiles with work.
    u32* const tiles_seen = sums + n_threads();
    sums[thread()] = sum;
    tiles_seen[thread()] = seen;
    for (int step = 1; step < n_threads(); step *= 2) {
        sync_block();
        const u32 before = thread() >= step ? sums[thread() - step] : 0;
        const u32 tiles_before = thread() >= step ? tiles_seen[thread() - step] : 0;
        sync_block();
        sums[thread()] += before;
        tiles_seen[thread()] += tiles_before;
    }
    sync_block();
    for (int t = first; t < end; t++) { start[t] += sums[thread()] - sum; }
    const u32 total = sums[n_threads() - 1], segments = tiles_seen[n_threads() - 1] * u32(a.segments_per_tile);
    sync_block();
    const u32 largest = a.coded_units > a.exact_units ? a.coded_units : a.exact_units;
    Shares split = shares(total, segments, a.grid, a.warps, largest);
    u32* const firsts = tiles_seen + n_threads();
    for (int b = thread(); b < a.grid + 2; b += n_threads()) { firsts[b] = split.first_of(b); }
    split.first = firsts;
    sync_block();
    // Neighbours go to different blocks: the lists diverge, and a multiprocessor takes long for a thousand of them.
    for (int v = thread() * n_blocks() + block(); v < a.grid * a.warps; v += n_blocks() * n_threads()) {
        list_work(a, start, split, v);
    }
}

CRUMB_BOTH constexpr size_t plan_shared_bytes(int n_tiles, int threads, int grid) {
    return (size_t(n_tiles) + 2 * size_t(threads) + size_t(grid) + 2) * 4;
}

}  // namespace crumb::cuda

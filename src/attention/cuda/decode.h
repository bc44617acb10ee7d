// Decode attention over pages, one launch a layer: persistent blocks whose warps follow the plan's work list, and merge.
//
// Loads. Every warp has a ring of pages in shared memory, filled by copies that run ahead of the arithmetic across the
// borders of records: no barrier of the block in the main loop. Exact tokens are read in place. The first copies start
// before the previous kernel has ended: it is map_query(), which writes nothing that they read.
// Merge. A segment that a warp does alone is written out at once. Of the others, a warp leaves its last one in shared memory
// and an earlier one, which began in another warp, in `scratch`; when all warps are done the block adds up what they have of
// a segment. If other blocks have parts of it, the sum goes to `partials`, and map_output() adds the parts, in ascending
// order. So nobody waits for anybody: no input and no order of blocks can hang the kernel, and two runs give the same bits.
// (A last block that counts or polls its way to the parts takes 2 to 3 us longer than the next kernel, which has to be
// started anyway.)
//
// What is written is sums in the spaces of pages (planes, channels); map_output() turns them into outputs.
#pragma once

#include "attention/cuda/coded.h"
#include "attention/cuda/exact.h"
#include "attention/cuda/parts.h"
#include "attention/cuda/plan.h"

namespace crumb::cuda {

static_assert(kItemTokens == kExactTokens);

struct DecodeArgs {
    const u8* coded;   // block i at coded + i * coded_stride: pages of all KV heads
    size_t coded_stride;
    const u8* exact;   // BF16 records, same
    size_t exact_stride;
    const u32* coded_ids;  // [sequence][ids_stride]
    const u32* exact_ids;
    size_t ids_stride;
    const TileWork* tiles;
    const WorkRecord* records;
    const u32* queries;           // [segment][kQueryWords]
    const HeadConstants* heads;   // [n_head_kv]
    float* merged;                // [segment][kEntryFloats]
    float* partials;              // [blocks][2][kEntryFloats]
    float* scratch;               // [blocks][warps][kEntryFloats]
    int n_head_kv, column_blocks;
    int sink;
    float softcap;  // of logits in units of log2, or 0
};

// A warp's copies, ahead of its arithmetic.
template <PageFormat F, int NT>
class Ring {
    using D = DecodeFormat<F, NT>;

  public:
    CRUMB_DEVICE Ring(const DecodeArgs& a, u8* pages, simt::u64* barriers, int record) : a_(a), pages_(pages), barriers_(barriers) {
        using namespace simt;
        for (int s = 0; s < D::kStages; s++) { copy_init(barriers + s); }
        copy_ready();
        next_ = record;
        if (!load_record()) { return; }
        const WorkRecord& first = a_.records[current_];
#pragma unroll
        for (int s = 0; s < D::kStages; s++) {  // ids come with the record: the first copies wait for one load alone
            if (item_ < end_) { copy(s, first.ids[s]); }
        }
        load_ids();
        for (int s = int(item_ - base_); s < D::kStages; s++) { issue(s); }
    }

    // The oldest page, when it has come.
    CRUMB_DEVICE const u8* wait() {
        simt::copy_wait(barriers_ + stage_, phase_);
        return pages_ + stage_ * D::kPageBytes;
    }

    // It has been read: its place is for the next one.
    CRUMB_DEVICE void release() {
        simt::sync_warp();
        issue(stage_);
        if (++stage_ == D::kStages) {
            stage_ = 0;
            phase_ ^= 1;
        }
    }

  private:
    static_assert(D::kStages <= kRecordIds);

    // The next record with coded items, or false.
    CRUMB_DEVICE bool load_record() {
        while (next_ >= 0) {
            current_ = next_;
            const WorkRecord& record = a_.records[current_];
            if (record.segment < 0) { break; }
            const int head_of = record.segment / a_.column_blocks;
            next_ = record.next;
            item_ = base_ = record.first;
            end_ = record.coded_end;
            ids_at_ = a_.coded_ids + record.first_id;
            head_ = a_.coded + size_t(head_of % a_.n_head_kv) * D::kPageBytes;
            if (item_ < end_) { return true; }
        }
        next_ = -1;
        item_ = end_ = 0;
        return false;
    }

    CRUMB_DEVICE u32 id_of(int item) const { return item < end_ ? ids_at_[item] : 0; }

    CRUMB_DEVICE void load_ids() {
        ids_ = id_of(base_ + simt::lane());
        later_ids_ = id_of(base_ + simt::kWarp + simt::lane());
    }

    CRUMB_DEVICE void issue(int stage) {
        if (item_ >= end_) {
            if (!load_record()) { return; }
            load_ids();
        }
        if (item_ == base_ + simt::kWarp) {
            base_ = item_;
            ids_ = later_ids_;
            later_ids_ = id_of(base_ + simt::kWarp + simt::lane());
        }
        copy(stage, simt::shuffle(ids_, item_ - base_));
    }

    CRUMB_DEVICE void copy(int stage, u32 id) {
        simt::copy_begin(barriers_ + stage, pages_ + stage * D::kPageBytes, head_ + size_t(id) * a_.coded_stride, D::kPageBytes);
        item_++;
    }

    const DecodeArgs& a_;
    u8* pages_;
    simt::u64* barriers_;
    int stage_ = 0;
    u32 phase_ = 0;
    int current_ = 0, next_, item_ = 0, end_ = 0, base_ = 0;
    const u32* ids_at_ = nullptr;
    const u8* head_ = nullptr;
    u32 ids_ = 0, later_ids_ = 0;
};

// What a warp has of a segment that others have parts of.
struct Piece {
    int segment;
    int first_block, last_block;
    int unused;
};

template <PageFormat F, int NT>
class Decode {
    using D = DecodeFormat<F, NT>;

  public:
    CRUMB_DEVICE static void run(const DecodeArgs& a, std::byte* shared_bytes) {
        using namespace simt;
        u8* const shared = reinterpret_cast<u8*>(shared_bytes);
        Piece* const pieces = reinterpret_cast<Piece*>(shared + D::kWarps * D::kWarpBytes);  // [warp][2]
        u8* const mine = shared + warp() * D::kWarpBytes;
        float* const entry = entry_of(shared, warp());
        u32* const query = D::kQueryInEntry ? reinterpret_cast<u32*>(entry) : reinterpret_cast<u32*>(entry + D::kEntryFloats);
        u64* const barriers = reinterpret_cast<u64*>(mine + D::kWarpBytes - 8 * D::kStages);
        if (lane() == 0) { pieces[2 * warp()].segment = pieces[2 * warp() + 1].segment = -1; }

        int at = block() * D::kWarps + warp();
        Ring<F, NT> ring(a, mine, barriers, at);
        wait_for_previous();
        launch_next();
        while (at >= 0 && a.records[at].segment >= 0) {
            const WorkRecord record = a.records[at];
            sums(a, record, ring, query, entry);
            const bool last = record.next < 0;
            if (record.whole) {
                copy_entry(entry, a.merged + size_t(record.segment) * D::kEntryFloats);
            } else {
                if (!last) { copy_entry(entry, scratch_of(a, warp())); }
                if (lane() == 0) {
                    pieces[2 * warp() + last] = {record.segment, record.first_block, record.last_block, 0};
                }
            }
            at = record.next;
        }
        sync_block();
        merge(a, shared, pieces);
    }

  private:
    CRUMB_DEVICE static float* entry_of(u8* shared, int warp) {
        return reinterpret_cast<float*>(shared + warp * D::kWarpBytes + D::kRingBytes);
    }
    CRUMB_DEVICE static float* scratch_of(const DecodeArgs& a, int warp) {
        return a.scratch + (size_t(simt::block()) * D::kWarps + warp) * D::kEntryFloats;
    }

    // One record's sums into `entry`.
    CRUMB_DEVICE static void sums(const DecodeArgs& a, const WorkRecord& record, Ring<F, NT>& ring, u32* shared_query,
                                  float* entry) {
        const int head_of = record.segment / a.column_blocks, head = head_of % a.n_head_kv;
        const TileWork tile = a.tiles[head_of / a.n_head_kv];
        const u32* query = a.queries + size_t(record.segment) * D::kQueryWords;
        const int coded_end = record.coded_end;
        if (record.first < coded_end) {
            Coded<F, NT> coded;
            coded.begin(query, shared_query, entry, a.softcap, a.sink, a.heads[head]);
#pragma unroll 1
            for (int i = record.first; i < coded_end; i++) {
                coded.page(ring.wait(), tile.coded_first + i);
                ring.release();
            }
            coded.finish(entry);
        }
        if (record.end > tile.n_coded) {
            const u32* ids = a.exact_ids + tile.sequence * a.ids_stride;
            const u8* records = a.exact + size_t(head) * kPageTokens * (D::kDimK + D::kDimV) * 2;
            Exact<F, NT> exact;
            exact.begin(query, a.softcap, a.sink);
#pragma unroll 1
            for (int i = most(record.first, tile.n_coded); i < record.end; i++) {
                const int group = tile.exact_group(i - tile.n_coded);
                exact.item(records + size_t(ids[group / (kPageTokens / kExactTokens)]) * a.exact_stride, group);
            }
            exact.finish(entry, record.first < coded_end);
        }
    }

    CRUMB_DEVICE static void copy_entry(const float* from, float* to) {
        using namespace simt;
        sync_warp();
        for (int i = lane(); i < D::kEntryFloats / 4; i += kWarp) {
            reinterpret_cast<Floats4*>(to)[i] = reinterpret_cast<const Floats4*>(from)[i];
        }
        sync_warp();
    }

    // Pieces of a segment are neighbours: warps are in the order of the work.
    CRUMB_DEVICE static void merge(const DecodeArgs& a, u8* shared, const Piece* pieces) {
#pragma unroll 1
        for (int i = 0; i < 2 * D::kWarps;) {
            const Piece piece = pieces[i];
            if (piece.segment < 0) {
                i++;
                continue;
            }
            int end = i + 1;
            while (end < 2 * D::kWarps && (pieces[end].segment < 0 || pieces[end].segment == piece.segment)) { end++; }
            const bool alone = piece.first_block == piece.last_block;
            float* const to = alone ? a.merged + size_t(piece.segment) * D::kEntryFloats
                                    : partial_of<D>(a.partials, simt::block(), piece.first_block);
            add_pieces(a, shared, pieces, i, end, to);
            i = end;
        }
    }

    CRUMB_DEVICE static void add_pieces(const DecodeArgs& a, u8* shared, const Piece* pieces, int first, int end, float* to) {
        using namespace simt;
        constexpr int kQuads = D::kWidth / 4 + 1;  // the last one is the scalars
        const auto part = [&](int k) -> const float* {
            if (pieces[k].segment < 0) { return nullptr; }
            return k % 2 ? entry_of(shared, k / 2) : scratch_of(a, k / 2);
        };
        for (int i = thread(); i < D::kColumns * kQuads; i += n_threads()) {
            const int column = i / kQuads, x = 4 * (i % kQuads);
            PartialSum s = PartialSum::of<D>(first, 1, end, column, x, part);
            if (x == D::kWidth) { s.sum.x = s.top; }
            *reinterpret_cast<Floats4*>(to + column * D::kStride + x) = s.sum;
        }
    }
};

}  // namespace crumb::cuda

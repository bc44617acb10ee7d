// Decode attention over pages, one launch a layer: persistent blocks whose warps follow the plan's work list, and merge.
//
// Loads. Every warp has a ring of pages in shared memory, filled by copies that run ahead of the arithmetic across the
// borders of records: no barrier of the block in the main loop. Exact tokens are read in place. The first copies start
// before the previous kernel has ended: it is map_query(), which writes nothing that they read.
// Merge. A segment that a warp does alone is written out at once. Of the others, a warp leaves its last one in its ring and
// an earlier one, which began in another warp, in `scratch`; when all warps are done the block adds up what they have of
// a segment. If other blocks have parts of it, the sum goes to `partials`, and map_output() adds the parts, in ascending
// order. So nobody waits for anybody: no input and no order of blocks can hang the kernel, and two runs give the same bits.
// (A last block that counts or polls its way to the parts takes 2 to 3 us longer than the next kernel, which has to be
// started anyway.)
//
// What is written is sums in the spaces of pages (planes, channels); map_output() turns them into outputs.
#pragma once

#include <type_traits>

#include "attention/cuda/coded.h"
#include "attention/cuda/exact.h"
#include "attention/cuda/grouped.h"
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
    Softcap softcap;
    PagePlanes planes;
};

// A warp's copies, ahead of its arithmetic.
template <KernelFormat F, int NT>
class Ring {
    using D = DecodeFormat<F, NT>;

  public:
    CRUMB_DEVICE Ring(const DecodeArgs& a, u8* pages, simt::u64* barriers, int record)
        : a_(a), pages_(pages), barriers_(barriers) {
        using namespace simt;
        if constexpr (F.any_planes) {
            bytes_ = page_offsets(F, a.planes).bytes;
            stages_ = least(D::kMostStages, int(D::kRingBytes / bytes_));
        }
        for (int s = 0; s < n_stages(); s++) { copy_init(barriers + s); }
        copy_ready();
        next_ = record;
        if (!load_record()) { return; }
        const WorkRecord& first = a_.records[current_];
#pragma unroll
        for (int s = 0; s < D::kMostStages; s++) {  // ids come with the record: the first copies wait for one load alone
            if (item_ < end_ && s < n_stages()) { copy(s, first.ids[s]); }
        }
        load_ids();
        for (int s = int(item_ - base_); s < n_stages(); s++) { issue(s); }
    }

    // The oldest page, when it has come.
    CRUMB_DEVICE const u8* wait() {
        simt::copy_wait(barriers_ + stage_, phase_);
        return pages_ + u32(stage_) * page_bytes();
    }

    // It has been read: its place is for the next one.
    CRUMB_DEVICE void release() {
        simt::sync_warp();
        issue(stage_);
        if (++stage_ == n_stages()) {
            stage_ = 0;
            phase_ ^= 1;
        }
    }

  private:
    static_assert(D::kMostStages <= kRecordIds);

    CRUMB_DEVICE int n_stages() const {
        if constexpr (F.any_planes) { return stages_; }
        return D::kStages;
    }
    CRUMB_DEVICE u32 page_bytes() const {
        if constexpr (F.any_planes) { return bytes_; }
        return D::kPageBytes;
    }

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
            ids_at_ = a_.coded_ids + record.tile.sequence * a_.ids_stride + record.tile.coded_first;
            head_ = a_.coded + size_t(head_of % a_.n_head_kv) * page_bytes();
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
        simt::copy_begin(barriers_ + stage, pages_ + u32(stage) * page_bytes(), head_ + size_t(id) * a_.coded_stride, page_bytes());
        item_++;
    }

    const DecodeArgs& a_;
    u8* pages_;
    simt::u64* barriers_;
    u32 bytes_ = 0;
    int stages_ = 0, stage_ = 0;
    u32 phase_ = 0;
    int current_ = 0, next_, item_ = 0, end_ = 0, base_ = 0;
    const u32* ids_at_ = nullptr;
    const u8* head_ = nullptr;
    u32 ids_ = 0, later_ids_ = 0;
};

// What a warp has of a segment that others have parts of.
struct alignas(16) Piece {
    int segment;
    int first_block, last_block;
};

template <KernelFormat F, int NT>
class Decode {
    using D = DecodeFormat<F, NT>;
    static constexpr u32 kExactBytes = u32(kPageTokens) * (D::kDimK + D::kDimV) * 2;

  public:
    CRUMB_DEVICE static void run(const DecodeArgs& a, std::byte* shared_bytes) {
        using namespace simt;
        u8* const shared = reinterpret_cast<u8*>(shared_bytes);
        Piece* const pieces = reinterpret_cast<Piece*>(shared + D::kWarps * D::kWarpBytes);  // [warp][2]
        u8* const mine = shared + warp() * D::kWarpBytes;
        if (lane() == 0) { pieces[2 * warp()].segment = pieces[2 * warp() + 1].segment = -1; }

        int at = block() * D::kWarps + warp();
        Ring<F, NT> ring(a, mine, reinterpret_cast<u64*>(mine + D::kBarriersAt), at);
        wait_for_previous();
        launch_next();
        while (at >= 0 && a.records[at].segment >= 0) {
            const WorkRecord& record = a.records[at];
            const bool last = record.next < 0;
            float* const entry = record.whole ? a.merged + size_t(record.segment) * D::kEntryFloats
                                 : last       ? entry_of(shared, warp())
                                              : scratch_of(a, warp());
            sums(a, record, ring, mine, entry);
            if (!record.whole && lane() == 0) {
                pieces[2 * warp() + last] = {record.segment, record.first_block, record.last_block};
            }
            at = record.next;
        }
        sync_block();
        merge(a, shared, pieces);
    }

  private:
    CRUMB_DEVICE static float* entry_of(u8* shared, int warp) {
        return reinterpret_cast<float*>(shared + warp * D::kWarpBytes);
    }
    CRUMB_DEVICE static float* scratch_of(const DecodeArgs& a, int warp) {
        return a.scratch + (size_t(simt::block()) * D::kWarps + warp) * D::kEntryFloats;
    }

    // One record's sums into `entry`.
    CRUMB_DEVICE static void sums(const DecodeArgs& a, const WorkRecord& record, Ring<F, NT>& ring, u8* mine, float* entry) {
        const int head = record.segment / a.column_blocks % a.n_head_kv, coded_end = record.coded_end;
        const u32* query = a.queries + size_t(record.segment) * D::kQueryWords;
        const u8* const windows = a.exact + size_t(head) * kExactBytes;
        if (record.first < coded_end) {
            const int first_block = record.tile.coded_first;  // or it would be read again for every page
            std::conditional_t<D::kGrouped, Grouped<F, NT>, Coded<F, NT>> coded(a.planes);
            coded.begin(query, reinterpret_cast<u32*>(mine + D::kQueryAt), reinterpret_cast<float*>(mine + D::kMeansAt), a.softcap,
                        a.sink, a.heads[head]);
#pragma unroll 1
            for (int i = record.first; i < coded_end; i++) {
                coded.page(ring.wait(), first_block + i);
                ring.release();
            }
            coded.finish(entry);
        }
        if (record.end > record.tile.n_coded) {
            const TileWork tile = record.tile;  // in registers: a load between two items would be waited for
            const int end = record.end;
            const u32* const ids = a.exact_ids + tile.sequence * a.ids_stride;
            const auto group = [&](int item) { return tile.exact_group(item - tile.n_coded); };
            const auto window = [&](int item) { return item < end ? ids[group(item) / (kPageTokens / kExactTokens)] : 0; };
            int i = most(record.first, tile.n_coded);
            const u8* block = windows + (i == record.first ? record.ids[0] : window(i)) * a.exact_stride;
            u32 id = window(i + 1);
            Exact<F, NT> exact;
            exact.first(block, group(i));
            exact.begin(query, a.softcap, a.sink);
#pragma unroll 1
            for (; i < end; i++) {
                const u8* const next = i + 1 < end ? windows + id * a.exact_stride : nullptr;
                id = window(i + 2);
                exact.item(block, group(i), next, group(i + 1));
                block = next;
            }
            exact.finish(entry, record.first < coded_end);
        }
    }

    // Every warp looks at all pieces at once: lane i at piece i.
    CRUMB_DEVICE static void merge(const DecodeArgs& a, u8* shared, const Piece* pieces) {
        using namespace simt;
        static_assert(2 * D::kWarps <= kWarp);
        const Piece own = pieces[lane() < 2 * D::kWarps ? lane() : 0];
        u32 left = ballot(lane() < 2 * D::kWarps && own.segment >= 0);
#pragma unroll 1
        while (left != 0) {
            const int one = lowest_bit(left), segment = int(shuffle(u32(own.segment), one));
            const int first_block = int(shuffle(u32(own.first_block), one)), last_block = int(shuffle(u32(own.last_block), one));
            const u32 members = ballot(left >> lane() & 1 && own.segment == segment);
            add_pieces(a, shared, members,
                       first_block == last_block ? a.merged + size_t(segment) * D::kEntryFloats
                                                 : partial_of<D>(a.partials, block(), first_block));
            left &= ~members;
        }
    }

    CRUMB_DEVICE static void add_pieces(const DecodeArgs& a, u8* shared, u32 members, float* to) {
        using namespace simt;
        constexpr int kQuads = D::kWidth / 4 + 1;  // the last one is the scalars
        for (int i = thread(); i < D::kColumns * kQuads; i += n_threads()) {
            const int column = i / kQuads, x = 4 * (i % kQuads);
            u32 left = members;
            PartialSum s = PartialSum::of<D>(column, x, [&]() -> const float* {
                if (left == 0) { return nullptr; }
                const int k = lowest_bit(left);
                left &= left - 1;
                return k % 2 ? entry_of(shared, k / 2) : scratch_of(a, k / 2);
            });
            if (x == D::kWidth) { s.sum.x = s.top; }
            *reinterpret_cast<Floats4*>(to + column * D::kStride + x) = s.sum;
        }
    }
};

}  // namespace crumb::cuda

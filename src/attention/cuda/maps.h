// The maps on both sides of decode: queries become what pages are read with (q' = B q, quantised), sums become outputs
// (o = B^T o' + channels). FP32 multiply-adds; the sum over a table's rows is cut in parts, added in order.
//
// A block serves one KV head and some of the tiles. What bounds these kernels is waiting: for the table, whose rows a
// thread therefore asks for before the previous kernel has ended, as many as fit in registers, then for the queries or sums
// themselves.
#pragma once

#include <math.h>

#include "attention/cuda/decode_format.h"
#include "attention/cuda/parts.h"
#include "attention/cuda/plan.h"
#include "attention/cuda/rows.h"

namespace crumb::cuda {

inline constexpr int kMapThreads = 512;  // emulated with fewer
inline constexpr int kFewAhead = 32, kManyAhead = 8;  // rows of a table in registers: more leave room for one block only
inline constexpr float kFineQueryTop = 8100.0f, kCoarseQueryTop = 509.0f;  // 4 times, 64 times it fits 16 bits
inline constexpr float kMeanQueryTop = 32000.0f;
inline constexpr float kLog2e = 1.44269504f;

// Static tables of a KV head on the device; null where the format has none.
struct HeadArrays {
    const float* k_decode_t;   // [D_k][P_k]: B transposed; of kernels that take any planes, as many as these have
    const float* k_ones;       // [D_k]
    const float* k_mean;       // [D_k]
    const float* k_mean_step;  // [D_k]
    const float* v_decode;     // [P_v][D_v]
    const float* v_ones;       // [D_v]
    const float* v_mean;       // [D_v]
    const u32* k_unmap;        // [D_k][P_k] BF16, of pages with groups FP16: B transposed
    const u32* v_unmap;        // [D_v][P_v]
};

struct MapArgs {
    const QueryRow* rows;  // [n_tiles][rows_per_tile]
    int n_tiles, rows_per_tile;
    int n_head_kv, group, column_blocks;  // group: query heads of a KV head
    int sink;
    float scale;           // of the logits
    const float* q;        // row `token` of head h at q + token * q_token_stride + h * q_head_stride
    size_t q_token_stride, q_head_stride;
    const HeadArrays* heads;  // [n_head_kv]
    u32* queries;             // [segment][kQueryWords]
    const TileWork* tiles;
    const SegmentParts* parts;  // [segment]
    const float* merged;      // [segment][kEntryFloats]
    const float* partials;    // [blocks][2][kEntryFloats]
    const float* sinks;       // [n_head] or null
    float* out;               // row `token` at out + token * out_stride: [n_head][D_v]
    size_t out_stride;
    PagePlanes planes;
    RowArgs stores;          // of map_query(): few new rows, stored by its last blocks
    int store_blocks;
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

// y = x T for kColumns rows x; T is [kRows][kWidth] in global memory. A thread takes a column of T and a part of its rows,
// of which it asks for the first kMostAhead at once.
template <int kRows, int kWidth, int kColumns, int kMostAhead>
class Product {
    static constexpr int parts() {
        int n = 1;
        while (n < 8 && 2 * n * kWidth <= kMapThreads && kRows / (2 * n) >= 8) { n *= 2; }
        return n;
    }
    static constexpr int kDepth = kRows / parts(), kAhead = kDepth < kMostAhead ? kDepth : kMostAhead;

  public:
    static constexpr int kParts = parts();
    static_assert(kRows % kParts == 0 && (kColumns % 4 == 0 || kColumns == 1));

    // Asks for what the thread needs first.
    CRUMB_DEVICE Product(const float* table) : table_(table) {
        const int i = simt::thread();
        if (i >= kParts * kWidth) { return; }
#pragma unroll
        for (int k = 0; k < kAhead; k++) { ahead_[k] = row_of(i)[k * kWidth]; }
    }

    // x: [kRows][kColumns], y: [kParts][kColumns][kWidth], in shared memory.
    CRUMB_DEVICE void multiply(const float* x, float* y) const {
        const int i = simt::thread();
        if (i < kParts * kWidth) {
            column(i, x, y, [&](int k) { return ahead_[k]; });
        }
        for (int j = i + simt::n_threads(); j < kParts * kWidth; j += simt::n_threads()) {
            column(j, x, y, [&](int k) { return row_of(j)[k * kWidth]; });
        }
    }

  private:
    CRUMB_DEVICE const float* row_of(int i) const { return table_ + i / kWidth * kDepth * kWidth + i % kWidth; }

    template <class First>
    CRUMB_DEVICE void column(int i, const float* x, float* y, First first) const {
        const float* from = row_of(i);
        const float* at = x + i / kWidth * kDepth * kColumns;
        float sum[kColumns] = {};
#pragma unroll
        for (int k = 0; k < kAhead; k++) { add(first(k), at + k * kColumns, sum); }
#pragma unroll 16
        for (int k = kAhead; k < kDepth; k++) { add(from[k * kWidth], at + k * kColumns, sum); }
#pragma unroll
        for (int c = 0; c < kColumns; c++) { y[(i / kWidth * kColumns + c) * kWidth + i % kWidth] = sum[c]; }
    }

    CRUMB_DEVICE static void add(float b, const float* x, float (&sum)[kColumns]) {
        using namespace simt;
        if constexpr (kColumns == 1) {
            sum[0] = fma_exact(b, x[0], sum[0]);
        } else {
#pragma unroll
            for (int c = 0; c < kColumns; c += 4) {
                const Floats4 four = *reinterpret_cast<const Floats4*>(x + c);
                sum[c] = fma_exact(b, four.x, sum[c]), sum[c + 1] = fma_exact(b, four.y, sum[c + 1]);
                sum[c + 2] = fma_exact(b, four.z, sum[c + 2]), sum[c + 3] = fma_exact(b, four.w, sum[c + 3]);
            }
        }
    }

    const float* table_;
    float ahead_[kAhead > 0 ? kAhead : 1];
};

// The block's KV head and columns, and the tiles that it takes, one after the other.
struct MapShare {
    int kv_head, column_block, column, first_tile, tile_step;

    CRUMB_DEVICE MapShare(const MapArgs& a, int columns_apart) {
        const int lanes = a.n_head_kv * a.column_blocks * columns_apart, b = simt::block() % lanes;
        column = b % columns_apart;
        column_block = b / columns_apart % a.column_blocks;
        kv_head = b / columns_apart / a.column_blocks;
        first_tile = simt::block() / lanes;
        tile_step = (simt::n_blocks() - a.store_blocks) / lanes;
    }
    CRUMB_DEVICE int segment(const MapArgs& a, int tile) const {
        return (tile * a.n_head_kv + kv_head) * a.column_blocks + column_block;
    }
};

template <KernelFormat F, int NT>
class Maps {
    using D = DecodeFormat<F, NT>;

    // Few segments: waiting is what counts, so a block has a multiprocessor for itself, and of sums it takes one column. Many:
    // several blocks side by side.
    template <bool kFew>
    struct Shape {
        static constexpr int kAhead = kFew ? kFewAhead : kManyAhead;
        static constexpr int kTogether = kFew ? 1 : D::kColumns;  // columns of sums
        static constexpr int kSplit = kFew ? 4 : 1;  // threads that share the parts of a segment
        using QueryProduct = Product<D::kDimK, D::kPlanesK, D::kColumns, kAhead>;
        using OutputProduct = Product<D::kPlanesV, D::kDimV, kTogether, kAhead>;
    };

  public:
    template <bool kFew>
    static constexpr size_t kQueryShared =
        4 * size_t(D::kColumns) * (2 * D::kDimK + Shape<kFew>::QueryProduct::kParts * D::kPlanesK);
    template <bool kFew>
    static constexpr size_t kOutputShared =
        4 * size_t(Shape<kFew>::kTogether) *
        ((Shape<kFew>::kSplit + 1) * D::kStride + Shape<kFew>::OutputProduct::kParts * D::kDimV);

    template <bool kFew>
    CRUMB_DEVICE static void query(const MapArgs& a, std::byte* shared) {
        using namespace simt;
        using S = Shape<kFew>;
        const int others = n_blocks() - a.store_blocks;
        if (block() >= others) { return store_f32_rows(a.stores, 1, block() - others, shared); }
        const MapShare share(a, 1);
        const HeadArrays& head = a.heads[share.kv_head];
        float* const q = reinterpret_cast<float*>(shared);     // [D_k][column], times scale and log2 e
        float* const mapped = q + D::kColumns * D::kDimK;      // [part][column][P_k]
        int* const steps = reinterpret_cast<int*>(mapped + S::QueryProduct::kParts * D::kColumns * D::kPlanesK);  // [column][D_k]
        const PageLayout<F> page(a.planes);
        const typename S::QueryProduct product(head.k_decode_t);
        const Vectors vectors(head);
        // Where element i of a tile's queries lies, or null.
        const auto source = [&](int tile, int i) -> const float* {
            if (i >= D::kColumns * D::kDimK || tile >= a.n_tiles) { return nullptr; }
            const Column column =
                column_of(i / D::kDimK, D::kColumns, share.column_block, a.rows_per_tile, a.group, share.kv_head);
            const u32 token = a.rows[size_t(tile) * a.rows_per_tile + column.row].token;
            return !column.used || token == kNoToken
                       ? nullptr
                       : a.q + token * a.q_token_stride + column.head * a.q_head_stride + i % D::kDimK;
        };
        const float* const own = source(share.first_tile, thread());  // rows have been there since the plan was made
        wait_for_previous();
        launch_next();
        for (int tile = share.first_tile; tile < a.n_tiles; tile += share.tile_step) {
            const QueryRow* rows = a.rows + size_t(tile) * a.rows_per_tile;
            u32* const record = a.queries + size_t(share.segment(a, tile)) * D::kQueryWords;
            for (int i = thread(); i < D::kColumns * D::kDimK; i += n_threads()) {
                const float* from = tile == share.first_tile && i == thread() ? own : source(tile, i);
                q[i % D::kDimK * D::kColumns + i / D::kDimK] = from ? *from * (a.scale * kLog2e) : 0.0f;
            }
            sync_block();
            product.multiply(q, mapped);
            sync_block();
            for (int c = warp(); c < D::kColumns; c += n_threads() / kWarp) {
                const Column column = column_of(c, D::kColumns, share.column_block, a.rows_per_tile, a.group, share.kv_head);
                const QueryColumn scalars = quantise<S>(vectors, rows[column.row], q + c, mapped, c, steps, has_tail(page.planes_k));
                if (lane() == 0) { reinterpret_cast<QueryColumn*>(record + D::kColumnAt)[c] = scalars; }
            }
            sync_block();
            write_words(record, reinterpret_cast<const int*>(mapped), steps, q, full_groups(page.planes_k));
            sync_block();
        }
    }

    template <bool kFew>
    CRUMB_DEVICE static void output(const MapArgs& a, std::byte* shared) {
        using namespace simt;
        using S = Shape<kFew>;
        constexpr int kAll = S::kTogether, kQuads = D::kWidth / 4 + 1;
        const MapShare share(a, D::kColumns / kAll);
        const HeadArrays& head = a.heads[share.kv_head];
        float* const sums = reinterpret_cast<float*>(shared);    // [split][column][kStride]
        float* const planes = sums + S::kSplit * kAll * D::kStride;  // [P_v][column], then [column][D_v + scalars]
        float* const channels = planes + kAll * D::kPlanesV;
        float* const mapped = planes + kAll * D::kStride;        // [part][column][D_v]
        const typename S::OutputProduct product(head.v_decode);
        // The parts of a segment; none: nobody has any.
        const auto parts_of = [&](int tile) {
            const bool any = tile < a.n_tiles && a.tiles[tile].units > 0;
            return any ? a.parts[share.segment(a, tile)] : SegmentParts{0, -1};
        };
        const SegmentParts own = parts_of(share.first_tile);  // it has been there since the plan was made
        wait_for_previous();
        launch_next();
        for (int tile = share.first_tile; tile < a.n_tiles; tile += share.tile_step) {
            const QueryRow* rows = a.rows + size_t(tile) * a.rows_per_tile;
            const SegmentParts parts = tile == share.first_tile ? own : parts_of(tile);
            const bool whole = parts.first_block == parts.last_block;
            const float* merged = a.merged + size_t(share.segment(a, tile)) * D::kEntryFloats;
            for (int i = thread(); i < S::kSplit * kAll * kQuads; i += n_threads()) {
                const int x = 4 * (i % kQuads), c = i / kQuads % kAll, split = i / kQuads / kAll;
                int block = parts.first_block + split;
                PartialSum s = PartialSum::of<D>(share.column * kAll + c, x, [&]() -> const float* {
                    if (block > parts.last_block) { return nullptr; }
                    const float* part = whole ? merged : partial_of<D>(a.partials, block, parts.first_block);
                    block += S::kSplit;
                    return part;
                });
                if (x == D::kWidth) { s.sum.x = s.top; }
                *reinterpret_cast<Floats4*>(sums + (split * kAll + c) * D::kStride + x) = s.sum;
            }
            sync_block();
            for (int i = thread(); i < kAll * kQuads; i += n_threads()) {
                const int x = 4 * (i % kQuads), c = i / kQuads;
                int split = 0;
                PartialSum s = PartialSum::of<D>(c, x, [&]() -> const float* {
                    return split < S::kSplit ? sums + split++ * kAll * D::kStride : nullptr;
                });
                if (x == D::kWidth) { s.sum.x = s.top; }
                if (x < D::kPlanesV) {
                    float* to = planes + x * kAll + c;
                    to[0] = s.sum.x, to[kAll] = s.sum.y, to[2 * kAll] = s.sum.z, to[3 * kAll] = s.sum.w;
                } else {
                    *reinterpret_cast<Floats4*>(channels + c * (D::kDimV + kEntryScalars) + x - D::kPlanesV) = s.sum;
                }
            }
            sync_block();
            product.multiply(planes, mapped);
            sync_block();
            for (int i = thread(); i < kAll * D::kDimV; i += n_threads()) {
                const int c = i / D::kDimV, d = i % D::kDimV;
                const Column column = column_of(share.column * kAll + c, D::kColumns, share.column_block, a.rows_per_tile,
                                                a.group, share.kv_head);
                const u32 token = rows[column.row].token;
                if (!column.used || token == kNoToken) { continue; }
                const float* sum = channels + c * (D::kDimV + kEntryScalars);
                const float* scalars = sum + D::kDimV;
                float value = 0;
                for (int p = 0; p < S::OutputProduct::kParts; p++) { value += mapped[(p * kAll + c) * D::kDimV + d]; }
                value += sum[d];
                if (head.v_ones) { value = fma_exact(scalars[kZeroSum], head.v_ones[d], value); }
                if (head.v_mean) { value = fma_exact(scalars[kCodedSum], head.v_mean[d], value); }
                const float weight = share_of(scalars[kTop], scalars[kSum], a.sinks, column.head);
                a.out[token * a.out_stride + size_t(column.head) * D::kDimV + d] = weight == 0 ? 0.0f : value * weight;
            }
            sync_block();
        }
    }

  private:
    // What a lane needs of a head's vectors over channels: channels lane + 32 i.
    struct Vectors {
        static constexpr int kEach = D::kDimK / simt::kWarp;
        float ones[kEach] = {}, mean[kEach] = {}, mean_step[kEach] = {};
        bool has_ones, has_mean;

        CRUMB_DEVICE Vectors(const HeadArrays& head) : has_ones(head.k_ones), has_mean(head.k_mean) {
#pragma unroll
            for (int i = 0; i < kEach; i++) {
                const int d = simt::lane() + simt::kWarp * i;
                if (has_ones) { ones[i] = head.k_ones[d]; }
                if (has_mean) { mean[i] = head.k_mean[d]; }
                if constexpr (F.k.mean) {
                    if (head.k_mean_step) { mean_step[i] = head.k_mean_step[d]; }
                }
            }
        }
    };

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

    static constexpr float kCodedQueryTop = D::kGrouped ? 1.0f : D::kFineQuery ? kFineQueryTop : kCoarseQueryTop;

    // What the integer of plane p is multiplied with. A digit counts 64 / multiple of an integer's unit.
    CRUMB_DEVICE static int multiple(int p, bool has_tail) {
        const bool tail = has_tail && p >= D::kTailPlaneK;
        if constexpr (D::kFineQuery) { return tail || p / 16 % 2 == 0 ? 4 : 1; }
        return tail ? 64 : 64 >> (2 * (p / 16 % 4));
    }

    // One warp, one column: integers over the first part of `mapped` and in `steps`. q: of the column.
    template <class S>
    CRUMB_DEVICE static QueryColumn quantise(const Vectors& vectors, const QueryRow& row, const float* q, float* mapped, int c,
                                             int* steps, bool has_tail) {
        using namespace simt;
        u32 most = 0;  // bits of |x|: what is not finite is above all that is
        for (int p = lane(); p < D::kPlanesK; p += kWarp) {
            float x = 0;
            for (int part = 0; part < S::QueryProduct::kParts; part++) { x += mapped[(part * D::kColumns + c) * D::kPlanesK + p]; }
            mapped[c * D::kPlanesK + p] = x;
            const u32 bits = bits_of(x) & 0x7fffffffu;
            most = bits > most ? bits : most;
        }
#pragma unroll
        for (int o = 16; o > 0; o /= 2) {
            const u32 other = shuffle_xor(most, o);
            most = other > most ? other : most;
        }
        const float top = float_of(most), odd = top - top;  // NaN if something is not finite
        const float inverse = top > 1e-30f && odd == 0 ? kCodedQueryTop / top : 0.0f;
        int centre = 0;
        for (int p = lane(); p < D::kPlanesK; p += kWarp) {
            const float x = odd == 0 ? mapped[c * D::kPlanesK + p] : 0.0f;
            if constexpr (D::kGrouped) {
                mapped[c * D::kPlanesK + p] = x * inverse;
                continue;
            }
            const int m = multiple(p, has_tail), v = int(rintf(x * (float(m) * inverse)));
            centre += 3 * (64 / m) * v;  // in halves
            reinterpret_cast<int*>(mapped)[c * D::kPlanesK + p] = v;
        }
        centre = total(centre);

        float ones = 0, offset = 0, mean_top = 0;
#pragma unroll
        for (int i = 0; i < Vectors::kEach; i++) {
            const float x = q[(lane() + kWarp * i) * D::kColumns];
            ones = fma_exact(x, vectors.ones[i], ones);
            offset = fma_exact(x, vectors.mean[i], offset);
            if constexpr (F.k.mean) { mean_top = max_of(mean_top, fabsf(x * vectors.mean_step[i])); }
        }
        if (vectors.has_ones) { ones = total(ones); }
        if (vectors.has_mean) { offset = total(offset); }
        if constexpr (F.k.mean) {
            mean_top = largest(mean_top);
            const float mean_inverse = mean_top > 1e-30f && odd == 0 ? kMeanQueryTop / mean_top : 0.0f;
#pragma unroll
            for (int i = 0; i < Vectors::kEach; i++) {
                const int d = lane() + kWarp * i;
                const float x = odd == 0 ? q[d * D::kColumns] * vectors.mean_step[i] : 0.0f;
                steps[c * D::kDimK + d] = int(rintf(x * mean_inverse));
            }
        }
        QueryColumn column;
        column.unit = odd != 0 ? odd : D::kGrouped ? top : top * (1.0f / (64.0f * kCodedQueryTop));
        column.ones = ones, column.offset = offset;
        column.mean_unit = mean_top * (1.0f / kMeanQueryTop);
        column.centre = 0.5f * float(centre);
        const bool there = row.token != kNoToken;
        column.begin = there ? row.begin : 0, column.coded_end = there ? row.coded_end : 0, column.end = there ? row.end : 0;
        return column;
    }

    CRUMB_DEVICE static u32 byte_of(int v, bool high) {
        const int top = (v + 128) >> 8;
        return u32(high ? top : v - 256 * top) & 0xffu;
    }
    CRUMB_DEVICE static u32 four_bytes(const int* v, bool high) {
        return byte_of(v[0], high) | byte_of(v[1], high) << 8 | byte_of(v[2], high) << 16 | byte_of(v[3], high) << 24;
    }

    // Word i of q' in halves.
    CRUMB_DEVICE static u32 half_word(const float* x, int i) {
        using namespace simt;
        constexpr int kSteps = D::kPlanesK / 16;
        const bool base = i < D::kScaledAt;
        const int t = base ? i : i - D::kScaledAt, w = t % 2, r = t / 8 % 8, step = t / 64 % kSteps, n = t / 64 / kSteps;
        const int column = base ? 4 * n + r / 2 : 4 * (2 * n + r % 2) + r / 2;
        if (column >= D::kColumns) { return 0; }
        const float* const at = x + column * D::kPlanesK + 16 * step + 4 * (t / 2 % 4) + 2 * (base ? r % 2 : w);
        const float factor = !base ? 1.0f / float(1 << (2 * (step % 4))) : w == 0 ? -1.5f : 1.0f;
        return half_pair(at[0] * factor, at[1] * factor);
    }

    // groups: full ones of the page's K; words of others are 0.
    CRUMB_DEVICE static void write_words(u32* record, const int* codes, const int* steps, const float* q, int groups) {
        using namespace simt;
        constexpr int kGroups = D::kGroupsK > 0 ? D::kGroupsK : 1;
        for (int i = thread(); i < D::kColumnAt; i += n_threads()) {
            u32 word;
            if (D::kGrouped && i < D::kCodeWords) {
                word = half_word(reinterpret_cast<const float*>(codes), i);
            } else if (i < D::kTailAt) {
                const int f = i % 4, l = i / 4 % 32, g = i / 128 % kGroups, n = i / 128 / kGroups;
                word = g < groups ? four_bytes(codes + (4 * n + l / 8) * D::kPlanesK + 64 * g + 16 * f + 4 * (l % 4), l / 4 % 2 == 0) : 0;
            } else if (i < D::kMeanAt) {
                const int t = i - D::kTailAt, w = t % 2, l = t / 2 % 32, n = t / 64;
                word = four_bytes(codes + (4 * n + l / 8) * D::kPlanesK + D::kTailPlaneK + 16 * w + 4 * (l % 4), l / 4 % 2 == 0);
            } else if (i < D::kExactAt) {
                const int t = i - D::kMeanAt, w = t % 4, l = t / 4 % 32, g = t / 128 % (D::kDimK / 64), n = t / 128 / (D::kDimK / 64);
                word = four_bytes(steps + (4 * n + l / 8) * D::kDimK + 64 * g + 16 * (l % 4) + 4 * w, l / 4 % 2 == 0);
            } else {
                const int t = i - D::kExactAt, w = t % 2, l = t / 2 % 32, s = t / 64 % (D::kDimK / 16), n = t / 64 / (D::kDimK / 16);
                const float* x = q + (16 * s + 8 * w + 2 * (l % 4)) * D::kColumns + 4 * n + l / 8;
                const float x0 = x[0], x1 = x[D::kColumns];
                const u32 high = bf16_pair(x0, x1);
                word = l / 4 % 2 == 0 ? high : bf16_pair(x0 - float_of(high << 16), x1 - float_of(high & 0xffff0000u));
            }
            record[i] = word;
        }
    }
};

}  // namespace crumb::cuda

// The encoder on a device: 64 exact tokens of one KV head and side become the codes and side information of a page, the same
// bytes as encode_page() gives. A block of kEncodeThreads threads takes all of them, or, where there is little to do, 8 or 16
// tokens of one (job, head, side); numbers lie in shared memory by channel.
//
// Every sum that the CPU takes in an order is taken in that order: the map runs over i ascending in one thread for some tokens and
// directions at once, for the gain's sums see encode_token.h. Compile with -fmad=false: only fma_exact() fuses. Tensor cores would
// add in an order of their own. So issue slots bound it: 0.86 ms for 32768 tokens of 8 heads of 128 channels with a gain on an H200, of
// which the map's multiply-adds would take 0.26 alone.
#pragma once

#include <math.h>

#include "base/cuda/simt.h"
#include "recipe/cuda/encode_args.h"
#include "recipe/cuda/encode_codes.h"
#include "recipe/cuda/encode_groups.h"
#include "recipe/cuda/encode_token.h"

namespace crumb::cuda {

inline constexpr int kEncodeThreads = 256;
inline constexpr int kBlockPitch = kPageTokens + kPageTokens / 8;  // floats of a channel of all tokens

// kTokens of a block's tokens; kDirections: of the map at once in a thread, up to 32 kDirections in all.
template <int kTokens, int kDirections>
class Encode {
  public:
    static constexpr int kSlices = kPageTokens / kTokens;

    static size_t shared_bytes(const EncodeShape& shape) {
        const size_t dim = size_t(shape.dim);
        return dim * kPitch * 4 + dim * sizeof(Direction) + kBuffers * 8 + 4 * 4 * kTokens + size_t(area_bytes(shape.dim)) + size_t(shape.planes) * 4;
    }

    // Grid: (head, side, slice, job), job fastest, for jobs next to each other share a head's map.
    CRUMB_DEVICE static void run(const EncodeArgs& a, const EncodeJob* jobs, std::byte* shared) {
        const int n_jobs = simt::n_blocks() / (2 * kSlices * a.n_head_kv);
        one(a, jobs[simt::block() % n_jobs], simt::block() / n_jobs, shared);
    }

    // The same jobs in many layers: `slots` blocks a layer, head, side and slice of the layer with most heads take them in turns, up to
    // the first without a source.
    CRUMB_DEVICE static void run_layers(const EncodeArgs* layers, int most_heads, int slots, const EncodeJob* jobs, int n_jobs, std::byte* shared) {
        const int parts = 2 * kSlices * most_heads, part = simt::block() / slots % parts;
        const EncodeArgs& a = layers[simt::block() / slots / parts];
        for (int j = simt::block() % slots; j < n_jobs && jobs[j].source != kNoBlock && part < 2 * kSlices * a.n_head_kv; j += slots) {
            one(a, jobs[j], part, shared);
            simt::sync_block();
        }
    }

  private:
    static constexpr int kLanes = kEncodeThreads / kTokens;         // that share a token
    static constexpr int kPitch = kTokens + kTokens / 8;            // floats of a direction: lanes of a token lie in other banks
    static constexpr int kCodePitch = (kPitch + 3) / 4 * 4;
    static constexpr int kChunkRows = 64 / kDirections;             // of the map, in shared memory at a time; head sizes are multiples of it
    static constexpr int kBuffers = kSlices > 1 ? 128 / kChunkRows : 2;  // few tokens: the copies' delay is what counts
    static constexpr int kEach = kTokens / 8;                       // tokens of a thread in the map
    using Quantise = TokenQuantiser<kTokens, kLanes, 32 * kDirections / kLanes, kPitch, kCodePitch>;
    static constexpr float kLargestInput = 1e30f;

    // Of the map's rows; later codes and starts have their place, and of a part of a block all tokens before, for their mean.
    CRUMB_BOTH static int area_bytes(int dim) {
        const int rows = kBuffers * kChunkRows * dim * 4, after = dim * kCodePitch + 4 * 3 * kStarts * kTokens;
        return rows > after ? rows : after;
    }
    static_assert(kSlices == 1 || kBuffers * kChunkRows >= kBlockPitch);

    CRUMB_DEVICE static void one(const EncodeArgs& a, const EncodeJob& job, int part, std::byte* shared) {
        const int slice = part % kSlices, side = part / kSlices % 2, head = part / kSlices / 2;
        if (job.source == kNoBlock) { return; }
        const u8* record = a.exact + job.source * a.exact_stride + head * a.exact_bytes;
        u8* page = a.coded + job.target * a.coded_stride + head * a.coded_bytes;
        const u8* kept = job.keep > 0 ? a.coded + job.kept * a.coded_stride + head * a.coded_bytes : nullptr;
        Encode encode(side == 0 ? a.k : a.v, head, slice * kTokens, shared, a.counts, job.keep);
        encode.side(side == 0, record, page, kept);
    }

    CRUMB_DEVICE Encode(const EncodeSide& s, int head, int first, std::byte* shared, EncodeCountsDevice* counts, int keep)
        : s_(s), tables_(s.tables[head]), dim_(s.format.dim), first_(first), keep_(keep), counts_(counts) {
        y_ = reinterpret_cast<float*>(shared);
        directions_ = reinterpret_cast<Direction*>(y_ + dim_ * kPitch);
        barriers_ = reinterpret_cast<simt::u64*>(directions_ + dim_);
        scale_ = reinterpret_cast<u32*>(barriers_ + kBuffers);
        chunks_ = reinterpret_cast<float*>(scale_ + 4 * kTokens);
        codes_ = reinterpret_cast<u8*>(chunks_);
        places_ = reinterpret_cast<u32*>(codes_ + area_bytes(dim_));
    }

    CRUMB_DEVICE static float clamp(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }
    CRUMB_DEVICE u32* zero() const { return scale_ + kTokens; }
    CRUMB_DEVICE u32* saturated() const { return scale_ + 2 * kTokens; }

    CRUMB_DEVICE void side(bool key, const u8* record, u8* page, const u8* kept) {
        using namespace simt;
        const u8* const rows = record + s_.rows_at;
        const bool mean_first = s_.format.mean && kSlices > 1;  // of all tokens, in the place of the map's rows
        if (tables_.encode && !mean_first) { begin_map(); }
        // Threads that have no row to load in a small part of a block come first.
        const int other = (thread() + kEncodeThreads / 2) % kEncodeThreads;
        for (int p = other; p < s_.format.planes; p += kEncodeThreads) {
            const u32 direction = tables_.direction[p];
            places_[p] = direction == kNoDirection ? CodeWriter::kNowhere : direction * kCodePitch | u32(2 * tables_.digit[p]) << 24;
        }
        if (s_.quantiser == Quantiser::gain) {
            for (int j = other; j < dim_; j += kEncodeThreads) {
                directions_[j] = direction_of(tables_.sigma[j], tables_.step[j], tables_.digits[j]);
            }
        }
        if (thread() < kTokens) { saturated()[thread()] = 0; }
        if (s_.format.mean) {
            load<kPageTokens, kBlockPitch>(key, rows, 0, kSlices > 1 ? chunks_ : y_);
            sync_block();
            page_mean(kSlices > 1 ? chunks_ : y_, page + s_.mean_at, kept ? kept + s_.mean_at : nullptr);
        } else {
            load<kTokens, kPitch>(key, rows, first_, y_);
        }
        sync_block();
        if (tables_.encode) {
            if (mean_first) {
                begin_map();
                sync_block();
            }
            map();
        } else {
            for (int j = Quantise::part(); j < dim_; j += kLanes) { keep_within(j, Quantise::token()); }
        }
        sync_block();
        if (has_groups(s_)) {
            const GroupEncoder groups = {s_.format, s_.bits, keep_, s_.integer_zero, y_, codes_, saturated(),
                                         reinterpret_cast<float*>(scale_), reinterpret_cast<float*>(zero()), kPitch,
                                         page + s_.info_at, kept ? kept + s_.info_at : nullptr};
            if constexpr (kSlices == 1) {
                if (key) { groups.keys(); } else { groups.values(); }
            }
        } else {
            Quantise quantise = {s_, tables_, dim_, y_, codes_, reinterpret_cast<float*>(codes_ + dim_ * kCodePitch), directions_,
                                 reinterpret_cast<float*>(scale_ + 3 * kTokens), scale_, zero(), saturated()};
            if (s_.quantiser == Quantiser::minmax) { quantise.minmax(); } else { quantise.gain(); }
        }
        sync_block();
        const CodeWriter writer = {codes_, kCodePitch, places_, s_.format.planes, first_, kTokens, keep_, kept ? kept + s_.codes_at : nullptr};
        if (key) { writer.write_keys(page + s_.codes_at); } else { writer.write_values(page + s_.codes_at); }
        if (thread() < kTokens) { finish_token(thread(), page + s_.info_at, kept ? kept + s_.info_at : nullptr); }
    }

    // Tokens from .. from + n of the block into to [D][pitch]. K lies by channel, V by token: 16 bytes are 8 tokens of a channel, or 8
    // channels of a token.
    template <int n, int pitch>
    CRUMB_DEVICE void load(bool key, const u8* rows, int from, float* to) {
        if (key) { load_side<true, n, pitch>(rows, from, to); } else { load_side<false, n, pitch>(rows, from, to); }
    }

    template <bool kKey, int n, int pitch>
    CRUMB_DEVICE void load_side(const u8* rows, int from, float* to) {
        using namespace simt;
#pragma unroll(n < kPageTokens ? 1 : 4)  // reads that are waited for together; of a part of a block a thread has one
        for (int i = thread(); i < dim_ * n / 8; i += kEncodeThreads) {
            const int channel = kKey ? i / (n / 8) : i / n * 8, t = kKey ? i % (n / 8) * 8 : i % n;
            const u8* const at = rows + 2 * (kKey ? channel * kPageTokens + from + t : (from + t) * dim_ + channel);
            const Words4 w = load_once(reinterpret_cast<const Words4*>(at));
            const u32 words[4] = {w.x, w.y, w.z, w.w};
            float x[8];
            u32 large = 0;  // a magnitude of 0x714a or more, which is 1e30
#pragma unroll
            for (int e = 0; e < 8; e++) {
                x[e] = float_of(e % 2 ? words[e / 2] & 0xffff0000u : words[e / 2] << 16);
                large |= ((words[e / 2] & 0x7fff7fffu) + 0x0eb60eb6u) & 0x80008000u;
            }
            if (tables_.mean) {
#pragma unroll
                for (int e = 0; e < 8; e++) { x[e] -= tables_.mean[kKey ? channel : channel + e]; }
            }
            float* const first = to + channel * pitch + t;
            if constexpr (kKey) {
                put<pitch>(x, first);
                put<pitch>(x + 4, first + 4);
            } else {
#pragma unroll
                for (int e = 0; e < 8; e++) { first[e * pitch] = x[e]; }
            }
            if (large) {
#pragma unroll 1
                for (int e = 0; e < 8; e++) {
                    const u32 bits = reinterpret_cast<const uint16_t*>(at)[e];
                    first[kKey ? e : e * pitch] = tame(bits, kKey ? channel : channel + e, from + t + (kKey ? e : 0));
                }
            }
        }
    }

    // A number of any size, less the centre: NaN is 0, others are within the largest input. Counts for the tokens that are the block's.
    CRUMB_DEVICE float tame(u32 bits, int channel, int t) {
        using namespace simt;
        const bool is_finite = (bits & 0x7f80u) != 0x7f80u, is_nan = (bits & 0x7fffu) > 0x7f80u;
        if (!is_finite && t >= keep_ && t >= first_ && t < first_ + kTokens) { add_device(&counts_->nonfinite, 1); }
        return (is_nan ? 0.0f : clamp(float_of(bits << 16), kLargestInput)) - (tables_.mean ? tables_.mean[channel] : 0.0f);
    }

    // Four tokens of a row of `pitch`.
    template <int pitch>
    CRUMB_DEVICE static void put(const float* x, float* to) {
        if constexpr (pitch % 4 == 0) {
            *reinterpret_cast<simt::Floats4*>(to) = {x[0], x[1], x[2], x[3]};
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) { to[e] = x[e]; }
        }
    }

    // x: [D][kBlockPitch], all tokens; less their mean, those of the thread's block go to y.
    CRUMB_DEVICE void page_mean(const float* x, u8* mean, const u8* kept) {
        using namespace simt;
        for (int i = thread(); i < dim_; i += kEncodeThreads) {
            const Floats4* const row = reinterpret_cast<const Floats4*>(x + i * kBlockPitch);
            const float step = tables_.mean_step[i];
            int code;
            if (kept) {
                code = int8_t(kept[i]);
            } else {
                float sum = 0;
#pragma unroll
                for (int t = 0; t < kPageTokens / 4; t++) {
                    const Floats4 four = row[t];
                    sum = sum + four.x, sum = sum + four.y, sum = sum + four.z, sum = sum + four.w;
                }
                code = int(floorf(clamp(sum * (1.0f / kPageTokens) / step, 127.0f) + 0.5f));
            }
            if (first_ == 0) { mean[i] = u8(code); }
            const float m = float(code) * step;
#pragma unroll
            for (int t = 0; t < kTokens; t += 4) {
                const Floats4 four = row[(first_ + t) / 4];
                const float less[4] = {four.x - m, four.y - m, four.z - m, four.w - m};
                put<kPitch>(less, y_ + i * kPitch + t);
            }
        }
    }

    // A mapped value, within the range of FP16.
    CRUMB_DEVICE void keep_within(int j, int t) {
        float& y = y_[j * kPitch + t];
        if (fabsf(y) > kLargestMapped) {
            simt::or_shared(saturated() + t, 1);
            y = clamp(y, kLargestMapped);
        }
    }

    // Token k of the thread in the map, of the tile: runs of up to 4.
    CRUMB_DEVICE static int mapped_token(int k) {
        constexpr int run = kEach < 4 ? kEach : 4;
        return k / run * (8 * run) + simt::thread() % 8 * run + k % run;
    }

    // Rows of the map come in chunks.
    CRUMB_DEVICE void copy(int chunk) {
        using namespace simt;
        const int n_floats = kChunkRows * dim_, buffer = chunk % kBuffers;
        if (warp() == 0 && chunk * kChunkRows < dim_) {
            copy_begin(barriers_ + buffer, chunks_ + buffer * n_floats, tables_.encode + chunk * n_floats, u32(n_floats) * 4, Reuse::soon);
        }
    }

    CRUMB_DEVICE void begin_map() {
        using namespace simt;
        if (warp() == 0) {
            for (int i = 0; i < kBuffers; i++) { copy_init(barriers_ + i); }
            copy_ready();
        }
        for (int chunk = 0; chunk < kBuffers; chunk++) { copy(chunk); }
    }

    CRUMB_DEVICE void map() {
        using namespace simt;
        const int j = kDirections * (thread() / 8), n_chunks = dim_ / kChunkRows;
        float sum[kDirections][kEach] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < n_chunks; chunk++) {
            copy_wait(barriers_ + chunk % kBuffers, u32(chunk / kBuffers) & 1);
            if (j < dim_) {
                const float* row = chunks_ + chunk % kBuffers * kChunkRows * dim_ + j;
                const float* const at = y_ + chunk * kChunkRows * kPitch;
#pragma unroll
                for (int i = 0; i < kChunkRows; i++, row += dim_) {
                    float x[kEach], b[kDirections];
                    load_tokens(at + i * kPitch, x);
#pragma unroll
                    for (int d = 0; d < kDirections; d += 4) {
                        const Floats4 four = *reinterpret_cast<const Floats4*>(row + d);
                        b[d] = four.x, b[d + 1] = four.y, b[d + 2] = four.z, b[d + 3] = four.w;
                    }
#pragma unroll
                    for (int d = 0; d < kDirections; d++) {
#pragma unroll
                        for (int t = 0; t < kEach; t++) { sum[d][t] = fma_exact(x[t], b[d], sum[d][t]); }
                    }
                }
            }
            if (chunk + 1 == n_chunks || chunk + kBuffers < n_chunks) { sync_block(); }
            copy(chunk + kBuffers);
        }
        if (j >= dim_) { return; }
        float largest = 0;
#pragma unroll
        for (int d = 0; d < kDirections; d++) {
#pragma unroll
            for (int t = 0; t < kEach; t++) {
                y_[(j + d) * kPitch + mapped_token(t)] = sum[d][t];
                largest = max_of(largest, fabsf(sum[d][t]));
            }
        }
        if (largest > kLargestMapped) {
#pragma unroll 1
            for (int d = 0; d < kDirections; d++) {
#pragma unroll 1
                for (int t = 0; t < kEach; t++) { keep_within(j + d, mapped_token(t)); }
            }
        }
    }

    CRUMB_DEVICE static void load_tokens(const float* at, float (&x)[kEach]) {
        using namespace simt;
        if constexpr (kEach >= 4) {
#pragma unroll
            for (int k = 0; k < kEach; k += 4) {
                const Floats4 four = *reinterpret_cast<const Floats4*>(at + mapped_token(k));
                x[k] = four.x, x[k + 1] = four.y, x[k + 2] = four.z, x[k + 3] = four.w;
            }
        } else if constexpr (kEach == 2) {
            const Floats2 two = *reinterpret_cast<const Floats2*>(at + mapped_token(0));
            x[0] = two.x, x[1] = two.y;
        } else {
            x[0] = at[mapped_token(0)];
        }
    }

    CRUMB_DEVICE void finish_token(int t, u8* info, const u8* kept) const {
        const int at = first_ + t;
        if (at >= keep_ && saturated()[t]) { simt::add_device(&counts_->saturated, 1); }
        if (has_groups(s_)) { return; }
        if (s_.format.info == SideInfo::gain8) {
            info[at] = at < keep_ ? kept[at] : u8(scale_[t]);
            return;
        }
        const auto write = [&](int i, u32 bits) {
            reinterpret_cast<uint16_t*>(info)[i] = at < keep_ ? reinterpret_cast<const uint16_t*>(kept)[i] : uint16_t(bits);
        };
        write(at, scale_[t]);
        if (s_.format.info == SideInfo::scale_zero) { write(kPageTokens + at, zero()[t]); }
    }

    const EncodeSide& s_;
    const EncodeTables tables_;
    int dim_, first_, keep_;  // first_: token of the block, the tile's first
    EncodeCountsDevice* counts_;
    float* y_;   // [D][kPitch], of the tile; before the map the rows, less what is subtracted
    Direction* directions_;  // [D]
    simt::u64* barriers_;    // [kBuffers]
    u32* scale_;    // [scale, zero, saturated, rms][kTokens]
    float* chunks_;  // [kBuffers][kChunkRows][D] of the map
    u8* codes_;      // [D][kCodePitch] in their place, then starts
    u32* places_;    // [P] see CodeWriter
};

}  // namespace crumb::cuda

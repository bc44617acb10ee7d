// The encoder on a device: 64 exact tokens of one KV head and side become the codes and side information of a page, the same
// bytes as encode_page() gives. A block of kEncodeThreads threads takes one (job, head, side); numbers lie in shared memory
// by channel.
//
// Every sum that the CPU takes in an order is taken in that order: the map runs over i ascending in one thread for 4 tokens
// and 4 directions, the gain's sums run over directions ascending in one thread for a token and two of the six starts.
// Minima, maxima and counts have no order: eight neighbouring lanes share a token. Compile with -fmad=false: only
// fma_exact() fuses.
//
// So FP32 multiply-adds bound it: at D = 128 a token of a side takes 16384 for the map, 0.29 ms for 32768 tokens of 8 heads at an
// H200's peak, and as many instructions for the gain; it takes 1.5 ms. Tensor cores would add in an order of their own.
#pragma once

#include <crumb/attention.h>
#include <crumb/recipe.h>
#include <math.h>

#include "base/cuda/simt.h"
#include "page/gain8.h"
#include "recipe/cuda/encode_groups.h"

namespace crumb::cuda {

using simt::u32;
using simt::u8;

inline constexpr int kEncodeThreads = 512;
inline constexpr int kStarts = 6;
inline constexpr int kChunkRows = 16;  // of the map, in shared memory at a time; head sizes are multiples of it
inline constexpr int kPitch = kPageTokens + 4;  // floats of a channel: 4 tokens of 8 channels lie in 32 banks

// Block `source` of exact records becomes block `target` of pages; tokens below `keep` are taken over from block `kept`.
// Without a source (kNoBlock) there is nothing to do: a recorded step has room for more jobs than most of its replays need.
struct EncodeJob {
    u32 source, target;
    int keep;
    u32 kept;
};

// Static tables of one (KV head, side) on the device: SideTables as pointers, null for what is empty.
struct EncodeTables {
    const float *mean, *encode, *sigma, *step, *mean_step;
    const u8* digits;           // [D]
    const uint16_t* direction;  // [P]
    const u8* digit;            // [P]
    float gain_reference;
};

struct EncodeSide {
    SideFormat format;
    Quantiser quantiser;
    int bits;
    bool integer_zero;           // of groups
    int clipped;                 // minmax: the threshold is the clipped-th largest |y|
    u32 rows_at;                 // of the exact record
    u32 codes_at, info_at, mean_at;  // of the page
    const EncodeTables* tables;  // [n_head_kv]
};

struct EncodeCountsDevice {
    u32 nonfinite, saturated;
};

struct EncodeArgs {
    EncodeSide k, v;
    int n_head_kv;
    const u8* exact;
    size_t exact_stride, exact_bytes;  // of a block, of a record
    u8* coded;
    size_t coded_stride, coded_bytes;
    EncodeCountsDevice* counts;  // added to
};

// What the kernel needs to know of a side.
inline EncodeSide encode_side(const SideRecipe& recipe, const PageFormat& format, bool key, const EncodeTables* tables) {
    const SideFormat& side = key ? format.k : format.v;
    EncodeSide s = {};
    s.format = side;
    s.quantiser = recipe.quantiser;
    s.bits = recipe.bits;
    s.integer_zero = recipe.integer_zero;
    const int kept = int(recipe.clip * float(side.dim));
    s.clipped = side.dim - (kept < side.dim - 1 ? kept : side.dim - 1);
    s.rows_at = key ? 0 : u32(format.k.dim) * kPageTokens * 2;
    s.codes_at = u32(key ? format.key_codes() : format.value_codes());
    s.info_at = u32(key ? format.key_info() : format.value_info());
    s.mean_at = u32(key ? format.key_mean() : format.value_mean());
    s.tables = tables;
    return s;
}

constexpr size_t encode_shared_bytes(int dim, int planes) {
    return 4 * (2 * size_t(dim) * kPitch + size_t(dim) * kPitch / 4 + 4 + 3 * kStarts * kPageTokens + 4 * kPageTokens +
                2 * size_t(dim) + size_t(planes) + 2 * kChunkRows * size_t(dim) + 4);
}

inline size_t encode_shared_bytes(const EncodeArgs& a) {
    return encode_shared_bytes(a.k.format.dim > a.v.format.dim ? a.k.format.dim : a.v.format.dim,
                               a.k.format.planes > a.v.format.planes ? a.k.format.planes : a.v.format.planes);
}

// What lies in dword i of a side's codes: the inverse of key_code_at() and value_code_at().
struct KeyWord {
    int token, plane, field_step, bytes;  // byte b of field f is plane + field_step f + b
};
CRUMB_BOTH KeyWord key_word(int planes, int i) {
    const int groups = planes / 64, quarter = i / 4 % 4, e = i % 4;
    int block = i / 16;
    if (block >= 16 * groups) {
        block -= 16 * groups;
        return {16 * (block / 2) + 4 * quarter + e, 64 * groups + 4 * (block % 2), 8, 4};
    }
    const int q = block % 4, s = block / 4 % 2, group = block / 8 % groups, half = block / 8 / groups;
    return {32 * half + 16 * s + 4 * (quarter ^ (q & 2)) + e, 64 * group + 4 * q, 16, 4};
}

struct ValueWord {
    int token, plane;  // byte b of field f is token + b + (tail ? 4 (f / 2) : 0) of plane + 16 (tail ? f % 2 : f)
    bool tail;
};
CRUMB_BOTH ValueWord value_word(int planes, int i) {
    const int groups = planes / 64, quarter = i / 4 % 4, e = i % 4, block = i / 16;
    if (block >= 16 * groups) {
        const int u = block - 16 * groups;
        return {8 * u, 64 * groups + 4 * (quarter ^ (u & 2)) + e, true};
    }
    const int u = block / 4 / groups * 4 + block % 4, group = block / 4 % groups;
    return {4 * u, 64 * group + 4 * (quarter ^ (u & 2)) + e, false};
}

class Encode {
  public:
    // Grid: (head, side, job), job fastest, for jobs next to each other share a head's map.
    CRUMB_DEVICE static void run(const EncodeArgs& a, const EncodeJob* jobs, std::byte* shared) {
        const int n_jobs = simt::n_blocks() / (2 * a.n_head_kv);
        one(a, jobs[simt::block() % n_jobs], simt::block() / n_jobs, shared);
    }

    // The same jobs in many layers: `slots` blocks a layer, head and side of the layer with most heads take them in turns, up to
    // the first without a source.
    CRUMB_DEVICE static void run_layers(const EncodeArgs* layers, int most_heads, int slots, const EncodeJob* jobs, int n_jobs, std::byte* shared) {
        const int part = simt::block() / slots % (2 * most_heads);
        const EncodeArgs& a = layers[simt::block() / slots / (2 * most_heads)];
        for (int j = simt::block() % slots; j < n_jobs && jobs[j].source != kNoBlock && part < 2 * a.n_head_kv; j += slots) {
            one(a, jobs[j], part, shared);
            simt::sync_block();
        }
    }

  private:
    CRUMB_DEVICE static void one(const EncodeArgs& a, const EncodeJob& job, int part, std::byte* shared) {
        const int side = part % 2, head = part / 2;
        if (job.source == kNoBlock) { return; }
        const u8* record = a.exact + job.source * a.exact_stride + head * a.exact_bytes;
        u8* page = a.coded + job.target * a.coded_stride + head * a.coded_bytes;
        const u8* kept = job.keep > 0 ? a.coded + job.kept * a.coded_stride + head * a.coded_bytes : nullptr;
        Encode encode(side == 0 ? a.k : a.v, head, shared, a.counts, job.keep);
        encode.side(side == 0, record, page, kept);
    }

    CRUMB_DEVICE Encode(const EncodeSide& s, int head, std::byte* shared, EncodeCountsDevice* counts, int keep)
        : s_(s), tables_(s.tables[head]), dim_(s.format.dim), keep_(keep), counts_(counts) {
        x_ = reinterpret_cast<float*>(shared);
        y_ = x_ + dim_ * kPitch;
        code_ = reinterpret_cast<u8*>(y_ + dim_ * kPitch);
        starts_ = reinterpret_cast<float*>(code_ + (dim_ * kPitch + 15) / 16 * 16);
        tokens_ = starts_ + 3 * kStarts * kPageTokens;
        shapes_ = reinterpret_cast<simt::Floats2*>(tokens_ + 4 * kPageTokens);
        places_ = reinterpret_cast<u32*>(shapes_ + dim_);
        chunks_ = reinterpret_cast<float*>(places_ + s.format.planes);
        barriers_ = reinterpret_cast<simt::u64*>(chunks_ + 2 * kChunkRows * dim_);
    }

    static constexpr float kLargestInput = 1e30f, kLargestMapped = 65504.0f, kTiny = 0x1p-24f;

    CRUMB_DEVICE static float larger(float a, float b) { return a > b ? a : b; }
    CRUMB_DEVICE static float smaller(float a, float b) { return a < b ? a : b; }
    CRUMB_DEVICE static float clamp(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }
    static constexpr int kLanes = kEncodeThreads / kPageTokens;  // that share a token
    CRUMB_DEVICE int token() const { return simt::thread() / kLanes; }
    CRUMB_DEVICE int part() const { return simt::thread() % kLanes; }
    CRUMB_DEVICE float* of_token(int which) const { return tokens_ + which * kPageTokens; }

    CRUMB_DEVICE void side(bool key, const u8* record, u8* page, const u8* kept) {
        for (int p = simt::thread(); p < s_.format.planes; p += kEncodeThreads) {
            const bool none = tables_.direction[p] == kNoDirection;  // then the digit read is 0
            places_[p] = none ? 8u << 16 : tables_.direction[p] | u32(2 * tables_.digit[p]) << 16;
        }
        load(key, record + s_.rows_at);
        simt::sync_block();
        if (s_.format.mean) {
            page_mean(page + s_.mean_at, kept ? kept + s_.mean_at : nullptr);
            simt::sync_block();
        }
        if (tables_.encode) {
            map();
            simt::sync_block();
        } else {
            float* const unused = y_;
            y_ = x_;
            x_ = unused;
        }
        clamp_mapped();
        if (grouped()) {
            const GroupEncoder groups = {s_.format, s_.bits, keep_, s_.integer_zero, y_, code_, saturated_of(), kPitch,
                                         page + s_.info_at, kept ? kept + s_.info_at : nullptr};
            if (key) { groups.keys(); } else { groups.values(); }
        } else if (s_.quantiser == Quantiser::minmax) {
            minmax();
        } else {
            gain();
        }
        simt::sync_block();
        write_codes(key, page + s_.codes_at, kept ? kept + s_.codes_at : nullptr);
        if (!grouped()) { write_info(page + s_.info_at, kept ? kept + s_.info_at : nullptr); }
        if (part() == 0 && token() >= keep_ && saturated_of()[token()]) { simt::add_device(&counts_->saturated, 1); }
    }

    // Parameters of groups: written where they are made.
    CRUMB_DEVICE bool grouped() const {
        return s_.quantiser == Quantiser::channels || (s_.quantiser == Quantiser::minmax && (s_.format.group > 0 || s_.integer_zero));
    }

    CRUMB_DEVICE u32* saturated_of() const { return reinterpret_cast<u32*>(of_token(3)); }
    CRUMB_DEVICE u32* scale_bits() const { return reinterpret_cast<u32*>(of_token(1)); }
    CRUMB_DEVICE u32* zero_bits() const { return reinterpret_cast<u32*>(of_token(2)); }

    // K lies by channel, V by token: 16 bytes are 8 tokens of a channel, or 8 channels of a token.
    CRUMB_DEVICE void load(bool key, const u8* rows) {
        using namespace simt;
        u32 nonfinite = 0;
#pragma unroll 4
        for (int n = thread(); n < dim_ * kPageTokens / 8; n += kEncodeThreads) {
            const int channel = key ? n / 8 : n / kPageTokens * 8, t = key ? n % 8 * 8 : n % kPageTokens;
            const Words4 w = load_once(reinterpret_cast<const Words4*>(rows) + (key ? n : (t * dim_ + channel) / 8));
            const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const u32 bits = words[i / 2] >> (16 * (i % 2)) & 0xffffu;
                const int c = key ? channel : channel + i, at = key ? t + i : t;
                const bool is_finite = (bits & 0x7f80u) != 0x7f80u, is_nan = (bits & 0x7fffu) > 0x7f80u;
                nonfinite += at >= keep_ && !is_finite;
                const float centre = tables_.mean ? tables_.mean[c] : 0.0f;
                x_[c * kPitch + at] = (is_nan ? 0.0f : clamp(float_of(bits << 16), kLargestInput)) - centre;
            }
        }
        if (nonfinite > 0) { add_device(&counts_->nonfinite, nonfinite); }
    }

    CRUMB_DEVICE void page_mean(u8* mean, const u8* kept) {
        for (int i = simt::thread(); i < dim_; i += kEncodeThreads) {
            float* row = x_ + i * kPitch;
            const float step = tables_.mean_step[i];
            int code;
            if (kept) {
                code = int8_t(kept[i]);
            } else {
                float sum = 0;
                for (int t = 0; t < kPageTokens; t++) { sum += row[t]; }
                code = int(floorf(clamp(sum * (1.0f / kPageTokens) / step, 127.0f) + 0.5f));
            }
            mean[i] = u8(code);
            const float m = float(code) * step;
            for (int t = 0; t < kPageTokens; t++) { row[t] -= m; }
        }
    }

    // Rows of the map come in chunks, copied while the chunk before is worked on.
    CRUMB_DEVICE void map() {
        using namespace simt;
        constexpr int kTokens = 4, kDirections = 4;
        const int t = kTokens * (thread() % (kPageTokens / kTokens));
        const int first = kDirections * (thread() / (kPageTokens / kTokens)), step = kDirections * kEncodeThreads * kTokens / kPageTokens;
        const int n_chunks = dim_ / kChunkRows, n_floats = kChunkRows * dim_;
        if (warp() == 0) {
            for (int i = 0; i < 2; i++) { copy_init(barriers_ + i); }
            copy_ready();
        }
        sync_block();
        int copied = 0, used = 0;  // chunks
        const auto copy = [&](int chunk) {
            if (warp() == 0) {
                copy_begin(barriers_ + copied % 2, chunks_ + copied % 2 * n_floats, tables_.encode + chunk * n_floats, u32(n_floats) * 4);
            }
            copied++;
        };
        for (int j = first; j < dim_ + first; j += step) {  // once, up to 128 directions
            float sum[kDirections][kTokens] = {};
            copy(0);
            sync_block();
#pragma unroll 1
            for (int chunk = 0; chunk < n_chunks; chunk++) {
                if (chunk + 1 < n_chunks) { copy(chunk + 1); }
                copy_wait(barriers_ + used % 2, u32(used / 2) & 1);
                const float* row = chunks_ + used % 2 * n_floats + j;
                const float* at = x_ + chunk * kChunkRows * kPitch + t;
                used++;
                if (j < dim_) {
#pragma unroll 8
                    for (int i = 0; i < kChunkRows; i++, row += dim_, at += kPitch) {
                        const Floats4 x = *reinterpret_cast<const Floats4*>(at);
                        const Floats4 y = *reinterpret_cast<const Floats4*>(row);
                        const float b[kDirections] = {y.x, y.y, y.z, y.w};
#pragma unroll
                        for (int k = 0; k < kDirections; k++) {
                            sum[k][0] = fma_exact(x.x, b[k], sum[k][0]), sum[k][1] = fma_exact(x.y, b[k], sum[k][1]);
                            sum[k][2] = fma_exact(x.z, b[k], sum[k][2]), sum[k][3] = fma_exact(x.w, b[k], sum[k][3]);
                        }
                    }
                }
                sync_block();
            }
            if (j >= dim_) { continue; }
#pragma unroll
            for (int k = 0; k < kDirections; k++) {
                *reinterpret_cast<Floats4*>(y_ + (j + k) * kPitch + t) = {sum[k][0], sum[k][1], sum[k][2], sum[k][3]};
            }
        }
    }

    // f(y) over all directions of the thread's token, by `join`.
    template <class F, class J>
    CRUMB_DEVICE float over_directions(float from, F f, J join) const {
        const float* y = y_ + token();
        float x = from;
#pragma unroll 8
        for (int j = part(); j < dim_; j += kLanes) { x = join(x, f(y[j * kPitch])); }
#pragma unroll
        for (int o = 1; o < kLanes; o *= 2) { x = join(x, simt::shuffle_xor(x, o)); }
        return x;
    }

    CRUMB_DEVICE void clamp_mapped() {
        const float largest = over_directions(0.0f, [](float y) { return fabsf(y); }, larger);
        const int t = token();
        for (int j = part(); j < dim_; j += kLanes) { y_[j * kPitch + t] = clamp(y_[j * kPitch + t], kLargestMapped); }
        if (part() == 0) { saturated_of()[t] = largest > kLargestMapped; }
        simt::sync_block();
    }

    // The clipped-th largest |y|. Bits of |y| order as numbers do: the range of what the threshold can be is halved until
    // just that many reach its lower end, of which the smallest is it, or, where several are equal, until one is left.
    CRUMB_DEVICE float threshold() const {
        using namespace simt;
        const float largest = over_directions(0.0f, [](float y) { return fabsf(y); }, larger);
        if (s_.clipped <= 1) { return largest; }
        constexpr u32 kOctaves = 2u << 23;  // it is seldom smaller than a quarter of the largest
        const float wanted = float(s_.clipped);
        u32 low = 0, high = bits_of(largest) + 1, middle = high > kOctaves ? high - kOctaves : high / 2;
        bool found = false;
        for (int step = 0; step < 34 && any(!found && low + 1 < high); step++) {
            const float reached = over_directions(
                0.0f, [&](float y) { return bits_of(fabsf(y)) >= middle ? 1.0f : 0.0f; }, [](float a, float b) { return a + b; });
            if (!found && low + 1 < high) {
                (reached >= wanted ? low : high) = middle;
                found = reached == wanted;
                middle = low + (high - low) / 2;
            }
        }
        return over_directions(
            largest, [&](float y) { return bits_of(fabsf(y)) >= low ? fabsf(y) : largest; }, smaller);
    }

    CRUMB_DEVICE void minmax() {
        const float limit = threshold();
        const int t = token(), levels = 1 << s_.bits;
        const auto clipped = [&](float y) { return smaller(larger(y, -limit), limit); };
        const float low = over_directions(limit, clipped, smaller), high = over_directions(-limit, clipped, larger);
        const u32 s = simt::to_half(larger((high - low) / float(levels - 1), kTiny));
        const float scale = simt::half_low(s);
        const u32 z = simt::to_half(low + scale * (0.5f * float(levels - 1)));
        const float zero = simt::half_low(z);
        if (part() == 0) { scale_bits()[t] = s, zero_bits()[t] = z; }
        for (int j = part(); j < dim_; j += kLanes) {
            const float position = (clipped(y_[j * kPitch + t]) - zero) / scale + float(levels / 2);
            code_[j * kPitch + t] = u8(int(smaller(larger(position, 0.0f), float(levels - 1))));
        }
    }

    CRUMB_DEVICE static float code_of(float u, float inverse, float levels) {
        const float position = simt::fma_exact(u, inverse, 0.5f * levels);
        return simt::whole(smaller(larger(position, 0.0f), levels - 1.0f));
    }

    CRUMB_DEVICE void gain() {
        using namespace simt;
        float* const rms = of_token(0);
        const int t = token();
        for (int j = thread(); j < dim_; j += kEncodeThreads) {
            const int digits = tables_.digits[j];
            shapes_[j] = {digits == 0 ? 0.0f : float(1 << (2 * digits)), tables_.step[j]};  // levels, step
        }
        for (int j = part(); j < dim_; j += kLanes) { x_[j * kPitch + t] = y_[j * kPitch + t] / tables_.sigma[j]; }
        sync_block();
        if (thread() < kPageTokens) {
            const float* normal = x_ + thread();
            float energy = 0;
            int n = 0;
#pragma unroll 8
            for (int j = 0; j < dim_; j++) {
                if (shapes_[j].x == 0) { continue; }
                energy = fma_exact(normal[j * kPitch], normal[j * kPitch], energy);
                n++;
            }
            rms[thread()] = sqrtf(energy / float(n));
        }
        for (int j = part(); j < dim_; j += kLanes) {
            if (shapes_[j].x > 0) { y_[j * kPitch + t] /= shapes_[j].y; }
        }
        sync_block();
        if (thread() < kStarts / 2 * kPageTokens) { try_starts(thread() % kPageTokens, thread() / kPageTokens); }
        sync_block();
        const float *const errors = starts_, *const gains = starts_ + kStarts * kPageTokens;
        int best = 0;
        for (int i = 1; i < kStarts; i++) {
            if (errors[i * kPageTokens + t] < errors[best * kPageTokens + t]) { best = i; }
        }
        const u32 bits = reinterpret_cast<const u32*>(gains + kStarts * kPageTokens)[best * kPageTokens + t];
        const float inverse = 1.0f / gains[best * kPageTokens + t];
        if (part() == 0) {
            scale_bits()[t] = bits & 0xffffu;
            saturated_of()[t] |= bits >> 16;
        }
        for (int j = part(); j < dim_; j += kLanes) {
            if (shapes_[j].x > 0) { code_[j * kPitch + t] = u8(code_of(y_[j * kPitch + t], inverse, shapes_[j].x)); }
        }
    }

    // Starts 2 pair and 2 pair + 1 for a token: errors, gains and what would be stored of them.
    CRUMB_DEVICE void try_starts(int t, int pair) {
        using namespace simt;
        constexpr float kStart[kStarts] = {0.6f, 0.75f, 0.9f, 1.05f, 1.25f, 1.5f};
        float *const errors = starts_, *const gains = starts_ + kStarts * kPageTokens;
        u32* const stored = reinterpret_cast<u32*>(gains + kStarts * kPageTokens);  // bits, out of range in bit 16
        const float* y = y_ + t;
        float inverse[2], gain[2], fit[2] = {}, norm[2] = {}, error[2] = {};
        u32 bits[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float start = pair == 0 ? kStart[i] : pair == 1 ? kStart[2 + i] : kStart[4 + i];
            inverse[i] = 1.0f / larger(start * of_token(0)[t], kTiny);
        }
#pragma unroll 8
        for (int j = 0; j < dim_; j++) {
            const float levels = shapes_[j].x, step = shapes_[j].y, u = y[j * kPitch];
            if (levels == 0) { continue; }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float c = code_of(u, inverse[i], levels) - 0.5f * (levels - 1.0f), weighted = step * step * c;
                fit[i] = fma_exact(weighted, u, fit[i]);
                norm[i] = fma_exact(weighted, c, norm[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            gain[i] = round_to_stored(larger(fit[i] / norm[i], kTiny), bits[i]);
            inverse[i] = 1.0f / gain[i];
        }
#pragma unroll 8
        for (int j = 0; j < dim_; j++) {
            const float levels = shapes_[j].x, step = shapes_[j].y, u = y[j * kPitch];
            if (levels == 0) { continue; }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float c = code_of(u, inverse[i], levels) - 0.5f * (levels - 1.0f);
                const float miss = fma_exact(-c, gain[i], u);
                error[i] = fma_exact(step * step * miss, miss, error[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = (2 * pair + i) * kPageTokens + t;
            errors[at] = error[i], gains[at] = gain[i], stored[at] = bits[i];
        }
    }

    CRUMB_DEVICE float round_to_stored(float gain, u32& bits) const {
        if (s_.format.info == SideInfo::gain8) {
            const Gain8 stored = gain8_of(gain / tables_.gain_reference);
            bits = stored.code | u32(stored.saturated) << 16;
            return gain8_value_of(stored.code) * tables_.gain_reference;
        }
        const u32 stored = simt::to_half(gain);
        bits = stored | u32(gain > kLargestMapped) << 16;
        return simt::half_low(stored);
    }

    CRUMB_DEVICE u32 code_at(int plane, int t) const {
        const u32 place = places_[plane];
        return u32(code_[(place & 0xffffu) * kPitch + t]) >> (place >> 16) & 3u;
    }

    CRUMB_DEVICE void write_codes(bool key, u8* codes, const u8* kept) const {
        const int planes = s_.format.planes;
        for (int i = simt::thread(); i < 4 * planes; i += kEncodeThreads) {
            u32 word = 0, old = 0;  // old: bytes and fields of tokens that are taken over
            if (key) {
                const KeyWord w = key_word(planes, i);
                for (int f = 0; f < 4; f++) {
                    for (int b = 0; b < 4; b++) { word |= code_at(w.plane + w.field_step * f + b, w.token) << (8 * b + 2 * f); }
                }
                old = w.token < keep_ ? ~0u : 0u;
            } else {
                const ValueWord w = value_word(planes, i);
                for (int f = 0; f < 4; f++) {
                    for (int b = 0; b < 4; b++) {
                        const int t = w.token + b + (w.tail ? 4 * (f / 2) : 0);
                        word |= code_at(w.plane + 16 * (w.tail ? f % 2 : f), t) << (8 * b + 2 * f);
                        if (t < keep_) { old |= 3u << (8 * b + 2 * f); }
                    }
                }
            }
            if (old) { word = (word & ~old) | (reinterpret_cast<const u32*>(kept)[i] & old); }
            reinterpret_cast<u32*>(codes)[i] = word;
        }
    }

    CRUMB_DEVICE void write_info(u8* info, const u8* kept) const {
        const int t = token();
        if (part() != 0) { return; }
        if (s_.format.info == SideInfo::gain8) {
            info[t] = t < keep_ ? kept[t] : u8(scale_bits()[t]);
            return;
        }
        const auto write = [&](int at, u32 bits) {
            reinterpret_cast<uint16_t*>(info)[at] = t < keep_ ? reinterpret_cast<const uint16_t*>(kept)[at] : uint16_t(bits);
        };
        write(t, scale_bits()[t]);
        if (s_.format.info == SideInfo::scale_zero) { write(kPageTokens + t, zero_bits()[t]); }
    }

    const EncodeSide& s_;
    const EncodeTables tables_;
    int dim_, keep_;
    EncodeCountsDevice* counts_;
    float *x_, *y_;   // [D][kPitch]
    u8* code_;        // [D][kPitch]
    float* starts_;   // [errors, gains, stored gains][kStarts][64]
    float* tokens_;   // [rms, scale, zero, saturated][64]
    simt::Floats2* shapes_;  // [D] levels and step
    u32* places_;     // [P] direction and shift of a plane
    float* chunks_;   // [2][kChunkRows][D] of the map
    simt::u64* barriers_;  // [2]
};

}  // namespace crumb::cuda

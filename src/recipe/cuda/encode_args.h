// What the encoder on a device is told: which blocks become which pages, and a layer's formats and tables.
#pragma once

#include <crumb/attention.h>
#include <crumb/recipe.h>

#include "base/cuda/simt.h"

namespace crumb::cuda {

using simt::u32;
using simt::u8;

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

// Parameters of groups, which are written where they are made; else each token has its own.
CRUMB_BOTH bool has_groups(const EncodeSide& s) {
    return s.quantiser == Quantiser::channels || (s.quantiser == Quantiser::minmax && (s.format.group > 0 || s.integer_zero));
}

// What the memory and the cut of a launch depend on: of one layer, or the largest of many.
struct EncodeShape {
    int dim = 0, planes = 0;
    bool groups = false;  // of tokens: they are not cut
};

inline EncodeShape widest(const EncodeShape& a, const EncodeShape& b) {
    return {a.dim > b.dim ? a.dim : b.dim, a.planes > b.planes ? a.planes : b.planes, a.groups || b.groups};
}

inline EncodeShape encode_shape(const EncodeArgs& a) {
    return widest({a.k.format.dim, a.k.format.planes, has_groups(a.k)}, {a.v.format.dim, a.v.format.planes, has_groups(a.v)});
}

}  // namespace crumb::cuda

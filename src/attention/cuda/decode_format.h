// What the decode kernel knows of a format at compile time: sizes of a warp's ring of pages, of a query as it reads it, of
// the sums it leaves.
//
// Columns. The query rows of a tile times the query heads of a KV head are columns, row by row; a warp takes up to
// 4 NT of them. A product has 8 columns: high and low bytes of 4.
//
// Query record, 32-bit words, one a (tile, KV head, block of columns); map_query() writes it, words of lane 4 r + q belong
// to column 4 n + r / 2, high bytes for even r, low bytes for odd r:
//   codes  [NT][G][32][4]  q' = q B as 16-bit integers: planes 64 g + 16 f + 4 q + byte of field f = word. Codes are masked
//                          in place and count 4^f, which the integers make up for: see kFineQuery
//   tail   [NT][32][2]     planes 64 G + 16 word + 4 q + byte
//   means  [NT][D_k / 64][32][4]  q times the static steps of K's page mean: channels 64 i + 16 q + 4 word + byte
//   (parameters by channel, grouped.h: instead of codes, tail and means
//   base   [NT][P_k / 16][32][2]  q' in FP16, of its largest element: planes 16 s + 4 q + {0, 1}, for odd r {2, 3}; first times -1.5
//   scaled [NT / 2][P_k / 16][32][2]  the same over 4^(s % 4): planes 16 s + 4 q + {0, 1} and {2, 3}; words of lane 4 r + q belong to
//                          column 4 (2 n + r % 2) + r / 2)
//   exact  [NT][D_k / 16][32][2]  q in BF16: channels 16 s + 2 q + 8 word + {0, 1}; the low part is what rounding left
//   column [4 NT][8]       QueryColumn
#pragma once

#include <crumb/page.h>

#include "attention/cuda/fragments.h"

namespace crumb::cuda {

// Where the parts of a coded page begin: what page.h says, in constant expressions. tests/cuda_fragments_test.cpp holds the
// two against each other.
struct PageOffsets {
    u32 value_codes, key_info, value_info, key_mean, value_mean, bytes;
};

// What kernels are compiled for: pages of one format; or, with any_planes, of every format that has at most so many planes and
// page means on both sides, one or none. `planes` has many formats, and which ones a model has is known when it is loaded.
struct KernelFormat {
    SideFormat k, v;
    bool any_planes = false;
    int tokens = kPageTokens;

    constexpr KernelFormat(const PageFormat& format, bool any = false)
        : k(format.k), v(format.v), any_planes(any), tokens(format.tokens) {}
    constexpr KernelFormat(const SideFormat& key, const SideFormat& value, bool any) : k(key), v(value), any_planes(any) {}

    // Parameters of K by channel and group of tokens, of V by token and group of channels: grouped.h reads these.
    constexpr bool grouped() const { return k.info == SideInfo::channels; }
    constexpr int value_groups() const { return v.group == 0 ? 1 : v.dim / v.group; }

    bool operator==(const KernelFormat&) const = default;
    bool takes(const PageFormat& f) const {
        const auto fits = [](const SideFormat& own, const SideFormat& side) {
            SideFormat largest = side;
            largest.planes = own.planes, largest.mean = own.mean;
            return largest == own && side.planes <= own.planes && (own.mean || !side.mean);
        };
        if (f.tokens != tokens) { return false; }
        return any_planes ? fits(k, f.k) && fits(v, f.v) : k == f.k && v == f.v;
    }
};

// What a format has of a KernelFormat: an argument of every launch.
struct PagePlanes {
    int k, v;
    bool mean_k, mean_v;
};
inline PagePlanes planes_of(const PageFormat& f) { return {f.k.planes, f.v.planes, f.k.mean, f.v.mean}; }

// The tail of 32 planes of an odd count lies where the last full group of the largest count would be, in tables, queries and
// sums: so these have one shape for all counts, and planes that a page lacks are zeros there.
CRUMB_BOTH constexpr int place_of_plane(int plane, int planes, int widest) {
    const int tail_from = planes / 64 * 64;
    return plane < tail_from || planes == widest ? plane : widest - 64 + plane - tail_from;
}

CRUMB_BOTH constexpr u32 info_bytes(const SideFormat& side, int tokens) {
    const u32 n = u32(tokens);
    if (side.info == SideInfo::channels) { return n / u32(side.group) * u32(side.dim) * 4 + (side.token_gain ? 2 * n : 0); }
    if (side.info == SideInfo::scale_zero && side.group > 0) { return u32(side.dim / side.group) * n * 4; }
    return n * (side.info == SideInfo::scale_zero ? 4 : side.info == SideInfo::gain16 ? 2 : side.info == SideInfo::gain8 ? 1 : 0);
}

CRUMB_BOTH constexpr PageOffsets page_offsets(const KernelFormat& f, const PagePlanes& planes) {
    PageOffsets at = {};
    at.value_codes = u32(f.tokens / 4 * planes.k);
    at.key_info = at.value_codes + u32(f.tokens / 4 * planes.v);
    at.value_info = at.key_info + info_bytes(f.k, f.tokens);
    at.key_mean = at.value_info + info_bytes(f.v, f.tokens);
    at.value_mean = at.key_mean + u32(planes.mean_k ? f.k.dim : 0);
    at.bytes = at.value_mean + u32(planes.mean_v ? f.v.dim : 0);
    return at;
}
CRUMB_BOTH constexpr PageOffsets page_offsets(const KernelFormat& f) {
    return page_offsets(f, {f.k.planes, f.v.planes, f.k.mean, f.v.mean});
}

// A page as a kernel sees it: constants, or what the launch says.
template <KernelFormat F, bool kAny = F.any_planes>
struct PageLayout {
    static constexpr PageOffsets at = page_offsets(F);
    static constexpr int planes_k = F.k.planes, planes_v = F.v.planes;
    static constexpr bool mean_k = F.k.mean, mean_v = F.v.mean;
    CRUMB_BOTH explicit PageLayout(const PagePlanes&) {}
};
template <KernelFormat F>
struct PageLayout<F, true> {
    PageOffsets at;
    int planes_k, planes_v;
    bool mean_k, mean_v;
    CRUMB_BOTH explicit PageLayout(const PagePlanes& p)
        : at(page_offsets(F, p)), planes_k(p.k), planes_v(p.v), mean_k(p.mean_k), mean_v(p.mean_v) {}
};

inline constexpr int kMaxTiles = 3;        // NT
inline constexpr int kExactTokens = 16;    // of an item of the exact window
inline constexpr int kSharedBytes = 224 * 1024;
inline constexpr float kUnset = -1e30f;    // a reference that no token has set

// Of logits in units of log2; cap 0: none. The host divides: in a kernel 1 / 0 is a call, which waits for all loads on their way.
struct Softcap {
    float cap, inverse;
};

// A column's scalars. Logits are in units of log2.
struct alignas(16) QueryColumn {
    float unit;       // of one code of scale 1
    float ones;       // of one unit of zero
    float offset;     // the static key mean
    float mean_unit;  // of one step of the page mean
    float centre;     // 1.5 x the sum of the integers, which makes digits centred
    int begin, coded_end, end;  // of its row
};
static_assert(sizeof(QueryColumn) == 32);

// Scalars behind the sums of a column.
enum EntryScalar { kTop, kSum, kCodedSum, kZeroSum, kEntryScalars = 8 };

template <KernelFormat F, int NT>
struct DecodeFormat {
    static constexpr int kDimK = F.k.dim, kDimV = F.v.dim, kPlanesK = F.k.planes, kPlanesV = F.v.planes;
    static_assert(kDimK % 64 == 0 && kDimV % 64 == 0 && NT >= 1 && NT <= kMaxTiles);
    static constexpr int kGroupsK = full_groups(kPlanesK), kGroupsV = full_groups(kPlanesV);
    // Whether pages may have one, and where its planes lie.
    static constexpr bool kTailK = F.any_planes || has_tail(kPlanesK), kTailV = F.any_planes || has_tail(kPlanesV);
    static constexpr int kTailPlaneK = 64 * (kGroupsK - F.any_planes), kTailPlaneV = 64 * (kGroupsV - F.any_planes);
    static_assert(!F.any_planes || (kPlanesK % 64 == 0 && kPlanesV % 64 == 0 && F.k.mean && F.v.mean));
    static constexpr int kColumns = 4 * NT;
    static constexpr PageOffsets kAt = page_offsets(F);
    static constexpr u32 kPageBytes = kAt.bytes;  // of the largest page
    static_assert(kPageBytes % 16 == 0);

    // Sums of a column: planes of V, channels of V, scalars. 8 floats behind a multiple of 32 spread columns over banks.
    static constexpr int kWidth = kPlanesV + kDimV, kStride = kWidth + kEntryScalars;
    static constexpr int kEntryFloats = kColumns * kStride;

    static constexpr bool kGrouped = F.grouped();
    static constexpr int kPairsOfTiles = (NT + 1) / 2;
    static constexpr int kScaledAt = NT * (kPlanesK / 16) * 64;  // of grouped pages
    static constexpr int kCodeWords = kGrouped ? kScaledAt + kPairsOfTiles * (kPlanesK / 16) * 64 : NT * (kGroupsK * 128 + kTailK * 64);
    static constexpr int kMeanWords = F.k.mean ? NT * kDimK * 2 : 0;
    static constexpr int kExactWords = NT * kDimK * 4;
    static constexpr int kTailAt = kGrouped ? kCodeWords : NT * kGroupsK * 128, kMeanAt = kCodeWords, kExactAt = kMeanAt + kMeanWords;
    static constexpr int kColumnAt = kExactAt + kExactWords;
    static constexpr int kQueryWords = kColumnAt + kColumns * 8;

    // 4 columns: 14 bits a plane; fields (0, 1) and (2, 3) are summed apart, and even ones hold 4 times the integer. More
    // columns: all fields are summed together, which leaves 9 bits to field 3 and 15 to field 0 and saves a tenth of the
    // instructions.
    static constexpr bool kFineQuery = NT == 1;
    // The query in registers where that is at most 8 of them, else in shared memory; its scalars always there.
    static constexpr bool kQueryInRegisters = kGrouped ? NT == 1 : kCodeWords / 32 <= 8 && !F.any_planes;
    static constexpr int kSharedMeanAt = kQueryInRegisters ? 0 : kCodeWords;
    static constexpr int kSharedColumnAt = kSharedMeanAt + kMeanWords;
    static constexpr int kSharedWords = kSharedColumnAt + kColumns * 8;
    // Page means of V are summed up in registers, 16 of them for 4 columns of 128 channels, or else in shared memory.
    static constexpr bool kMeansInShared = F.v.mean && kColumns * ((kDimV + 127) / 128) > 4;
    static constexpr int kMeanFloats = kMeansInShared ? kColumns * kDimV : 0;

    // 9 KB of pages on their way a warp are enough (measured: more only lengthens the queue). When its last page has been
    // read, a warp leaves its sums in the ring.
    static constexpr int stages() {
        int n = kPageBytes >= 4096 ? 2 : kPageBytes >= 2816 ? 3 : 4;
        while (n * kPageBytes < kEntryFloats * 4) { n++; }
        return n;
    }
    static constexpr int kStages = stages();
    static constexpr u32 kRingBytes = kStages * kPageBytes;
    static constexpr int kMostStages = F.any_planes ? 4 : kStages;  // of smaller pages there is room for more
    static constexpr u32 kQueryAt = kRingBytes, kMeansAt = kQueryAt + kSharedWords * 4, kBarriersAt = kMeansAt + kMeanFloats * 4;
    static constexpr u32 kWarpBytes = (kBarriersAt + kMostStages * 8 + 127) / 128 * 128;
    static constexpr int kFitting = kSharedBytes / int(kWarpBytes);
    static_assert(!kGrouped || (kPlanesK == kDimK && kPlanesV == kDimV && !F.k.mean && !F.v.mean && F.value_groups() <= 8));
    // As many warps as keep their sums in registers: 128 of them with 16 warps, 168 with 12, 255 with 8. Of any planes, 256 of them
    // with 128 channels want 8 warps (10.2 -> 8.0 us for 2k tokens), 192 with 64 channels 12, although some are spilled (9.2 -> 7.5 us).
    static constexpr int kLargeSums = NT * (kPlanesV / 4 + 4);
    static constexpr bool kSmall = kDimK == 64 && kLargeSums <= 24 && !F.v.mean && !kGrouped;
    static constexpr bool kLarge = kDimK == 256 || kLargeSums > (kGrouped || (F.any_planes && kDimK == 128) ? 44 : 76);
    static constexpr int kWanted = kSmall ? 16 : kLarge ? 8 : 12;
    static constexpr int kWarps = kFitting < kWanted ? kFitting : kWanted;
    static_assert(kWarps >= 4, "a warp's share of shared memory is too large");
    static constexpr u32 kSharedSize = kWarps * kWarpBytes + 4 * 4 * 2 * kWarps;

    // Exact tokens are read in place. Where there are registers for it an item is asked for one ahead; with few columns they
    // take one and a half times as long as their bytes would, twice if they are waited for.
    static constexpr bool kExactAhead = NT == 1 && kDimK <= 128 && kDimV <= 128;
    static constexpr u32 kExactUnits = kExactTokens * (kDimK + kDimV) * (kExactAhead ? 3 : NT == 1 ? 4 : 2) / 128;
};

// A block's part of a segment that several have parts of: [blocks][2][kEntryFloats], one for the segment that it begins.
template <class D, class T>
CRUMB_DEVICE T* partial_of(T* partials, int block, int first_block) {
    return partials + (2 * size_t(block) + (block == first_block)) * D::kEntryFloats;
}

}  // namespace crumb::cuda

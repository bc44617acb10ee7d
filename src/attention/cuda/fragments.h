// Where the lanes of a warp find their operands in a page, and what they have found: the map of page.h, read as fragments
// of mma.m16n8k32. Lane 4 r + q (r < 8, q < 4). tests/cuda_fragments_test.cpp holds every line here against
// key_code_at() and value_code_at(), and counts bank conflicts: there are none.
//
// K: rows are tokens, k runs over planes. One load of 16 bytes a lane is 32 tokens x 64 planes: word e holds token
// 32 half + 4 r + e, so words 0, 1 are rows r, r + 8 of one product and words 2, 3 those of another. Masked in place, field
// f counts planes 64 group + 16 f + 4 q + byte, times 4^f.
// V: rows are planes, k runs over tokens. One load of 8 bytes a lane is 16 planes x 4 fields of one token quad: words 0, 1
// are planes 64 group + 16 f + 2 r + {0, 1}. A product takes two quads of 32 tokens, 8 q + {0..3} and 8 q + {4..7};
// lanes with q >= 2 take them in the other order, which keeps them off each other's banks.
// An odd multiple of 32 planes ends in a tail of 32.
#pragma once

#include "base/cuda/simt.h"

namespace crumb::cuda {

using simt::u32;

inline constexpr int kBlockBytes = 64;

CRUMB_BOTH constexpr int full_groups(int planes) { return planes / 64; }
CRUMB_BOTH constexpr bool has_tail(int planes) { return planes % 64 != 0; }

// Byte offsets from the start of the codes of a side.
CRUMB_BOTH constexpr u32 key_load(int planes, int half, int group, int r, int q) {
    const u32 lane = u32(kBlockBytes * (r / 4 * 4 + q) + 16 * ((r % 4) ^ (q & 2)));
    return lane + u32(kBlockBytes * 8 * (half * full_groups(planes) + group));
}

CRUMB_BOTH constexpr u32 key_tail_load(int planes, int half, int r, int q) {
    const int block = 16 * full_groups(planes) + (2 * half + r / 4) * 2 + (q & 1);
    return u32(kBlockBytes * block + 16 * (r % 4));
}

// The quad of 4 tokens of a half that a lane loads first (slot 0) or second (slot 1).
CRUMB_BOTH constexpr int value_quad(int q, int slot) { return 2 * q + (slot ^ (q >> 1)); }

// Written as a part of the lane and a part of half and group, which is then an immediate operand.
CRUMB_BOTH constexpr u32 value_load(int planes, int half, int group, int slot, int r, int q) {
    const int u = value_quad(q, slot), groups = full_groups(planes);
    const u32 lane = u32(kBlockBytes * (u / 4 * groups * 4 + u % 4) + 16 * ((r / 2) ^ (u & 2)) + 8 * (r % 2));
    return lane + u32(kBlockBytes * 4 * (2 * half * groups + group));
}

// Both quads at once: fields 0, 1 are quad 2 q, fields 2, 3 quad 2 q + 1.
CRUMB_BOTH constexpr u32 value_tail_load(int planes, int half, int r, int q) {
    const int u = 4 * half + q;
    return u32(kBlockBytes * (16 * full_groups(planes) + u) + 16 * ((r / 2) ^ (u & 2)) + 8 * (r % 2));
}

CRUMB_BOTH constexpr u32 field(u32 word, int f) { return word & (0x03030303u << (2 * f)); }
// Fields 0 .. f: what lies below is taken off the sums afterwards, which saves a mask in four.
CRUMB_BOTH constexpr u32 fields_to(u32 word, int f) { return f == 3 ? word : word & (0x03030303u * ((1u << (2 * f + 2)) / 3)); }

// Operands of the tail, all fields moved to the bottom: planes 4 q + byte and 16 + 4 q + byte of K ...
struct Pair {
    u32 first, second;
};
CRUMB_BOTH constexpr Pair key_tail_fields(u32 word, int q) {
    const u32 at = word >> (2 * (q >> 1));
    return {at & 0x03030303u, at >> 4 & 0x03030303u};
}
// ... and 16 sixteen + 2 r (+ 1) of V, sixteen = 0 or 1, for the lane's first and second quad, times 4^sixteen.
CRUMB_BOTH constexpr Pair value_tail_fields(u32 word, int sixteen, int q) {
    const int shift = q >> 1 ? 4 : 0;
    return {field(word >> shift, sixteen), field(word >> (4 - shift), sixteen)};
}

// Probabilities as an operand. Lane 4 r + q has, of query column q, the 15-bit weights of tokens 32 half + 4 r + e as
// bits 8..22 of x[e]. Returns the operand of V: column r, tokens of the lane's first and second quad; even columns hold
// high bytes, odd ones low bytes.
CRUMB_DEVICE Pair weight_operand(const u32 (&x)[4], int q) {
    const u32 a = simt::transpose(simt::permute_bytes(x[0], x[1], 0x5162));
    const u32 b = simt::transpose(simt::permute_bytes(x[2], x[3], 0x5162));
    const u32 low = q >> 1 ? 0x7632u : 0x5410u;
    return {simt::permute_bytes(a, b, low), simt::permute_bytes(a, b, low ^ 0x2222u)};
}

}  // namespace crumb::cuda

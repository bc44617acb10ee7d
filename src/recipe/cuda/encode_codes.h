// Codes of tokens, bytes by direction in shared memory, as the dwords of a page: 16 bytes of a page at a time, the inverse of
// key_code_at() and value_code_at().
#pragma once

#include "base/cuda/simt.h"

namespace crumb::cuda {

using simt::u32;
using simt::u8;

// 16 bytes of K: token + e in dword e, of which byte b of field f is plane + field_step f + b.
struct KeyWords {
    int at, plane, field_step;
};
// `token`: the first of four; `item`: of planes / 16.
CRUMB_BOTH KeyWords key_words(int planes, int token, int item) {
    const int groups = planes / 64, quarter = token / 4 % 4;
    if (item >= 4 * groups) {
        const int tail = item - 4 * groups;
        return {4 * (16 * groups + token / 16 * 2 + tail) + quarter, 64 * groups + 4 * tail, 8};
    }
    const int q = item % 4, group = item / 4;
    return {4 * ((token / 32 * groups + group) * 8 + token / 16 % 2 * 4 + q) + (quarter ^ (q & 2)), 64 * group + 4 * q, 16};
}

// 16 bytes of V: plane + e in dword e, of which byte b of field f is token + b (of a tail: + 4 (f / 2)) of plane + 16 f (16 (f % 2)).
struct ValueWords {
    int at, token, plane;
    bool tail;
};
// `token`: the first of four; `item`: of planes / 16.
CRUMB_BOTH ValueWords value_words(int planes, int token, int item) {
    const int groups = planes / 64;
    if (item >= 4 * groups) {  // 8 tokens: half of a tail's words belong to either four
        const int u = token / 8, quarter = 2 * (token / 4 % 2) + item - 4 * groups;
        return {4 * (16 * groups + u) + quarter, 8 * u, 64 * groups + 4 * (quarter ^ (u & 2)), true};
    }
    const int u = token / 4, quarter = item % 4, group = item / 4;
    return {4 * ((u / 4 * groups + group) * 4 + u % 4) + quarter, 4 * u, 64 * group + 4 * (quarter ^ (u & 2)), false};
}

struct CodeWriter {
    const u8* codes;    // [D][pitch], a multiple of 4; the tile's first token first
    int pitch;
    const u32* places;  // [P]: row of codes times pitch, shift in the top byte, or kNowhere
    int planes, first, tokens;  // of the tile
    int keep;
    const u8* kept;     // codes of the page from which tokens below `keep` are taken over

    static constexpr u32 kNowhere = ~0u;

    CRUMB_DEVICE void write_keys(u8* page) const {
        using namespace simt;
        for (int n = thread(); n < tokens / 4 * (planes / 16); n += n_threads()) {
            const int t = 4 * (n % (tokens / 4));
            const KeyWords w = key_words(planes, first + t, n / (tokens / 4));
            u32 word[4] = {};
#pragma unroll
            for (int f = 0; f < 4; f++) {
                u32 four[4];
#pragma unroll
                for (int b = 0; b < 4; b++) { four[b] = four_at(w.plane + w.field_step * f + b, t); }
                const u32 low[2] = {permute_bytes(four[0], four[1], 0x5140), permute_bytes(four[2], four[3], 0x5140)};
                const u32 high[2] = {permute_bytes(four[0], four[1], 0x7362), permute_bytes(four[2], four[3], 0x7362)};
                word[0] |= permute_bytes(low[0], low[1], 0x5410) << (2 * f);
                word[1] |= permute_bytes(low[0], low[1], 0x7632) << (2 * f);
                word[2] |= permute_bytes(high[0], high[1], 0x5410) << (2 * f);
                word[3] |= permute_bytes(high[0], high[1], 0x7632) << (2 * f);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (first + t + e < keep) { word[e] = reinterpret_cast<const u32*>(kept)[4 * w.at + e]; }
            }
            reinterpret_cast<Words4*>(page)[w.at] = {word[0], word[1], word[2], word[3]};
        }
    }

    CRUMB_DEVICE void write_values(u8* page) const {
        using namespace simt;
        for (int n = thread(); n < tokens / 4 * (planes / 16); n += n_threads()) {
            const ValueWords w = value_words(planes, first + 4 * (n % (tokens / 4)), n / (tokens / 4));
            u32 old = 0;  // bytes and fields of tokens that are taken over
            for (int f = 0; f < 4; f++) {
                for (int b = 0; b < 4; b++) {
                    if (w.token + b + (w.tail ? 4 * (f / 2) : 0) < keep) { old |= 3u << (8 * b + 2 * f); }
                }
            }
            u32 word[4] = {};
#pragma unroll
            for (int e = 0; e < 4; e++) {
#pragma unroll
                for (int f = 0; f < 4; f++) {
                    word[e] |= four_at(w.plane + e + 16 * (w.tail ? f % 2 : f), w.token - first + (w.tail ? 4 * (f / 2) : 0)) << (2 * f);
                }
                if (old) { word[e] = (word[e] & ~old) | (reinterpret_cast<const u32*>(kept)[4 * w.at + e] & old); }
            }
            reinterpret_cast<Words4*>(page)[w.at] = {word[0], word[1], word[2], word[3]};
        }
    }

  private:
    // Digits of four tokens, a byte each.
    CRUMB_DEVICE u32 four_at(int plane, int t) const {
        const u32 place = places[plane];
        if (place == kNowhere) { return 0; }
        return *reinterpret_cast<const u32*>(codes + (place & 0xffffffu) + t) >> (place >> 24) & 0x03030303u;
    }
};

}  // namespace crumb::cuda

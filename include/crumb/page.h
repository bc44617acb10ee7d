// A page: 64 tokens (128 in some formats of family C) of one KV head of one layer, K and V, codes and side information
// in one record without pointers.
// It can be copied, saved, hashed, shared and moved between machines as bytes. This header is the only place that knows
// where a byte of it is; every size, bits-per-element figure and plan comes from here. docs/design/page-format.md
//
// Record of family T (per token), offsets in bytes, D = head size, P = planes, little endian:
//   K codes   16 P_k         blocks of 64 bytes, see key_code_at()
//   V codes   16 P_v         blocks of 64 bytes, see value_code_at()
//   K info    scale_zero: FP16 scale[64], FP16 zero[64]; gain16: FP16 gain[64]; gain8: uint8 gain[64]
//   V info    same
//   K mean    int8 [D_k], if there is a page mean
//   V mean    int8 [D_v], same
// A token's value reads as   x_hat = mean + page mean + s_t sum_p B_p (digit_tp - 1.5) + z_t ones
// with s_t the scale or gain, z_t the zero (the value of the middle of the code range, not of code 0), and B, ones, mean
// static tables (recipe.h). Digits are base 4: a direction coded in 4 bits is two planes whose rows of B are 4 d u and d u.
//
// Record of family C (parameters per channel, and everything else that no kernel reads in place, see planar()): the same
// order; a page of 128 tokens has two areas of codes a side, one after the other, each with the byte map of 64 tokens.
// Info is what InfoLayout says. A direction of a token reads as
//   y = r_t g_j (a C(code) + m)   C(code) = code - middle, or an entry of a static table of levels;
// a and m belong to a token, to a token and a group of directions, or to a direction and a group of tokens; r_t is a
// gain of the token, g_j of the direction, both optional.
//
// P is a multiple of 32, so that budgets move in steps of half a head at D = 64. Head sizes that are not are padded with
// planes that hold code 0 and whose rows of B are 0.
//
// BF16 record (windows, sinks, the `bf16` recipe): K as bf16 [D_k][64], so that 64 tokens of a channel are one vector,
// then V as bf16 [64][D_v].
//
// The byte map is version 0: measured on CPU and CUDA, not frozen yet.
#pragma once

#include <crumb/half.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace crumb {

inline constexpr int kPageTokens = 64;
inline constexpr int kPlaneStep = 32;
inline constexpr int kPageFormatVersion = 0;

enum class SideInfo : uint8_t {
    none,        // BF16 rows carry no side information
    scale_zero,  // two FP16 a token
    gain16,      // one FP16 a token
    gain8,       // one byte a token: gain = ref 2^((code - 128) / 16), ref static
    channels,    // family C: two FP16 a direction and group of tokens
};

// K or V of a page.
struct SideFormat {
    int dim = 0;     // head size D: channels of a BF16 row and of the page mean
    int planes = 0;  // 2-bit codes a token; 0: tokens are BF16 rows
    SideInfo info = SideInfo::none;
    bool mean = false;  // int8 mean of the page's 64 tokens, a byte a channel

    int group = 0;              // directions (scale_zero; 0: all) or tokens (channels) that share a scale and zero
    bool lookup = false;        // codes are entries of a static table of levels
    bool token_gain = false;    // FP16 a token
    bool channel_gain = false;  // FP16 a direction
    int boosted = 0;            // directions with two more bits, chosen page by page
    int outliers = 0;           // tokens that are FP16 rows of directions, chosen page by page

    bool coded() const { return planes > 0; }
    // Whether x_hat is linear in the digits with at most a scale and a zero a token: what kernels read in place.
    bool planar() const {
        return info != SideInfo::channels && group == 0 && !lookup && !token_gain && !channel_gain && boosted == 0 &&
               outliers == 0;
    }
    bool operator==(const SideFormat&) const = default;
};

// Where the parts of a side's info lie, counted from its start, little endian. Parts that the format lacks are empty.
struct InfoLayout {
    size_t scale = 0;           // FP16 [tokens]; groups of directions: [groups][tokens]; channels: [groups][D]
    size_t zero = 0;            // the same; gain8 has bytes as scale and no zero
    size_t token_gain = 0;      // FP16 [tokens]
    size_t channel_gain = 0;    // FP16 [D]
    size_t outlier_rows = 0;    // FP16 [outliers][D]
    size_t outlier_tokens = 0;  // uint16 [outliers]: their places in the page, ascending
    size_t boosted_codes = 0;   // [boosted][tokens / 4]: bits 2 (t % 4) of byte t / 4 are the high digit of token t
    size_t boosted = 0;         // uint8 [boosted]: their directions, ascending
    size_t bytes = 0;
};
InfoLayout info_layout(const SideFormat& side, int tokens);

// Both sides are coded, or both are BF16.
struct PageFormat {
    SideFormat k, v;
    int tokens = kPageTokens;  // or twice as many

    bool coded() const { return k.coded(); }
    bool planar() const { return tokens == kPageTokens && k.planar() && v.planar(); }
    size_t key_codes() const { return 0; }
    size_t value_codes() const;  // BF16 records: where the V rows start
    size_t key_info() const;
    size_t value_info() const;
    size_t key_mean() const;
    size_t value_mean() const;
    size_t bytes() const;

    // Bits that the record spends on one element of K or V, side information included.
    double bits_per_element() const;
    bool operator==(const PageFormat&) const = default;
};

// Throws Error: head sizes from 32 to 256 in steps of 16, planes in steps of 32 up to 4 dim (8 bits), matching sides,
// parts that do not go together.
void check(const PageFormat& format);

// The BF16 format for a head.
PageFormat bf16_format(int dim_k, int dim_v);

// Planes that `directions` directions of `digits` base-4 digits need, padded to kPlaneStep.
int padded_planes(int directions, int digits);

// Where a code lies: bits shift, shift + 1 of a byte, counted from the start of the codes of 64 tokens of its side.
struct CodeAt {
    uint32_t byte;
    uint32_t shift;
    bool operator==(const CodeAt&) const = default;
};

// Blocks of 64 bytes are 16 lanes of 4 bytes of 4 fields; the four dwords of a 16-byte quarter are lanes 4 c .. 4 c + 3.
// Full groups of 64 planes come first; the last 32 planes of an odd multiple of 32 are a tail of 8 blocks after them.
//
// K, lane = token 16 s + 4 c + e of half h: bytes and fields are planes. One vector load is one operand of an integer dot
// product over 4 planes of 16 tokens, and thread 4 r + q of an mma.m16n8k32 finds its rows in 16 bytes of block q.
// Quarters of blocks with q & 2 are swapped (c ^ 2): no bank conflict on CUDA.
CodeAt key_code_at(int planes, int token, int plane);

// V, lane = plane: bytes are the tokens of quad u, fields are four groups of 16 planes, quarters swap where u & 2. In the
// tail fields are two groups of 16 planes times two quads.
CodeAt value_code_at(int planes, int token, int plane);

// Reference pack and unpack: codes[token * planes + plane] in 0..3, 64 tokens.
void pack_keys(int planes, std::span<const uint8_t> codes, std::byte* page_codes);
void pack_values(int planes, std::span<const uint8_t> codes, std::byte* page_codes);
void unpack_keys(int planes, const std::byte* page_codes, std::span<uint8_t> codes);
void unpack_values(int planes, const std::byte* page_codes, std::span<uint8_t> codes);

// gain8: 2^((code - 128) / 16), from 2^-8 to 2^7.94; and the code nearest in the logarithm. The same on every machine.
struct Gain8 {
    uint8_t code;
    bool saturated;  // the gain lies outside the range
};
float gain8_value(uint8_t code);
Gain8 to_gain8(float gain);

// Rows of a BF16 record.
bf16 key_at(const PageFormat& format, const std::byte* page, int token, int channel);
bf16 value_at(const PageFormat& format, const std::byte* page, int token, int channel);
void set_key(const PageFormat& format, std::byte* page, int token, std::span<const bf16> row);
void set_value(const PageFormat& format, std::byte* page, int token, std::span<const bf16> row);

}  // namespace crumb

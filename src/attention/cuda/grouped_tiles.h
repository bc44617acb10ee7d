// Pages whose parameters belong to groups as rows of BF16 tiles (prefill_tiles.h): what codes read as in FP16, y = a (code - 1.5) + m,
// is the operand of the product with the map, which is FP16 too. It is a quarter of that, as levels may lie outside the range of FP16
// when both scale and zero are at its ends. Gains of tokens multiply its sums.
#pragma once

#include "attention/cuda/coded.h"
#include "attention/cuda/warpgroup.h"

namespace crumb::cuda {

template <KernelFormat F>
struct GroupedTiles {
    static constexpr int kDim = F.k.dim, kGroupsOfPlanes = full_groups(F.k.planes), kParts = F.value_groups();
    static constexpr PageOffsets kAt = page_offsets(F);
    static constexpr u32 kScales = u32(F.tokens / F.k.group * kDim * 2), kValueScales = u32(kParts * F.tokens * 2);
    static_assert(F.k.planes == kDim && F.v.planes == kDim);

    CRUMB_DEVICE static simt::Words2 quarter(const u8* halves) {
        const simt::Words2 w = *reinterpret_cast<const simt::Words2*>(halves);
        return {simt::multiply_half(w.x, 0x34003400u), simt::multiply_half(w.y, 0x34003400u)};
    }

    // Codes in bits 2 f and 2 f + 16 of x.
    CRUMB_DEVICE static u32 read(u32 x, int f, u32 scale, u32 zero) {
        const u32 bits = (x << (8 - 2 * f) & 0x03000300u) | 0x44004400u;  // 4 + code
        return simt::fma_half(simt::fma_half(bits, 0x3c003c00u, 0xc580c580u), scale, zero);
    }

    // Tokens 32 half .. of an area of 64, kDim / 2 channels; rows of A are tokens. map: FP16 [channel][plane], rows `stride` bytes apart.
    // write(token of the half, channel, 8 channels).
    template <class Write>
    CRUMB_DEVICE static void keys(const u8* page, int area, int half, int part, const u8* map, u32 stride, Write write) {
        using namespace simt;
        const int r = lane() / 4, q = lane() % 4, token = kPageTokens * area + 32 * half;
        const u8* const info = page + kAt.key_info;
        const u8* const scales = info + token / F.k.group * (2 * kDim) + 8 * q;
        Words4 codes[kGroupsOfPlanes];
#pragma unroll
        for (int g = 0; g < kGroupsOfPlanes; g++) {
            codes[g] = *reinterpret_cast<const Words4*>(page + kPageTokens / 4 * kDim * area + key_load(kDim, half, g, r, q));
        }
        float gain[4] = {1, 1, 1, 1};
        if constexpr (F.k.token_gain) {
            const Words2 s = *reinterpret_cast<const Words2*>(info + 2 * kScales + 2 * (token + 4 * r));
            gain[0] = half_low(s.x), gain[1] = half_high(s.x), gain[2] = half_low(s.y), gain[3] = half_high(s.y);
        }
#pragma unroll 1
        for (int c0 = part * (kDim / 2); c0 < (part + 1) * (kDim / 2); c0 += 32) {
            float sum[2][4][4] = {};
#pragma unroll
            for (int g = 0; g < kGroupsOfPlanes; g++) {
                const u32 w[4] = {codes[g].x, codes[g].y, codes[g].z, codes[g].w};
#pragma unroll
                for (int f = 0; f < 4; f++) {
                    const int plane = 64 * g + 16 * f;
                    const Words2 s = quarter(scales + 2 * plane), z = quarter(scales + kScales + 2 * plane);
                    u32 a[2][4];
#pragma unroll
                    for (int m = 0; m < 2; m++) {
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            a[m][i] = read(permute_bytes(w[2 * m + i], 0, 0x4140), f, s.x, z.x);
                            a[m][2 + i] = read(permute_bytes(w[2 * m + i], 0, 0x4342), f, s.y, z.y);
                        }
                    }
#pragma unroll
                    for (int b = 0; b < 4; b++) {
                        const Words2 k = *reinterpret_cast<const Words2*>(map + u32(c0 + 4 * r + b) * stride + 2 * (plane + 4 * q));
#pragma unroll
                        for (int m = 0; m < 2; m++) { mma_f16(sum[m][b], a[m][0], a[m][1], a[m][2], a[m][3], k.x, k.y); }
                    }
                }
            }
            // Columns 2 q, 2 q + 1 of product b are channels 8 q + b and 8 q + 4 + b.
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float x[8];
#pragma unroll
                for (int i = 0; i < 8; i++) { x[i] = sum[e / 2][i % 4][2 * (e % 2) + i / 4] * (4 * gain[e]); }
                write(4 * r + e, c0 + 8 * q, x);
            }
        }
    }

    // The same of V: rows of A are channels; column n of product b is token 4 n + b of the half. write(channel, token of the half, 8 tokens).
    template <class Write>
    CRUMB_DEVICE static void values(const u8* page, int area, int half, int part, const u8* map, u32 stride, Write write) {
        using namespace simt;
        const int r = lane() / 4, q = lane() % 4, u = 8 * half + r;
        const u8* const code_area = page + kAt.value_codes + kPageTokens / 4 * kDim * area;
        const u8* const info = page + kAt.value_info + 2 * (kPageTokens * area + 32 * half + 4 * r);
        Words2 codes[kGroupsOfPlanes][2], scale[kParts], zero[kParts];
#pragma unroll
        for (int g = 0; g < kGroupsOfPlanes; g++) {
            const u8* const quad = code_area + kBlockBytes * ((u / 4 * kGroupsOfPlanes + g) * 4 + u % 4) + 8 * (q % 2);
            codes[g][0] = *reinterpret_cast<const Words2*>(quad + 16 * ((q / 2) ^ (u & 2)));
            codes[g][1] = *reinterpret_cast<const Words2*>(quad + 16 * ((q / 2 + 2) ^ (u & 2)));
        }
#pragma unroll
        for (int i = 0; i < kParts; i++) {
            scale[i] = quarter(info + 2 * F.tokens * i), zero[i] = quarter(info + 2 * F.tokens * i + kValueScales);
        }
#pragma unroll 1
        for (int c0 = part * (kDim / 2); c0 < (part + 1) * (kDim / 2); c0 += 32) {
            float sum[2][4][4] = {};
#pragma unroll
            for (int g = 0; g < kGroupsOfPlanes; g++) {
                const u32 w[4] = {codes[g][0].x, codes[g][0].y, codes[g][1].x, codes[g][1].y};
#pragma unroll
                for (int f = 0; f < 4; f++) {
                    const int plane = 64 * g + 16 * f, group = plane * kParts / kDim;
                    u32 a[2][4];
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        const u8* const at = map + u32(c0 + 16 * m + r) * stride + 2 * (plane + 2 * q);
                        a[m][0] = *reinterpret_cast<const u32*>(at), a[m][1] = *reinterpret_cast<const u32*>(at + 8 * stride);
                        a[m][2] = *reinterpret_cast<const u32*>(at + 16), a[m][3] = *reinterpret_cast<const u32*>(at + 8 * stride + 16);
                    }
#pragma unroll
                    for (int b = 0; b < 4; b++) {
                        const u32 selector = 0x0400u + u32(b) * 0x0101u;  // byte b of both words; bytes 1 and 3 are masked away
                        const u32 twice = b % 2 ? 0x3232u : 0x1010u;
                        const u32 s = permute_bytes(b < 2 ? scale[group].x : scale[group].y, 0, twice);
                        const u32 z = permute_bytes(b < 2 ? zero[group].x : zero[group].y, 0, twice);
                        const u32 b0 = read(permute_bytes(w[0], w[1], selector), f, s, z), b1 = read(permute_bytes(w[2], w[3], selector), f, s, z);
#pragma unroll
                        for (int m = 0; m < 2; m++) { mma_f16(sum[m][b], a[m][0], a[m][1], a[m][2], a[m][3], b0, b1); }
                    }
                }
            }
#pragma unroll
            for (int row = 0; row < 4; row++) {
                float x[8];
#pragma unroll
                for (int i = 0; i < 8; i++) { x[i] = 4 * sum[row / 2][i % 4][2 * (row % 2) + i / 4]; }  // token 8 q + i
                write(c0 + 16 * (row / 2) + 8 * (row % 2) + r, 8 * q, x);
            }
        }
    }
};

}  // namespace crumb::cuda

// Products of a warpgroup, four warps together, on tiles of shared memory: 64 rows of A in registers, 16 of them a warp's,
// times a tile of B. sm_90a has an instruction for that, which runs while the warps go on; everything else, the emulator
// too, does the same with products of single warps.
//
// A tile has rows of 128 bytes, 64 BF16 numbers of k; a row is a column of B. In row i lies the 16-byte piece c at place
// c xor (i and 7), so that neither the instruction nor a warp meets a bank twice. Tiles begin at multiples of 1024 bytes.
#pragma once

#include "base/cuda/simt.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CRUMB_WARPGROUPS 1
#else
#define CRUMB_WARPGROUPS 0
#endif

namespace crumb::cuda {

using simt::u32;
using simt::u64;
using simt::u8;

inline constexpr int kTileRowBytes = 128;

// Where the 16-byte piece c of row i lies.
CRUMB_BOTH constexpr u32 tile_at(int row, int piece) { return u32(row * kTileRowBytes + ((piece ^ (row & 7)) << 4)); }

#if CRUMB_WARPGROUPS

template <int N>
CRUMB_DEVICE void wgmma(float (&d)[N / 8][4], const u32 (&a)[4], u32 b, bool add);

// What a descriptor says of a tile but for its place: 8 rows are 1024 bytes, pieces are swapped as above.
inline constexpr u32 kTileShape = 8 * kTileRowBytes >> 4 | 1u << 30;

using TileAddress = u32;  // in shared memory
CRUMB_DEVICE TileAddress tile_address(const u8* tile) { return simt::shared_address(tile); }


template <>
CRUMB_DEVICE void wgmma<64>(float (&d)[8][4], const u32 (&a)[4], u32 b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p,%37,0;\nmov.b64 b,{%36,%38};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "},{%32,%33,%34,%35},b,p,1,1,0;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
          "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int(add)), "n"(kTileShape));
}

template <>
CRUMB_DEVICE void wgmma<128>(float (&d)[16][4], const u32 (&a)[4], u32 b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p,%69,0;\nmov.b64 b,{%68,%70};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "},{%64,%65,%66,%67},b,p,1,1,0;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
          "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
          "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]),
          "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]),
          "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),
          "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int(add)), "n"(kTileShape));
}

// A warpgroup's registers a thread: 168 at first where three share a multiprocessor.
template <int kRegisters>
CRUMB_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
CRUMB_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

// Between registers that were written and products that read them.
CRUMB_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products.
CRUMB_DEVICE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last kLeft groups are done.
template <int kLeft>
CRUMB_DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory"); }
// Sums are not read before this point, nor kept elsewhere.
template <int N>
CRUMB_DEVICE void products_hold(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < 4; k++) { asm volatile("" : "+f"(d[i][k])::"memory"); }
    }
}

// d (+)= A B over 16 k from byte `k` of the tile's rows on. Lane 4 r + q of a warp: A as in mma_bf16(), d[j] columns
// 8 j + 2 q, + 1 of rows r and r + 8.
template <int N>
CRUMB_DEVICE void product(float (&d)[N / 8][4], const u32 (&a)[4], TileAddress tile, int k, bool add) {
    wgmma<N>(d, a, (tile + u32(k)) >> 4 | 1u << 16, add);
}

#else

using TileAddress = const u8*;
CRUMB_DEVICE TileAddress tile_address(const u8* tile) { return tile; }

template <int kRegisters>
CRUMB_DEVICE void take_registers() {}
template <int kRegisters>
CRUMB_DEVICE void give_registers() {}
CRUMB_DEVICE void products_begin() {}
CRUMB_DEVICE void products_end() {}
template <int kLeft>
CRUMB_DEVICE void products_wait() {}
template <int N>
CRUMB_DEVICE void products_hold(float (&)[N][4]) {}

template <int N>
CRUMB_DEVICE void product(float (&d)[N / 8][4], const u32 (&a)[4], TileAddress tile, int k, bool add) {
    const int r = simt::lane() / 4, q = simt::lane() % 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const u32 b0 = *reinterpret_cast<const u32*>(tile + tile_at(8 * j + r, k / 16) + 4 * q);
        const u32 b1 = *reinterpret_cast<const u32*>(tile + tile_at(8 * j + r, k / 16 + 1) + 4 * q);
        if (!add) { d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0; }
        simt::mma_bf16(d[j], a[0], a[1], a[2], a[3], b0, b1);
    }
}

#endif

}  // namespace crumb::cuda

// The inner loops of the encoder. A tile is channel-major, so that the 64 tokens of a page are the lanes of vectors; a
// lane computes what a scalar program for one token would, in the same order, so bytes do not depend on the vector
// width.
//
// Files of this folder are compiled once a level (CRUMB_LEVEL names it) and hold nothing but plain loops: they call no
// inline function of the standard library, whose copy would be compiled for the wrong machine. Without FMA instructions
// (the portable level of x86-64) fmaf is a library call: the same bytes, 50 times slower and more.
#pragma once

#include <crumb/half.h>

#include <cstdint>

namespace crumb::lanes {

inline constexpr int kLanes = 64;
inline constexpr int kMaxDim = 256;
inline constexpr float kLargestInput = 1e30f;      // what an infinite element counts as
inline constexpr float kLargestMapped = 65504.0f;  // mapped values are clamped to the range of FP16
inline constexpr float kTiny = 0x1p-24f;           // the smallest FP16: floor of scales and gains

struct alignas(64) Tile {
    float at[kMaxDim][kLanes];
};

// Per direction, per token; side info as stored bits, one or two 16-bit numbers or a byte a token.
struct Coded {
    uint8_t code[kMaxDim][kLanes];
    uint16_t scale[kLanes];  // FP16, or the code of a gain8
    uint16_t zero[kLanes];
    bool saturated[kLanes];
};

// Static tables of the gain quantiser.
struct GainTables {
    const float* sigma;     // [dim]
    const float* step;      // [dim]
    const uint8_t* digits;  // [dim]
    float reference;
    bool gain8;
};

struct Kernels {
    const char* name;
    // BF16 rows [64][dim] minus mean (null: 0) into columns of x. NaN counts as 0, infinite as the largest input;
    // returns how many there were in tokens from `first` on.
    uint64_t (*load)(const bf16* rows, int dim, const float* mean, int first, Tile& x);
    // Mean of the 64 tokens, as int8 codes of a static step.
    void (*page_mean)(const Tile& x, int dim, const float* step, int8_t* mean);
    void (*subtract)(Tile& x, int dim, const float* step, const int8_t* mean);
    // y_j = sum over i ascending of fma(x_i, matrix[i][j]).
    void (*map)(const Tile& x, int dim, const float* matrix, Tile& y);
    // Codes and side info. `clipped`: the clip threshold is the clipped-th largest |y|, 1 for no clip.
    void (*minmax)(Tile& y, int dim, int bits, int clipped, float shrink, Coded& __restrict out);
    void (*gain)(Tile& y, int dim, const GainTables& tables, Coded& __restrict out);
};

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

#ifdef CRUMB_LEVEL
namespace CRUMB_LEVEL {
void minmax(Tile& y, int dim, int bits, int clipped, float shrink, Coded& __restrict out);
void gain(Tile& y, int dim, const GainTables& tables, Coded& __restrict out);

// Clamps mapped values to the range of FP16 and notes the tokens that had others.
void clamp_mapped(Tile& y, int dim, bool* saturated);
}  // namespace CRUMB_LEVEL
#endif

}  // namespace crumb::lanes

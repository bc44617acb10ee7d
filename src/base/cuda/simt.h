// The words in which CUDA kernels are written: lanes, warps, tensor-core products, copies into shared memory. nvcc turns
// them into instructions (simt_cuda.inl). Any other compiler sees declarations only, and the emulator of the tests
// (tests/cuda/emulator.h) gives them the meaning of the PTX manual, one fiber a thread: so the very source of a kernel
// runs, and is held against its reference, on a machine without a GPU.
//
// A kernel is a function template over plain arguments and one block of shared memory; the .cu files hold nothing but
// its __global__ entry and its launch. Warp operations are for all 32 lanes together.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define CRUMB_DEVICE __device__ __forceinline__
#define CRUMB_BOTH __host__ __device__ __forceinline__
#else
#define CRUMB_DEVICE inline
#define CRUMB_BOTH inline
#endif

namespace crumb::simt {

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

struct alignas(8) Words2 {
    u32 x, y;
};
struct alignas(16) Words4 {
    u32 x, y, z, w;
};

struct alignas(8) Floats2 {
    float x, y;
};
struct alignas(16) Floats4 {
    float x, y, z, w;
};

inline constexpr int kWarp = 32;

#ifdef __CUDACC__
#define CRUMB_WORD CRUMB_DEVICE
#else
#define CRUMB_WORD
#endif

CRUMB_WORD int thread();    // in its block
CRUMB_WORD int n_threads();
CRUMB_WORD int block();
CRUMB_WORD int n_blocks();
CRUMB_DEVICE int lane() { return thread() % kWarp; }
CRUMB_DEVICE int warp() { return thread() / kWarp; }

CRUMB_WORD void sync_block();
CRUMB_WORD void sync_warp();
CRUMB_WORD u32 shuffle(u32 x, int source);
CRUMB_WORD u32 shuffle_xor(u32 x, int mask);
CRUMB_WORD bool any(bool x);
CRUMB_WORD u32 ballot(bool x);  // bit i: lane i

// d += a b. Lane 4 r + q: a0, a1 are rows r, r + 8 of A at k = 4 q .. 4 q + 3 (bytes), a2, a3 the same rows at k + 16;
// b0, b1 column r of B at the same k; d columns 2 q, 2 q + 1 of rows r and r + 8.
CRUMB_WORD void mma_u8s8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
CRUMB_WORD void mma_u8u8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
CRUMB_WORD void mma_s8s8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
// BF16 or FP16 pairs: k = 2 q, 2 q + 1 and k + 8.
CRUMB_WORD void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
CRUMB_WORD void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
// An 8 x 8 matrix of 16-bit elements, lane 4 r + q holding columns 2 q, 2 q + 1 of row r, is transposed.
CRUMB_WORD u32 transpose(u32 x);

CRUMB_WORD int lowest_bit(u32 x);  // of x != 0
CRUMB_WORD u32 permute_bytes(u32 low, u32 high, u32 selector);  // nibble i of the selector names byte i of the result
CRUMB_WORD u32 bits_of(float x);
CRUMB_WORD float float_of(u32 x);
CRUMB_WORD float exp2_fast(float x);  // within 2^-22
CRUMB_WORD float log2_fast(float x);
CRUMB_WORD float tanh_exact(float x);
CRUMB_WORD float fma_exact(float a, float b, float c);
CRUMB_WORD float fma_unit(float a, float b, float c);  // within 0 .. 1
CRUMB_WORD float add_down(float a, float b);  // rounded towards minus infinity
CRUMB_WORD float reaches(float a, float b);  // 1 if a >= b, else 0
CRUMB_WORD float max_of(float a, float b);  // the other one if one is NaN
CRUMB_WORD float min_of(float a, float b);  // same
CRUMB_WORD float half_low(u32 pair);
CRUMB_WORD float half_high(u32 pair);
CRUMB_WORD u32 bf16_pair(float low, float high);
CRUMB_WORD u32 add_bf16(u32 a, u32 b);  // pairs
CRUMB_WORD u32 half_pair(float low, float high);  // nearest even, infinite beyond 65504
CRUMB_WORD u32 multiply_half(u32 a, u32 b);    // pairs
CRUMB_WORD u32 fma_half(u32 a, u32 b, u32 c);  // pairs
CRUMB_WORD u32 to_half(float x);  // to_fp16() of half.h: nearest even, saturates at 65504

// Global memory that is read once, past the caches' better uses.
CRUMB_WORD u32 load_once(const u32* p);
CRUMB_WORD Words4 load_once(const Words4* p);

// A copy of whole 16 bytes into shared memory, completing on `barrier`. All lanes call these with the same arguments.
// wait: until the copies of this phase (0, 1, 0 ...) have come; warps other than the one that copies may wait too. It gives
// up and ends the kernel with an error after some seconds, so that no fault can hang a device.
enum class Reuse { none, soon };  // whether other blocks will read the same bytes, from L2
CRUMB_WORD void copy_init(u64* barrier);
CRUMB_WORD void copy_ready();  // after all copy_init() of the warp
CRUMB_WORD void copy_begin(u64* barrier, void* shared, const void* global, u32 bytes, Reuse reuse = Reuse::none);
CRUMB_WORD void copy_wait(u64* barrier, u32 phase);

// A barrier that `warps` warps reach, phase by phase, and that others wait for, with the bound of copy_wait(). All lanes of
// a warp call these.
CRUMB_WORD void reach_init(u64* barrier, u32 warps);
CRUMB_WORD void reach(u64* barrier);
CRUMB_WORD void reach_wait(u64* barrier, u32 phase);
// The same where every lane arrives for itself: dearer, and what tools that look for races understand. For what is handed over seldom.
CRUMB_WORD void reach_lanes_init(u64* barrier, u32 warps);
CRUMB_WORD void reach_lanes(u64* barrier);

CRUMB_WORD u32 add_device(u32* counter, u32 x);  // returns the old value
CRUMB_WORD void or_shared(u32* word, u32 bits);

// Overlap with the neighbouring kernels of a stream where the launch allows it.
CRUMB_WORD void wait_for_previous();
CRUMB_WORD void launch_next();

CRUMB_DEVICE float shuffle(float x, int source) { return float_of(shuffle(bits_of(x), source)); }
CRUMB_DEVICE float shuffle_xor(float x, int mask) { return float_of(shuffle_xor(bits_of(x), mask)); }

template <int N>
struct Index {
    static constexpr int value = N;
};

}  // namespace crumb::simt

#ifdef __CUDACC__
#include "base/cuda/simt_cuda.inl"
#endif

// simt.h as instructions. sm_80 and later; bulk copies on sm_90 and later, 16-byte copies by all lanes before.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace crumb::simt {

CRUMB_WORD int thread() { return int(threadIdx.x); }
CRUMB_WORD int n_threads() { return int(blockDim.x); }
CRUMB_WORD int block() { return int(blockIdx.x); }
CRUMB_WORD int n_blocks() { return int(gridDim.x); }

CRUMB_WORD void sync_block() { __syncthreads(); }
CRUMB_WORD void sync_warp() { __syncwarp(); }
CRUMB_WORD u32 shuffle(u32 x, int source) { return __shfl_sync(~0u, x, source); }
CRUMB_WORD u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
CRUMB_WORD bool any(bool x) { return __any_sync(~0u, x) != 0; }
CRUMB_WORD u32 ballot(bool x) { return __ballot_sync(~0u, x); }

CRUMB_WORD void mma_u8s8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

CRUMB_WORD void mma_u8u8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

CRUMB_WORD void mma_s8s8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

CRUMB_WORD void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

CRUMB_WORD void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

CRUMB_WORD u32 transpose(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(y) : "r"(x));
    return y;
}

CRUMB_WORD int lowest_bit(u32 x) { return __ffs(int(x)) - 1; }
CRUMB_WORD u32 permute_bytes(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }
CRUMB_WORD u32 bits_of(float x) { return __float_as_uint(x); }
CRUMB_WORD float float_of(u32 x) { return __uint_as_float(x); }

CRUMB_WORD float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

CRUMB_WORD float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

CRUMB_WORD float tanh_exact(float x) { return tanhf(x); }
CRUMB_WORD float fma_exact(float a, float b, float c) { return __fmaf_rn(a, b, c); }
CRUMB_WORD float fma_unit(float a, float b, float c) {
    float y;
    asm("fma.rn.sat.f32 %0,%1,%2,%3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
    return y;
}

CRUMB_WORD float add_down(float a, float b) { return __fadd_rd(a, b); }
CRUMB_WORD float reaches(float a, float b) {
    float y;
    asm("set.ge.f32.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
CRUMB_WORD float max_of(float a, float b) { return fmaxf(a, b); }
CRUMB_WORD float min_of(float a, float b) { return fminf(a, b); }

CRUMB_WORD float half_low(u32 pair) { return __half2float(__ushort_as_half((unsigned short)(pair & 0xffff))); }
CRUMB_WORD float half_high(u32 pair) { return __half2float(__ushort_as_half((unsigned short)(pair >> 16))); }

CRUMB_WORD u32 bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32*>(&pair);
}

CRUMB_WORD u32 half_pair(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const u32*>(&pair);
}

CRUMB_WORD u32 multiply_half(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

CRUMB_WORD u32 fma_half(u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

CRUMB_WORD u32 add_bf16(u32 a, u32 b) {
    const __nv_bfloat162 sum = __hadd2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const u32*>(&sum);
}

CRUMB_WORD u32 to_half(float x) {
    const float within = x < -65504.0f ? -65504.0f : x > 65504.0f ? 65504.0f : x;
    return __half_as_ushort(__float2half_rn(within));
}

CRUMB_WORD u32 load_once(const u32* p) { return __ldcs(p); }

CRUMB_WORD Words4 load_once(const Words4* p) {
    const uint4 w = __ldcs(reinterpret_cast<const uint4*>(p));
    return {w.x, w.y, w.z, w.w};
}

CRUMB_DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

CRUMB_WORD void copy_init(u64* barrier) {
    if (lane() == 0) { asm volatile("mbarrier.init.shared.b64 [%0],1;" ::"r"(shared_address(barrier))); }
}

CRUMB_WORD void copy_ready() {
    if (lane() == 0) { asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory"); }
    __syncwarp();
}

CRUMB_WORD void copy_begin(u64* barrier, void* shared, const void* global, u32 bytes, Reuse reuse) {
    if (lane() == 0) {
        const u32 b = shared_address(barrier);
        u64 policy;
        if (reuse == Reuse::none) {
            asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        } else {
            asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
        }
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(b), "r"(bytes) : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(
                shared_address(shared)),
            "l"(global), "r"(bytes), "r"(b), "l"(policy)
            : "memory");
    }
}

#else

CRUMB_WORD void copy_init(u64* barrier) {
    if (lane() == 0) { asm volatile("mbarrier.init.shared.b64 [%0],32;" ::"r"(shared_address(barrier))); }
}

CRUMB_WORD void copy_ready() { __syncwarp(); }

CRUMB_WORD void copy_begin(u64* barrier, void* shared, const void* global, u32 bytes, Reuse) {
    for (u32 i = 16u * u32(lane()); i < bytes; i += 16u * kWarp) {
        asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared_address(shared) + i),
                     "l"(static_cast<const char*>(global) + i)
                     : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

#endif

CRUMB_WORD void copy_wait(u64* barrier, u32 phase) {
    const u32 b = shared_address(barrier);
#pragma unroll 1
    for (u32 i = 0; i < 1u << 24; i++) {
        u32 done;
        asm volatile(
            "{\n.reg .pred p;\n"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
            "mbarrier.try_wait.parity.shared.b64 p,[%1],%2;\n"
#else
            "mbarrier.test_wait.parity.shared.b64 p,[%1],%2;\n"
#endif
            "selp.u32 %0,1,0,p;\n}"
            : "=r"(done)
            : "r"(b), "r"(phase)
            : "memory");
        if (done) { return; }
    }
    __trap();
}

CRUMB_WORD void reach_init(u64* barrier, u32 warps) {
    if (lane() == 0) { asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(shared_address(barrier)), "r"(warps)); }
}

CRUMB_WORD void reach_lanes_init(u64* barrier, u32 warps) { reach_init(barrier, kWarp * warps); }

CRUMB_WORD void reach_lanes(u64* barrier) {
    asm volatile("{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s,[%0];\n}" ::"r"(shared_address(barrier)) : "memory");
}

CRUMB_WORD void reach(u64* barrier) {
    if (lane() == 0) { reach_lanes(barrier); }
}

CRUMB_WORD void reach_wait(u64* barrier, u32 phase) { copy_wait(barrier, phase); }

CRUMB_WORD u32 add_device(u32* counter, u32 x) { return atomicAdd(counter, x); }
CRUMB_WORD void or_shared(u32* word, u32 bits) { atomicOr(word, bits); }

CRUMB_WORD void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

CRUMB_WORD void launch_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace crumb::simt

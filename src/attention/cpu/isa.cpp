// Instruction sets that this CPU has, and the kernel of each.
#include <crumb/error.h>

#include "attention/cpu/kernel.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace crumb {

namespace {

#if defined(__x86_64__)
struct CpuId {
    uint32_t a, b, c, d;
};

// Compilers of 2022 have no names for all of these.
CpuId leaf_7(uint32_t sub_leaf) {
    CpuId r{7, 0, sub_leaf, 0};
    __asm__("cpuid" : "+a"(r.a), "+c"(r.c), "=b"(r.b), "=d"(r.d));
    return r;
}

// Asked once: on a virtual machine cpuid takes some 8 us.
bool has_avx_vnni() {
    static const bool has = (leaf_7(1).a >> 4 & 1) != 0;
    return has;
}

bool has_amx() {
    const uint32_t bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25, all = bf16 | tile | int8, avx512_bf16 = 1u << 5;
    static const bool has = (leaf_7(0).d & all) == all && (leaf_7(1).a & avx512_bf16) != 0;
    return has;
}

// Linux gives the registers of tiles to processes that ask, once, for all their threads. Kernels that do not know them refuse.
bool has_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    static const bool has = has_amx() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return has;
}
#endif

}  // namespace

const char* name(Isa isa) {
    switch (isa) {
        case Isa::portable:
            return "portable";
        case Isa::avx2:
            return "avx2";
        case Isa::avx_vnni:
            return "avx-vnni";
        case Isa::avx512:
            return "avx512";
        case Isa::amx:
            return "amx";
        case Isa::neon:
            return "neon";
    }
    CRUMB_ASSERT(false);
}

bool supported(Isa isa) {
    switch (isa) {
        case Isa::portable:
            return true;
#if defined(__x86_64__)
        case Isa::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        case Isa::avx_vnni:
            return supported(Isa::avx2) && has_avx_vnni();
        case Isa::avx512:
            return supported(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vnni");
        case Isa::amx:
            return supported(Isa::avx512) && has_tiles();
#elif defined(__aarch64__)
        case Isa::neon:
            return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
        default:
            return false;
    }
}

bool tiles_refused() {
#if defined(__x86_64__)
    return supported(Isa::avx512) && has_amx() && !has_tiles();
#else
    return false;
#endif
}

Isa best_isa() {
    Isa best = Isa::portable;
    for (const Isa isa : kIsas) {
        if (supported(isa)) {
            best = isa;
        }
    }
    return best;
}

const cpu::Kernel& cpu::kernel_of(Isa isa) {
    CRUMB_ASSERT(supported(isa));
    switch (isa) {
#if defined(__x86_64__)
        case Isa::avx2:
            return avx2_kernel;
        case Isa::avx_vnni:
            return avx_vnni_kernel;
        case Isa::avx512:
            return avx512_kernel;
        case Isa::amx:
            return amx_kernel;
#elif defined(__aarch64__)
        case Isa::neon:
            return neon_kernel;
#endif
        default:
            return portable_kernel;
    }
}

}  // namespace crumb

// Instruction sets that this CPU has, and the kernel of each.
#include <crumb/error.h>

#include "attention/cpu/kernel.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace crumb {

namespace {

#if defined(__x86_64__)
// Leaf 7, sub-leaf 1: compilers of 2022 have no name for it.
bool has_avx_vnni() {
    uint32_t a = 7, b = 0, c = 1, d = 0;
    __asm__("cpuid" : "+a"(a), "+c"(c), "=b"(b), "=d"(d));
    return (a >> 4 & 1) != 0;
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
#elif defined(__aarch64__)
        case Isa::neon:
            return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
        default:
            return false;
    }
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
#elif defined(__aarch64__)
        case Isa::neon:
            return neon_kernel;
#endif
        default:
            return portable_kernel;
    }
}

}  // namespace crumb

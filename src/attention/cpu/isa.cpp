// Instruction sets that this CPU has, and the kernel of each.
#include <crumb/error.h>

#include "attention/cpu/kernel.h"

namespace crumb {

bool supported(Isa isa) {
    switch (isa) {
        case Isa::portable:
            return true;
#if defined(__x86_64__)
        case Isa::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        case Isa::avx512:
            return supported(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
        default:
            return false;
    }
}

Isa best_isa() {
    for (const Isa isa : {Isa::avx512, Isa::avx2}) {
        if (supported(isa)) {
            return isa;
        }
    }
    return Isa::portable;
}

const cpu::Kernel& cpu::kernel_of(Isa isa) {
    CRUMB_ASSERT(supported(isa));
    switch (isa) {
#if defined(__x86_64__)
        case Isa::avx2:
            return avx2_kernel;
        case Isa::avx512:
            return avx512_kernel;
#endif
        default:
            return portable_kernel;
    }
}

}  // namespace crumb

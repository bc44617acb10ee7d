#include "recipe/levels.h"

#include <vector>

namespace crumb::lanes {

std::span<const Kernels* const> supported() {
    static const std::vector<const Kernels*> levels = [] {
        std::vector<const Kernels*> found = {&portable::kernels};
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
            found.push_back(&avx2::kernels);
        }
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            found.push_back(&avx512::kernels);
        }
#endif
        return found;
    }();
    return levels;
}

const Kernels& best() { return *supported().back(); }

}  // namespace crumb::lanes

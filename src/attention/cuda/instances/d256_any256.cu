// planes at D = 256, counts up to 256: of smaller tables and sums, so 8 warps and nothing spilled with 4 columns. 12 columns would spill
// 2 KB a thread of 4 warps.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d256_any256() {
    using P = AnyPage<256, 256>;
    return {device_kernels<P, 1>(), device_kernels<P, 2>()};
}

}  // namespace crumb::cuda::instances

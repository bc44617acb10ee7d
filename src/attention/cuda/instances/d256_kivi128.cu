// kivi128 at D = 256. 12 columns would leave room for 3 warps.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d256_kivi128() {
    using P = GroupedPage<256, 128, false, 128>;
    return {device_kernels<P, 1>(), device_kernels<P, 2>()};
}

}  // namespace crumb::cuda::instances

// kivi32 at D = 256. 12 columns would leave room for 3 warps.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d256_kivi32() {
    using P = GroupedPage<256, 32, false, 32>;
    return {device_kernels<P, 1>(), device_kernels<P, 2>()};
}

}  // namespace crumb::cuda::instances

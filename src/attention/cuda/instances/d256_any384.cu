// planes at D = 256, counts up to 384: 3 bits a channel, on either side. 12 columns would leave room for 3 warps.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d256_any384() {
    using P = AnyPage<256, 384>;
    return {device_kernels<P, 1>(), device_kernels<P, 2>()};
}

}  // namespace crumb::cuda::instances

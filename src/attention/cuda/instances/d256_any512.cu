// planes at D = 256, counts up to 512: 4 bits a channel, on either side. 4 columns alone: sums of 8 are more than the registers, 4 KB a thread would spill.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d256_any512() { return {device_kernels<AnyPage<256, 512>, 1>()}; }

}  // namespace crumb::cuda::instances

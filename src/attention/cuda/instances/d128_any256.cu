// planes at D = 128: up to 4 bits a channel, on either side.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_any256() { return all_columns<AnyPage<128, 256>>(); }

}  // namespace crumb::cuda::instances

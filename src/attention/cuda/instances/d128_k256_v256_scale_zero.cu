// saw4 at D = 128: 4 bits.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_k256_v256_scale_zero() { return all_columns<Page<128, 256, 256, SideInfo::scale_zero>>(); }

}  // namespace crumb::cuda::instances

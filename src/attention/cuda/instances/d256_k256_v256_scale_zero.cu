// int2, quarot, oscar at D = 256.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d256_k256_v256_scale_zero() { return all_columns<Page<256, 256, 256, SideInfo::scale_zero>>(); }

}  // namespace crumb::cuda::instances

// int2, quarot, oscar at D = 128.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_k128_v128_scale_zero() { return all_columns<Page<128, 128, 128, SideInfo::scale_zero>>(); }

}  // namespace crumb::cuda::instances

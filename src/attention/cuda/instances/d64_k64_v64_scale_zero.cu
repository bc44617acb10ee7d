// int2, quarot, oscar at D = 64.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d64_k64_v64_scale_zero() { return all_columns<Page<64, 64, 64, SideInfo::scale_zero>>(); }

}  // namespace crumb::cuda::instances

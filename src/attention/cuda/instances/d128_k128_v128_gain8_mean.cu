// 2 bits with page means.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_k128_v128_gain8_mean() { return all_columns<Page<128, 128, 128, SideInfo::gain8, true>>(); }

}  // namespace crumb::cuda::instances

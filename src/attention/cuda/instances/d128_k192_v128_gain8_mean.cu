// 2.5 bits with page means.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_k192_v128_gain8_mean() { return all_columns<Page<128, 192, 128, SideInfo::gain8, true>>(); }

}  // namespace crumb::cuda::instances

// 3 bits with page means.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_k192_v192_gain8_mean() { return all_columns<Page<128, 192, 192, SideInfo::gain8, true>>(); }

}  // namespace crumb::cuda::instances

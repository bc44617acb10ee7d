// 2 bits with 16-bit gains.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_k128_v128_gain16() { return all_columns<Page<128, 128, 128, SideInfo::gain16>>(); }

}  // namespace crumb::cuda::instances

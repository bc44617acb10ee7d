// had2 at D = 128.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_k128_v128_gain8() { return all_columns<Page<128, 128, 128, SideInfo::gain8>>(); }

}  // namespace crumb::cuda::instances

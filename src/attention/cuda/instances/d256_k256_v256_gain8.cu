// had2 at D = 256.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d256_k256_v256_gain8() { return all_columns<Page<256, 256, 256, SideInfo::gain8>>(); }

}  // namespace crumb::cuda::instances

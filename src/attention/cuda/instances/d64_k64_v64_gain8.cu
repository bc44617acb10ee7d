// had2 at D = 64.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d64_k64_v64_gain8() { return all_columns<Page<64, 64, 64, SideInfo::gain8>>(); }

}  // namespace crumb::cuda::instances

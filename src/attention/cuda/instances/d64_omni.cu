// omni at D = 64.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d64_omni() { return all_columns<GroupedPage<64, 32, true, 32>>(); }

}  // namespace crumb::cuda::instances

// omni at D = 128.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_omni() { return all_columns<GroupedPage<128, 32, true, 32>>(); }

}  // namespace crumb::cuda::instances

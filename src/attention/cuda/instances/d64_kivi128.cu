// kivi128 at D = 64.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d64_kivi128() { return all_columns<GroupedPage<64, 128, false, 0>>(); }

}  // namespace crumb::cuda::instances

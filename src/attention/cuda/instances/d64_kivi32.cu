// kivi32 at D = 64.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d64_kivi32() { return all_columns<GroupedPage<64, 32, false, 32>>(); }

}  // namespace crumb::cuda::instances

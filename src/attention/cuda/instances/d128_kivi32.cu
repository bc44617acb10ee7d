// kivi32 at D = 128.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_kivi32() { return all_columns<GroupedPage<128, 32, false, 32>>(); }

}  // namespace crumb::cuda::instances

// kivi128 at D = 128.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_kivi128() { return all_columns<GroupedPage<128, 128, false, 0>>(); }

}  // namespace crumb::cuda::instances

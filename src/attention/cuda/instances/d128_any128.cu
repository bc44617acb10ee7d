// planes at D = 128, counts up to 128: smaller tables and sums, so faster than the kernels for more.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d128_any128() { return all_columns<AnyPage<128, 128>>(); }

}  // namespace crumb::cuda::instances

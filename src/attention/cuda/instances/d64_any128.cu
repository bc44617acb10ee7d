// planes at D = 64, counts up to 128: smaller tables and sums, so faster than the kernels for more.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d64_any128() { return all_columns<AnyPage<64, 128>>(); }

}  // namespace crumb::cuda::instances

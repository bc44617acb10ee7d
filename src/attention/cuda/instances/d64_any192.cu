// planes at D = 64: all counts that it gives.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d64_any192() { return all_columns<AnyPage<64, 192>>(); }

}  // namespace crumb::cuda::instances

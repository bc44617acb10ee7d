// 2.5 bits with page means at D = 64: a tail of 32 planes.
#include "attention/cuda/launch.cuh"

namespace crumb::cuda::instances {

std::vector<Kernels> d64_k96_v64_gain8_mean() { return all_columns<Page<64, 96, 64, SideInfo::gain8, true>>(); }

}  // namespace crumb::cuda::instances

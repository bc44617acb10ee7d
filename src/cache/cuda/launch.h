// The cache's kernels. Present in builds with -DCRUMB_CUDA=ON.
#pragma once

#include "cache/cuda/rows.h"

namespace crumb::cuda {

void launch_rows(const RowArgs& args, void* stream);

}  // namespace crumb::cuda

// The device's kernels. Present in builds with -DCRUMB_CUDA=ON.
#pragma once

#include <span>
#include <vector>

#include "attention/cuda/prefill_step.h"

namespace crumb::cuda {

// Decode kernels of every format of this build, one for each number of columns.
std::span<const std::vector<Kernels>> all_kernels();

// Those of a format; empty if it has none.
std::span<const Kernels> kernels_for(const PageFormat& format);

const PrefillLaunches& prefill_launches();

void launch_plan(const PlanArgs& args, Stream stream);

}  // namespace crumb::cuda

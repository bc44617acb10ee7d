// The device's kernels. Present in builds with -DCRUMB_CUDA=ON.
#pragma once

#include <span>
#include <vector>

#include "attention/cuda/prefill_step.h"

namespace crumb::cuda {

// Decode kernels as this build has them, by what they are compiled for, one for each number of columns.
std::span<const std::vector<Kernels>> all_kernels();

// Those of a format, compiled for it alone or else for the fewest planes that are enough; empty if it has none.
std::vector<Kernels> kernels_for(const PageFormat& format);

void launch_rows(const RowArgs& args, Stream stream);

const PrefillLaunches& prefill_launches();

void launch_plan(const PlanArgs& args, Stream stream);

}  // namespace crumb::cuda

// The device's append path: rows into exact records, exact records into pages. Present in builds with -DCRUMB_CUDA=ON.
#pragma once

#include "recipe/cuda/encode.h"
#include "recipe/cuda/store.h"

namespace crumb::cuda {

void launch_store(const StoreArgs& args, int n_tokens, void* stream);
void launch_encode(const EncodeArgs& args, int n_jobs, void* stream);

}  // namespace crumb::cuda

// The device's append path: rows into exact records, exact records into pages. Present in builds with -DCRUMB_CUDA=ON.
#pragma once

#include "recipe/cuda/encode_args.h"
#include "recipe/cuda/store.h"

namespace crumb::cuda {

void launch_store(const StoreArgs& args, int n_tokens, void* stream);
void launch_encode(const EncodeArgs& args, const EncodeJob* jobs, int n_jobs, void* stream);

// Of many layers in one launch.
inline constexpr int kJobSlots = 4;
struct EncodeLayers {
    const EncodeArgs* args = nullptr;  // [n], on the device
    int n = 0, most_heads = 0;
    EncodeShape shape;  // the widest
};
void launch_encode_layers(const EncodeLayers& layers, const EncodeJob* jobs, int n_jobs, void* stream);

}  // namespace crumb::cuda

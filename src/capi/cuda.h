// What an engine that knows this library's own types asks of CUDA beside the C API. In builds with -DCRUMB_CUDA=ON.
#pragma once

#include "attention/cuda/registry.h"
#include "capi/layer.h"
#include "recipe/cuda/launch.h"

namespace crumb::capi {

// Those of the layer's format; throws Unsupported if it has none.
std::vector<cuda::Kernels> kernels_of(const crumb_layer& layer);

// As Backend::attend of tiles, with new rows that are stored by the launch that maps the queries.
void attend_storing(const crumb_layer& layer, const crumb_step& step, const crumb_io& io, const cuda::RowArgs& rows, void* stream);

// What Backend::encode launches with; throws Unsupported if the encoder lacks a stage of the recipe.
cuda::EncodeArgs encode_args(const crumb_layer& layer, const crumb_encode_batch& batch);

}  // namespace crumb::capi

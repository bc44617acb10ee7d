// Entries and launches of the decode kernels of one format. An instance file names its format and numbers of columns.
// Launches carry programmatic dependent launch: a kernel may start while its predecessor ends, and waits for its data.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "attention/cuda/decode.h"
#include "attention/cuda/step.h"

namespace crumb::cuda {

template <PageFormat F, int NT>
__global__ void __launch_bounds__(512) map_query_kernel(const __grid_constant__ MapArgs args) {
    extern __shared__ __align__(128) std::byte shared[];
    Maps<F, NT>::query(args, shared);
}

template <PageFormat F, int NT>
__global__ void __launch_bounds__(DecodeFormat<F, NT>::kWarps * 32, 1) decode_kernel(const __grid_constant__ DecodeArgs args) {
    extern __shared__ __align__(128) std::byte shared[];
    Decode<F, NT>::run(args, shared);
}

template <PageFormat F, int NT>
__global__ void __launch_bounds__(512) map_output_kernel(const __grid_constant__ MapArgs args) {
    extern __shared__ __align__(128) std::byte shared[];
    Maps<F, NT>::output(args, shared);
}

// Errors of a launch stay where CUDA keeps them: callers ask cudaGetLastError() once a step.
template <class Args>
void launch(void (*kernel)(Args), const Args& args, int blocks, int threads, size_t shared, Stream stream) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = shared;
    config.stream = cudaStream_t(stream);
    cudaLaunchAttribute overlap;
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &overlap;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, args);
}

template <PageFormat F, int NT>
Kernels device_kernels() {
    Kernels k = kernels_of<F, NT>();
    k.map_query = [](const MapArgs& args, int segments, Stream stream) {
        launch<MapArgs>(map_query_kernel<F, NT>, args, segments, 512, Maps<F, NT>::kQueryShared, stream);
    };
    k.decode = [](const DecodeArgs& args, int blocks, Stream stream) {
        using D = DecodeFormat<F, NT>;
        launch<DecodeArgs>(decode_kernel<F, NT>, args, blocks, 32 * D::kWarps, D::kSharedSize, stream);
    };
    k.map_output = [](const MapArgs& args, int segments, Stream stream) {
        launch<MapArgs>(map_output_kernel<F, NT>, args, segments, 512, Maps<F, NT>::kOutputShared, stream);
    };
    return k;
}

constexpr PageFormat page(int dim, int planes_k, int planes_v, SideInfo info, bool mean = false) {
    return {.k = {dim, planes_k, info, mean}, .v = {dim, planes_v, info, mean}};
}

// 4, 8 and 12 columns.
template <PageFormat F>
std::vector<Kernels> all_columns() {
    return {device_kernels<F, 1>(), device_kernels<F, 2>(), device_kernels<F, 3>()};
}

}  // namespace crumb::cuda

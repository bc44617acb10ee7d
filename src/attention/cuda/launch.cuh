// Entries and launches of the decode kernels of one format. An instance file names its format and numbers of columns.
// Launches carry programmatic dependent launch: a kernel may start while its predecessor ends, and waits for its data.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "attention/cuda/decode.h"
#include "attention/cuda/prefill_tiles.h"
#include "attention/cuda/step.h"
#include "base/cuda/shared_memory.h"

namespace crumb::cuda {

// Formats as types: nvcc 13.0 cannot write the host's side of an entry whose template argument is a KernelFormat.
template <int kDim, int kPlanesK, int kPlanesV, SideInfo kInfo, bool kMean = false>
struct Page {
    static constexpr KernelFormat kFormat = {{kDim, kPlanesK, kInfo, kMean}, {kDim, kPlanesV, kInfo, kMean}, false};
};
// Pages of `planes` with up to kPlanes planes on either side.
template <int kDim, int kPlanes>
struct AnyPage {
    static constexpr KernelFormat kFormat = {{kDim, kPlanes, SideInfo::gain8, true}, {kDim, kPlanes, SideInfo::gain8, true}, true};
};

// 2 bits by groups: of kTokens tokens in K, with a gain a token or none, of kChannels channels in V (0: all).
template <int kDim, int kTokens, bool kGain, int kChannels>
struct GroupedPage {
    static constexpr KernelFormat kFormat = PageFormat{
        .k = {.dim = kDim, .planes = kDim, .info = SideInfo::channels, .group = kTokens, .token_gain = kGain},
        .v = {.dim = kDim, .planes = kDim, .info = SideInfo::scale_zero, .group = kChannels},
        .tokens = kTokens > kPageTokens ? 2 * kPageTokens : kPageTokens};
};

template <class P, int NT, bool kFew>
__global__ void __launch_bounds__(kMapThreads, kFew ? 1 : 2) map_query_kernel(const __grid_constant__ MapArgs args) {
    extern __shared__ __align__(128) std::byte shared[];
    Maps<P::kFormat, NT>::template query<kFew>(args, shared);
}

template <class P, int NT>
__global__ void __launch_bounds__(DecodeFormat<P::kFormat, NT>::kWarps * 32, 1) decode_kernel(const __grid_constant__ DecodeArgs args) {
    extern __shared__ __align__(128) std::byte shared[];
    Decode<P::kFormat, NT>::run(args, shared);
}

template <class P, int NT, bool kFew>
__global__ void __launch_bounds__(kMapThreads, kFew ? 1 : 2) map_output_kernel(const __grid_constant__ MapArgs args) {
    extern __shared__ __align__(128) std::byte shared[];
    Maps<P::kFormat, NT>::template output<kFew>(args, shared);
}

template <class P>
__global__ void __launch_bounds__(kUnpackThreads, kUnpackBlocks) unpack_kernel(const __grid_constant__ UnpackArgs args) {
    extern __shared__ __align__(128) std::byte shared[];
    Unpack<P::kFormat>::run(args, shared);
}

// Errors of a launch stay where CUDA keeps them: callers ask cudaGetLastError() once a step.
template <class Args>
void launch(void (*kernel)(Args), const Args& args, int blocks, int threads, size_t shared, Stream stream) {
    allow_shared_memory(kernel, shared);
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

template <class P, int NT>
Kernels device_kernels() {
    Kernels k = kernels_of<P::kFormat, NT>();
    using M = Maps<P::kFormat, NT>;
    k.map_query = [](const MapArgs& args, int blocks, bool few, Stream stream) {
        const auto kernel = few ? map_query_kernel<P, NT, true> : map_query_kernel<P, NT, false>;
        launch<MapArgs>(kernel, args, blocks, kMapThreads, few ? M::template kQueryShared<true> : M::template kQueryShared<false>, stream);
    };
    k.decode = [](const DecodeArgs& args, int blocks, Stream stream) {
        using D = DecodeFormat<P::kFormat, NT>;
        launch<DecodeArgs>(decode_kernel<P, NT>, args, blocks, 32 * D::kWarps, D::kSharedSize, stream);
    };
    k.map_output = [](const MapArgs& args, int blocks, bool few, Stream stream) {
        const auto kernel = few ? map_output_kernel<P, NT, true> : map_output_kernel<P, NT, false>;
        launch<MapArgs>(kernel, args, blocks, kMapThreads, few ? M::template kOutputShared<true> : M::template kOutputShared<false>, stream);
    };
    if constexpr (P::kFormat.k.dim <= 128) {
        k.unpack = [](const UnpackArgs& args, int blocks, Stream stream) {
            launch<UnpackArgs>(unpack_kernel<P>, args, blocks, kUnpackThreads, Unpack<P::kFormat>::shared_bytes(args.planes), stream);
        };
    }
    return k;
}

// 4, 8 and 12 columns.
template <class P>
std::vector<Kernels> all_columns() {
    return {device_kernels<P, 1>(), device_kernels<P, 2>(), device_kernels<P, 3>()};
}

}  // namespace crumb::cuda

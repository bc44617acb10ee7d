// How much dynamic shared memory a kernel may have is a state of the kernel, not of a launch, and a CUDA graph is instantiated with
// what it is then, not with what it was when the launch was recorded. Layers of a model launch one kernel with different
// amounts, so it is only ever raised: a later layer that took it down again made the graph of a step invalid.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace crumb::cuda {

template <class Kernel>
void allow_shared_memory(Kernel kernel, size_t bytes) {
    cudaFuncAttributes now;
    if (cudaFuncGetAttributes(&now, kernel) == cudaSuccess && size_t(now.maxDynamicSharedSizeBytes) < bytes) {
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
    }
}

}  // namespace crumb::cuda

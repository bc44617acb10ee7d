#include "cuda_device.h"

#include <crumb/error.h>

namespace crumb::llama {

void require(cudaError_t status, const char* what) {
    if (status != cudaSuccess) { fail("CUDA: {}: {}", what, cudaGetErrorString(status)); }
}

OnDevice::OnDevice(int ordinal) {
    require(cudaGetDevice(&before_), "device");
    require(cudaSetDevice(ordinal), "device");
}

std::byte* CudaMemory::allocate(size_t bytes) {
    const OnDevice on(ordinal_);
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
        cudaGetLastError();
        size_t free = 0, total = 0;
        cudaMemGetInfo(&free, &total);
        fail("no memory for the KV cache on CUDA{}: {:.1f} MiB more are needed and {:.1f} of {:.1f} MiB are free; use a smaller "
             "context (-c) or fewer sequences (-np), or {}",
             ordinal_, double(bytes) / 1048576.0, double(free) / 1048576.0, double(total) / 1048576.0, kRemedy);
    }
    require(cudaMemset(memory, 0, bytes), "memory");
    require(cudaDeviceSynchronize(), "memory");
    return static_cast<std::byte*>(memory);
}

void CudaMemory::free(std::byte* memory) {
    const OnDevice on(ordinal_);
    cudaDeviceSynchronize();
    cudaFree(memory);
}

void CudaMemory::clear(std::byte* to, size_t bytes) {
    const OnDevice on(ordinal_);
    require(cudaDeviceSynchronize(), "wait");
    require(cudaMemset(to, 0, bytes), "clear");
    require(cudaDeviceSynchronize(), "clear");
}

// The backend's streams do not wait for others.
void CudaMemory::move(void* to, const void* from, size_t bytes) {
    const OnDevice on(ordinal_);
    require(cudaDeviceSynchronize(), "wait");
    require(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copy");
    require(cudaDeviceSynchronize(), "copy");
}

}  // namespace crumb::llama

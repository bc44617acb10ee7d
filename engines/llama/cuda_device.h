// Memory of a CUDA device, as the cache asks for it.
#pragma once

#include <crumb/cache.h>

#include <cuda_runtime_api.h>

namespace crumb::llama {

inline constexpr const char* kRemedy = "keep the KV cache on the CPU with --no-kv-offload";

// Throws Error with CUDA's reason.
void require(cudaError_t status, const char* what);

// The device that calls are for, until the end of the scope.
class OnDevice {
public:
    explicit OnDevice(int ordinal);
    ~OnDevice() { cudaSetDevice(before_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    int before_ = 0;
};

// Every call waits for the device: none is made during a step.
class CudaMemory : public DeviceMemory {
public:
    explicit CudaMemory(int ordinal) : ordinal_(ordinal) {}

    std::byte* allocate(size_t bytes) override;
    void free(std::byte* memory) override;
    void copy(std::byte* to, const std::byte* from, size_t bytes) override { move(to, from, bytes); }
    void clear(std::byte* to, size_t bytes) override;
    void read(void* to, const std::byte* from, size_t bytes) override { move(to, from, bytes); }
    void write(std::byte* to, const void* from, size_t bytes) override { move(to, from, bytes); }

private:
    void move(void* to, const void* from, size_t bytes);
    int ordinal_;
};

}  // namespace crumb::llama

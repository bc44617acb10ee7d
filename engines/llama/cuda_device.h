// Memory of a CUDA device, as the cache asks for it.
#pragma once

#include <crumb/cache.h>

#include <cuda_runtime_api.h>

#include <map>

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

// Every call waits for the device: none is made during a step. What lies partly in main memory is one range of addresses, by
// the driver's virtual memory management: the device's memory first, then pinned main memory.
class CudaMemory : public DeviceMemory {
public:
    explicit CudaMemory(int ordinal) : ordinal_(ordinal) {}

    std::byte* allocate(size_t bytes, size_t on_host = 0) override;
    void free(std::byte* memory) override;
    void copy(std::byte* to, const std::byte* from, size_t bytes) override { move(to, from, bytes); }
    void clear(std::byte* to, size_t bytes) override;
    void read(void* to, const std::byte* from, size_t bytes) override { move(to, from, bytes); }
    void write(std::byte* to, const void* from, size_t bytes) override { move(to, from, bytes); }

private:
    struct Split {
        size_t bytes, on_device;
        size_t mapped[2];  // of the device's and of main memory
    };
    std::byte* allocate_both(size_t bytes, size_t on_host);
    size_t to_border(const void* at, size_t bytes) const;
    void move(void* to, const void* from, size_t bytes);
    int ordinal_;
    std::map<const std::byte*, Split> splits_;
};

}  // namespace crumb::llama

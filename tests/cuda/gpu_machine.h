// A device that is a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "attention/cuda/registry.h"
#include "cuda/device_attend.h"

namespace crumb::cuda {

inline void require(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
}

class GpuMachine : public Machine {
  public:
    ~GpuMachine() override {
        for (void* p : memory_) cudaFree(p);
    }
    void* allocate(size_t bytes) override {
        void* p = nullptr;
        require(cudaMalloc(&p, bytes), "cudaMalloc");
        require(cudaMemset(p, 0xff, bytes), "cudaMemset");
        memory_.push_back(p);
        return p;
    }
    void upload(void* device, const void* host, size_t bytes) override {
        require(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "upload");
    }
    void download(void* host, const void* device, size_t bytes) override {
        require(cudaGetLastError(), "launch");
        require(cudaDeviceSynchronize(), "kernel");
        require(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "download");
    }
    void zero(void* device, size_t bytes) override { require(cudaMemset(device, 0, bytes), "zero"); }
    PlanLaunch plan_launch() const override { return launch_plan; }
    PrefillLaunches prefill_launches() const override { return cuda::prefill_launches(); }

  private:
    std::vector<void*> memory_;
};

inline int multiprocessors() {
    int n = 0;
    require(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0), "device");
    return n;
}

// Whether this GPU has the shared memory that chunks take.
inline bool takes_chunks(int dim) {
    int most = 0;
    require(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), "device");
    return prefill_shared_bytes(dim) > 0 && prefill_shared_bytes(dim) <= size_t(most);
}

}  // namespace crumb::cuda

// A device that is a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <vector>

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

// Kernels by format: those for any planes with some counts of either side, with means and without.
inline const std::vector<std::vector<Kernels>>& kernels_by_format() {
    static const auto all = [] {
        std::vector<std::vector<Kernels>> result;
        for (const std::vector<Kernels>& kernels : all_kernels()) {
            const KernelFormat& f = kernels[0].compiled;
            if (!f.any_planes) {
                result.push_back(kernels);
                continue;
            }
            const int d = f.k.dim;
            for (const auto& [k, v, means] : {std::tuple(32, 32, 2), {d, d, 1}, {d, d, 2}, {d, d / 2, 2}, {3 * d / 2, d, 2}, {d / 2 + 32, f.v.planes, 0},
                                              {f.k.planes, f.v.planes - 32, 1}}) {
                if (k > f.k.planes || v > f.v.planes) { continue; }
                PageFormat format = {.k = f.k, .v = f.v};
                format.k.planes = k, format.v.planes = v, format.k.mean = means > 0, format.v.mean = means > 1;
                result.emplace_back();
                for (const Kernels& one : kernels) { result.back().push_back(fitted(one, format)); }
            }
        }
        return result;
    }();
    return all;
}

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

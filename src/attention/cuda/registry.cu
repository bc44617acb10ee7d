// Which kernels there are, and the plan. The build writes cuda_instances.inc: CRUMB_INSTANCE(name) for every file of
// instances/ that it compiles.
#include "attention/cuda/registry.h"

#include "attention/cuda/launch.cuh"

namespace crumb::cuda {

#define CRUMB_INSTANCE(name) std::vector<Kernels> name();
namespace instances {
#include "cuda_instances.inc"
}  // namespace instances
#undef CRUMB_INSTANCE

namespace {

__global__ void __launch_bounds__(1024) plan_kernel(const __grid_constant__ PlanArgs args) {
    extern __shared__ __align__(128) std::byte shared[];
    make_plan(args, shared);
}

__global__ void __launch_bounds__(kRowThreads) rows_kernel(const __grid_constant__ RowArgs args, int per_block) {
    extern __shared__ __align__(128) std::byte shared[];
    store_f32_rows(args, per_block, simt::block(), shared);
}

}  // namespace

void launch_rows(const RowArgs& args, Stream stream) {
    if (args.n_stores == 0) { return; }
    const int per_block = stores_per_block(args.n_stores);
    rows_kernel<<<row_blocks(args), kRowThreads, row_shared_bytes(args.dim_k, per_block), cudaStream_t(stream)>>>(args, per_block);
}

void launch_plan(const PlanArgs& args, Stream stream) {
    const int blocks = 32, threads = args.n_tiles > 64 ? 1024 : 128;  // sums over few tiles need few steps
    launch<PlanArgs>(plan_kernel, args, blocks, threads, plan_shared_bytes(args.n_tiles, threads, args.grid), stream);
}

std::span<const std::vector<Kernels>> all_kernels() {
    static const std::vector<std::vector<Kernels>> all = {
#define CRUMB_INSTANCE(name) instances::name(),
#include "cuda_instances.inc"
#undef CRUMB_INSTANCE
    };
    return all;
}

std::vector<Kernels> kernels_for(const PageFormat& format) {
    const std::vector<Kernels>* best = nullptr;
    const auto cost = [](const std::vector<Kernels>& kernels) {
        const KernelFormat& f = kernels[0].compiled;
        return f.any_planes ? f.k.planes + f.v.planes : 0;
    };
    for (const std::vector<Kernels>& kernels : all_kernels()) {
        if (kernels[0].compiled.takes(format) && (!best || cost(kernels) < cost(*best))) { best = &kernels; }
    }
    std::vector<Kernels> result;
    if (best) {
        for (const Kernels& kernels : *best) { result.push_back(fitted(kernels, format)); }
    }
    return result;
}

}  // namespace crumb::cuda

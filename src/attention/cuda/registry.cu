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

}  // namespace

void launch_plan(const PlanArgs& args, Stream stream) {
    constexpr int kThreads = 1024, kBlocks = 32;
    launch<PlanArgs>(plan_kernel, args, kBlocks, kThreads, plan_shared_bytes(args.n_tiles, kThreads, args.grid), stream);
}

std::span<const std::vector<Kernels>> all_kernels() {
    static const std::vector<std::vector<Kernels>> all = {
#define CRUMB_INSTANCE(name) instances::name(),
#include "cuda_instances.inc"
#undef CRUMB_INSTANCE
    };
    return all;
}

std::span<const Kernels> kernels_for(const PageFormat& format) {
    for (const std::vector<Kernels>& kernels : all_kernels()) {
        if (kernels[0].format == format) { return kernels; }
    }
    return {};
}

}  // namespace crumb::cuda

// Entries of what formats share of attention over chunks.
#include "attention/cuda/launch.cuh"
#include "attention/cuda/prefill.h"
#include "attention/cuda/registry.h"

namespace crumb::cuda {

namespace {

__global__ void __launch_bounds__(256) prefill_plan_kernel(const __grid_constant__ PrefillPlanArgs args) { make_prefill_plan(args); }

template <int kDim, bool kSoftcap>
__global__ void __launch_bounds__(32 * kPrefillWarps, 1) prefill_kernel(const __grid_constant__ PrefillArgs args) {
    extern __shared__ __align__(1024) std::byte ring[];
    Prefill<kDim, kSoftcap>::run(args, ring);
}

template <int kDim>
void launch_prefill(const PrefillArgs& args, int blocks, Stream stream) {
    const auto kernel = args.softcap > 0 ? prefill_kernel<kDim, true> : prefill_kernel<kDim, false>;
    launch<PrefillArgs>(kernel, args, blocks, 32 * kPrefillWarps, Prefill<kDim, false>::kShared, stream);
}

}  // namespace

const PrefillLaunches& prefill_launches() {
    static const PrefillLaunches launches = {
        .plan = [](const PrefillPlanArgs& args, Stream stream) {
            launch<PrefillPlanArgs>(prefill_plan_kernel, args, args.n_chunks, 256, 0, stream);
        },
        .attend = [](const PrefillArgs& args, int dim, int blocks, Stream stream) {
            (dim == 64 ? launch_prefill<64> : launch_prefill<128>)(args, blocks, stream);
        },
    };
    return launches;
}

}  // namespace crumb::cuda

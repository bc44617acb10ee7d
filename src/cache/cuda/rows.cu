#include <cuda_runtime.h>

#include "cache/cuda/launch.h"

namespace crumb::cuda {

namespace {

__global__ void __launch_bounds__(kRowThreads) rows_kernel(const __grid_constant__ RowArgs args, int per_block) {
    extern __shared__ __align__(128) std::byte shared[];
    store_f32_rows(args, per_block, shared);
}

}  // namespace

void launch_rows(const RowArgs& args, void* stream) {
    if (args.n_stores == 0) { return; }
    const int per_block = stores_per_block(args.n_stores);
    const int blocks = (args.n_stores + per_block - 1) / per_block * args.n_head_kv;
    rows_kernel<<<blocks, kRowThreads, row_shared_bytes(args.dim_k, per_block), cudaStream_t(stream)>>>(args, per_block);
}

}  // namespace crumb::cuda

#include <cuda_runtime.h>

#include "recipe/cuda/launch.h"

namespace crumb::cuda {

namespace {

__global__ void __launch_bounds__(kStoreThreads) store_kernel(const __grid_constant__ StoreArgs args) { store_rows(args); }

__global__ void __launch_bounds__(256) store_chunk_kernel(const __grid_constant__ StoreArgs args, int n_tokens) {
    extern __shared__ __align__(128) std::byte shared[];
    store_chunk(args, n_tokens, shared);
}

__global__ void __launch_bounds__(kEncodeThreads, 2) encode_kernel(const __grid_constant__ EncodeArgs args, const EncodeJob* jobs) {
    extern __shared__ __align__(128) std::byte shared[];
    Encode::run(args, jobs, shared);
}

__global__ void __launch_bounds__(kEncodeThreads, 2) encode_layers_kernel(const EncodeArgs* layers, int most_heads, int slots, const EncodeJob* jobs, int n_jobs) {
    extern __shared__ __align__(128) std::byte shared[];
    Encode::run_layers(layers, most_heads, slots, jobs, n_jobs, shared);
}

}  // namespace

void launch_store(const StoreArgs& args, int n_tokens, void* stream) {
    if (n_tokens >= kManyTokens) {
        const int blocks = (n_tokens + kStoreTokens - 1) / kStoreTokens * args.n_head_kv;
        store_chunk_kernel<<<blocks, 256, store_shared_bytes(args.dim_k), cudaStream_t(stream)>>>(args, n_tokens);
    } else if (n_tokens > 0) {
        store_kernel<<<n_tokens * args.n_head_kv, kStoreThreads, 0, cudaStream_t(stream)>>>(args);
    }
}

void launch_encode(const EncodeArgs& args, const EncodeJob* jobs, int n_jobs, void* stream) {
    if (n_jobs == 0) { return; }
    const size_t shared = encode_shared_bytes(args);
    cudaFuncSetAttribute(encode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    encode_kernel<<<2 * args.n_head_kv * n_jobs, kEncodeThreads, shared, cudaStream_t(stream)>>>(args, jobs);
}

void launch_encode_layers(const EncodeLayers& layers, const EncodeJob* jobs, int n_jobs, void* stream) {
    if (n_jobs == 0 || layers.n == 0) { return; }
    const int slots = n_jobs < kJobSlots ? n_jobs : kJobSlots;
    cudaFuncSetAttribute(encode_layers_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(layers.shared_bytes));
    encode_layers_kernel<<<layers.n * 2 * layers.most_heads * slots, kEncodeThreads, layers.shared_bytes, cudaStream_t(stream)>>>(
        layers.args, layers.most_heads, slots, jobs, n_jobs);
}

}  // namespace crumb::cuda

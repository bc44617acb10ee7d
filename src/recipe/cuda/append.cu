#include <cuda_runtime.h>

#include "base/cuda/shared_memory.h"
#include "recipe/cuda/encode.h"
#include "recipe/cuda/launch.h"

namespace crumb::cuda {

namespace {

// Whole blocks up to which their tokens are shared out over 4 or 8 blocks of threads each.
constexpr int kManyBlocks = 64, kFewBlocks = 16;

__global__ void __launch_bounds__(kStoreThreads) store_kernel(const __grid_constant__ StoreArgs args) { store_rows(args); }

__global__ void __launch_bounds__(256) store_chunk_kernel(const __grid_constant__ StoreArgs args, int n_tokens) {
    extern __shared__ __align__(128) std::byte shared[];
    store_chunk(args, n_tokens, shared);
}

// Blocks of a multiprocessor: what shared memory and registers have room for.
constexpr int blocks_of(int directions) { return directions > 4 ? 2 : 3; }

template <int kTokens, int kDirections>
__global__ void __launch_bounds__(kEncodeThreads, blocks_of(kDirections))
    encode_kernel(const __grid_constant__ EncodeArgs args, const EncodeJob* jobs) {
    extern __shared__ __align__(128) std::byte shared[];
    Encode<kTokens, kDirections>::run(args, jobs, shared);
}

template <int kTokens, int kDirections>
__global__ void __launch_bounds__(kEncodeThreads, blocks_of(kDirections))
    encode_layers_kernel(const EncodeArgs* layers, int most_heads, int slots, const EncodeJob* jobs, int n_jobs) {
    extern __shared__ __align__(128) std::byte shared[];
    Encode<kTokens, kDirections>::run_layers(layers, most_heads, slots, jobs, n_jobs, shared);
}

// Calls launch.operator()<tokens, directions>() for so many whole blocks: with few of them a block's tokens are shared out.
template <class F>
void cut(const EncodeShape& shape, int blocks, F launch) {
    const auto with = [&]<int kDirections>() {
        if (shape.groups || blocks > kManyBlocks) {
            launch.template operator()<kPageTokens, kDirections>();
        } else if (blocks > kFewBlocks) {
            launch.template operator()<16, kDirections>();
        } else {
            launch.template operator()<8, kDirections>();
        }
    };
    if (shape.dim > 128) { with.template operator()<8>(); } else { with.template operator()<4>(); }
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
    const EncodeShape shape = encode_shape(args);
    const int blocks = 2 * args.n_head_kv * n_jobs;
    cut(shape, blocks, [&]<int kTokens, int kDirections>() {
        using E = Encode<kTokens, kDirections>;
        const size_t shared = E::shared_bytes(shape);
        allow_shared_memory(encode_kernel<kTokens, kDirections>, shared);
        encode_kernel<kTokens, kDirections><<<blocks * E::kSlices, kEncodeThreads, shared, cudaStream_t(stream)>>>(args, jobs);
    });
}

void launch_encode_layers(const EncodeLayers& layers, const EncodeJob* jobs, int n_jobs, void* stream) {
    if (n_jobs == 0 || layers.n == 0) { return; }
    const int slots = n_jobs < kJobSlots ? n_jobs : kJobSlots, blocks = layers.n * 2 * layers.most_heads * slots;
    cut(layers.shape, blocks, [&]<int kTokens, int kDirections>() {
        using E = Encode<kTokens, kDirections>;
        const size_t shared = E::shared_bytes(layers.shape);
        allow_shared_memory(encode_layers_kernel<kTokens, kDirections>, shared);
        encode_layers_kernel<kTokens, kDirections><<<blocks * E::kSlices, kEncodeThreads, shared, cudaStream_t(stream)>>>(
            layers.args, layers.most_heads, slots, jobs, n_jobs);
    });
}

}  // namespace crumb::cuda

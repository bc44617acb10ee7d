#include <cuda_runtime.h>

#include <algorithm>

#include "cuda_fill.h"

namespace crumb::cuda {

namespace {

using u32 = uint32_t;

__device__ u32 hash(size_t i) {
    u32 h = u32(i) * 2654435761u ^ u32(i >> 32);
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13, h *= 3266489917u;
    return h ^ h >> 16;
}

// Where side information of a kind begins and ends, in words of a page.
struct Region {
    u32 begin, zeros, gains, end;
    SideInfo info;
};

__device__ bool plausible(const Region& r, u32 word, u32& value) {
    if (word < r.begin || word >= r.end) { return false; }
    if (r.info == SideInfo::gain8) {
        value = 0x78787878u + (value & 0x0f0f0f0fu);  // 2^-0.5 .. 2^0.44
    } else {
        const u32 sign = word >= r.zeros && word < r.gains ? value & 0x80008000u : 0u;
        value = sign | 0x38003800u | (value & 0x00ff00ffu);  // FP16 of 0.5 .. 0.62
    }
    return true;
}

__global__ void fill(u32* to, size_t words, u32 page_words, Region k, Region v) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += size_t(gridDim.x) * blockDim.x) {
        u32 value = hash(i);
        const u32 word = u32(i % page_words);
        if (!plausible(k, word, value)) { plausible(v, word, value); }
        to[i] = value;
    }
}

__global__ void fill_bf16(u32* to, size_t words) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += size_t(gridDim.x) * blockDim.x) {
        to[i] = (hash(i) & 0x807f807fu) | 0x3f003f00u;
    }
}

__global__ void read_all(const uint4* from, uint4* to, size_t n) {
    const size_t step = size_t(gridDim.x) * blockDim.x;
    uint4 s = make_uint4(0, 0, 0, 0);
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i + 3 * step < n; i += 4 * step) {
        const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        s.x ^= a.x ^ b.x ^ c.x ^ d.x, s.y ^= a.y ^ b.y ^ c.y ^ d.y;
        s.z ^= a.z ^ b.z ^ c.z ^ d.z, s.w ^= a.w ^ b.w ^ c.w ^ d.w;
    }
    if (s.x == 0x12345678u && s.y == 1) { *to = s; }
}

Region region(const SideFormat& side, size_t info, int tokens) {
    const InfoLayout at = info_layout(side, tokens);
    const auto word = [&](size_t byte) { return u32((info + byte) / 4); };
    return {word(0), word(at.zero), word(at.token_gain), word(at.bytes), side.info};
}

}  // namespace

void fill_pages(std::byte* pages, size_t n_pages, const PageFormat& format) {
    fill<<<2048, 256>>>(reinterpret_cast<u32*>(pages), n_pages * format.bytes() / 4, u32(format.bytes() / 4),
                        region(format.k, format.key_info(), format.tokens), region(format.v, format.value_info(), format.tokens));
}

void fill_exact(std::byte* memory, size_t bytes) { fill_bf16<<<2048, 256>>>(reinterpret_cast<u32*>(memory), bytes / 4); }

double read_roof() {
    const size_t bytes = size_t(4) << 30;
    uint4 *from = nullptr, *to = nullptr;
    if (cudaMalloc(&from, bytes) != cudaSuccess || cudaMalloc(&to, 64) != cudaSuccess) { return 0; }
    fill_exact(reinterpret_cast<std::byte*>(from), bytes);
    int processors = 0;
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
    cudaEvent_t start, end;
    cudaEventCreate(&start), cudaEventCreate(&end);
    float best = 1e9f;
    for (int i = 0; i < 8; i++) {
        cudaEventRecord(start);
        read_all<<<processors * 16, 512>>>(from, to, bytes / 16);
        cudaEventRecord(end);
        cudaEventSynchronize(end);
        float ms = 0;
        cudaEventElapsedTime(&ms, start, end);
        best = std::min(best, ms);
    }
    cudaEventDestroy(start), cudaEventDestroy(end);
    cudaFree(from), cudaFree(to);
    return double(bytes) / best / 1e9;
}

}  // namespace crumb::cuda

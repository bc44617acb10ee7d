// What this machine can do at best: read memory, and multiply bytes.
#include "attn_bench.h"

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace crumb::app::attn {

namespace {

constexpr size_t kReadBytes = 256u << 20, kChunk = 32u << 20;

uint64_t read(const uint64_t* from, size_t words) {
    typedef uint64_t Vector __attribute__((vector_size(16)));
    Vector sum[8] = {};
    const auto* at = reinterpret_cast<const Vector*>(from);
    for (const auto* end = at + words / 2; at + 8 <= end; at += 8) {
        for (int i = 0; i < 8; ++i) { sum[i] ^= at[i]; }
    }
    for (int i = 1; i < 8; ++i) { sum[0] ^= sum[i]; }
    return sum[0][0] ^ sum[0][1];
}

// Ten independent chains hide the latency of the instruction.
#if defined(__x86_64__)
#define CHAINS(instruction)                                                                                              \
    instruction "0\n" instruction "1\n" instruction "2\n" instruction "3\n" instruction "4\n" instruction "5\n"          \
    instruction "6\n" instruction "7\n" instruction "8\n" instruction "9\n"
void vpdpbusd_512(int n) {
    for (int i = 0; i < n; ++i) {
        asm volatile(CHAINS("vpdpbusd %%zmm11, %%zmm10, %%zmm") ::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9");
    }
}
void vpdpbusd_256(int n) {
    for (int i = 0; i < n; ++i) {
        asm volatile(CHAINS("%{vex%} vpdpbusd %%ymm11, %%ymm10, %%ymm") ::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9");
    }
}
void vpmaddubsw_256(int n) {  // its sums need an addition each
    for (int i = 0; i < n; ++i) {
        asm volatile(CHAINS("vpmaddubsw %%ymm11, %%ymm10, %%ymm12\n vpaddw %%ymm12, %%ymm13, %%ymm") ::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm12");
    }
}
#undef CHAINS
void tdpbsud_tiles(int n) {  // five chains, twice
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const shapes;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
    for (int i = 0; i < 2 * n; ++i) {
        asm volatile(
            "tdpbsud %tmm7, %tmm6, %tmm0\n tdpbsud %tmm7, %tmm6, %tmm1\n tdpbsud %tmm7, %tmm6, %tmm2\n"
            "tdpbsud %tmm7, %tmm6, %tmm3\n tdpbsud %tmm7, %tmm6, %tmm4");
    }
    asm volatile("tilerelease");
}
#endif

}  // namespace

double read_roof(int n_threads) {
    std::vector<LargeVector<uint64_t>> memory(n_threads, LargeVector<uint64_t>(kReadBytes / 8 / n_threads, 1));
    double best = 0;
    for (size_t at = 0; at + kChunk / n_threads <= kReadBytes / n_threads; at += kChunk / n_threads) {
        std::barrier barrier(n_threads);
        double start = 0;
        volatile uint64_t sink = 0;
        const auto body = [&](int t) {
            barrier.arrive_and_wait();
            if (t == 0) { start = seconds(n_threads); }
            sink = read(memory[t].data() + at / 8, kChunk / n_threads / 8);
            barrier.arrive_and_wait();
        };
        std::vector<std::jthread> others;
        for (int t = 1; t < n_threads; ++t) { others.emplace_back(body, t); }
        body(0);
        best = std::max(best, double(kChunk) / (seconds(n_threads) - start));
    }
    return best;
}

double dot_roof(Isa isa) {
    void (*dots)(int) = nullptr;
    double products = 0;  // multiply-adds of an instruction
#if defined(__x86_64__)
    switch (isa) {
        case Isa::amx:
            dots = tdpbsud_tiles, products = 16384;
            break;
        case Isa::avx512:
            dots = vpdpbusd_512, products = 64;
            break;
        case Isa::avx_vnni:
            dots = vpdpbusd_256, products = 32;
            break;
        case Isa::avx2:
            dots = vpmaddubsw_256, products = 32;
            break;
        default:
            break;
    }
#endif
    double best = 0;
    for (int round = 0; dots && round < 5; ++round) {
        constexpr int kSteps = 1'000'000;
        const double start = seconds(1);
        dots(kSteps);
        best = std::max(best, 10 * products * kSteps / (seconds(1) - start));
    }
    return best;
}

}  // namespace crumb::app::attn

// Where the time of a page goes, its data in the first caches: cycles a (query head, page of 64 tokens) of the dot
// products with K and with V, of unpacking, and of a BF16 page. amx unpacks within the products. Compiled for this machine: build with -DCRUMB_BENCH=ON and
// type build/bench/attention_parts. Whole layers against ggml's: crumb attn-bench.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

#include "attention/cpu/kernel.inl"

namespace crumb::cpu {
namespace {

constexpr int kPages = 4, kRounds = 7, kRepeat = 600, kMostRows = 16;
#if defined(__AMX_INT8__)
constexpr bool kLazy = true;
#else
constexpr bool kLazy = false;
#endif

double now() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// By a chain of multiplications of three cycles each.
double clock_hertz() {
    uint32_t x = 1;
    const int n = 20'000'000;
    const double start = now();
    for (int i = 0; i < n; i++) {
#if defined(__x86_64__)
        asm volatile("imul %0, %0" : "+r"(x));
#else
        asm volatile("mul %w0, %w0, %w0" : "+r"(x));
#endif
    }
    return 3.0 * n / (now() - start);
}

template <class F>
double cycles(double hertz, int rows, F f) {
    std::vector<double> times;
    for (int round = 0; round < kRounds; round++) {
        const double start = now();
        for (int i = 0; i < kRepeat; i++) f(i % kPages);
        times.push_back((now() - start) / kRepeat * hertz / rows);
    }
    std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
    return times[kRounds / 2];
}

void measure(int planes, int n, double hertz) {
    std::mt19937 random(1);
    std::vector<std::byte> pages(size_t(kPages) * 32 * planes + 64), digits(size_t(256) * planes + 64);
    for (std::byte& x : pages) x = std::byte(random());
    std::vector<int8_t> q(size_t(kMostRows + 15) * planes);
    for (int8_t& x : q) x = int8_t(random() % 255 - 127);
    alignas(64) static int32_t dots[kMostRows * kTokens];
    alignas(64) static uint8_t weights[kMostRows * kTokens];
    for (uint8_t& x : weights) x = uint8_t(random() % 128);
    alignas(64) static float out[kMostRows * 1024], units[kMostRows], floats[kMostRows * kMaxDim];
    alignas(64) static uint16_t exact[kTokens * kMaxDim];
    for (uint16_t& x : exact) x = uint16_t(0x3f80 + random() % 128);
    const auto key = [&](int page) { return Packed{&pages[size_t(page) * 32 * planes], planes, 0}; };
    const auto value = [&](int page) { return Packed{&pages[size_t(page) * 32 * planes + 16 * planes], planes, 0}; };
    std::byte* bytes = digits.data() + (64 - reinterpret_cast<uintptr_t>(digits.data()) % 64);
    const auto keys = unpack_keys(key(0), bytes);
    const auto values = unpack_values(value(0), bytes);
    float* memory = reinterpret_cast<float*>(bytes);
    const QueryRows queries{q.data(), size_t(planes), 1, &planes};
    const WeightRows rows{weights, units, out, size_t(planes) + 208};  // about that of partials
    Item item;
    item.n_heads = kLazy ? 1 << 20 : n;  // by tiles, if there are any
    item.exact.k.dim = planes;
    const Tiles tiles(true);
    const auto touch = [] { asm volatile("" ::: "memory"); };
    const auto print = [&](int most, int each, auto f) {
        n <= most ? void(std::printf(" %7.0f |", cycles(hertz, each, f))) : void(std::printf("       - |"));
    };
    std::printf("| %6d | %4d |", planes, n);
    print(kDotRows, n, [&](int page) { score_rows(n, key(page), queries, dots), touch(); });
    print(kDotRows, n, [&](int page) { weigh_rows(n, value(page), rows), touch(); });
    const int unpacked = decltype(keys)::kRows;
    print(unpacked, n, [&](int) { score_rows(n, keys, queries, dots), touch(); });
    print(unpacked, n, [&](int) { begin_values(values), weigh_rows(n, values, rows), touch(); });
    print(kLazy ? 0 : kMostRows, n, [&](int page) { unpack_keys(key(page), bytes), unpack_values(value(page), bytes), touch(); });
    print(kMostRows, n, [&](int) {
        multiply_page(item, n, planes, kTokens, floats, planes, exact, kAllRows, out, kTokens, memory);
        multiply_page(item, n, kTokens, planes, floats, kTokens, exact, kAllRows, out, planes, memory);
        touch();
    });
    std::printf("\n");
}

}  // namespace
}  // namespace crumb::cpu

int main() {
    using namespace crumb::cpu;
    const double hertz = clock_hertz();
    if (kLazy && !crumb::supported(crumb::Isa::amx)) {
        std::puts("compiled for AMX, which this process may not use");
        return 1;
    }
    std::printf("%.2f GHz, %d lanes; cycles a row and page\n\n| planes | rows | K codes | V codes | K bytes | V bytes | unpack | window |\n"
                "|---|---|---|---|---|---|---|---|\n", hertz * 1e-9, kLanes);
    for (const int planes : {64, 128, 256}) {
        for (const int n : {1, 2, 3, 4, 5, 6, 8, 12, 16}) measure(planes, n, hertz);
    }
}

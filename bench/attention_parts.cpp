// Where the time of a page goes, its data in the first caches: cycles a (query head, page of 64 tokens) of the dot
// products with K, of those with V, of unpacking, and of all. Compiled for this machine: build with -DCRUMB_BENCH=ON and
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

constexpr int kPages = 4, kRounds = 7, kRepeat = 600;

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

template <int Rows>
void measure(int planes, double hertz) {
    std::mt19937 random(1);
    std::vector<std::byte> pages(size_t(kPages) * 32 * planes + 64), digits(size_t(128) * planes + 64);
    for (std::byte& x : pages) x = std::byte(random());
    std::vector<int8_t> q(size_t{Rows} * planes);
    for (int8_t& x : q) x = int8_t(random() % 255 - 127);
    alignas(64) static int32_t dots[kDotRows * kTokens];
    alignas(64) static uint8_t weights[kDotRows * kTokens];
    for (uint8_t& x : weights) x = uint8_t(random() % 128);
    alignas(64) static float out[kDotRows * 1024], units[kDotRows];
    const auto key = [&](int page) { return Packed{&pages[size_t(page) * 32 * planes], planes, 0}; };
    const auto value = [&](int page) { return Packed{&pages[size_t(page) * 32 * planes + 16 * planes], planes, 0}; };
    std::byte* bytes = digits.data() + (64 - reinterpret_cast<uintptr_t>(digits.data()) % 64);
    const WeightRows rows{weights, units, out, 1024};
    const auto touch = [] { asm volatile("" ::: "memory"); };
    std::printf("| %6d | %4d | %7.0f | %7.0f | %7.0f | %7.0f | %7.0f |\n", planes, Rows,
                cycles(hertz, Rows, [&](int page) { score<Rows>(key(page), q.data(), planes, dots), touch(); }),
                cycles(hertz, Rows, [&](int page) { weigh<Rows>(value(page), rows), touch(); }),
                cycles(hertz, Rows, [&](int) { score<Rows>(Unpacked{bytes, planes}, q.data(), planes, dots), touch(); }),
                cycles(hertz, Rows, [&](int) { weigh<Rows>(Unpacked{bytes, planes}, rows), touch(); }),
                cycles(hertz, Rows, [&](int page) { unpack_keys(key(page), bytes), unpack_values(value(page), bytes), touch(); }));
}

template <int... Rows>
void measure_all(double hertz, std::integer_sequence<int, Rows...>) {
    for (const int planes : {64, 128, 256}) (measure<Rows + 1>(planes, hertz), ...);
}

}  // namespace
}  // namespace crumb::cpu

int main() {
    using namespace crumb::cpu;
    const double hertz = clock_hertz();
    std::printf("%.2f GHz, %d lanes; cycles a row and page\n\n| planes | rows | K codes | V codes | K bytes | V bytes | unpack |\n"
                "|---|---|---|---|---|---|---|\n", hertz * 1e-9, kLanes);
    measure_all(hertz, std::make_integer_sequence<int, kDotRows>());
}

#include "cuda/emulator.h"

#include <crumb/half.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "base/cuda/simt.h"

namespace crumb::simt {

namespace {

constexpr size_t kStack = 256 * 1024;

[[noreturn]] void hang(const char* what) {
    std::fprintf(stderr, "emulated kernel: %s (block %d, thread %d)\n", what, block(), thread());
    std::abort();
}

// A point that all of a number of threads must reach, with what they bring and take.
struct Meeting {
    int expected = 0, arrived = 0;
    const char* what = nullptr;
    uint64_t held = 0;
    u32 in[kWarp][8];
    u32 out[kWarp][4];
};

struct Fiber {
    ucontext_t context;
    std::byte* stack = nullptr;
    bool done = false;
    const uint64_t* waits_for = nullptr;  // a meeting's count that must differ from `seen`
    uint64_t seen = 0;
};

struct Barrier {
    uint64_t begun = 0, done = 0;
    uint32_t expected = 0, arrived = 0;  // of reach()
    void* to = nullptr;
    const void* from = nullptr;
    u32 bytes = 0;
    void finish() {
        if (begun > done) {
            std::memcpy(to, from, bytes);
            done++;
        }
    }
};

struct Machine {
    Grid grid;
    const std::function<void(std::byte*)>* kernel = nullptr;
    std::mt19937 random;
    std::vector<Fiber> fibers;
    std::vector<Meeting> warps;
    Meeting all;
    std::map<const u64*, Barrier> barriers;
    std::byte* shared = nullptr;
    ucontext_t scheduler;
    int block = 0, thread = 0;
};

Machine* machine = nullptr;

void yield() { swapcontext(&machine->fibers[machine->thread].context, &machine->scheduler); }

// `last` runs once, in the thread that arrives last.
template <class F>
void meet(Meeting& meeting, const char* what, F last) {
    if (meeting.arrived == 0) meeting.what = what;
    if (std::strcmp(meeting.what, what) != 0) hang("lanes of a warp meet in different operations");
    if (++meeting.arrived == meeting.expected) {
        last();
        meeting.arrived = 0;
        meeting.held++;
        return;
    }
    Fiber& fiber = machine->fibers[machine->thread];
    fiber.waits_for = &meeting.held;
    fiber.seen = meeting.held;
    yield();
    fiber.waits_for = nullptr;
}

Meeting& my_warp() { return machine->warps[thread() / kWarp]; }

void entry() {
    (*machine->kernel)(machine->shared);
    machine->fibers[machine->thread].done = true;
    yield();
}

// One turn of every fiber that can go on; whether there was one.
bool turn(const std::vector<int>& order) {
    bool moved = false;
    for (int warp : order) {
        for (int lane = 0; lane < kWarp; lane++) {
            Fiber& fiber = machine->fibers[warp * kWarp + lane];
            if (fiber.done || (fiber.waits_for && *fiber.waits_for == fiber.seen)) continue;
            machine->thread = warp * kWarp + lane;
            swapcontext(&machine->scheduler, &fiber.context);
            moved = true;
        }
    }
    return moved;
}

void run_block() {
    Machine& m = *machine;
    std::memset(m.shared, 0xff, m.grid.shared_bytes);
    m.barriers.clear();
    m.warps.assign(m.grid.threads / kWarp, Meeting{});
    for (Meeting& warp : m.warps) warp.expected = kWarp;
    m.all = Meeting{};
    m.all.expected = m.grid.threads;
    for (Fiber& fiber : m.fibers) {
        fiber.done = false;
        fiber.waits_for = nullptr;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = &m.scheduler;
        makecontext(&fiber.context, entry, 0);
    }
    std::vector<int> order(m.warps.size());
    std::iota(order.begin(), order.end(), 0);
    do {
        std::shuffle(order.begin(), order.end(), m.random);
    } while (turn(order));
    for (const Fiber& fiber : m.fibers) {
        if (!fiber.done) {
            m.thread = int(&fiber - m.fibers.data());
            hang("not all threads reach an operation of the whole warp or block");
        }
    }
}

struct Fragments {
    const Meeting& m;
    u32 a(int row, int word) const { return m.in[4 * (row % 8) + word % 4][row / 8 + 2 * (word / 4)]; }
    u32 b(int column, int word) const { return m.in[4 * column + word % 4][4 + word / 4]; }
};

int byte_of(u32 word, int i, bool is_signed) {
    const u8 byte = u8(word >> (8 * i));
    return is_signed ? int(int8_t(byte)) : int(byte);
}

void multiply(int (&d)[4], const u32 (&in)[6], bool signed_a, bool signed_b, const char* what) {
    Meeting& m = my_warp();
    const int l = lane();
    std::copy(in, in + 6, m.in[l]);
    meet(m, what, [&] {
        const Fragments f{m};
        for (int row = 0; row < 16; row++) {
            for (int column = 0; column < 8; column++) {
                u32 sum = 0;
                for (int word = 0; word < 8; word++) {
                    for (int i = 0; i < 4; i++) {
                        sum += u32(byte_of(f.a(row, word), i, signed_a) * byte_of(f.b(column, word), i, signed_b));
                    }
                }
                m.out[4 * (row % 8) + column / 2][2 * (row / 8) + column % 2] = sum;
            }
        }
    });
    for (int i = 0; i < 4; i++) d[i] = int(u32(d[i]) + m.out[l][i]);
}

float bf16_of(u32 pair, int i) { return to_float(bf16{uint16_t(pair >> (16 * i))}); }
float fp16_of(u32 pair, int i) { return to_float(fp16{uint16_t(pair >> (16 * i))}); }

void multiply(float (&d)[4], const u32 (&in)[6], float (*element)(u32, int), const char* what) {
    Meeting& m = my_warp();
    const int l = lane();
    std::copy(in, in + 6, m.in[l]);
    meet(m, what, [&] {
        const Fragments f{m};
        for (int row = 0; row < 16; row++) {
            for (int column = 0; column < 8; column++) {
                float sum = 0;
                for (int word = 0; word < 8; word++) {
                    for (int i = 0; i < 2; i++) sum += element(f.a(row, word), i) * element(f.b(column, word), i);
                }
                m.out[4 * (row % 8) + column / 2][2 * (row / 8) + column % 2] = std::bit_cast<u32>(sum);
            }
        }
    });
    for (int i = 0; i < 4; i++) d[i] += std::bit_cast<float>(m.out[l][i]);
}

}  // namespace

int thread() { return machine->thread; }
int n_threads() { return machine->grid.threads; }
int block() { return machine->block; }
int n_blocks() { return machine->grid.blocks; }

void sync_block() { meet(machine->all, "sync_block", [] {}); }
void sync_warp() { meet(my_warp(), "sync_warp", [] {}); }

u32 shuffle(u32 x, int source) {
    Meeting& m = my_warp();
    m.in[lane()][0] = x;
    meet(m, "shuffle", [&] { for (int i = 0; i < kWarp; i++) m.out[i][0] = m.in[i][0]; });
    return m.out[source & 31][0];
}

u32 shuffle_xor(u32 x, int mask) { return shuffle(x, lane() ^ mask); }

bool any(bool x) {
    Meeting& m = my_warp();
    m.in[lane()][0] = x;
    meet(m, "any", [&] {
        u32 some = 0;
        for (int i = 0; i < kWarp; i++) some |= m.in[i][0];
        for (int i = 0; i < kWarp; i++) m.out[i][0] = some;
    });
    return m.out[lane()][0] != 0;
}

u32 ballot(bool x) {
    Meeting& m = my_warp();
    m.in[lane()][0] = x;
    meet(m, "ballot", [&] {
        u32 bits = 0;
        for (int i = 0; i < kWarp; i++) bits |= m.in[i][0] << i;
        for (int i = 0; i < kWarp; i++) m.out[i][0] = bits;
    });
    return m.out[lane()][0];
}

void mma_u8s8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(d, {a0, a1, a2, a3, b0, b1}, false, true, "mma_u8s8");
}
void mma_u8u8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(d, {a0, a1, a2, a3, b0, b1}, false, false, "mma_u8u8");
}
void mma_s8s8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(d, {a0, a1, a2, a3, b0, b1}, true, true, "mma_s8s8");
}

void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(d, {a0, a1, a2, a3, b0, b1}, bf16_of, "mma_bf16");
}
void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(d, {a0, a1, a2, a3, b0, b1}, fp16_of, "mma_f16");
}

u32 transpose(u32 x) {
    Meeting& m = my_warp();
    const int l = lane();
    m.in[l][0] = x;
    meet(m, "transpose", [&] {
        const auto at = [&](int row, int column) { return m.in[4 * row + column / 2][0] >> (16 * (column % 2)) & 0xffff; };
        for (int row = 0; row < 8; row++) {
            for (int q = 0; q < 4; q++) m.out[4 * row + q][0] = at(2 * q, row) | at(2 * q + 1, row) << 16;
        }
    });
    return m.out[l][0];
}

u32 permute_bytes(u32 low, u32 high, u32 selector) {
    const u64 bytes = u64(high) << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= u32(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return result;
}

u32 bits_of(float x) { return std::bit_cast<u32>(x); }
float float_of(u32 x) { return std::bit_cast<float>(x); }
float exp2_fast(float x) { return std::exp2(x); }
float log2_fast(float x) { return std::log2(x); }
float tanh_exact(float x) { return std::tanh(x); }
float fma_exact(float a, float b, float c) { return std::fma(a, b, c); }
int lowest_bit(u32 x) { return __builtin_ctz(x); }
float fma_unit(float a, float b, float c) { return std::clamp(std::fma(a, b, c), 0.0f, 1.0f); }
float add_down(float a, float b) {
    const float sum = a + b, of_b = sum - a, rest = (a - (sum - of_b)) + (b - of_b);  // sum + rest is a + b
    return rest < 0 ? std::nextafter(sum, -INFINITY) : sum;
}
float reaches(float a, float b) { return a >= b ? 1.0f : 0.0f; }
float max_of(float a, float b) { return std::fmax(a, b); }
float min_of(float a, float b) { return std::fmin(a, b); }
float half_low(u32 pair) { return to_float(fp16{uint16_t(pair)}); }
float half_high(u32 pair) { return to_float(fp16{uint16_t(pair >> 16)}); }
u32 bf16_pair(float low, float high) { return u32(to_bf16(low).bits) | u32(to_bf16(high).bits) << 16; }

u32 add_bf16(u32 a, u32 b) {
    return bf16_pair(bf16_of(a, 0) + bf16_of(b, 0), bf16_of(a, 1) + bf16_of(b, 1));
}

u32 half_pair(float low, float high) {
    const auto half = [](float x) { return std::abs(x) >= 65520.0f ? u32(std::signbit(x)) << 15 | 0x7c00u : u32(to_fp16(x).bits); };
    return half(low) | half(high) << 16;
}
u32 multiply_half(u32 a, u32 b) { return half_pair(fp16_of(a, 0) * fp16_of(b, 0), fp16_of(a, 1) * fp16_of(b, 1)); }
u32 fma_half(u32 a, u32 b, u32 c) {
    const auto one = [&](int i) { return float(double(fp16_of(a, i)) * fp16_of(b, i) + fp16_of(c, i)); };
    return half_pair(one(0), one(1));
}
u32 to_half(float x) { return to_fp16(x).bits; }

u32 load_once(const u32* p) { return *p; }
Words4 load_once(const Words4* p) { return *p; }

void copy_init(u64* barrier) {
    meet(my_warp(), "copy_init", [&] { machine->barriers[barrier] = {}; });
}
void copy_ready() { sync_warp(); }

void copy_begin(u64* barrier, void* to, const void* from, u32 bytes, Reuse) {
    meet(my_warp(), "copy_begin", [&] {
        const auto at = machine->barriers.find(barrier);
        if (at == machine->barriers.end()) hang("a copy on a barrier without copy_init");
        if (at->second.begun != at->second.done) hang("a copy begun before the last one was waited for");
        if (bytes % 16 || uintptr_t(to) % 16 || uintptr_t(from) % 16) hang("a copy of other than whole 16 bytes");
        if (to < machine->shared || static_cast<std::byte*>(to) + bytes > machine->shared + machine->grid.shared_bytes) {
            hang("a copy outside shared memory");
        }
        at->second.to = to, at->second.from = from, at->second.bytes = bytes;
        at->second.begun++;
        if (machine->random() % 2) at->second.finish();
    });
}

void copy_wait(u64* barrier, u32 phase) {
    const auto at = machine->barriers.find(barrier);
    if (at == machine->barriers.end()) hang("a wait on a barrier without copy_init");
    Fiber& fiber = machine->fibers[machine->thread];
    for (at->second.finish(); (at->second.done & 1) == phase; at->second.finish()) {
        fiber.waits_for = &at->second.begun;
        fiber.seen = at->second.begun;
        yield();
    }
    fiber.waits_for = nullptr;
}

void reach_init(u64* barrier, u32 warps) {
    meet(my_warp(), "reach_init", [&] { machine->barriers[barrier] = {.expected = warps}; });
}

void reach(u64* barrier) {
    meet(my_warp(), "reach", [&] {
        const auto at = machine->barriers.find(barrier);
        if (at == machine->barriers.end() || at->second.expected == 0) hang("reach() without reach_init()");
        if (++at->second.arrived == at->second.expected) at->second.arrived = 0, at->second.begun++, at->second.done++;
    });
}

void reach_wait(u64* barrier, u32 phase) { copy_wait(barrier, phase); }
void reach_lanes_init(u64* barrier, u32 warps) { reach_init(barrier, warps); }
void reach_lanes(u64* barrier) { reach(barrier); }

u32 add_device(u32* counter, u32 x) {
    const u32 old = *counter;
    *counter += x;
    return old;
}

void or_shared(u32* word, u32 bits) { *word |= bits; }

void wait_for_previous() {}
void launch_next() {}

void emulate(const Grid& grid, const std::function<void(std::byte*)>& kernel) {
    Machine here;
    machine = &here;
    here.grid = grid;
    here.kernel = &kernel;
    here.random.seed(grid.seed);
    here.fibers.resize(grid.threads);
    const size_t bytes = kStack * grid.threads;
    void* stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) std::abort();
    for (int i = 0; i < grid.threads; i++) here.fibers[i].stack = static_cast<std::byte*>(stacks) + kStack * i;
    here.shared = static_cast<std::byte*>(std::aligned_alloc(128, (grid.shared_bytes + 127) / 128 * 128 + 128));
    std::vector<int> blocks(grid.blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), here.random);
    for (int b : blocks) {
        here.block = b;
        run_block();
    }
    std::free(here.shared);
    munmap(stacks, bytes);
    machine = nullptr;
}

}  // namespace crumb::simt

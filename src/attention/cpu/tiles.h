// Dot products with codes by AMX: a tile product is 16 rows times 16 columns over 64 bytes, eight times what vpdpbusd
// does in its time. What unpacking writes is the second operand as it lies there: quads of planes of 64 tokens for K,
// quads of tokens of 64 planes for V; rows of queries and of weights are the first. Sums are of integers, so they are
// those of codes.h. Internal to the unit (see kernel.h).
//
// Instructions are spelled out: the tile loads of GCC 12 do not tell the compiler that they read memory, and its
// _tile_loadconfig() names 8 of the 64 bytes that are read.
#pragma once

#include "attention/cpu/codes.h"

#if defined(__AMX_INT8__)

namespace crumb::cpu {
namespace {

// Four sums, and both operands of products over 64 bytes and over the 32 of a tail.
constexpr int kSums = 4, kLeft = 4, kRight = 5, kLeftTail = 6, kRightTail = 7;

// The shapes of this thread's tiles, as long as it lives. Tiles in use make switches of context dearer.
class Tiles {
  public:
    explicit Tiles(bool needed) : needed_(needed) {
        if (needed_) {
            struct alignas(64) {
                uint8_t palette = 1, start_row = 0, reserved[14] = {};
                uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 32, 64};
                uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
            } const shapes;
            static_assert(sizeof shapes == 64);
            asm volatile("ldtilecfg %0" ::"m"(shapes));
        }
    }
    ~Tiles() {
        if (needed_) asm volatile("tilerelease");
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

  private:
    bool needed_;
};

template <int Tile>
inline void load_tile(const void* from, size_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(Tile), "r"(from), "r"(stride) : "memory");
}

template <int Tile>
inline void store_tile(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(Tile), "r"(to), "r"(stride) : "memory");
}

template <int Tile>
inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// Sum += int8 rows of `Left` times digits of `Right`.
template <int Sum, int Left, int Right>
inline void multiply_tiles() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
}

template <int... Sum, class F>
inline void for_each_sum(std::integer_sequence<int, Sum...>, F f) {
    (f(std::integral_constant<int, Sum>()), ...);
}

// Codes that are unpacked for 16 rows, a group ahead of the products, to memory for two groups: twice as fast as a
// whole page first where the bytes of a page fill the first cache, and as fast for hundreds of rows.
struct Passing {
    static constexpr int kRows = 16;

    Packed codes;
    std::byte* memory;

    int groups() const { return codes.groups(); }
    bool tail() const { return codes.tail(); }
    std::byte* at(int group) const { return memory + group % 2 * kGroupDigits; }
    void prepare_keys(int group) const {
        if (group < codes.all_groups()) unpack_key_group(codes, group, at(group));
    }
    void prepare_values(int group) const {
        if (group < codes.all_groups()) unpack_value_group(codes, group, at(group));
    }
};

Passing unpack_keys(const Packed& keys, std::byte* memory) { return {keys, memory}; }
Passing unpack_values(const Packed& values, std::byte* memory) { return {values, memory}; }

// Rows beyond n are read and not written: 16 rows of queries and of weights are memory.
void score_rows(int, const Passing& keys, const QueryRows& q, int32_t* out) {
    constexpr size_t kRow = kTokens * 4;
    constexpr auto kAll = std::make_integer_sequence<int, kSums>();
    const int groups = keys.groups();
    keys.prepare_keys(0);
    for (int part = 0, group = 0; part < q.n_parts; part++, out += kTokens) {
        for_each_sum(kAll, [](auto sum) { clear_tile<sum>(); });
        for (; group < q.part_ends[part] / kGroup; group++) {
            keys.prepare_keys(group + 1);
            load_tile<kLeft>(q.bytes + group * kGroup, q.stride);
            for_each_sum(kAll, [&](auto sum) {
                load_tile<kRight>(keys.at(group) + sum * 64, kRow);
                multiply_tiles<sum, kLeft, kRight>();
            });
        }
        if (q.part_ends[part] % kGroup != 0) {
            load_tile<kLeftTail>(q.bytes + groups * kGroup, q.stride);
            for_each_sum(kAll, [&](auto sum) {
                load_tile<kRightTail>(keys.at(groups) + sum * 64, kRow);
                multiply_tiles<sum, kLeftTail, kRightTail>();
            });
        }
        for_each_sum(kAll, [&](auto sum) { store_tile<sum>(out + sum * 16, q.n_parts * kRow); });
    }
}

// Sums First and First + 1, of 32 planes: the products, and their way to the outputs.
template <int First>
inline void multiply_planes(const std::byte* digits, size_t quad) {
    for_each_sum(std::make_integer_sequence<int, 2>(), [&](auto i) {
        clear_tile<First + i>();
        load_tile<kRight>(digits + 64 * i, quad);
        multiply_tiles<First + i, kLeft, kRight>();
    });
}

template <int First>
inline void add_sums(int n, const WeightRows& rows, int plane) {
    alignas(64) int32_t sums[16 * 32];
    store_tile<First>(sums, 128);
    store_tile<First + 1>(sums + 16, 128);
    for (int r = 0; r < n; r++) {
        const Floats scale = splat(rows.scale[r]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            float* to = rows.out + r * rows.out_stride + plane + v * kLanes;
            store(to, multiply_add(to_floats(load<Ints>(sums + (2 * r + v) * 16)), scale, load<Floats>(to)));
        }
    }
}

// Before all else of these rows: tiles wait for bytes that were just written.
void begin_values(const Passing& values) { values.prepare_values(0); }

// The products of the next planes run while sums become floats.
void weigh_rows(int n, const Passing& values, const WeightRows& rows) {
    constexpr size_t kQuad = kGroup * 4;
    const int groups = values.groups();
    const auto begin = [&](int group) {
        if (group < groups) {
            multiply_planes<0>(values.at(group), kQuad);
        } else if (group == groups && values.tail()) {
            multiply_planes<0>(values.at(group), kQuad / 2);
        }
    };
    load_tile<kLeft>(rows.bytes, kTokens);
    begin(0);
    for (int group = 0; group < groups; group++) {
        values.prepare_values(group + 1);
        multiply_planes<2>(values.at(group) + kQuad / 2, kQuad);
        add_sums<0>(n, rows, group * kGroup);
        begin(group + 1);
        add_sums<2>(n, rows, group * kGroup + kGroup / 2);
    }
    if (values.tail()) add_sums<0>(n, rows, groups * kGroup);
}

}  // namespace
}  // namespace crumb::cpu

#else

namespace crumb::cpu {
namespace {

struct Tiles {
    explicit Tiles(bool) {}
};

}  // namespace
}  // namespace crumb::cpu

#endif

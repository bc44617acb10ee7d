// Dot products with the codes of a page, in place or unpacked to bytes: of query rows with 64 tokens, and of the
// tokens' weights with planes. The byte map is that of page.h; docs/design/page-format.md draws it. Internal to the
// unit (see kernel.h).
//
// A block of 64 bytes is 16 lanes of 4 bytes of 4 fields. Shifted and masked it is one operand of dot(): 16 tokens
// times 4 planes of K, 16 planes times 4 tokens of V; the other is a dword of the query row or of the weights,
// broadcast. No sum crosses lanes. A unit with narrower vectors takes a block in parts, and reads the parts of swapped
// blocks crosswise.
//
// Register blocks are of up to kDotRows rows: beyond that accumulators spill, below it masks and shifts are shared by
// fewer products (docs/design/attention-cpu.md).
#pragma once

#include "attention/cpu/integer_dot.h"

namespace crumb::cpu {
namespace {

constexpr int kTokens = 64;
constexpr int kPageVectors = kTokens / kLanes;
constexpr int kGroup = 64;                // planes of a full group of blocks; 32 more are the tail
constexpr int kBlock = 64;                // bytes
constexpr int kParts = 16 / kLanes;       // vectors of a block
constexpr int kGroupBytes = 16 * kBlock;  // of 64 tokens
constexpr int kGroupDigits = 4 * kGroupBytes;

#if defined(__AVX512F__)
constexpr int kDotRows = 8;
constexpr int key_vectors(int rows) { return rows <= 4 ? 4 : 2; }
constexpr int unpacked_vectors(int rows) { return rows <= 6 ? 4 : 2; }
constexpr int value_fields(int rows) { return rows <= 5 ? 4 : 2; }
#elif defined(__AVX2__)
constexpr int kDotRows = 6;
constexpr int key_vectors(int) { return 2; }
constexpr int unpacked_vectors(int) { return 2; }
constexpr int value_fields(int) { return 2; }
#else
#if defined(__aarch64__)
constexpr int kDotRows = 6;
#else
constexpr int kDotRows = 2;  // SSE2 has 16 registers and no dot product
#endif
constexpr int key_vectors(int) { return 4; }
constexpr int unpacked_vectors(int) { return 4; }
constexpr int value_fields(int) { return 4; }
#endif

// Planes of a query row lie in the order in which score() takes them: 4 planes a dword, by group of 64, block q, field
// f.
constexpr int key_order_plane(int dword, int planes) {
    const int groups = planes / kGroup, group = dword / 16, q = dword / 4 % 4, f = dword % 4;
    return group < groups ? kGroup * group + 16 * f + 4 * q : kGroup * groups + 8 * f + 4 * q;
}

template <bool Swapped>
inline Words load_part(const std::byte* block, int part) {
    if constexpr (kLanes == 16) {
        const Words lanes = load<Words>(block);
        return Swapped ? rotate<kLanes / 2>(lanes) : lanes;
    } else {
        return load<Words>(block + ((4 * kLanes * part) ^ (Swapped ? 32 : 0)));
    }
}

// Whether it pays to unpack codes for these dot rows. Tiles lose to products in place below some 1536 products a token: 6
// and 8 rows of 128 planes and 12 of 64 took 1.1 to 1.4 times as long, 12 of 128 and 8 of 256 up to a third less.
#if defined(__AMX_INT8__)
constexpr bool unpacking_pays(int rows, int planes) { return rows * planes >= 1536; }
#else
constexpr bool unpacking_pays(int rows, int) { return rows >= 12; }
#endif

// Of more rows than kStepRows, kBatch pages are read step by step. What is unpacked for all rows takes one page at a
// time.
#if defined(__AMX_INT8__)
constexpr int kStepRows = 16;
#else
constexpr int kStepRows = 1 << 20;
#endif
constexpr int kBatch = 4;

// Codes of one side of a page, and how far away the next page is, to be fetched meanwhile.
struct Packed {
    static constexpr int kRows = kDotRows;

    const std::byte* codes;
    int planes;
    ptrdiff_t next;

    int groups() const { return planes / kGroup; }
    bool tail() const { return planes % kGroup != 0; }
    int all_groups() const { return groups() + tail(); }
};

// Unpacked: digits as bytes, group by group. K [16 dwords][64 tokens][4 planes], dwords in the order of query rows;
// V [16 quads of tokens][64 planes][4 tokens]. The tail has half as many dwords, and half as many planes.
struct Unpacked {
    static constexpr int kRows = kDotRows;

    const std::byte* digits;
    int planes;

    int groups() const { return planes / kGroup; }
    bool tail() const { return planes % kGroup != 0; }
    const std::byte* at(int group) const { return digits + group * kGroupDigits; }
};

// ---- K: out[row][part][token] = sum over the part's planes of digit times row

struct QueryRows {
    const int8_t* bytes;  // rows at stride bytes
    size_t stride;
    int n_parts;
    const int* part_ends;  // in planes: multiples of kGroup, and all of them
};

// Blocks of token groups 2 h + s lie s * pair + h * half bytes from the first.
struct BlockStrides {
    ptrdiff_t pair, half;
};

template <int Rows, int Vectors, bool Swapped>
inline void score_block(const std::byte* block, BlockStrides strides, const int8_t* q, size_t stride,
                        Dot (&sum)[Rows][Vectors]) {
    static_assert(Vectors % kParts == 0);
    Words bytes[Vectors];
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; v++) {
        const int group = v / kParts;
        bytes[v] = load_part<Swapped>(block + group % 2 * strides.pair + group / 2 * strides.half, v % kParts);
    }
#pragma GCC unroll 4
    for (int f = 0; f < 4; f++) {
        Words digits[Vectors];
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; v++) {
            digits[v] = field(bytes[v], f);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            const Words factors = broadcast(q + r * stride + 4 * f);
#pragma GCC unroll 16
            for (int v = 0; v < Vectors; v++) {
                sum[r][v] = dot(sum[r][v], digits[v], factors);
            }
        }
    }
}

template <int Rows, int Vectors>
inline void add_scores(const Dot (&sum)[Rows][Vectors], bool first, int32_t* out, size_t out_stride) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; v++) {
            int32_t* to = out + r * out_stride + v * kLanes;
            store(to, first ? total(sum[r][v]) : total(sum[r][v]) + load<Ints>(to));
        }
    }
}

template <int Rows>
void score(const Packed& keys, const QueryRows& q, int32_t* out) {
    constexpr int kVectors = key_vectors(Rows);
    constexpr int kChain = kDotSteps / 16;  // groups of planes
    const int groups = keys.groups();
    const size_t out_stride = q.n_parts * kTokens;
    const BlockStrides full{4 * kBlock, ptrdiff_t(groups) * 8 * kBlock}, tail{2 * kBlock, 4 * kBlock};
    for (int v = 0; v < kPageVectors; v += kVectors) {
        const int h = v / (2 * kParts), s = v / kParts % 2;
        const std::byte* block = keys.codes + h * full.half + s * full.pair;
        for (int part = 0, group = 0; part < q.n_parts; part++) {
            int32_t* to = out + part * kTokens + v * kLanes;
            const int end = q.part_ends[part] / kGroup;
            bool first = true;
            while (group < end) {
                Dot sum[Rows][kVectors] = {};
                const int last = end - group > kChain ? group + kChain : end;
                for (; group < last; group++) {
                    const std::byte* at = block + group * 8 * kBlock;
                    const int8_t* factors = q.bytes + group * kGroup;
#pragma GCC unroll 4
                    for (int i = 0; i < kVectors / kParts; i++) {  // each line of the next page once
                        const std::byte* ahead = at + i % 2 * full.pair + i / 2 * full.half + keys.next;
#pragma GCC unroll 4
                        for (int line = 0; line < 4; line++) {
                            __builtin_prefetch(ahead + line * kBlock);
                        }
                    }
                    score_block<Rows, kVectors, false>(at, full, factors, q.stride, sum);
                    score_block<Rows, kVectors, false>(at + kBlock, full, factors + 16, q.stride, sum);
                    score_block<Rows, kVectors, true>(at + 2 * kBlock, full, factors + 32, q.stride, sum);
                    score_block<Rows, kVectors, true>(at + 3 * kBlock, full, factors + 48, q.stride, sum);
                }
                add_scores(sum, first, to, out_stride);
                first = false;
            }
            if (q.part_ends[part] % kGroup != 0) {
                Dot sum[Rows][kVectors] = {};
                const std::byte* at = keys.codes + groups * kGroupBytes + h * tail.half + s * tail.pair;
                const int8_t* factors = q.bytes + groups * kGroup;
                __builtin_prefetch(at + keys.next);
                __builtin_prefetch(at + keys.next + kBlock);
                score_block<Rows, kVectors, false>(at, tail, factors, q.stride, sum);
                score_block<Rows, kVectors, false>(at + kBlock, tail, factors + 16, q.stride, sum);
                add_scores(sum, first, to, out_stride);
            }
        }
    }
}

template <int Rows>
void score(const Unpacked& keys, const QueryRows& q, int32_t* out) {
    constexpr int kVectors = unpacked_vectors(Rows);
    const size_t out_stride = q.n_parts * kTokens;
    for (int v = 0; v < kPageVectors; v += kVectors, out += kVectors * kLanes) {
        for (int part = 0, i = 0; part < q.n_parts; part++) {
            const int end = q.part_ends[part] / 4;
            for (bool first = true; i < end; first = false) {
                Dot sum[Rows][kVectors] = {};
                const int last = end - i > kDotSteps ? i + kDotSteps : end;
                for (; i < last; i++) {
                    Words digits[kVectors];
#pragma GCC unroll 16
                    for (int k = 0; k < kVectors; k++) {
                        digits[k] = load<Words>(keys.digits + (i * kTokens + (v + k) * kLanes) * 4);
                    }
#pragma GCC unroll 8
                    for (int r = 0; r < Rows; r++) {
                        const Words factors = broadcast(q.bytes + r * q.stride + 4 * i);
#pragma GCC unroll 16
                        for (int k = 0; k < kVectors; k++) {
                            sum[r][k] = dot(sum[r][k], digits[k], factors);
                        }
                    }
                }
                add_scores(sum, first, out + part * kTokens, out_stride);
            }
        }
    }
}

// ---- V: out[row][plane] += scale of the row times sum over tokens of digit times weight

struct WeightRows {
    const uint8_t* bytes;  // [rows][64], up to 127
    const float* scale;    // [rows]
    float* out;            // rows at out_stride floats
    size_t out_stride;
};

template <int Rows, int Fields>
inline void add_planes(const Dot (&sum)[Rows][Fields], const WeightRows& rows, int plane, int plane_step, int field,
                       bool in_place) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
        for (int f = 0; f < Fields; f++) {
            float* to = rows.out + r * rows.out_stride + plane + f * plane_step;
            const float unit = in_place ? field_unit(field + f) : 1.0f;
            store(to, multiply_add(to_floats(total(sum[r][f])), splat(rows.scale[r] * unit), load<Floats>(to)));
        }
    }
}

template <int Rows, int Fields, bool Swapped>
inline void weigh_block(const std::byte* block, int part, int field, const uint8_t* weights, Dot (&sum)[Rows][Fields]) {
    const Words bytes = load_part<Swapped>(block, part);
    Words digits[Fields];
#pragma GCC unroll 4
    for (int f = 0; f < Fields; f++) {
        digits[f] = field_in_place(bytes, field + f);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
        const Words factors = broadcast(weights + r * kTokens);
#pragma GCC unroll 4
        for (int f = 0; f < Fields; f++) {
            sum[r][f] = dot(sum[r][f], digits[f], factors);
        }
    }
}

template <int Rows>
void weigh_tail(const Packed& values, const WeightRows& rows) {
    const int groups = values.groups();
    const std::byte* tail = values.codes + groups * kGroupBytes;
    for (int part = 0; part < kParts; part++) {
        Dot sum[Rows][2] = {};
        for (int u = 0; u < 8; u++) {
            const std::byte* block = tail + u * kBlock;
            __builtin_prefetch(block + values.next);
            const Words bytes = u & 2 ? load_part<true>(block, part) : load_part<false>(block, part);
#pragma GCC unroll 2
            for (int quad = 0; quad < 2; quad++) {
                const Words two_fields = quad ? bytes >> 4 : bytes;
#pragma GCC unroll 8
                for (int r = 0; r < Rows; r++) {
                    const Words factors = broadcast(rows.bytes + r * kTokens + 4 * (2 * u + quad));
                    sum[r][0] = dot(sum[r][0], field_in_place(two_fields, 0), factors);
                    sum[r][1] = dot(sum[r][1], field_in_place(two_fields, 1), factors);
                }
            }
        }
        add_planes(sum, rows, groups * kGroup + part * kLanes, 16, 0, true);
    }
}

template <int Rows>
void weigh(const Packed& values, const WeightRows& rows) {
    constexpr int kFields = value_fields(Rows);
    const int groups = values.groups();
    const ptrdiff_t four_quads = ptrdiff_t(groups) * 4 * kBlock;
    for (int group = 0; group < groups; group++) {
        for (int part = 0; part < kParts; part++) {
#pragma GCC unroll 4
            for (int f = 0; f < 4; f += kFields) {
                Dot sum[Rows][kFields] = {};
                const std::byte* at = values.codes + group * 4 * kBlock;
                const uint8_t* weights = rows.bytes;
#pragma GCC unroll 1
                for (int i = 0; i < 4; i++, at += four_quads, weights += 16) {
                    if (f == 0 && part == 0) {
#pragma GCC unroll 4
                        for (int line = 0; line < 4; line++) {
                            __builtin_prefetch(at + values.next + line * kBlock);
                        }
                    }
                    weigh_block<Rows, kFields, false>(at, part, f, weights, sum);
                    weigh_block<Rows, kFields, false>(at + kBlock, part, f, weights + 4, sum);
                    weigh_block<Rows, kFields, true>(at + 2 * kBlock, part, f, weights + 8, sum);
                    weigh_block<Rows, kFields, true>(at + 3 * kBlock, part, f, weights + 12, sum);
                }
                add_planes(sum, rows, group * kGroup + 16 * f + part * kLanes, 16, f, true);
            }
        }
    }
    if (values.tail()) {
        weigh_tail<Rows>(values, rows);
    }
}

template <int Rows, int Vectors>
void weigh_unpacked(const std::byte* digits, int width, const WeightRows& rows, int plane) {
    for (int first = 0; first < width; first += Vectors * kLanes) {
        Dot sum[Rows][Vectors] = {};
        for (int quad = 0; quad < 16; quad++) {
            Words planes[Vectors];
#pragma GCC unroll 16
            for (int k = 0; k < Vectors; k++) {
                planes[k] = load<Words>(digits + (quad * width + first + k * kLanes) * 4);
            }
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) {
                const Words factors = broadcast(rows.bytes + r * kTokens + 4 * quad);
#pragma GCC unroll 16
                for (int k = 0; k < Vectors; k++) {
                    sum[r][k] = dot(sum[r][k], planes[k], factors);
                }
            }
        }
        add_planes(sum, rows, plane + first, kLanes, 0, false);
    }
}

template <int Rows>
void weigh(const Unpacked& values, const WeightRows& rows) {
    const int groups = values.groups();
    for (int group = 0; group < groups; group++) {
        weigh_unpacked<Rows, unpacked_vectors(Rows)>(values.at(group), kGroup, rows, group * kGroup);
    }
    if (values.tail()) {
        weigh_unpacked<Rows, 2>(values.at(groups), kGroup / 2, rows, groups * kGroup);
    }
}

// ---- unpacking, for many rows

// Planes of a group, or of the tail, which comes after all groups.
void unpack_key_group(const Packed& keys, int group, std::byte* to) {
    const int groups = keys.groups();
    const bool full = group < groups;
    const int pair = full ? 4 : 2;  // blocks of 16 tokens
    const std::byte* codes = keys.codes + (full ? group * 8 * kBlock : groups * kGroupBytes);
    const ptrdiff_t half = (full ? groups : 1) * 2 * pair * kBlock;
    for (int token_group = 0; token_group < 4; token_group++) {
        const std::byte* at = codes + token_group / 2 * half + token_group % 2 * pair * kBlock;
        for (int q = 0; q < pair; q++, at += kBlock) {
            __builtin_prefetch(at + keys.next);
            for (int part = 0; part < kParts; part++) {
                const Words bytes = q & 2 ? load_part<true>(at, part) : load_part<false>(at, part);
                std::byte* out = to + (q * 4 * kTokens + token_group * 16 + part * kLanes) * 4;
#pragma GCC unroll 4
                for (int f = 0; f < 4; f++) {
                    store(out + f * kTokens * 4, field(bytes, f));
                }
            }
        }
    }
}

void unpack_value_group(const Packed& values, int group, std::byte* to) {
    const int groups = values.groups();
    if (group < groups) {
        for (int u = 0; u < 16; u++) {
            const std::byte* at = values.codes + ((u / 4 * groups + group) * 4 + u % 4) * kBlock;
            __builtin_prefetch(at + values.next);
            for (int part = 0; part < kParts; part++) {
                const Words bytes = u & 2 ? load_part<true>(at, part) : load_part<false>(at, part);
                std::byte* out = to + (u * kGroup + part * kLanes) * 4;
#pragma GCC unroll 4
                for (int f = 0; f < 4; f++) {
                    store(out + f * 16 * 4, field(bytes, f));
                }
            }
        }
        return;
    }
    for (int u = 0; u < 8; u++) {
        const std::byte* at = values.codes + groups * kGroupBytes + u * kBlock;
        __builtin_prefetch(at + values.next);
        for (int part = 0; part < kParts; part++) {
            const Words bytes = u & 2 ? load_part<true>(at, part) : load_part<false>(at, part);
#pragma GCC unroll 4
            for (int f = 0; f < 4; f++) {
                const int quad = 2 * u + f / 2, plane = f % 2 * 16 + part * kLanes;
                store(to + (quad * (kGroup / 2) + plane) * 4, field(bytes, f));
            }
        }
    }
}

#if !defined(__AMX_INT8__)
Unpacked unpack_keys(const Packed& keys, std::byte* to) {
    for (int group = 0; group < keys.all_groups(); group++) unpack_key_group(keys, group, to + group * kGroupDigits);
    return {to, keys.planes};
}

Unpacked unpack_values(const Packed& values, std::byte* to) {
    for (int group = 0; group < values.all_groups(); group++)
        unpack_value_group(values, group, to + group * kGroupDigits);
    return {to, values.planes};
}
#endif

// ---- any number of rows up to kDotRows

// Comes before the weights of these rows.
template <class Codes>
void begin_values(const Codes&) {}

template <class Codes, int Rows = kDotRows>
void score_rows(int n, const Codes& keys, const QueryRows& q, int32_t* out) {
    if (n == Rows) {
        score<Rows>(keys, q, out);
    } else if constexpr (Rows > 1) {
        score_rows<Codes, Rows - 1>(n, keys, q, out);
    }
}

template <class Codes, int Rows = kDotRows>
void weigh_rows(int n, const Codes& values, const WeightRows& rows) {
    if (n == Rows) {
        weigh<Rows>(values, rows);
    } else if constexpr (Rows > 1) {
        weigh_rows<Codes, Rows - 1>(n, values, rows);
    }
}

}  // namespace
}  // namespace crumb::cpu

// Attention of one item (kernel.h) with the instruction set of the including unit. No operand of a multiplication is
// ever stored with the context: a page's digits become floats in the thread's scratch, once a tile.
//
//   q' = B_k q                                                          once an item
//   logit_t = s_t sum_p q'_p (digit_tp - 1.5) + z_t (q . ones) + q . (mean + page mean)
//   w_t = e^(logit_t - top)
//   o'_p = sum_t w_t s_t (digit_tp - 1.5),  sum_t w_t,  sum_t w_t z_t,  o += (sum_t w_t) page mean
//   out = (o + B_v^T o' + (sum w) mean + (sum w z) ones) / sum          once a row, after the merge
//
// Pages of BF16 rows take the same path with the identity for B. A block that holds tokens of both kinds is visited
// twice.
//
// A row's arithmetic is the same in every tile: sums run over planes, and over tokens, in ascending order within a
// lane, and register blocking only chooses which rows and lanes go side by side.
#include <crumb/error.h>

#include "attention/cpu/kernel.h"
#include "attention/cpu/simd.h"
#include "attention/cpu/unpack_map.h"

namespace crumb::cpu {
namespace {

constexpr int kPageVectors = kPageTokens / kLanes;
constexpr float kNothing = -3.402823466e38f;  // the top of no logits: finite, so that differences are numbers
constexpr float kMinusInfinity = -__builtin_inff();

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

// ---- products of small matrices

// out[Rows][Vectors] += a[Rows][depth] b[depth][Vectors].
template <int Rows, int Vectors>
void multiply_block(int depth, const float* a, size_t a_stride, const float* b, size_t b_stride, float* out,
                    size_t out_stride) {
    Floats sum[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) {
            sum[r][v] = load<Floats>(out + r * out_stride + v * kLanes);
        }
    }
    for (int i = 0; i < depth; i++) {
        Floats x[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) {
            x[v] = load<Floats>(b + i * b_stride + v * kLanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            const Floats y = splat(a[r * a_stride + i]);
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; v++) {
                sum[r][v] = multiply_add(y, x[v], sum[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) {
            store(out + r * out_stride + v * kLanes, sum[r][v]);
        }
    }
}

// Few rows have registers left for more columns, and need them to hide the latency of a multiplication.
template <int Rows, int Vectors = Rows <= 2 ? 2 * kVectors : kVectors>
void multiply_rows(int depth, int width, const float* a, size_t a_stride, const float* b, size_t b_stride, float* out,
                   size_t out_stride) {
    int c = 0;
    for (; c + Vectors * kLanes <= width; c += Vectors * kLanes) {
        multiply_block<Rows, Vectors>(depth, a, a_stride, b + c, b_stride, out + c, out_stride);
    }
    if constexpr (Vectors > 1) {
        if (c < width) {
            multiply_rows<Rows, Vectors / 2>(depth, width - c, a, a_stride, b + c, b_stride, out + c, out_stride);
        }
    }
}

// out[n][width] += a[n][depth] b[depth][width]; width is a multiple of 16.
template <int Rows = kRows>
void multiply(int n, int depth, int width, const float* a, size_t a_stride, const float* b, size_t b_stride, float* out,
              size_t out_stride) {
    int r = 0;
    for (; r + Rows <= n; r += Rows) {
        multiply_rows<Rows>(depth, width, a + r * a_stride, a_stride, b, b_stride, out + r * out_stride, out_stride);
    }
    if constexpr (Rows > 1) {
        if (r < n) {
            multiply<Rows - 1>(n - r, depth, width, a + r * a_stride, a_stride, b, b_stride, out + r * out_stride,
                               out_stride);
        }
    }
}

// out[n][m] = a[n][depth] b[m][depth]^T; depth is a multiple of 16.
void dot_products(int n, int m, int depth, const float* a, const float* b, float* out, size_t out_stride) {
    for (int j = 0; j < m; j++) {
        for (int i = 0; i < n; i++) {
            Floats sum = {};
            for (int c = 0; c < depth; c += kLanes) {
                sum = multiply_add(load<Floats>(a + i * depth + c), load<Floats>(b + j * depth + c), sum);
            }
            out[i * out_stride + j] = sum_lanes(sum);
        }
    }
}

void scale_row(float* row, int width, float factor) {
    for (int c = 0; c < width; c += kLanes) {
        store(row + c, load<Floats>(row + c) * factor);
    }
}

void add_scaled(float* row, int width, float factor, const float* more) {
    for (int c = 0; c < width; c += kLanes) {
        store(row + c, multiply_add(splat(factor), load<Floats>(more + c), load<Floats>(row + c)));
    }
}

// ---- pages

// Digits minus 1.5, where the map says.
void unpack_codes(const Side& side, const std::byte* page, const std::byte* next, float* to) {
    constexpr int kBlockVectors = kBlockLanes / kLanes;
    const int blocks = side.planes * kPageTokens / (kBlockLanes * kDigitsPerLane);
    for (int b = 0; b < blocks; b++) {
        const std::byte* block = page + side.codes + b * kBlockBytes;
        const uint16_t* at = side.unpack_at + b * kDigitsPerLane;
        __builtin_prefetch(next + side.codes + b * kBlockBytes);
        for (int v = 0; v < kBlockVectors; v++) {
            Words lanes;
            if constexpr (kLanes == kBlockLanes) {
                lanes = load<Words>(block);
                if (side.swapped[b]) {
                    lanes = rotate<kLanes / 2>(lanes);
                }
            } else {
                lanes = load<Words>(block + 4 * ((v * kLanes) ^ (side.swapped[b] * (kBlockLanes / 2))));
            }
            // A digit in the two highest bits of the mantissa of 4.0 makes it 4, 5, 6 or 7.
#pragma GCC unroll 16
            for (int i = 0; i < kDigitsPerLane; i++) {
                const Words digit = 2 * i < 21 ? lanes << (21 - 2 * i) : lanes >> (2 * i - 21);
                store(to + at[i] + v * kLanes, as_floats((digit & 0x00600000u) | 0x40800000u) - 5.5f);
            }
        }
    }
}

void unpack_rows(const Side& side, const std::byte* page, float* to) {
    const uint16_t* rows = reinterpret_cast<const uint16_t*>(page + side.codes);
    for (int i = 0; i < side.dim * kPageTokens; i += kLanes) {
        store(to + i, as_floats(__builtin_convertvector(load<Halves>(rows + i), Words) << 16));
    }
}

void unpack(const Side& side, const std::byte* page, const std::byte* next, float* to) {
    if (side.planes > 0) {
        unpack_codes(side, page, next, to);
    } else {
        unpack_rows(side, page, to);
    }
}

// Side information of a page as numbers.
struct alignas(64) Info {
    float scale[kPageTokens];
    float zero[kPageTokens];
    float mean[kMaxDim];  // if the side has page means
};

void unpack_halves(const std::byte* halves, float* to) {
    for (int t = 0; t < kPageTokens; t += kLanes) {
        store(to + t, from_fp16(__builtin_convertvector(load<Halves>(halves + 2 * t), Words)));
    }
}

void unpack_info(const Side& side, const std::byte* page, Info& info) {
    const std::byte* scales = page + side.scales;
    if (side.info == SideInfo::gain8) {
        for (int t = 0; t < kPageTokens; t++) {
            info.scale[t] = side.gain_reference * side.gains[uint8_t(scales[t])];
        }
    } else {
        unpack_halves(scales, info.scale);
    }
    if (side.info == SideInfo::scale_zero) {
        unpack_halves(scales + 2 * kPageTokens, info.zero);
    } else {
        __builtin_memset(info.zero, 0, sizeof info.zero);
    }
    if (side.page_mean) {
        for (int c = 0; c < side.dim; c += kLanes) {
            const Ints codes = __builtin_convertvector(load<SignedBytes>(page + side.mean_codes + c), Ints);
            store(info.mean + c, to_floats(codes) * load<Floats>(side.mean_step + c));
        }
    }
}

bool has_page(const Pages& pages, int block) { return size_t(block) < pages.n_ids && pages.ids[block] != kNoBlock; }

const std::byte* page_at(const Pages& pages, int block) {
    CRUMB_ASSERT(has_page(pages, block));
    return pages.base + pages.ids[block] * pages.stride;
}

// ---- which tokens of a block a row reads in a visit

// Bit j: token 64 block + j is in [first, last).
uint64_t tokens_between(int block, int first, int last) {
    const int from = max(first - block * kPageTokens, 0), to = min(last - block * kPageTokens, kPageTokens);
    if (from >= to) {
        return 0;
    }
    return (~uint64_t(0) >> (kPageTokens - (to - from))) << from;
}

uint64_t visible_tokens(const QueryRow& row, int sink, int block, bool coded) {
    const uint64_t with_codes = tokens_between(block, sink, row.coded_end);
    return tokens_between(block, row.begin, row.end) & (coded ? with_codes : ~with_codes);
}

// ---- softmax

struct Visit {
    const Item& item;
    const Scratch& scratch;
    const Pages& pages;
    float* partials;
    int block;
    bool codes;  // not BF16 rows: logits are raw, weights want scales
    const Info& k;
    const Info& v;
};

float* partial_of(const Item& item, float* partials, int n) { return partials + n * item.partial_stride; }
float* scalars_of(const Item& item, float* partial) { return partial + item.coded.v.planes + item.exact.v.dim; }

Floats soft_capped(Floats x, float cap) {
    const Floats u = x * (1.0f / cap);
    const Floats negative = select(u < 0.0f, u, -u);
    const Floats e = exp_negative(negative * 2.0f);
    const Floats magnitude = (1.0f - e) / (1.0f + e) * cap;
    return select(u < 0.0f, -magnitude, magnitude);
}

// Turns the products of query n with the keys of a block into weights of its values, and updates the partial's scalars.
void weigh(const Visit& visit, int n, uint64_t mask) {
    const Item& item = visit.item;
    const Scratch& scratch = visit.scratch;
    float* x = scratch.weights + n * kPageTokens;
    const QueryRow& row = item.rows[n / item.n_heads];
    const int head = n % item.n_heads;

    float constant = 0.0f, ones = 0.0f;
    if (visit.codes) {
        constant = scratch.q_mean[n];
        if (visit.pages.k.page_mean) {
            const int dim = visit.pages.k.dim;
            float dot;
            dot_products(1, 1, dim, scratch.q + n * dim, visit.k.mean, &dot, 1);
            constant += dot;
        }
        ones = scratch.q_ones[n];
    }

    const Words lanes = lane_numbers();
    Floats top = splat(kNothing);
    Floats logits[kPageVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kPageVectors; i++) {
        const int t = i * kLanes;
        Floats y = load<Floats>(x + t);
        if (visit.codes) {
            y = multiply_add(y, load<Floats>(visit.k.scale + t),
                             multiply_add(splat(ones), load<Floats>(visit.k.zero + t), splat(constant)));
        }
        if (item.softcap > 0.0f) {
            y = soft_capped(y, item.softcap);
        }
        if (item.slopes) {
            const int nearest = row.position - visit.block * kPageTokens - t;
            const Ints distance = nearest - reinterpret_cast<Ints>(lanes);
            y = multiply_add(splat(-item.slopes[head]), to_floats(distance < 0 ? -distance : distance), y);
        }
        if (~mask != 0) {
            const Words bits = uint32_t(mask >> t) & (1u << lanes);
            y = select(bits == 0u, splat(kMinusInfinity), y);
        }
        top = select(y > top, y, top);
        logits[i] = y;
    }

    float* partial = partial_of(item, visit.partials, n);
    float* scalars = scalars_of(item, partial);
    const float highest = max_lanes(top);
    if (highest > scalars[kTop]) {
        const float factor = exp_negative(splat(scalars[kTop] - highest))[0];
        scale_row(partial, int(item.partial_stride), factor);
        scalars[kTop] = highest;
    }

    Floats sum = {}, zero_sum = {};
#pragma GCC unroll 4
    for (int i = 0; i < kPageVectors; i++) {
        const int t = i * kLanes;
        Floats w = exp_negative(logits[i] - scalars[kTop]);
        sum = sum + w;
        if (visit.codes) {
            zero_sum = multiply_add(w, load<Floats>(visit.v.zero + t), zero_sum);
            w = w * load<Floats>(visit.v.scale + t);
        }
        store(x + t, w);
    }
    const float all = sum_lanes(sum);
    scalars[kSum] += all;
    if (visit.codes) {
        scalars[kCodedSum] += all;
        scalars[kZeroSum] += sum_lanes(zero_sum);
        if (visit.pages.v.page_mean) {
            add_scaled(partial + item.coded.v.planes, visit.pages.v.dim, all, visit.v.mean);
        }
    }
}

// ---- visits

// A value that is not finite must not reach rows that do not see its token: there its weight is 0, and 0 * NaN is NaN.
bool all_finite(const float* x, int n) {
    Words exponent = {};
    for (int i = 0; i < n; i += kLanes) {
        const Words e = load<Words>(x + i) & 0x7f800000u;
        exponent = e > exponent ? e : exponent;
    }
    for (int i = 0; i < kLanes; i++) {
        if (exponent[i] == 0x7f800000u) {
            return false;
        }
    }
    return true;
}

// partials += weights times values, for query vectors [first, last).
void add_values(const Visit& visit, const uint64_t* masks, int first, int last) {
    const Item& item = visit.item;
    const int width = visit.codes ? visit.pages.v.planes : visit.pages.v.dim;
    float* out = visit.partials + (visit.codes ? 0 : item.coded.v.planes);
    const float* values = visit.scratch.page;
    const float* weights = visit.scratch.weights;
    if (visit.codes || all_finite(values, kPageTokens * width)) {
        multiply(last - first, kPageTokens, width, weights + first * kPageTokens, kPageTokens, values, width,
                 out + first * item.partial_stride, item.partial_stride);
        return;
    }
    for (int n = first; n < last; n++) {
        const uint64_t mask = masks[n / item.n_heads];
        for (int t = 0; t < kPageTokens; t++) {
            if ((mask >> t & 1) == 0) {
                continue;
            }
            multiply(1, 1, width, weights + n * kPageTokens + t, kPageTokens, values + t * width, width,
                     out + n * item.partial_stride, item.partial_stride);
        }
    }
}

// Adds what the rows read in one block, from the coded or from the exact table.
void visit_block(const Item& item, const Scratch& scratch, float* partials, int block, bool coded) {
    uint64_t masks[kTileRows];
    int first = item.n_rows, last = 0;
    for (int r = 0; r < item.n_rows; r++) {
        masks[r] = visible_tokens(item.rows[r], item.sink, block, coded);
        if (masks[r] == 0) {
            continue;
        }
        first = min(first, r);
        last = r + 1;
    }
    if (first >= last) {
        return;
    }
    first *= item.n_heads;
    last *= item.n_heads;

    const Pages& pages = coded ? item.coded : item.exact;
    const std::byte* page = page_at(pages, block);
    const std::byte* next = has_page(pages, block + 1) ? page_at(pages, block + 1) : page;
    const bool codes = pages.k.planes > 0;
    Info k, v;
    if (codes) {
        for (size_t i = pages.k.scales; i < pages.bytes; i += 64) {
            __builtin_prefetch(next + i);
        }
        unpack_info(pages.k, page, k);
        unpack_info(pages.v, page, v);
    }

    const Visit visit{item, scratch, pages, partials, block, codes, k, v};
    const int depth = codes ? pages.k.planes : pages.k.dim;
    const float* q = (codes ? scratch.q_codes : scratch.q) + first * depth;
    float* logits = scratch.weights + first * kPageTokens;
    unpack(pages.k, page, next, scratch.page);
    __builtin_memset(logits, 0, (last - first) * kPageTokens * sizeof(float));
    multiply(last - first, depth, kPageTokens, q, depth, scratch.page, kPageTokens, logits, kPageTokens);

    for (int n = first; n < last; n++) {
        weigh(visit, n, masks[n / item.n_heads]);
    }

    unpack(pages.v, page, next, scratch.page);
    add_values(visit, masks, first, last);
}

// ---- the functions of the table

// A query that is not finite becomes NaN as a whole: the row has no answer, whichever tokens it sees.
void queries(const Item& item, const Scratch& scratch) {
    const Side& k = item.coded.k;
    const int dim = k.dim;
    for (int n = 0; n < item.n; n++) {
        const float* q =
            item.q + item.rows[n / item.n_heads].token * item.token_stride + n % item.n_heads * item.head_stride;
        float* to = scratch.q + n * dim;
        Floats poison = {};
        for (int c = 0; c < dim; c += kLanes) {
            poison = poison + load<Floats>(q + c) * 0.0f;
        }
        const float add = sum_lanes(poison);
        for (int c = 0; c < dim; c += kLanes) {
            store(to + c, load<Floats>(q + c) * item.scale + add);
        }
    }
    if (k.planes == 0) {
        return;
    }
    dot_products(item.n, k.planes, dim, scratch.q, k.decode, scratch.q_codes, k.planes);
    for (int n = 0; n < item.n; n++) {
        scratch.q_mean[n] = scratch.q_ones[n] = 0.0f;
    }
    if (k.mean) {
        dot_products(item.n, 1, dim, scratch.q, k.mean, scratch.q_mean, 1);
    }
    if (k.ones) {
        dot_products(item.n, 1, dim, scratch.q, k.ones, scratch.q_ones, 1);
    }
}

void clear(const Item& item, float* partials) {
    __builtin_memset(partials, 0, item.n * item.partial_stride * sizeof(float));
    for (int n = 0; n < item.n; n++) {
        scalars_of(item, partial_of(item, partials, n))[kTop] = kNothing;
    }
}

void range(const Item& item, const Scratch& scratch, int first, int last, float* partials) {
    clear(item, partials);
    for (int block = first; block < last; block++) {
        visit_block(item, scratch, partials, block, true);
        visit_block(item, scratch, partials, block, false);
    }
}

void merge(const Item& item, float* partials, const float* more) {
    for (int n = 0; n < item.n; n++) {
        float* a = partial_of(item, partials, n);
        const float* b = more + n * item.partial_stride;
        float* scalars = scalars_of(item, a);
        const float other = b[scalars - a + kTop];
        const float top = scalars[kTop] > other ? scalars[kTop] : other;
        const float keep = exp_negative(splat(scalars[kTop] - top))[0];
        const float add = exp_negative(splat(other - top))[0];
        scale_row(a, int(item.partial_stride), keep);
        add_scaled(a, int(item.partial_stride), add, b);
        scalars[kTop] = top;
    }
}

void finish(const Item& item, float* partials) {
    const Side& v = item.coded.v;
    const int dim = v.dim;
    if (v.planes > 0) {
        multiply(item.n, v.planes, dim, partials, item.partial_stride, v.decode, dim, partials + v.planes,
                 item.partial_stride);
    }
    for (int n = 0; n < item.n; n++) {
        float* partial = partial_of(item, partials, n);
        const float* scalars = scalars_of(item, partial);
        float* o = partial + v.planes;
        const int head = n % item.n_heads;
        if (v.mean) {
            add_scaled(o, dim, scalars[kCodedSum], v.mean);
        }
        if (v.ones) {
            add_scaled(o, dim, scalars[kZeroSum], v.ones);
        }
        float keep = 1.0f, sum = scalars[kSum];
        if (item.sinks) {
            const float sink = item.sinks[head], top = scalars[kTop] > sink ? scalars[kTop] : sink;
            keep = exp_negative(splat(scalars[kTop] - top))[0];
            sum = sum * keep + exp_negative(splat(sink - top))[0];
        }
        const float factor = sum == 0.0f ? 0.0f : keep / sum;
        float* out = item.out + item.rows[n / item.n_heads].token * item.out_stride + head * dim;
        for (int c = 0; c < dim; c += kLanes) {
            store(out + c, load<Floats>(o + c) * factor);
        }
    }
}

constexpr Kernel kKernel = {queries, range, merge, clear, finish};

}  // namespace
}  // namespace crumb::cpu

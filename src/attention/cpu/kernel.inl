// Attention of one item (kernel.h) with the instruction set of the including unit. Codes are never turned into numbers
// one by one: integer dot products take them as they are.
//
//   q' = B_k q, in int8 of the largest of a part of its planes (or 15 bits as two int8 rows)            once an item
//   logit_t = s_t sum of unit (sum_p q'_p digit_tp - 1.5 sum_p q'_p) + z_t (q . ones) + q . (mean + page mean)
//   w_t = 2^(logit_t - top),  b_t = w_t s_t in bytes 0 .. 127 of the page's largest, rounded
//   o'_p += unit_b sum_t b_t digit_tp,  b += unit_b sum_t b_t,  sum_t w_t,  sum_t w_t z_t
//   out = (B_v^T (o' - 1.5 b) + sum of (sum of a page's w) page mean + (sum w) mean + (sum w z) ones) / sum
//
// The digits are centred by the sum of the *rounded* weights, so that their rounding errors meet centred digits too.
// What these roundings cost: docs/design/attention-cpu.md. BF16 pages are read in FP32. A block that holds tokens of
// both kinds is visited twice.
//
// A row's arithmetic is the same in every tile: integer sums have no order, float sums run over pages in ascending
// order, and register blocking only chooses which rows go side by side.
#include <crumb/error.h>

#include "attention/cpu/pairs.h"
#include "attention/cpu/softmax.h"

namespace crumb::cpu {
namespace {

bool has_page(const Pages& pages, int block) { return size_t(block) < pages.n_ids && pages.ids[block] != kNoBlock; }

const std::byte* page_at(const Pages& pages, int block) {
    CRUMB_ASSERT(has_page(pages, block));
    return pages.base + pages.ids[block] * pages.stride;
}

// ---- which tokens of a block a row reads in a visit

// Bit j: token 64 block + j is in [first, last).
uint64_t tokens_between(int block, int first, int last) {
    const int from = max(first - block * kTokens, 0), to = min(last - block * kTokens, kTokens);
    if (from >= to) {
        return 0;
    }
    return (~uint64_t(0) >> (kTokens - (to - from))) << from;
}

uint64_t visible_tokens(const QueryRow& row, int sink, int block, bool coded) {
    const uint64_t with_codes = tokens_between(block, sink, row.coded_end);
    return tokens_between(block, row.begin, row.end) & (coded ? with_codes : ~with_codes);
}

// The query vectors that see anything of a block, and the tokens that each row sees.
struct Seen {
    uint64_t masks[kTileRows];
    int first, last;

    Seen(const Item& item, int block, bool coded) : first(item.n_rows), last(0) {
        for (int r = 0; r < item.n_rows; r++) {
            masks[r] = visible_tokens(item.rows[r], item.sink, block, coded);
            if (masks[r] != 0) {
                first = min(first, r);
                last = r + 1;
            }
        }
        first *= item.n_heads;
        last *= item.n_heads;
    }
    bool none() const { return first >= last; }
};

// ---- codes

// Sums of products that a query has with a token: of its parts, or of its high and its low row.
inline int sums_of(const Item& item) { return item.q_rows * item.n_parts; }

// Weights of the values of a block times their scales, from the dot products of query n with its keys. Returns the
// largest, by lanes.
Floats weigh_coded(const Item& item, const Scratch& scratch, float* partials, int n, int block, uint64_t mask,
                   const int32_t* dots, const Info& k, const Info& v, const float* k_mean, float* weights) {
    const Side &keys = item.coded.k, &values = item.coded.v;
    const bool zero_k = keys.info == SideInfo::scale_zero, zero_v = values.info == SideInfo::scale_zero;
    const float offset = scratch.q_offset[n], ones = scratch.q_ones[n];
    const float* units = scratch.q_unit + n * sums_of(item);
    float constant = scratch.q_mean[n];
    if (k_mean) {
        constant += dot_product(keys.dim, scratch.q + n * keys.dim, k_mean);
    }

    Floats x[kPageVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kPageVectors; i++) {
        x[i] = multiply_add(to_floats(load<Ints>(dots + i * kLanes)), splat(units[0]), splat(-offset));
    }
    for (int s = 1; s < sums_of(item); s++) {
#pragma GCC unroll 16
        for (int i = 0; i < kPageVectors; i++) {
            x[i] = multiply_add(to_floats(load<Ints>(dots + s * kTokens + i * kLanes)), splat(units[s]), x[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kPageVectors; i++) {
        const int t = i * kLanes;
        Floats base = splat(constant);
        if (zero_k) {
            base = multiply_add(splat(ones), load<Floats>(k.zero + t), base);
        }
        x[i] = multiply_add(x[i], load<Floats>(k.scale + t), base);
    }
    if (~mask != 0 || item.softcap > 0.0f || item.slopes) {
        adjust(item, n, block, mask, x);
    }
    exponents(item, scratch, partials, n, x);

    float* vectors = vectors_of(item, partial_of(item, partials, n));
    const Floats all = sum(x);
    add_lanes(vectors, kCodedSum, all);
    if (values.page_mean) {
        scratch.page_sums[n * kMeanBlocks + block % kMeanBlocks] += sum_lanes(all);
    }
    if (zero_v) {
        Floats zeros = {};
#pragma GCC unroll 16
        for (int i = 0; i < kPageVectors; i++) {
            zeros = multiply_add(x[i], load<Floats>(v.zero + i * kLanes), zeros);
        }
        add_lanes(vectors, kZeroSum, zeros);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kPageVectors; i++) {
        x[i] = x[i] * load<Floats>(v.scale + i * kLanes);
        store(weights + i * kLanes, x[i]);
    }
    return largest(x);
}

// Weights as bytes of which one unit is `unit`, and their sum.
void round_weights(const Item& item, float* partial, const float* weights, float unit, uint8_t* bytes) {
    to_bytes(weights, unit, bytes);
    Dot rounded = {};
#pragma GCC unroll 16
    for (int i = 0; i < kPageVectors / 4; i++) {
        rounded = dot(rounded, load<Words>(bytes + i * 4 * kLanes), 0x01010101u - Words{});
    }
    float* digit_sum = vectors_of(item, partial) + 16 * kDigitSum;
    store(digit_sum, multiply_add(to_floats(total(rounded)), splat(unit), load<Floats>(digit_sum)));
}

// A coded page, and who sees what of it.
struct CodedBlock {
    int block;
    Seen seen;
    Info k, v;
    alignas(64) float k_mean[kMaxDim];
    Packed keys, values;
    bool unpacks_keys, unpacks_values;

    CodedBlock(const Item& item, const Scratch& scratch, int block) : block(block), seen(item, block, true) {
        const Pages& pages = item.coded;
        const std::byte* page = page_at(pages, block);
        const ptrdiff_t next = has_page(pages, block + 1) ? page_at(pages, block + 1) - page : 0;
        for (size_t i = pages.k.scales; i < pages.bytes; i += 64) {
            __builtin_prefetch(page + next + i);
        }
        unpack_info(pages.k, page, k);
        unpack_info(pages.v, page, v);
        if (pages.k.page_mean) {
            unpack_mean(pages.k, page, k_mean);
        }
        if (pages.v.page_mean) {
            unpack_mean(pages.v, page, scratch.page_means + block % kMeanBlocks * pages.v.dim);
        }
        keys = {page + pages.k.codes, pages.k.planes, next};
        values = {page + pages.v.codes, pages.v.planes, next};
        const int rows = seen.last - seen.first;
        unpacks_keys = unpacking_pays(rows * item.q_rows, keys.planes);
        unpacks_values = unpacks_keys && unpacking_pays(rows, values.planes);
    }
};

// The smallest number of equal parts of at most `most`: how large they are.
int even_parts(int n, int most) {
    const int parts = (n + most - 1) / most;
    return (n + parts - 1) / parts;
}

// Query vectors first .. last - 1 against a page, as many at a time as its codes take.
template <class Keys, class Values>
void visit_codes(const Item& item, const Scratch& scratch, float* partials, const CodedBlock& at, int first, int last,
                 const Keys& keys, const Values& values) {
    alignas(64) int32_t dots[Keys::kRows * kMostQueryParts * kTokens];
    alignas(64) uint8_t bytes[Values::kRows * kTokens];
    alignas(64) float weights[Values::kRows * kTokens];
    Floats largest[Values::kRows];
    float units[Values::kRows];
    const float* k_mean = item.coded.k.page_mean ? at.k_mean : nullptr;
    const int step = even_parts(last - first, Values::kRows), q_bytes = item.q_rows * item.coded.k.planes;
    for (; first < last; first += step) {
        const int rows = min(step, last - first), part = even_parts(rows, Keys::kRows / item.q_rows);
        begin_values(values);
        for (int r = 0; r < rows; r++) {
            if (r % part == 0) {
                score_rows(min(part, rows - r) * item.q_rows, keys,
                           {scratch.q_bytes + size_t(first + r) * q_bytes, size_t(item.coded.k.planes), item.n_parts, item.part_ends},
                           dots);
            }
            largest[r] =
                weigh_coded(item, scratch, partials, first + r, at.block, at.seen.masks[(first + r) / item.n_heads],
                            dots + r % part * sums_of(item) * kTokens, at.k, at.v, k_mean, weights + r * kTokens);
        }
        for (int r = 0; r < rows; r++) {  // apart, so that rows do not wait for their lanes
            units[r] = byte_unit(largest[r]);
        }
        for (int r = 0; r < rows; r++) {
            round_weights(item, partial_of(item, partials, first + r), weights + r * kTokens, units[r],
                          bytes + r * kTokens);
        }
        weigh_rows(rows, values, {bytes, units, partial_of(item, partials, first), item.partial_stride});
    }
}

void visit_rows(const Item& item, const Scratch& scratch, float* partials, const CodedBlock& at, int first, int last) {
    const auto visit = [&](const auto& keys, const auto& values) {
        visit_codes(item, scratch, partials, at, first, last, keys, values);
    };
    if (!at.unpacks_keys) {
        visit(at.keys, at.values);
        return;
    }
    std::byte* digits = reinterpret_cast<std::byte*>(scratch.page);
    const auto unpacked = unpack_keys(at.keys, digits);
    if (!at.unpacks_values) {
        visit(unpacked, at.values);
    } else {
        visit(unpacked, unpack_values(at.values, digits + at.keys.planes * kTokens));
    }
}

// Some blocks, of which all rows see something, kStepRows rows at a time, whose partials then stay in the first cache.
void visit_coded(const Item& item, const Scratch& scratch, float* partials, const int* blocks, int n_blocks) {
    if (n_blocks == 1) {
        const CodedBlock at(item, scratch, *blocks);
        visit_rows(item, scratch, partials, at, at.seen.first, at.seen.last);
        return;
    }
    static_assert(kBatch == 4);
    const CodedBlock at[kBatch] = {
        {item, scratch, blocks[0]}, {item, scratch, blocks[1]}, {item, scratch, blocks[2]}, {item, scratch, blocks[3]}};
    const int step = even_parts(item.n, kStepRows);
    for (int first = 0; first < item.n; first += step) {
        for (const CodedBlock& block : at) {
            const int from = max(first, block.seen.first), to = min(first + step, block.seen.last);
            if (from < to) {
                visit_rows(item, scratch, partials, block, from, to);
            }
        }
    }
}

void clear_page_sums(const Item& item, const Scratch& scratch) {
    __builtin_memset(scratch.page_sums, 0, item.n * kMeanBlocks * sizeof(float));
    __builtin_memset(scratch.page_means, 0, item.coded.v.dim * kMeanBlocks * sizeof(float));
}

void add_page_means(const Item& item, const Scratch& scratch, float* partials) {
    const int dim = item.coded.v.dim;
    multiply(item.n, kMeanBlocks, dim, scratch.page_sums, kMeanBlocks, scratch.page_means, dim,
             partials + item.coded.v.planes, item.partial_stride);
    clear_page_sums(item, scratch);
}

// ---- BF16 pages

void weigh_exact(const Item& item, const Scratch& scratch, float* partials, int n, int block, uint64_t mask) {
    float* weights = scratch.weights + n * kTokens;
    Floats x[kPageVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kPageVectors; i++) {
        x[i] = load<Floats>(weights + i * kLanes);
    }
    adjust(item, n, block, mask, x);
    exponents(item, scratch, partials, n, x);
    add_lanes(vectors_of(item, partial_of(item, partials, n)), kExactSum, sum(x));
#pragma GCC unroll 16
    for (int i = 0; i < kPageVectors; i++) {
        store(weights + i * kLanes, x[i]);
    }
}

void add_values(const Item& item, const Scratch& scratch, float* partials, const Seen& seen, const uint16_t* values) {
    const int dim = item.exact.v.dim;
    float* out = partials + item.coded.v.planes;
    const float* weights = scratch.weights;
    bool all_seen = true;
    for (int r = seen.first / item.n_heads; r < seen.last / item.n_heads; r++) {
        all_seen = all_seen && ~seen.masks[r] == 0;
    }
    if (all_seen || all_finite(values, kTokens * dim)) {
        multiply_page(item, seen.last - seen.first, kTokens, dim, weights + seen.first * kTokens, kTokens, values,
                      kAllRows, out + seen.first * item.partial_stride, item.partial_stride, scratch.page);
        return;
    }
    for (int n = seen.first; n < seen.last; n++) {
        multiply_page(item, 1, kTokens, dim, weights + n * kTokens, kTokens, values, seen.masks[n / item.n_heads],
                      out + n * item.partial_stride, item.partial_stride, scratch.page);
    }
}

void visit_exact(const Item& item, const Scratch& scratch, float* partials, int block, const Pages& pages,
                 const Seen& seen) {
    const std::byte* page = page_at(pages, block);
    const uint16_t* keys = reinterpret_cast<const uint16_t*>(page + pages.k.codes);
    const uint16_t* values = reinterpret_cast<const uint16_t*>(page + pages.v.codes);
    const int first = seen.first, n = seen.last - seen.first, dim = pages.k.dim;
    float* logits = scratch.weights + first * kTokens;
    __builtin_memset(logits, 0, n * kTokens * sizeof(float));
    multiply_page(item, n, dim, kTokens, scratch.q + first * dim, dim, keys, kAllRows, logits, kTokens, scratch.page);
    for (int i = first; i < seen.last; i++) {
        weigh_exact(item, scratch, partials, i, block, seen.masks[i / item.n_heads]);
    }
    add_values(item, scratch, partials, seen, values);
}

// ---- the functions of the table

// Query n in int8 of the largest element of a part, or in 15 bits: high rows times 128 plus low rows.
void to_rows(const Item& item, const Scratch& scratch, int n) {
    const int planes = item.coded.k.planes;
    const float* q = scratch.q_codes + n * planes;
    float* units = scratch.q_unit + n * sums_of(item);
    int8_t* high = scratch.q_bytes + n * item.q_rows * planes;
    int8_t* low = high + (item.q_rows - 1) * planes;
    alignas(64) int8_t codes[2][kMaxPlanes];  // high, low
    scratch.q_offset[n] = 0.0f;
    for (int part = 0, first = 0; part < item.n_parts; first = item.part_ends[part++]) {
        const int end = item.part_ends[part];
        Floats most = splat(1e-30f);
        for (int p = first; p < end; p += kLanes) {
            const Floats x = load<Floats>(q + p);
            most = maximum(maximum(x, -x), most);
        }
        const float largest = max_lanes(most), top = item.q_rows == 2 ? 127.0f * 128.0f : 127.0f;
        const float inverse = top / largest;
        Words sums = {};  // of NaN they wrap
        for (int p = first; p < end; p += kLanes) {
            const Floats shifted =
                load<Floats>(q + p) * inverse + 0x1.8p23f;  // rounded to nearest: its low bits are the integer
            const Ints code = reinterpret_cast<Ints>(shifted) - 0x4b400000;
            const Ints hundreds = item.q_rows == 2 ? (code + 64) >> 7 : code;
            sums += reinterpret_cast<Words>(code);
            store(codes[0] + p, __builtin_convertvector(hundreds, SignedBytes));
            store(codes[1] + p, __builtin_convertvector(code - (hundreds << 7), SignedBytes));
        }
        uint32_t sum = 0;
        for (int i = 0; i < kLanes; i++) {
            sum += sums[i];
        }
        units[part] = largest / top;
        scratch.q_offset[n] += 1.5f * units[part] * float(int32_t(sum));
    }
    if (item.q_rows == 2) {
        units[1] = units[0];
        units[0] *= 128.0f;
    }
    for (int i = 0; i < planes; i += 4) {
        const int plane = key_order_plane(i / 4, planes);
        __builtin_memcpy(high + i, codes[0] + plane, 4);
        if (item.q_rows == 2) {
            __builtin_memcpy(low + i, codes[1] + plane, 4);
        }
    }
}

// What a unit of a digit is worth.
float digit_value(int digit) { return float(1 << 2 * digit); }

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
            store(to + c, load<Floats>(q + c) * (item.scale * kLog2e) + add);
        }
        scratch.q_mean[n] = k.mean ? dot_product(dim, to, k.mean) : to[0] * 0.0f;
        scratch.q_ones[n] = k.ones ? dot_product(dim, to, k.ones) : 0.0f;
    }
    if (k.planes == 0) {
        return;
    }
    __builtin_memset(scratch.q_codes, 0, item.n * k.planes * sizeof(float));
    if (k.map) {
        multiply(item.n, dim, k.planes, scratch.q, dim, k.map, k.planes, scratch.q_codes, k.planes);
    } else {
        for (int n = 0; n < item.n; n++) {
            for (int first = 0; first + dim <= k.planes; first += dim) {
                add_scaled(scratch.q_codes + n * k.planes + first, dim, digit_value(first / dim), scratch.q + n * dim);
            }
        }
    }
    for (int n = 0; n < item.n; n++) {
        to_rows(item, scratch, n);
    }
}

void clear(const Item& item, float* partials) {
    __builtin_memset(partials, 0, item.n * item.partial_stride * sizeof(float));
    for (int n = 0; n < item.n; n++) {
        vectors_of(item, partial_of(item, partials, n))[16 * kTop] = kNothing;
    }
}

// Fetches into the second cache what is read after the codes of a range, a slice a coded page: BF16 pages are eight
// times as large as coded ones and are read faster than memory delivers them.
class Ahead {
  public:
    Ahead(const Item& item, const int* exact, int n_exact, int n_coded)
        : item_(item), exact_(exact), n_exact_(n_exact) {
        const size_t bytes = n_exact * item.exact.bytes + item.ahead[0].bytes + item.ahead[1].bytes;
        slice_ = n_coded > 0 ? (bytes / n_coded / 64 + 1) * 64 : 0;
    }

    void fetch_slice() {
        for (size_t left = slice_; left > 0 && index_ < n_exact_ + 2;) {
            const Span span = index_ < n_exact_ ? Span{page_at(item_.exact, exact_[index_]), item_.exact.bytes}
                                                : item_.ahead[index_ - n_exact_];
            for (; left > 0 && at_ < span.bytes; at_ += 64, left -= 64) {
                __builtin_prefetch(static_cast<const char*>(span.data) + at_, 0, 2);
            }
            if (at_ >= span.bytes) {
                index_++;
                at_ = 0;
            }
        }
    }

  private:
    const Item& item_;
    const int* exact_;
    int n_exact_, index_ = 0;
    size_t slice_ = 0, at_ = 0;
};

// Codes first, so that what is exact arrives meanwhile.
void range(const Item& item, const Scratch& scratch, int first, int last, float* partials) {
    clear(item, partials);
    clear_page_sums(item, scratch);
    const Tiles tiles(unpacking_pays(item.n * item.q_rows, item.coded.k.planes) || reads_windows_by_tiles(item));
    constexpr int kChunk = 64;
    for (int end; first < last; first = end) {
        end = min((first / kChunk + 1) * kChunk, last);
        int coded[kChunk], exact[kChunk], n_coded = 0, n_exact = 0;
        for (int block = first; block < end; block++) {
            if (!Seen(item, block, true).none()) coded[n_coded++] = block;
            if (!Seen(item, block, false).none()) exact[n_exact++] = block;
        }
        Ahead ahead(item, exact, n_exact, n_coded);
        for (int i = 0, batch; i < n_coded; i += batch) {
            batch = 1;
            if (item.coded.k.planes == 0) {
                visit_exact(item, scratch, partials, coded[i], item.coded, Seen(item, coded[i], true));
                continue;
            }
            if (item.n > kStepRows && i + kBatch <= n_coded &&
                coded[i] / kMeanBlocks == coded[i + kBatch - 1] / kMeanBlocks) {
                batch = kBatch;
            }
            for (int k = 0; k < batch; k++) {
                ahead.fetch_slice();
            }
            visit_coded(item, scratch, partials, coded + i, batch);
            const int last = i + batch - 1;
            const bool ends_mean = last + 1 == n_coded || coded[last + 1] / kMeanBlocks != coded[last] / kMeanBlocks;
            if (item.coded.v.page_mean && ends_mean) {
                add_page_means(item, scratch, partials);
            }
        }
        for (int i = 0; i < n_exact; i++) {
            visit_exact(item, scratch, partials, exact[i], item.exact, Seen(item, exact[i], false));
        }
    }
}

void merge(const Item& item, float* partials, const float* more) {
    for (int n = 0; n < item.n; n++) {
        float* a = partial_of(item, partials, n);
        const float* b = more + n * item.partial_stride;
        float* vectors = vectors_of(item, a);
        const float other = b[vectors - a + 16 * kTop];
        const float top = vectors[16 * kTop] > other ? vectors[16 * kTop] : other;
        const Floats keep = exp2(splat(vectors[16 * kTop] - top)), add = exp2(splat(other - top));
        for (int c = 0; c < int(vectors - a) + 16 * kTop; c += kLanes) {
            store(a + c, multiply_add(add, load<Floats>(b + c), load<Floats>(a + c) * keep));
        }
        vectors[16 * kTop] = top;
    }
}

void finish(const Item& item, float* partials) {
    const Side& v = item.coded.v;
    const int dim = v.dim;
    if (v.planes > 0) {
        for (int n = 0; n < item.n; n++) {
            float* partial = partial_of(item, partials, n);
            const float offset = 1.5f * lanes_sum(vectors_of(item, partial), kDigitSum);
            for (int p = 0; p < v.planes; p += kLanes) {
                store(partial + p, load<Floats>(partial + p) - offset);
            }
        }
        if (v.map) {
            multiply(item.n, v.planes, dim, partials, item.partial_stride, v.map, dim, partials + v.planes,
                     item.partial_stride);
        }
        for (int n = 0; n < item.n && !v.map; n++) {
            float* partial = partial_of(item, partials, n);
            for (int first = 0; first + dim <= v.planes; first += dim) {
                add_scaled(partial + v.planes, dim, digit_value(first / dim), partial + first);
            }
        }
    }
    for (int n = 0; n < item.n; n++) {
        float* partial = partial_of(item, partials, n);
        const float* vectors = vectors_of(item, partial);
        float* o = partial + v.planes;
        const int head = n % item.n_heads;
        const float coded = lanes_sum(vectors, kCodedSum), top = vectors[16 * kTop];
        if (v.mean) {
            add_scaled(o, dim, coded, v.mean);
        }
        if (v.ones) {
            add_scaled(o, dim, lanes_sum(vectors, kZeroSum), v.ones);
        }
        float keep = 1.0f, sum = coded + lanes_sum(vectors, kExactSum);
        if (item.sinks) {
            const float sink = item.sinks[head] * kLog2e, highest = top > sink ? top : sink;
            keep = exp2(splat(top - highest))[0];
            sum = sum * keep + exp2(splat(sink - highest))[0];
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

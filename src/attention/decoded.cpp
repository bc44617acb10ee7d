// A page is decoded once for the rows of up to 16 tiles. Rows that see the same tokens of a block, which are nearly all,
// meet it together: eight query vectors share each load of it. Products are compiled for AVX-512, AVX2 and what every
// machine has, without fused multiply-adds: sums run over directions or tokens in ascending order within a lane, so all give
// the same bits. A row over 2,048 tokens (omni, 9 query and 3 KV heads of 64 channels, AVX-512, one thread) takes 3.0 ms
// alone, nearly all of it decoding, and 0.08 ms in a prompt of 512, three quarters of it products. The kernel of `int2` takes
// 0.06 and 0.03 ms.
#include "attention/decoded.h"

#include <crumb/error.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "attention/alibi.h"
#include "base/clones.h"
#include "base/exponential.h"

namespace crumb {

namespace {

constexpr float kNothing = -3.402823466e38f;  // the top of no logits: finite, so that differences are numbers
constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kSlack = 20.0f;  // a top is raised by logits that exceed it by more: sums are almost never rescaled
constexpr int kTogether = 24;    // query vectors whose logits are kept at a time
constexpr size_t kMostTiles = 16;  // of a task

// Numbers of several query vectors, `stride` apart.
template <class T>
struct Vectors {
    T* first;
    size_t stride;
    T* operator[](int v) const { return first + size_t(v) * stride; }
};

// out[v][width] += sum over i of x[v][i] rows[i][width].
template <int kVectors>
[[gnu::always_inline]] inline void add_products(int n, int width, Vectors<const float> x, const float* rows,
                                                Vectors<float> out) {
    for (int c = 0; c < width; c += kLanes) {
        Floats sum[kVectors];
        for (int v = 0; v < kVectors; v++) {
            sum[v] = *reinterpret_cast<const Floats*>(out[v] + c);
        }
        for (int i = 0; i < n; i++) {
            const Floats row = *reinterpret_cast<const Floats*>(rows + size_t(i) * width + c);
            for (int v = 0; v < kVectors; v++) {
                sum[v] += x[v][i] * row;
            }
        }
        for (int v = 0; v < kVectors; v++) {
            *reinterpret_cast<Floats*>(out[v] + c) = sum[v];
        }
    }
}

// The same for any number of vectors; width is a multiple of 16. Eight vectors share the loads of rows.
CRUMB_CLONES void add_products(int count, int n, int width, Vectors<const float> x, const float* rows, Vectors<float> out) {
    int v = 0;
    for (; v + 8 <= count; v += 8) {
        add_products<8>(n, width, {x[v], x.stride}, rows, {out[v], out.stride});
    }
    for (; v + 3 <= count; v += 3) {
        add_products<3>(n, width, {x[v], x.stride}, rows, {out[v], out.stride});
    }
    for (; v < count; v++) {
        add_products<1>(n, width, {x[v], x.stride}, rows, {out[v], out.stride});
    }
}

// Tokens [begin, end) of a block.
struct Tokens {
    int begin = 0, end = 0;
    bool empty() const { return begin >= end; }
    bool operator==(const Tokens&) const = default;
};

// What a row sees of a block through codes, or exactly: sinks may lie before coded tokens, recent ones after.
using Parts = std::array<Tokens, 2>;

// Adds mean[v] to logits[v][64]. Those that are not seen become -inf; highest[v] is the largest.
CRUMB_CLONES void add_means(int count, const int32_t (&seen)[kPageTokens], const float* mean, float (*logits)[kPageTokens],
                            float* highest) {
    for (int v = 0; v < count; v++) {
        Floats most = Floats{} + kNothing;
        for (int t = 0; t < kPageTokens; t += kLanes) {
            Floats& x = *reinterpret_cast<Floats*>(logits[v] + t);
            x = *reinterpret_cast<const Ints*>(seen + t) != 0 ? x + mean[v] : Floats{} + kMinusInfinity;
            most = x > most ? x : most;
        }
        float lanes[kLanes];
        std::memcpy(lanes, &most, sizeof lanes);
        for (int n = kLanes / 2; n > 0; n /= 2) {
            for (int l = 0; l < n; l++) {
                lanes[l] = lanes[l] < lanes[l + n] ? lanes[l + n] : lanes[l];
            }
        }
        highest[v] = lanes[0];
    }
}

// logits[v][64] become e^(logit - top[v]); their sum is added to sums[v].
CRUMB_CLONES void exponentials(int count, const float* top, float (*logits)[kPageTokens], float* sums) {
    for (int v = 0; v < count; v++) {
        Floats sum = {};
        for (int t = 0; t < kPageTokens; t += kLanes) {
            Floats x = *reinterpret_cast<const Floats*>(logits[v] + t);
            x -= top[v];
            exponential(x);
            *reinterpret_cast<Floats*>(logits[v] + t) = x;
            sum += x;
        }
        float lanes[kLanes];
        std::memcpy(lanes, &sum, sizeof lanes);
        sums[v] += folded(lanes);
    }
}

// BF16 is the upper half of FP32.
CRUMB_CLONES void widen(size_t n, const std::byte* halves, float* to) {
    for (size_t i = 0; i < n; i++) {
        uint16_t half;
        std::memcpy(&half, halves + 2 * i, sizeof half);
        const uint32_t bits = uint32_t(half) << 16;
        std::memcpy(to + i, &bits, sizeof bits);
    }
}

// to [width][n] = transposed from [n][width].
void transpose(size_t n, size_t width, const float* from, float* to) {
    for (size_t j = 0; j < width; j++) {
        for (size_t i = 0; i < n; i++) {
            to[j * n + i] = from[i * width + j];
        }
    }
}

// Rows of some tiles of a sequence and one KV head. Query vectors are rows times the heads of the group.
class Worker {
  public:
    Worker(const AttentionLayer& layer, const AttentionPlan& plan, std::span<const SequenceView> sequences,
           const AttentionIo& io)
        : layer_(layer),
          plan_(plan),
          sequences_(sequences),
          io_(io),
          exact_format_(bf16_format(layer.format.k.dim, layer.format.v.dim)),
          dim_k_(layer.format.k.dim),
          dim_v_(layer.format.v.dim),
          group_(layer.n_head / layer.n_head_kv),
          by_channel_(layer.format.planar()) {}

    void run(std::span<const AttentionTile> tiles, int head) {
        head_ = head;
        const AttentionTile &first = tiles.front(), &last = tiles.back();
        rows_ = plan_.rows().subspan(first.first_row, last.first_row + last.n_rows - first.first_row);
        record_ = -1;
        const size_t n = rows_.size() * size_t(group_);
        top_.assign(n, kNothing);
        for (const bool coded : {false, true}) {
            weights_[coded].assign(n, 0.0f);
            sums_[coded].assign(n * dim_v_, 0.0f);
        }
        prepare_queries();
        uint32_t begin = first.first_block, end = 0;
        for (const AttentionTile& tile : tiles) {
            begin = std::min(begin, tile.first_block);
            end = std::max(end, tile.end_block);
        }
        for (int block = int(begin); block < int(end); block++) {
            visit(block, true);
            visit(block, false);
        }
        finish();
    }

  private:
    const HeadTables& tables() const { return layer_.tables[head_]; }
    const QueryRow& row_of(int vector) const { return rows_[vector / group_]; }
    int head_of(int vector) const { return head_ * group_ + vector % group_; }
    int vectors() const { return int(top_.size()); }

    // Codes are met, and their values summed, by direction.
    bool by_direction(bool coded) const { return coded && !by_channel_; }

    Vectors<float> sums(bool by_direction, int vector) {
        return {&sums_[by_direction][size_t(vector) * dim_v_], size_t(dim_v_)};
    }

    // The inverse map [direction][channel].
    static std::vector<float> inverse(const SideTables& side) {
        std::vector<float> rows;
        for (int j = 0; j < side.format.dim; j++) {
            const auto row = inverse_row(side, j);
            rows.insert(rows.end(), row.begin(), row.end());
        }
        return rows;
    }

    void prepare_queries() {
        const size_t dim = size_t(dim_k_);
        q_.resize(vectors() * dim);
        q_mean_.assign(vectors(), 0.0f);
        for (int v = 0; v < vectors(); v++) {
            const float* q = io_.q + row_of(v).token * io_.token_stride + head_of(v) * io_.head_stride;
            std::transform(q, q + dim, &q_[v * dim], [&](float x) { return x * layer_.scale; });
        }
        if (by_channel_) {
            return;
        }
        std::vector<float> to_directions(dim * dim);
        transpose(dim, dim, inverse(tables().k).data(), to_directions.data());
        q_directions_.assign(q_.size(), 0.0f);
        add_products(vectors(), dim_k_, dim_k_, {q_.data(), dim}, to_directions.data(), {q_directions_.data(), dim});
        for (int v = 0; v < vectors() && !tables().k.mean.empty(); v++) {
            for (size_t c = 0; c < dim; c++) {
                q_mean_[v] += q_[v * dim + c] * tables().k.mean[c];
            }
        }
    }

    Parts seen(const QueryRow& row, int block, bool coded) const {
        const int sink = plan_.sink(), first_exact = std::max(sink, row.coded_end);
        const auto part = [&](int begin, int end) {
            const int first = block * kPageTokens;
            return Tokens{std::clamp(std::max(begin, row.begin) - first, 0, kPageTokens),
                          std::clamp(std::min(end, row.end) - first, 0, kPageTokens)};
        };
        return coded ? Parts{part(sink, row.coded_end), {}} : Parts{part(0, sink), part(first_exact, row.end)};
    }

    // Rows that see the same tokens of a block meet it together.
    void visit(int block, bool coded) {
        bool loaded = false;
        const int n = int(rows_.size());
        for (int begin = 0, end; begin < n; begin = end) {
            const Parts parts = seen(rows_[begin], block, coded);
            for (end = begin + 1; end < n && seen(rows_[end], block, coded) == parts;) {
                end++;
            }
            if (parts[0].empty() && parts[1].empty()) {
                continue;
            }
            if (!loaded) {
                coded ? load_coded(block) : load_exact(block);
                loaded = true;
            }
            for (int v = begin * group_; v < end * group_; v += kTogether) {
                add(v, std::min(kTogether, end * group_ - v), parts, block, coded);
            }
        }
    }

    // keys_ [D_k][64], values_ [64][D_v].
    void load_coded(int block) {
        const int blocks = layer_.format.tokens / kPageTokens, record = block / blocks;
        if (record != record_) {
            const BlockTable& table = sequences_[rows_[0].sequence].coded;
            CRUMB_ASSERT(size_t(record) < table.ids.size() && table.ids[record] != kNoBlock);
            const std::byte* page = table.block(record) + head_ * layer_.format.bytes();
            record_k_.resize(size_t(layer_.format.tokens) * dim_k_);
            record_v_.resize(size_t(layer_.format.tokens) * dim_v_);
            (by_channel_ ? decode_keys : key_directions)(layer_.format, tables().k, page, record_k_);
            (by_channel_ ? decode_values : value_directions)(layer_.format, tables().v, page, record_v_);
            record_ = record;
        }
        const size_t first = size_t(block % blocks) * kPageTokens;
        keys_.resize(size_t(dim_k_) * kPageTokens);
        transpose(kPageTokens, dim_k_, &record_k_[first * dim_k_], keys_.data());
        values_ = &record_v_[first * dim_v_];
    }

    void load_exact(int block) {
        const BlockTable& table = sequences_[rows_[0].sequence].exact;
        CRUMB_ASSERT(size_t(block) < table.ids.size() && table.ids[block] != kNoBlock);
        const std::byte* page = table.block(block) + head_ * exact_format_.bytes();
        keys_.resize(size_t(dim_k_) * kPageTokens);
        exact_v_.resize(size_t(dim_v_) * kPageTokens);
        widen(keys_.size(), page, keys_.data());
        widen(exact_v_.size(), page + exact_format_.value_codes(), exact_v_.data());
        values_ = exact_v_.data();
    }

    // A block for vectors [first, first + count).
    void add(int first, int count, const Parts& parts, int block, bool coded) {
        alignas(64) float logits[kTogether][kPageTokens] = {};
        const std::vector<float>& q = by_direction(coded) ? q_directions_ : q_;
        add_products(count, dim_k_, kPageTokens, {&q[size_t(first) * dim_k_], size_t(dim_k_)}, keys_.data(),
                     {logits[0], kPageTokens});
        weigh(first, count, parts, block, coded, logits);
        for (const Tokens& part : parts) {
            if (!part.empty()) {
                add_products(count, part.end - part.begin, dim_v_, {logits[0] + part.begin, kPageTokens},
                             values_ + size_t(part.begin) * dim_v_, sums(by_direction(coded), first));
            }
        }
    }

    // Logits become weights.
    void weigh(int first, int count, const Parts& parts, int block, bool coded, float (*logits)[kPageTokens]) {
        float mean[kTogether] = {}, highest[kTogether];
        if (coded) {
            std::copy_n(&q_mean_[first], count, mean);
        }
        if (layer_.softcap > 0 || layer_.alibi_max_bias > 0) {
            for (int v = 0; v < count; v++) {
                adjust(first + v, block, std::exchange(mean[v], 0.0f), logits[v]);
            }
        }
        alignas(Ints) int32_t is_seen[kPageTokens] = {};
        for (const Tokens& part : parts) {
            std::fill(is_seen + part.begin, is_seen + std::max(part.begin, part.end), 1);
        }
        add_means(count, is_seen, mean, logits, highest);
        for (int v = 0; v < count; v++) {
            if (highest[v] > top_[first + v] + kSlack) {
                raise(first + v, highest[v]);
            }
        }
        exponentials(count, &top_[first], logits, &weights_[coded][first]);
    }

    void adjust(int vector, int block, float mean, float* logits) const {
        const float slope =
            layer_.alibi_max_bias > 0 ? float(alibi_slope(layer_.alibi_max_bias, layer_.n_head, head_of(vector))) : 0;
        for (int t = 0; t < kPageTokens; t++) {
            const float logit = logits[t] + mean;
            logits[t] = (layer_.softcap > 0 ? layer_.softcap * std::tanh(logit / layer_.softcap) : logit) -
                        slope * float(std::abs(row_of(vector).position - (block * kPageTokens + t)));
        }
    }

    // Brings what a vector has so far to a higher top.
    void raise(int vector, float top) {
        const float factor = std::exp(top_[vector] - top);
        top_[vector] = top;
        for (const bool coded : {false, true}) {
            weights_[coded][vector] *= factor;
            float* sum = sums(coded, vector)[0];
            std::transform(sum, sum + dim_v_, sum, [&](float x) { return x * factor; });
        }
    }

    void finish() {
        if (!by_channel_) {
            add_products(vectors(), dim_v_, dim_v_, {sums_[true].data(), size_t(dim_v_)}, inverse(tables().v).data(),
                         sums(false, 0));
        }
        const bool add_mean = !by_channel_ && !tables().v.mean.empty();
        for (int v = 0; v < vectors(); v++) {
            const int head = head_of(v);
            float* out = io_.out + row_of(v).token * io_.out_stride + size_t(head) * dim_v_;
            if (row_of(v).begin >= row_of(v).end) {
                std::fill_n(out, dim_v_, 0.0f);
                continue;
            }
            if (layer_.sinks && layer_.sinks[head] > top_[v]) {
                raise(v, layer_.sinks[head]);
            }
            const float sink = layer_.sinks ? std::exp(layer_.sinks[head] - top_[v]) : 0.0f;
            const float weight = weights_[false][v] + weights_[true][v] + sink;
            const float* sum = sums(false, v)[0];
            for (int c = 0; c < dim_v_; c++) {
                out[c] = (sum[c] + (add_mean ? weights_[true][v] * tables().v.mean[c] : 0.0f)) / weight;
            }
        }
    }

    const AttentionLayer& layer_;
    const AttentionPlan& plan_;
    std::span<const SequenceView> sequences_;
    const AttentionIo& io_;
    const PageFormat exact_format_;
    const int dim_k_, dim_v_, group_;
    const bool by_channel_;  // decoded rows are channels with their mean, not directions

    int head_ = 0;
    std::span<const QueryRow> rows_;
    std::vector<float> q_, q_directions_;  // [query vector][D_k], times the scale
    std::vector<float> q_mean_;            // [query vector], q . mean of the keys
    std::vector<float> top_;               // [query vector], logits are weighed relative to it
    std::vector<float> weights_[2];        // [coded][query vector], their sums
    std::vector<float> sums_[2];           // [by direction][query vector][D_v], values times weights
    int record_ = -1;                         // the coded record that is decoded
    std::vector<float> record_k_, record_v_;  // [tokens][D]
    std::vector<float> keys_, exact_v_;
    const float* values_ = nullptr;
};

}  // namespace

void attend_decoded(const AttentionLayer& layer, const AttentionPlan& plan, std::span<const SequenceView> sequences,
                    const AttentionIo& io, std::atomic<uint32_t>& next, int n_threads) {
    Worker worker(layer, plan, sequences, io);
    const size_t heads = size_t(layer.n_head_kv);
    const size_t together = std::clamp<size_t>(plan.tiles().size() * heads / (4 * size_t(n_threads)), 1, kMostTiles);
    std::vector<std::span<const AttentionTile>> groups;
    for (size_t first = 0, n = 1; first < plan.tiles().size(); first += n, n = 1) {
        const std::span<const AttentionTile> rest = plan.tiles().subspan(first);
        const auto sequence = [&](const AttentionTile& tile) { return plan.rows()[tile.first_row].sequence; };
        while (n < std::min(rest.size(), together) && sequence(rest[n]) == sequence(rest[0])) {
            n++;
        }
        groups.push_back(rest.first(n));
    }
    const uint32_t n_tasks = uint32_t(groups.size() * heads);
    // The last tiles of a sequence see the most tokens: they go first.
    for (uint32_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
        const uint32_t task = n_tasks - 1 - i;
        worker.run(groups[task / heads], int(task % heads));
    }
}

}  // namespace crumb

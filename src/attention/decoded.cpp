// A page is decoded once for the rows of four tiles, and four query vectors share each load of it. A row over 2,048 tokens
// (omni, 9 query and 3 KV heads of 64 channels, AVX-512, one thread of a busy machine) takes 4.2 ms alone, nearly all of it
// decoding, and 0.31 ms in a prompt of 512, where the kernels of family T take 0.07 and 0.03 ms. Products are compiled for
// AVX-512, AVX2 and what every machine has: sums run over directions or tokens in ascending order within a lane, so all
// give the same bits.
#include "attention/decoded.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/alibi.h"
#include "base/clones.h"
#include "base/exponential.h"

namespace crumb {

namespace {

constexpr float kNothing = -3.402823466e38f;  // the top of no logits: finite, so that differences are numbers
constexpr size_t kTilesTogether = 4;  // tiles of a sequence that share a decoded page

constexpr int kTogether = 4;  // query vectors whose products share the loads of a block

// out[v][64] = sum over i of x[v][i] rows[i][64].
CRUMB_CLONES void combine64(int n, const float* const (&x)[kTogether], const float* rows, float (&out)[kTogether][64]) {
    for (int half = 0; half < 64; half += 2 * kLanes) {
        Floats sum[kTogether][2] = {};
        for (int i = 0; i < n; i++) {
            Floats row[2];
            std::memcpy(row, rows + i * 64 + half, sizeof row);
            for (int v = 0; v < kTogether; v++) {
                sum[v][0] += x[v][i] * row[0];
                sum[v][1] += x[v][i] * row[1];
            }
        }
        for (int v = 0; v < kTogether; v++) {
            std::memcpy(out[v] + half, sum[v], sizeof sum[v]);
        }
    }
}

// out[v][width] += sum over i of x[v][i] rows[i][width] for the first `count` vectors; width is a multiple of 16.
CRUMB_CLONES void add_rows(int n, int width, int count, const float* const (&x)[kTogether], const float* rows,
                           float* const (&out)[kTogether]) {
    for (int c = 0; c < width; c += kLanes) {
        Floats sum[kTogether];
        for (int v = 0; v < kTogether; v++) {
            sum[v] = *reinterpret_cast<const Floats*>(out[v] + c);
        }
        for (int i = 0; i < n; i++) {
            const Floats row = *reinterpret_cast<const Floats*>(rows + size_t(i) * width + c);
            for (int v = 0; v < kTogether; v++) {
                sum[v] += x[v][i] * row;
            }
        }
        for (int v = 0; v < count; v++) {
            *reinterpret_cast<Floats*>(out[v] + c) = sum[v];
        }
    }
}

constexpr Ints kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Adds to logits [begin, end) of 64 and returns the largest of them and `top`.
CRUMB_CLONES float shift(int begin, int end, float by, float* logits, float top) {
    Floats highest = Floats{} + top;
    for (int t = 0; t < 64; t += kLanes) {
        Floats x;
        std::memcpy(&x, logits + t, sizeof x);
        x += by;
        std::memcpy(logits + t, &x, sizeof x);
        highest = (kLane + t >= begin) & (kLane + t < end) & (x > highest) ? x : highest;
    }
    float lanes[kLanes];
    std::memcpy(lanes, &highest, sizeof lanes);
    for (int n = kLanes / 2; n > 0; n /= 2) {
        for (int l = 0; l < n; l++) {
            lanes[l] = lanes[l] < lanes[l + n] ? lanes[l + n] : lanes[l];
        }
    }
    return lanes[0];
}

// weights[64] = e^(logits - top), 0 outside of [begin, end). Returns their sum.
CRUMB_CLONES float exponentials(int begin, int end, const float* logits, float top, float* weights) {
    Floats sums = {};
    for (int t = 0; t < 64; t += kLanes) {
        Floats x;
        std::memcpy(&x, logits + t, sizeof x);
        x -= top;
        exponential(x);
        x = Floats(Ints(x) & (kLane + t >= begin) & (kLane + t < end));
        std::memcpy(weights + t, &x, sizeof x);
        sums += x;
    }
    float lanes[kLanes];
    std::memcpy(lanes, &sums, sizeof lanes);
    return folded(lanes);
}

// Tokens [begin, end) of a block.
struct Tokens {
    int begin = 0, end = 0;
    bool empty() const { return begin >= end; }
    bool operator==(const Tokens&) const = default;
};

// Query vectors that see the same tokens of a block: sinks may lie before coded tokens, recent ones after.
struct Seen {
    Tokens parts[2];
    int count = 0;
    size_t vectors[kTogether];
};

// Sums of one query vector so far.
struct Sums {
    float top = kNothing, weights = 0, coded_weights = 0;
    std::vector<float> coded, exact;  // [D_v] by direction, by channel
};

// Rows of a few tiles and one KV head. Query vectors are rows times the heads of the group.
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
        for (size_t i = 0; i < rows_.size(); i++) {
            for (int g = 0; g < group_; g++) {
                finish(rows_[i], head_ * group_ + g, sums_[i * group_ + g]);
            }
        }
    }

  private:
    const HeadTables& tables() const { return layer_.tables[head_]; }

    void prepare_queries() {
        const size_t n = rows_.size() * size_t(group_);
        q_.resize(n * dim_k_);
        q_directions_.resize(n * dim_k_);
        q_mean_.assign(n, 0.0f);
        sums_.assign(n, Sums{.coded = std::vector<float>(dim_v_), .exact = std::vector<float>(dim_v_)});
        inverse_v_.clear();
        for (int j = 0; j < dim_v_ && !by_channel_; j++) {
            const auto row = inverse_row(tables().v, j);
            inverse_v_.insert(inverse_v_.end(), row.begin(), row.end());
        }
        for (size_t i = 0; i < n; i++) {
            const size_t token = rows_[i / group_].token, head = head_ * group_ + i % group_;
            const float* q = io_.q + token * io_.token_stride + head * io_.head_stride;
            float* scaled = &q_[i * dim_k_];
            std::transform(q, q + dim_k_, scaled, [&](float x) { return x * layer_.scale; });
            if (by_channel_) {
                continue;
            }
            for (int j = 0; j < dim_k_; j++) {
                q_directions_[i * dim_k_ + j] = dot(scaled, inverse_row(tables().k, j));
            }
            if (!tables().k.mean.empty()) {
                q_mean_[i] = dot(scaled, tables().k.mean);
            }
        }
    }

    static float dot(const float* x, std::span<const float> y) {
        float sum = 0;
        for (size_t c = 0; c < y.size(); c++) {
            sum += x[c] * y[c];
        }
        return sum;
    }

    // What a row sees of a block, through codes or exactly: sinks may lie before coded tokens, recent ones after.
    void seen(const QueryRow& row, int block, bool coded, Tokens (&parts)[2]) const {
        const int sink = plan_.sink(), first_exact = std::max(sink, row.coded_end);
        const auto part = [&](int begin, int end) {
            const int first = block * kPageTokens;
            return Tokens{std::clamp(std::max(begin, row.begin) - first, 0, kPageTokens),
                          std::clamp(std::min(end, row.end) - first, 0, kPageTokens)};
        };
        parts[0] = coded ? part(sink, row.coded_end) : part(0, sink);
        parts[1] = coded ? Tokens{} : part(first_exact, row.end);
    }

    void visit(int block, bool coded) {
        bool loaded = false;
        Seen batch;
        for (size_t i = 0; i < rows_.size(); i++) {
            Tokens parts[2];
            seen(rows_[i], block, coded, parts);
            if (parts[0].empty() && parts[1].empty()) {
                continue;
            }
            if (!loaded) {
                coded ? load_coded(block) : load_exact(block);
                loaded = true;
            }
            for (int g = 0; g < group_; g++) {
                if (batch.count == kTogether || (batch.count > 0 && !std::ranges::equal(batch.parts, parts))) {
                    add(batch, block, coded);
                    batch.count = 0;
                }
                std::ranges::copy(parts, batch.parts);
                batch.vectors[batch.count++] = i * size_t(group_) + size_t(g);
            }
        }
        if (batch.count > 0) {
            add(batch, block, coded);
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
        for (int t = 0; t < kPageTokens; t++) {
            for (int j = 0; j < dim_k_; j++) {
                keys_[j * kPageTokens + t] = record_k_[(first + t) * dim_k_ + j];
            }
        }
        const auto rows = record_v_.begin() + ptrdiff_t(first * dim_v_);
        values_.assign(rows, rows + ptrdiff_t(kPageTokens) * dim_v_);
    }

    void load_exact(int block) {
        const BlockTable& table = sequences_[rows_[0].sequence].exact;
        CRUMB_ASSERT(size_t(block) < table.ids.size() && table.ids[block] != kNoBlock);
        const std::byte* page = table.block(block) + head_ * exact_format_.bytes();
        keys_.resize(size_t(dim_k_) * kPageTokens);
        values_.resize(size_t(dim_v_) * kPageTokens);
        for (int t = 0; t < kPageTokens; t++) {
            for (int c = 0; c < dim_k_; c++) {
                keys_[c * kPageTokens + t] = to_float(key_at(exact_format_, page, t, c));
            }
            for (int c = 0; c < dim_v_; c++) {
                values_[t * dim_v_ + c] = to_float(value_at(exact_format_, page, t, c));
            }
        }
    }

    void add(const Seen& batch, int block, bool coded) {
        const bool directions = coded && !by_channel_;
        const float *queries[kTogether], *weights[kTogether];
        float* out[kTogether];
        float logits[kTogether][kPageTokens], weight[kTogether][2][kPageTokens];
        for (int v = 0; v < kTogether; v++) {  // the last vector again where there are fewer
            const size_t i = batch.vectors[std::min(v, batch.count - 1)];
            queries[v] = &(directions ? q_directions_ : q_)[i * dim_k_];
            out[v] = (directions ? sums_[i].coded : sums_[i].exact).data();
        }
        combine64(dim_k_, queries, keys_.data(), logits);
        for (int v = 0; v < batch.count; v++) {
            weigh(batch, v, block, coded, logits[v], weight[v]);
        }
        for (size_t which = 0; which < std::size(batch.parts); which++) {
            const Tokens& part = batch.parts[which];
            if (part.empty()) {
                continue;
            }
            for (int v = 0; v < kTogether; v++) {
                weights[v] = weight[std::min(v, batch.count - 1)][which] + part.begin;
            }
            add_rows(part.end - part.begin, dim_v_, batch.count, weights, &values_[size_t(part.begin) * dim_v_], out);
        }
    }

    // Weights of a vector's logits; what the vector has so far is brought to their top.
    void weigh(const Seen& batch, int v, int block, bool coded, float* logits, float (&weights)[2][kPageTokens]) {
        const size_t i = batch.vectors[v];
        const QueryRow& row = rows_[i / size_t(group_)];
        const int head = head_ * group_ + int(i % size_t(group_));
        const float slope = layer_.alibi_max_bias > 0 ? float(alibi_slope(layer_.alibi_max_bias, layer_.n_head, head)) : 0;
        Sums& sums = sums_[i];
        float top = sums.top, mean = coded ? q_mean_[i] : 0.0f;
        if (layer_.softcap > 0 || slope != 0) {
            for (int t = 0; t < kPageTokens; t++) {
                const float logit = logits[t] + mean;
                logits[t] = (layer_.softcap > 0 ? layer_.softcap * std::tanh(logit / layer_.softcap) : logit) -
                            slope * float(std::abs(row.position - (block * kPageTokens + t)));
            }
            mean = 0;
        }
        for (const Tokens& part : batch.parts) {
            if (!part.empty()) {
                top = shift(part.begin, part.end, mean, logits, top);
                mean = 0;  // it is in all of them now
            }
        }
        rescale(sums, top);
        for (size_t part = 0; part < std::size(batch.parts); part++) {
            if (batch.parts[part].empty()) {
                continue;
            }
            const float sum = exponentials(batch.parts[part].begin, batch.parts[part].end, logits, top, weights[part]);
            sums.weights += sum;
            sums.coded_weights += coded ? sum : 0.0f;
        }
    }

    static void rescale(Sums& sums, float top) {
        if (top == sums.top) {
            return;
        }
        const float factor = std::exp(sums.top - top);
        sums.top = top;
        sums.weights *= factor;
        sums.coded_weights *= factor;
        for (float& x : sums.coded) {
            x *= factor;
        }
        for (float& x : sums.exact) {
            x *= factor;
        }
    }

    void finish(const QueryRow& row, int head, Sums& sums) {
        float* out = io_.out + row.token * io_.out_stride + size_t(head) * dim_v_;
        if (row.begin >= row.end) {
            std::fill_n(out, dim_v_, 0.0f);
            return;
        }
        if (layer_.sinks) {
            rescale(sums, std::max(sums.top, layer_.sinks[head]));
            sums.weights += std::exp(layer_.sinks[head] - sums.top);
        }
        if (!by_channel_) {
            const float* coded[kTogether];
            float* exact[kTogether];
            std::ranges::fill(coded, sums.coded.data());
            std::ranges::fill(exact, sums.exact.data());
            add_rows(dim_v_, dim_v_, 1, coded, inverse_v_.data(), exact);
        }
        const bool add_mean = !by_channel_ && !tables().v.mean.empty();
        for (int c = 0; c < dim_v_; c++) {
            out[c] = (sums.exact[c] + (add_mean ? sums.coded_weights * tables().v.mean[c] : 0.0f)) / sums.weights;
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
    std::vector<float> inverse_v_;         // [D_v][D_v]
    std::vector<Sums> sums_;
    int record_ = -1;                          // the coded record that is decoded
    std::vector<float> record_k_, record_v_;   // [tokens][D]
    std::vector<float> keys_, values_;
};

}  // namespace

void attend_decoded(const AttentionLayer& layer, const AttentionPlan& plan, std::span<const SequenceView> sequences,
                    const AttentionIo& io, std::atomic<uint32_t>& next) {
    Worker worker(layer, plan, sequences, io);
    std::vector<std::span<const AttentionTile>> groups;
    for (size_t first = 0, n = 1; first < plan.tiles().size(); first += n, n = 1) {
        const std::span<const AttentionTile> rest = plan.tiles().subspan(first);
        const auto sequence = [&](const AttentionTile& tile) { return plan.rows()[tile.first_row].sequence; };
        while (n < std::min(rest.size(), kTilesTogether) && sequence(rest[n]) == sequence(rest[0])) {
            n++;
        }
        groups.push_back(rest.first(n));
    }
    const uint32_t heads = uint32_t(layer.n_head_kv), n_tasks = uint32_t(groups.size()) * heads;
    // The last tiles of a sequence see the most tokens: they go first.
    for (uint32_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
        const uint32_t task = n_tasks - 1 - i;
        worker.run(groups[task / heads], int(task % heads));
    }
}

}  // namespace crumb

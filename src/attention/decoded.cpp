// Decoding a page costs about as much as 48 query vectors over it. A row over 2,048 tokens (9 query and 3 KV heads of 64
// channels, AVX-512, one thread) takes 3.5 ms alone and 0.41 ms in a prompt, where the kernels take 0.07 and 0.03 ms.
// Products are compiled for AVX-512, AVX2 and what every machine has: sums run over directions or tokens in ascending
// order within a lane, so all give the same bits.
#include "attention/decoded.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/alibi.h"
#include "base/clones.h"

namespace crumb {

namespace {

constexpr float kNothing = -3.402823466e38f;  // the top of no logits: finite, so that differences are numbers
constexpr int kLanes = 16;

using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4)));

// out[64] = sum over i of x[i] rows[i][64].
CRUMB_CLONES void combine64(int n, const float* x, const float* rows, float* out) {
    Floats sum[4] = {};
    for (int i = 0; i < n; i++) {
        for (int v = 0; v < 4; v++) {
            Floats row;
            std::memcpy(&row, rows + i * 64 + v * kLanes, sizeof row);
            sum[v] += x[i] * row;
        }
    }
    std::memcpy(out, sum, sizeof sum);
}

// out[width] += sum over i of x[i] rows[i][width]; width is a multiple of 16.
CRUMB_CLONES void add_rows(int n, int width, const float* x, const float* rows, float* out) {
    for (int c = 0; c < width; c += kLanes) {
        Floats sum;
        std::memcpy(&sum, out + c, sizeof sum);
        for (int i = 0; i < n; i++) {
            Floats row;
            std::memcpy(&row, rows + size_t(i) * width + c, sizeof row);
            sum += x[i] * row;
        }
        std::memcpy(out + c, &sum, sizeof sum);
    }
}

// Tokens [begin, end) of a block.
struct Tokens {
    int begin = 0, end = 0;
    bool empty() const { return begin >= end; }
};

// Sums of one query vector so far.
struct Sums {
    float top = kNothing, weights = 0, coded_weights = 0;
    std::vector<float> coded, exact;  // [D_v] by direction, by channel
};

// A tile of rows and one KV head. Query vectors are rows times the heads of the group.
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

    void run(const AttentionTile& tile, int head) {
        head_ = head;
        rows_ = plan_.rows().subspan(tile.first_row, tile.n_rows);
        record_ = -1;
        prepare_queries();
        for (int block = int(tile.first_block); block < int(tile.end_block); block++) {
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
                add(rows_[i], i * size_t(group_) + g, block, coded, parts);
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

    void add(const QueryRow& row, size_t i, int block, bool coded, const Tokens (&parts)[2]) {
        const int head = head_ * group_ + int(i % size_t(group_));
        const float slope = layer_.alibi_max_bias > 0 ? float(alibi_slope(layer_.alibi_max_bias, layer_.n_head, head)) : 0;
        float logits[kPageTokens];
        combine64(dim_k_, &(coded && !by_channel_ ? q_directions_ : q_)[i * dim_k_], keys_.data(), logits);
        Sums& sums = sums_[i];
        float top = sums.top;
        for (const Tokens& part : parts) {
            for (int t = part.begin; t < part.end; t++) {
                float logit = logits[t] + (coded ? q_mean_[i] : 0.0f);
                if (layer_.softcap > 0) {
                    logit = layer_.softcap * std::tanh(logit / layer_.softcap);
                }
                logits[t] = logit - slope * float(std::abs(row.position - (block * kPageTokens + t)));
                top = std::max(top, logits[t]);
            }
        }
        rescale(sums, top);
        std::vector<float>& out = coded && !by_channel_ ? sums.coded : sums.exact;
        for (const Tokens& part : parts) {
            for (int t = part.begin; t < part.end; t++) {
                logits[t] = std::exp(logits[t] - top);
                sums.weights += logits[t];
                sums.coded_weights += coded ? logits[t] : 0.0f;
            }
            if (!part.empty()) {
                add_rows(part.end - part.begin, dim_v_, logits + part.begin, &values_[size_t(part.begin) * dim_v_],
                         out.data());
            }
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
            add_rows(dim_v_, dim_v_, sums.coded.data(), inverse_v_.data(), sums.exact.data());
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
    const uint32_t heads = uint32_t(layer.n_head_kv), n_tasks = uint32_t(plan.tiles().size()) * heads;
    // The last tiles of a sequence see the most tokens: they go first.
    for (uint32_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
        const uint32_t task = n_tasks - 1 - i;
        worker.run(plan.tiles()[task / heads], int(task % heads));
    }
}

}  // namespace crumb

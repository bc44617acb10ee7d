// Attention by its definition: every token that a row sees is decoded, one softmax over all of them, in double
// precision.
#include <crumb/attention.h>
#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "attention/alibi.h"

namespace crumb {

namespace {

// K and V of the 64 tokens of a block in one KV head.
struct Rows {
    std::vector<float> k, v;
};

class Decoder {
  public:
    Decoder(const AttentionLayer& layer, const SequenceView& sequence, int head)
        : layer_(layer),
          sequence_(sequence),
          head_(head),
          exact_(bf16_format(layer.format.k.dim, layer.format.v.dim)) {}

    const Rows& block(int index, bool coded) {
        const auto [found, is_new] = blocks_.try_emplace({index, coded});
        if (is_new) {
            found->second = coded && layer_.format.coded() ? decode(index) : read(index, coded);
        }
        return found->second;
    }

  private:
    const std::byte* page(const BlockTable& table, int index, size_t bytes) const {
        CRUMB_ASSERT(size_t(index) < table.ids.size() && table.ids[index] != kNoBlock);
        return table.block(index) + head_ * bytes;
    }

    Rows empty() const {
        return {std::vector<float>(size_t(kPageTokens) * exact_.k.dim),
                std::vector<float>(size_t(kPageTokens) * exact_.v.dim)};
    }

    // A record may hold several blocks.
    Rows decode(int index) const {
        const int blocks = layer_.format.tokens / kPageTokens;
        const size_t first = size_t(index % blocks) * kPageTokens, tokens = size_t(layer_.format.tokens);
        const std::byte* record = page(sequence_.coded, index / blocks, layer_.format.bytes());
        Rows all = {std::vector<float>(tokens * exact_.k.dim), std::vector<float>(tokens * exact_.v.dim)}, rows = empty();
        decode_keys(layer_.format, layer_.tables[head_].k, record, all.k);
        decode_values(layer_.format, layer_.tables[head_].v, record, all.v);
        std::copy_n(all.k.begin() + ptrdiff_t(first * exact_.k.dim), rows.k.size(), rows.k.begin());
        std::copy_n(all.v.begin() + ptrdiff_t(first * exact_.v.dim), rows.v.size(), rows.v.begin());
        return rows;
    }

    // BF16 records, in the exact table or in place of codes.
    Rows read(int index, bool coded) const {
        const std::byte* record = page(coded ? sequence_.coded : sequence_.exact, index, exact_.bytes());
        Rows rows = empty();
        for (int t = 0; t < kPageTokens; t++) {
            for (int c = 0; c < exact_.k.dim; c++) {
                rows.k[t * exact_.k.dim + c] = to_float(key_at(exact_, record, t, c));
            }
            for (int c = 0; c < exact_.v.dim; c++) {
                rows.v[t * exact_.v.dim + c] = to_float(value_at(exact_, record, t, c));
            }
        }
        return rows;
    }

    const AttentionLayer& layer_;
    const SequenceView& sequence_;
    int head_;
    PageFormat exact_;
    std::map<std::pair<int, bool>, Rows> blocks_;
};

void attend_row(const AttentionLayer& layer, const QueryRow& row, int sink, int head, Decoder& decoder, const float* q,
                float* out) {
    const int dim_k = layer.format.k.dim, dim_v = layer.format.v.dim;
    const double slope = layer.alibi_max_bias > 0 ? alibi_slope(layer.alibi_max_bias, layer.n_head, head) : 0.0;
    const auto token = [&](int j) -> const Rows& {
        return decoder.block(j / kPageTokens, j >= sink && j < row.coded_end);
    };

    std::vector<double> logits;
    for (int j = row.begin; j < row.end; j++) {
        const float* k = token(j).k.data() + (j % kPageTokens) * dim_k;
        double logit = 0;
        for (int c = 0; c < dim_k; c++) {
            logit += double(q[c]) * k[c];
        }
        logit *= layer.scale;
        if (layer.softcap > 0) {
            logit = layer.softcap * std::tanh(logit / layer.softcap);
        }
        logits.push_back(logit - slope * std::abs(row.position - j));
    }

    std::fill_n(out, dim_v, 0.0f);
    if (logits.empty()) {
        return;
    }
    double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    if (layer.sinks) {
        top = std::max(top, double(layer.sinks[head]));
        sum = std::exp(layer.sinks[head] - top);
    }
    std::vector<double> values(dim_v);
    for (int j = row.begin; j < row.end; j++) {
        const float* v = token(j).v.data() + (j % kPageTokens) * dim_v;
        const double weight = std::exp(logits[j - row.begin] - top);
        sum += weight;
        for (int c = 0; c < dim_v; c++) {
            values[c] += weight * v[c];
        }
    }
    for (int c = 0; c < dim_v; c++) {
        out[c] = float(values[c] / sum);
    }
}

}  // namespace

void attend_reference(const AttentionLayer& layer, const AttentionPlan& plan, std::span<const SequenceView> sequences,
                      const AttentionIo& io) {
    const int group = layer.n_head / layer.n_head_kv;
    for (const AttentionTile& tile : plan.tiles()) {
        const auto rows = plan.rows().subspan(tile.first_row, tile.n_rows);
        for (int kv_head = 0; kv_head < layer.n_head_kv; kv_head++) {
            Decoder decoder(layer, sequences[rows[0].sequence], kv_head);
            for (const QueryRow& row : rows) {
                for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
                    attend_row(layer, row, plan.sink(), head, decoder,
                               io.q + row.token * io.token_stride + head * io.head_stride,
                               io.out + row.token * io.out_stride + size_t(head) * layer.format.v.dim);
                }
            }
        }
    }
}

}  // namespace crumb

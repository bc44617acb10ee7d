#include "verify.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>

namespace crumb::llama {

CacheConfig Verify::exact_config(const CacheConfig& config) {
    CacheConfig exact = config;
    exact.recipe = find_recipe("bf16");
    exact.memory = 0;
    exact.tokens_total = std::max(cache_bytes(config).tokens, config.tokens_per_sequence);
    for (CacheLayer& layer : exact.layers) { layer.stores = layer.stores && layer.window == 0; }
    set_formats(exact, nullptr);
    set_tables(exact, nullptr);
    return exact;
}

Verify::Verify(const CacheConfig& config, int every) : every_(every), cache_(exact_config(config)) {}

void Verify::crop(uint32_t sequence, int32_t length) { cache_.crop(sequence, length); }

void Verify::fork(uint32_t from, uint32_t to, int32_t length) { cache_.fork(from, to, std::min(length, cache_.length(from))); }

void Verify::reuse(uint32_t sequence, std::span<const int32_t> ids, int32_t own, uint64_t salt, int32_t common, int32_t length) {
    cache_.reuse(sequence, ids, std::min(own, cache_.length(sequence)), salt, common);
    cache_.crop(sequence, length);
}

void Verify::begin(std::span<const Append> appends, bool causal, const Cache& coded) {
    plan_ = {};
    stores_ = cache_.begin(appends, causal);
    const auto& layers = cache_.config().layers;
    const auto layer = std::ranges::find_if(layers, &CacheLayer::stores) - layers.begin();
    if (!stores_ || size_t(layer) == layers.size()) {
        for (int s = 0; s < cache_.config().n_sequences; ++s) { cache_.crop(s, 0); }
        return;
    }
    const auto exact_rows = cache_.plan(int(layer)).rows(), coded_rows = coded.plan(int(layer)).rows();
    CRUMB_ASSERT(exact_rows.size() == coded_rows.size());
    std::vector<QueryRow> rows;
    for (size_t i = 0; i < coded_rows.size(); ++i) {
        const QueryRow& row = coded_rows[i];
        CRUMB_ASSERT(row.token == exact_rows[i].token);
        const bool complete = cache_.length(row.sequence) == coded.length(row.sequence);
        if (complete && row.position % every_ == 0 && row.coded_end > cache_.config().sink) { rows.push_back(exact_rows[i]); }
    }
    plan_ = AttentionPlan(std::move(rows), cache_.config().sink);
}

void Verify::store(int layer, RowSource k, RowSource v, int thread, int n_threads) {
    if (stores_) { cache_.store(layer, k, v, thread, n_threads); }
}

void Verify::prepare(const AttentionLayer& a, int n_threads) { work_.prepare(plan_, a.n_head, a.n_head_kv, a.format, n_threads); }

void Verify::attend(const AttentionLayer& attention, int layer, const AttentionIo& io, int thread, int n_threads) {
    static const Isa isa = best_isa();
    if (!plan_.rows().empty()) { crumb::attend(isa, attention, plan_, cache_.views(layer), io, work_, thread, n_threads); }
}

void Verify::compare(const float* out, size_t out_stride, const float* exact, size_t exact_stride, size_t n) {
    std::lock_guard lock(mutex_);
    for (const QueryRow& row : plan_.rows()) {
        double wrong = 0, all = 0;
        for (size_t i = 0; i < n; ++i) {
            const double right = exact[row.token * exact_stride + i], off = out[row.token * out_stride + i] - right;
            wrong += off * off;
            all += right * right;
        }
        const double error = all > 0 ? std::sqrt(wrong / all) : 0;
        drift_.rows++;
        drift_.sum += error;
        drift_.worst = std::max(drift_.worst, error);
    }
}

Drift Verify::drift() const {
    std::lock_guard lock(mutex_);
    return drift_;
}

}  // namespace crumb::llama

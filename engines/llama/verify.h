// --kv-verify N: attention against exact K and V. A second cache keeps the same sequences in BF16, and every Nth token that
// reads codes attends in both. K and V are those of the run itself, so the difference is what the codes of one layer do
// to its attention, not what earlier differences have become.
//
// A sequence is checked as long as its exact rows are complete: one that was restored, or that began with pages whose
// exact rows are gone, is not.
#pragma once

#include <crumb/attention.h>
#include <crumb/cache.h>

#include <mutex>
#include <vector>

namespace crumb::llama {

// |out - exact| / |exact| of a row of attention in one layer.
struct Drift {
    uint64_t rows = 0;
    double sum = 0;
    double worst = 0;
};

class Verify {
public:
    // Every `every`th position of the cache that `config` describes.
    Verify(const CacheConfig& config, int every);

    static CacheConfig exact_config(const CacheConfig& config);
    Cache& cache() { return cache_; }
    bool checks(int layer) const { return cache_.config().layers[layer].stores; }

    // As the calls of Cache, after they were done there.
    void crop(uint32_t sequence, int32_t length);
    void fork(uint32_t from, uint32_t to, int32_t length);
    void reuse(uint32_t sequence, std::span<const int32_t> ids, int32_t own, uint64_t salt, int32_t common, int32_t length);
    void begin(std::span<const Append> appends, bool causal, const Cache& coded);
    void store(int layer, RowSource k, RowSource v, int thread, int n_threads);

    // What coded attention would be with exact K and V; only rows that are checked are written. attend() by all threads,
    // then compare() by one.
    void prepare(const AttentionLayer& attention, int n_threads);
    void attend(const AttentionLayer& attention, int layer, const AttentionIo& io, int thread, int n_threads);
    void compare(const float* out, size_t out_stride, const float* exact, size_t exact_stride, size_t n);

    Drift drift() const;

private:
    const int every_;
    Cache cache_;
    bool stores_ = false;  // this step
    AttentionPlan plan_;   // of the rows that are checked
    AttentionWork work_;
    mutable std::mutex mutex_;
    Drift drift_;
};

}  // namespace crumb::llama

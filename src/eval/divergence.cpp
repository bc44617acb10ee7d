#include <crumb/error.h>
#include <crumb/eval.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/clones.h"
#include "base/exponential.h"

namespace crumb {

namespace {

constexpr int kResamples = 500;

struct LogSum {
    double value;  // log sum exp
    size_t top;
};

using Doubles = double __attribute__((vector_size(8 * kLanes)));

constexpr float kNothing = -1e30f;  // a logit that adds nothing

// 16 of n logits from i on, kNothing where there are fewer.
[[gnu::always_inline]] inline void load(Floats& to, const float* x, size_t n, size_t i) {
    if (i + kLanes <= n) {
        std::memcpy(&to, x + i, sizeof to);
    } else {
        to = Floats{} + kNothing;
        std::memcpy(&to, x + i, sizeof(float) * (n - i));
    }
}

CRUMB_CLONES float largest(size_t n, const float* x) {
    Floats most = Floats{} + kNothing;
    for (size_t i = 0; i < n; i += kLanes) {
        Floats these;
        load(these, x, n, i);
        most = these > most ? these : most;
    }
    float top = most[0];
    for (int l = 1; l < kLanes; l++) {
        top = std::max(top, most[l]);
    }
    return top;
}

// sum of e^(x - top): terms in floats, their sums in doubles.
CRUMB_CLONES double sum_of_exponentials(size_t n, const float* x, float top) {
    Doubles sums = {};
    for (size_t i = 0; i < n; i += kLanes) {
        Floats terms;
        load(terms, x, n, i);
        terms -= top;
        exponential(terms);
        sums += __builtin_convertvector(terms, Doubles);
    }
    double lanes[kLanes];
    std::memcpy(lanes, &sums, sizeof lanes);
    return folded(lanes);
}

// sum of p (log p - log q) with log p = base - log_p and log p - log q = base - logits - shift, small numbers all.
CRUMB_CLONES double sum_of_divergence(size_t n, const float* base, float log_p, const float* logits, float shift) {
    Doubles sums = {};
    for (size_t i = 0; i < n; i += kLanes) {
        Floats p, q;
        load(p, base, n, i);
        load(q, logits, n, i);
        Floats differ = p - q - shift;
        p -= log_p;
        exponential(p);
        differ = p > 0 ? differ : Floats{};  // logits of minus infinity
        sums += __builtin_convertvector(p, Doubles) * __builtin_convertvector(differ, Doubles);
    }
    double lanes[kLanes];
    std::memcpy(lanes, &sums, sizeof lanes);
    return folded(lanes);
}

LogSum log_sum(std::span<const float> logits, const char* which) {
    const float top = largest(logits.size(), logits.data());
    const double value = std::log(sum_of_exponentials(logits.size(), logits.data(), top)) + top;
    if (!std::isfinite(value)) { fail("the logits of the {} run are not finite: the model or its KV cache is broken", which); }
    return {value, size_t(std::ranges::find(logits, top) - logits.begin())};
}

// All positions with the largest divergence first, so that a high percentile of a draw is found after a short walk.
struct Ranked {
    float kld;
    uint32_t block;
};

struct Sample {
    double mean_kld, kld_90, kld_99, kld_999, ppl_ratio, same_top;
};

class Blocks {
public:
    explicit Blocks(const std::vector<Block>& blocks) : blocks_(blocks) {
        for (uint32_t b = 0; b < blocks.size(); ++b) {
            for (const float kld : blocks[b].kld) { ranked_.push_back({kld, b}); }
        }
        std::stable_sort(ranked_.begin(), ranked_.end(), [](const Ranked& x, const Ranked& y) { return x.kld > y.kld; });
    }

    // Figures of the text in which block b occurs times[b] times.
    Sample sample(const std::vector<uint32_t>& times) const {
        double n = 0, kld = 0, log_ratio = 0, same = 0;
        for (size_t b = 0; b < blocks_.size(); ++b) {
            n += double(times[b]) * double(blocks_[b].kld.size());
            kld += times[b] * blocks_[b].sum_kld;
            log_ratio += times[b] * (blocks_[b].nll - blocks_[b].nll_base);
            same += double(times[b]) * double(blocks_[b].same_top);
        }
        return {kld / n, percentile(times, n, 0.9), percentile(times, n, 0.99), percentile(times, n, 0.999), std::exp(log_ratio / n), same / n};
    }

    double percentile(const std::vector<uint32_t>& times, double n, double p) const {
        const double above = n - 1 - std::min(n - 1, std::floor(p * n));  // so many are larger
        double seen = 0;
        for (const Ranked& r : ranked_) {
            seen += times[r.block];
            if (seen > above) { return r.kld; }
        }
        CRUMB_ASSERT(false);
    }

private:
    const std::vector<Block>& blocks_;
    std::vector<Ranked> ranked_;
};

// Deviation of one figure over the draws, summed up as they come.
class Spread {
public:
    void add(double x) {
        const double before = x - mean_;
        mean_ += before / ++n_;
        squares_ += before * (x - mean_);
    }
    double deviation() const { return n_ > 1 ? std::sqrt(squares_ / (n_ - 1)) : std::numeric_limits<double>::quiet_NaN(); }

private:
    double n_ = 0, mean_ = 0, squares_ = 0;
};

}  // namespace

double DivergenceSum::add(std::span<const float> base, std::span<const float> logits, int32_t next) {
    CRUMB_ASSERT(base.size() == logits.size() && next >= 0 && size_t(next) < base.size());
    const LogSum b = log_sum(base, "16-bit"), q = log_sum(logits, "quantised");
    const double kld = sum_of_divergence(base.size(), base.data(), float(b.value), logits.data(), float(b.value - q.value));
    const double nll_base = b.value - base[next], nll = q.value - logits[next];
    if (!std::isfinite(kld) || !std::isfinite(nll_base) || !std::isfinite(nll)) {
        fail("a logit is not finite: the divergence is {} nats, and the token that follows costs {} nats at 16 bit and {} quantised; the model or its KV "
             "cache is broken, or the text holds a token that the model forbids",
             kld, nll_base, nll);
    }
    if (!open_ || blocks_.back().kld.size() == kBlockPositions) { blocks_.emplace_back(); }
    open_ = true;
    Block& block = blocks_.back();
    block.kld.push_back(float(kld));
    block.sum_kld += kld;
    block.nll_base += nll_base;
    block.nll += nll;
    block.same_top += b.top == q.top;
    return kld;
}

void DivergenceSum::merge(const DivergenceSum& other) {
    blocks_.insert(blocks_.end(), other.blocks_.begin(), other.blocks_.end());
    open_ = false;
}

Divergence DivergenceSum::result() const {
    Divergence d;
    if (blocks_.empty()) { return d; }
    const Blocks blocks(blocks_);
    std::vector<uint32_t> times(blocks_.size(), 1);
    const Sample once = blocks.sample(times);
    double nll_base = 0, nll = 0;
    d.blocks = blocks_.size();
    for (const Block& block : blocks_) {
        d.positions += block.kld.size();
        nll_base += block.nll_base;
        nll += block.nll;
    }
    const double n = double(d.positions);
    d.median_kld = blocks.percentile(times, n, 0.5);
    d.max_kld = blocks.percentile(times, n, 1.0);
    d.ppl_base = std::exp(nll_base / n);
    d.ppl = std::exp(nll / n);

    Spread mean, p90, p99, p999, ratio, same;
    std::mt19937_64 random(1);
    for (int i = 0; d.blocks > 1 && i < kResamples; ++i) {
        std::fill(times.begin(), times.end(), 0);
        for (size_t b = 0; b < d.blocks; ++b) { ++times[random() % d.blocks]; }
        const Sample s = blocks.sample(times);
        mean.add(s.mean_kld);
        p90.add(s.kld_90);
        p99.add(s.kld_99);
        p999.add(s.kld_999);
        ratio.add(s.ppl_ratio);
        same.add(s.same_top);
    }
    d.mean_kld = {once.mean_kld, mean.deviation()};
    d.kld_90 = {once.kld_90, p90.deviation()};
    d.kld_99 = {once.kld_99, p99.deviation()};
    d.kld_999 = {once.kld_999, p999.deviation()};
    d.ppl_ratio = {once.ppl_ratio, ratio.deviation()};
    d.same_top = {once.same_top, same.deviation()};
    return d;
}

std::vector<size_t> pareto_front(std::span<const RateLoss> points) {
    std::vector<size_t> order(points.size());
    for (size_t i = 0; i < order.size(); ++i) { order[i] = i; }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        return points[a].rate != points[b].rate ? points[a].rate < points[b].rate : points[a].loss < points[b].loss;
    });
    std::vector<size_t> front;
    for (const size_t i : order) {
        if (front.empty() || points[i].loss < points[front.back()].loss) { front.push_back(i); }
    }
    return front;
}

}  // namespace crumb

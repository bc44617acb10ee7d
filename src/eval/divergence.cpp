#include <crumb/error.h>
#include <crumb/eval.h>

#include <algorithm>
#include <cmath>

namespace crumb {

namespace {

struct LogSum {
    double value;  // log sum exp
    size_t top;
};

LogSum log_sum(std::span<const float> logits, const char* which) {
    const auto top = std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float x : logits) { sum += std::exp(x - *top); }
    const double value = std::log(sum) + *top;
    if (!std::isfinite(value)) { fail("the logits of the {} run are not finite: the model or its KV cache is broken", which); }
    return {value, size_t(top - logits.begin())};
}

double percentile(const std::vector<float>& sorted, double p) {
    return sorted[std::min(sorted.size() - 1, size_t(p * double(sorted.size())))];
}

}  // namespace

double DivergenceSum::add(std::span<const float> base, std::span<const float> logits, int32_t next) {
    CRUMB_ASSERT(base.size() == logits.size() && next >= 0 && size_t(next) < base.size());
    const LogSum b = log_sum(base, "16-bit"), q = log_sum(logits, "quantised");
    double kld = 0;
    for (size_t i = 0; i < base.size(); ++i) {
        const float log_p = float(base[i] - b.value);
        if (log_p > -30.0f) { kld += double(std::exp(log_p)) * (log_p - (logits[i] - q.value)); }
    }
    kld_.push_back(float(kld));
    sum_ += kld;
    sum_squares_ += kld * kld;
    nll_base_ += b.value - base[next];
    nll_ += q.value - logits[next];
    same_top_ += b.top == q.top;
    return kld;
}

void DivergenceSum::merge(const DivergenceSum& other) {
    kld_.insert(kld_.end(), other.kld_.begin(), other.kld_.end());
    sum_ += other.sum_;
    sum_squares_ += other.sum_squares_;
    nll_base_ += other.nll_base_;
    nll_ += other.nll_;
    same_top_ += other.same_top_;
}

Divergence DivergenceSum::result() const {
    Divergence d;
    d.positions = kld_.size();
    if (kld_.empty()) { return d; }
    const double n = double(kld_.size());
    std::vector<float> sorted = kld_;
    std::sort(sorted.begin(), sorted.end());
    d.mean_kld = sum_ / n;
    d.mean_kld_error = n > 1 ? std::sqrt(std::max(0.0, sum_squares_ / n - d.mean_kld * d.mean_kld) / (n - 1)) : 0;
    d.max_kld = sorted.back();
    d.kld_999 = percentile(sorted, 0.999);
    d.kld_99 = percentile(sorted, 0.99);
    d.median_kld = percentile(sorted, 0.5);
    d.ppl_base = std::exp(nll_base_ / n);
    d.ppl = std::exp(nll_ / n);
    d.same_top = double(same_top_) / n;
    return d;
}

}  // namespace crumb

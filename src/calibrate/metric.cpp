#include <crumb/error.h>
#include <crumb/metric.h>

#include <algorithm>
#include <cmath>

namespace crumb {

namespace {

double trace(const std::vector<double>& m) {
    const auto d = size_t(std::lround(std::sqrt(double(m.size()))));
    double sum = 0;
    for (size_t i = 0; i < d; ++i) {
        sum += m[i * d + i];
    }
    return sum;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
    CRUMB_ASSERT(a.size() == b.size());
    const double ta = std::max(trace(a), 1e-300), tb = std::max(trace(b), 1e-300);
    double difference = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        difference += (a[i] / ta - b[i] / tb) * (a[i] / ta - b[i] / tb);
        size += b[i] / tb * b[i] / tb;
    }
    return std::sqrt(difference / std::max(size, 1e-300));
}

double median(std::vector<double> values) {
    if (values.empty()) {
        return 0;
    }
    const auto middle = values.begin() + std::ptrdiff_t(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

}  // namespace

Disagreement disagreement(const Metric& a, const Metric& b) {
    std::vector<double> k, v;
    for (const auto& [number, layer] : a) {
        const LayerMetric& other = b.at(number);
        for (size_t h = 0; h < layer.heads.size(); ++h) {
            k.push_back(distance(layer.heads[h].k, other.heads[h].k));
            v.push_back(distance(layer.heads[h].v, other.heads[h].v));
        }
    }
    return {median(k), median(v)};
}

}  // namespace crumb

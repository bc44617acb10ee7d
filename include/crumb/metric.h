// What noise on K and V costs: second moments of the loss gradient, which the `planes` recipe measures errors with.
//
// For one KV head of a layer, M = mean over tokens j of g_j^T g_j, where g_j is the gradient, with respect to noise added
// to row j of K (after RoPE and norms) or V as far queries alone read it (tokens that the cache keeps exact are exact),
// of the sum over scored positions of -log p(y), y drawn from the model itself. Unit: if every far row is off by an
// independent error e, then half of E[e M e^T] is, to first order, what the model's next-token distributions lose, in nats
// of KL divergence a position; so squared errors of different heads, layers, and of K and V, can be added and compared.
//
// Layers are the model's own numbers: those that store K and V. Layers that read another's count for the one they read.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace crumb {

struct HeadMetric {
    std::vector<double> k;  // [D_k][D_k], row major, symmetric, positive semi-definite
    std::vector<double> v;  // [D_v][D_v], same
    bool operator==(const HeadMetric&) const = default;
};

struct LayerMetric {
    std::vector<HeadMetric> heads;  // by KV head
    uint64_t tokens = 0;            // rows that the means are over
    bool operator==(const LayerMetric&) const = default;
};

using Metric = std::map<int, LayerMetric>;

// How much the shapes of two metrics of one model differ: |A / tr A - B / tr B| / |B / tr B|, median over all heads; 0 for
// equal shapes, above 1 for unrelated ones. Of two halves of the text it says how far one can trust the whole.
struct Disagreement {
    double k = 0, v = 0;
};
Disagreement disagreement(const Metric& a, const Metric& b);

}  // namespace crumb

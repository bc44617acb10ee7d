// A stand-in for the gradient metric (crumb/metric.h) that needs no backward pass: what noise on far K and V does to the
// output of their own layer's attention behind W_O, to first order. With softmax weights p, outputs o before W_O, and
// query heads of a KV head added up:
//
//   V:  sum over far pairs (t, j) of p_tj^2  W_O^T W_O
//   K:  sum over queries t of  scale^2 (sum over far j of p_tj^2 |W_O (v_j - o_t)|^2)  q_t^T q_t
//
// divided by the number of far rows. Unit: squares of residual-stream elements, not nats; what later layers make of them
// is left out. On SmolLM2-135M it is worth as much as the gradient of a thousand tokens, mostly for K and for sharing
// bits between layers.
#pragma once

#include <crumb/calibrate.h>
#include <crumb/metric.h>

#include <map>
#include <span>
#include <vector>

namespace crumb {

class LocalMetric {
  public:
    // Rows sink <= j <= t - recent are far for query t. Threads change the time, never a bit.
    LocalMetric(int sink, int recent, int n_threads = 1);

    // `projection`: W_O, [n_out][n_head * D_v], rows at n_head * D_v floats. Only layers that have one are measured.
    void set_projection(int layer, const LayerShape& shape, std::span<const float> projection);
    bool measures(int layer) const { return layers_.contains(layer); }

    // The blocks that follow are positions 0, 1, ... of a new sequence, which belongs to this part of the text.
    void begin_sequence(int fold = 0);

    // The next tokens of the sequence; `scale` is that of the softmax, which is causal and over all keys. K and V of the
    // sequence are kept as floats. Throws Error if the shape is not that of the projection.
    void observe(int layer, const LayerShape& shape, float scale, const TokenBlock& block);

    // One for each part of the text that has queries with far rows. Throws Error that names the layers that saw none.
    std::vector<Metric> metrics() const;

  private:
    // Of one query head and one part of the text.
    struct Sums {
        std::vector<double> k;  // [D_k][D_k], upper triangle
        double v = 0;           // of p^2
    };
    struct Head {
        std::vector<double> output;  // [D_v][D_v]  W_O^T W_O of the head
        std::vector<float> factor;   // [D_v][D_v]  L, lower triangular, L L^T = output
        std::vector<Sums> folds;
    };
    struct Layer {
        LayerShape shape;
        std::vector<Head> heads;
        std::vector<std::vector<float>> keys;    // by KV head, [tile][D_k][kTile]
        std::vector<std::vector<float>> values;  // by KV head, [tokens][D_v]
        int64_t position = 0;
        std::vector<uint64_t> tokens;  // by part: far rows, one for each query that has any
    };
    void add_head(Layer& layer, int head, float scale, const TokenBlock& block) const;
    static LayerMetric mean_of(const Layer& layer, size_t fold);

    std::map<int, Layer> layers_;
    int sink_, recent_, n_threads_;
    size_t fold_ = 0, n_folds_ = 1;
};

}  // namespace crumb

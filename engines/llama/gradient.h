// The gradient metric (crumb/metric.h) of a GGUF model, by one forward and one backward pass over each window of text.
//
// Forward layer by layer, keeping the layers' outputs; the head; then back layer by layer, each layer's forward pass
// computed again. So memory beside the weights is n_layer x n x n_embd floats, at most 128 MiB of logits and one layer's
// graph, and there is no limit on the depth of a model. Weights are used as they are in the file: forward is what
// llama.cpp computes on a CPU with this file, and rounding of activations to 8 bits in products with quantised weights is
// passed straight through on the way back.
#pragma once

#include <crumb/metric.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "gradient_attention.h"
#include "gradient_checkpoint.h"
#include "gradient_graph.h"
#include "gradient_head.h"

namespace crumb::llama {

// Of the noise on a layer's far rows; row j of KV head h is at (h * n + j) * dim.
struct RowGradients {
    int layer, n_tokens, n_head_kv, dim_k, dim_v;
    const float *k, *v;
};

// One window length: graph, buffers, and the passes over it.
class WindowGradient {
  public:
    WindowGradient(llama_context* context, int n_tokens, FarRule rule, int n_threads);

    // Emits the way back through every layer, without computing anything. Throws Error that names what has no rule.
    void require_rules();

    // Calls each() for every layer whose rows the cache codes, from the last to the first. `progress` gets the work done
    // since its last call. Returns the loss.
    double run(Compute& compute, std::span<const llama_token> tokens, uint64_t seed,
               const std::function<void(const RowGradients&)>& each, const std::function<void(double)>& progress);

    double work() const;  // multiply-adds, roughly
    size_t kept_bytes() const;

  private:
    struct Back;
    void emit(Back& back, int layer);
    struct Work {
        double forward, back;
    };
    Work work(int layer) const;

    FarRule rule_;
    int lowest_ = 0;  // the layer where the way back ends: below it no rows are coded
    WindowAttention attention_;
    WindowGraph graph_;
    Head head_;
    ggml_context_ptr context_;
    ggml_tensor* gradient_ = nullptr;  // of the output of the layer in hand
    std::unique_ptr<Kept> kept_;
    std::vector<Work> work_;  // by layer
    double head_work_ = 0;    // of a slice
};

struct GradientOptions {
    FarRule rule;  // what the cache will keep exact
    uint64_t seed = 0;
    // Gradients of rows that are longer than this times their median length in a head are shortened to it, and the
    // head's sum is scaled to what its trace was without that; 0: none. On held-out text (SmolLM2, 2 windows of 1024
    // against 2 others, both ways) the loss that planes predicts at 2 bits is, without, with 10, 3, 1: at equal budgets
    // 18.4 18.6 17.1 16.3, with one budget over the model 8.5 5.3 4.9 4.8 of what the other text's own metric reaches at
    // equal budgets. Clipped without the scaling, layers lose their measure: 22 with one budget.
    double clip = 3;
    int n_threads = 1;
    std::filesystem::path checkpoint;  // empty: none is written
    std::string model_hash;            // what the checkpoint belongs to
};

// Throws Error if the model is not supported, before any work: the text says why and what to type instead. `model` was
// loaded with Load::mapped; `folds` says for each window which part of the text it belongs to, 0 or 1. One metric is
// returned for each part that has windows with far rows. Progress goes to stderr. The same model, windows, seed and
// options give the same bits, whatever the threads, and however often the run was stopped and went on from its
// checkpoint.
std::vector<Metric> gradient_metrics(llama_model* model, std::span<const std::vector<llama_token>> windows,
                                     std::span<const int> folds, const GradientOptions& options);

}  // namespace crumb::llama

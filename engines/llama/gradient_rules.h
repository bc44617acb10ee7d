// The way back through a graph of ggml: one rule an operation, made of ordinary operations only.
//
// ggml has a backward pass of its own, for training. It ends the process at an operation that it does not know (GELU,
// GEGLU, LayerNorm, ...), and goes through a quantised weight with OUT_PROD, which dequantises each row once a token.
// Here a weight W [n, m] is dequantised and transposed once, and MUL_MAT takes the gradient [m, t] to [n, t].
#pragma once

#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

struct ggml_context;
struct ggml_tensor;

namespace crumb::llama {

class Reverse {
  public:
    // What a node does with its gradient instead of a rule; such a node always gets one.
    using OwnRule = std::function<void(Reverse&, ggml_tensor* gradient)>;

    explicit Reverse(ggml_context* context) : context_(context) {}

    void want(ggml_tensor* leaf) { needed_.insert(leaf); }
    void set_rule(ggml_tensor* node, OwnRule rule) { rules_[node] = std::move(rule); }

    // Emits what computes the gradients, from that of `result`. `nodes` lead to `result` and come in the order of their
    // computation. Throws Error that names the operation that has no rule.
    void run(const std::vector<ggml_tensor*>& nodes, ggml_tensor* result, ggml_tensor* gradient);

    // Of a wanted leaf, or nullptr if nothing came back to it.
    ggml_tensor* gradient(ggml_tensor* tensor) const;

    // For rules.
    bool needs(const ggml_tensor* tensor) const { return needed_.contains(tensor); }
    void add(ggml_tensor* tensor, ggml_tensor* gradient);
    // Left to itself, ggml computes a sum over blocks first for K and then for V, and keeps the scores of all blocks.
    void compute_next(ggml_tensor* tensor) { order_.push_back(tensor); }
    const std::vector<ggml_tensor*>& order() const { return order_; }
    ggml_context* context() const { return context_; }

  private:
    void step(ggml_tensor* node, ggml_tensor* gradient);
    void unary(ggml_tensor* node, ggml_tensor* gradient);
    void gate(ggml_tensor* node, ggml_tensor* gradient);
    ggml_tensor* through_weight(ggml_tensor* weight, ggml_tensor* gradient);

    ggml_context* context_;
    std::unordered_set<const ggml_tensor*> needed_;
    std::unordered_map<const ggml_tensor*, OwnRule> rules_;
    std::unordered_map<const ggml_tensor*, ggml_tensor*> gradients_;
    std::vector<ggml_tensor*> order_;
};

// Rows become columns, in new memory.
ggml_tensor* transposed(ggml_context* context, ggml_tensor* tensor);
ggml_tensor* contiguous(ggml_context* context, ggml_tensor* tensor);

}  // namespace crumb::llama

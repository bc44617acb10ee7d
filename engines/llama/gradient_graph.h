// llama.cpp's own forward graph over one window of tokens, without a KV cache, and cut into layers.
//
// The graph of any architecture that asks for a plain or sliding-window KV cache is built by llama.cpp; attention goes
// through crumb's hooks to a function of ours. The tensors that llama.cpp names l_out-N are the cuts: layer N computes
// l_out-N from l_out-(N-1), or from the tokens. The gradient is right only if nothing else connects layers, which is
// checked.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "gradient_attention.h"
#include "session.h"

class llm_graph_result;

namespace crumb::llama {

// A small context, for what llama.cpp builds graphs from. Throws Error unless attention is what AttentionCall says: causal
// softmax over K and V of the layer itself, over all keys or a sliding window. The text names what is in the way.
ContextPtr plain_context(llama_model* model);

// The sliding windows of a model's layers, 0 for those that see everything.
std::vector<int> attention_windows(const llama_model& model);

class WindowGraph {
  public:
    // Returns the attention's output, [D_v * heads, n]; called once a layer.
    using Attend = std::function<ggml_tensor*(ggml_context*, const AttentionCall&)>;

    // `context`: a plain_context() of a model that was loaded with Load::mapped. Throws Error if its layers cannot be
    // cut.
    WindowGraph(llama_context* context, int n_tokens, Attend attend);
    ~WindowGraph();

    void set_tokens(std::span<const llama_token> tokens);  // n of them

    int n_tokens() const { return n_; }
    int n_layer() const { return int(outputs_.size()); }

    // Layer n_layer() leads from the last layer's output to what the head reads. Layer 0 has no input but the tokens.
    ggml_tensor* input(int layer) const { return layer == 0 ? nullptr : outputs_[layer - 1]; }
    ggml_tensor* output(int layer) const { return layer == n_layer() ? hidden_ : outputs_[layer]; }
    ggml_tensor* hidden() const { return hidden_; }  // [n_embd, n]
    ggml_tensor* logits() const { return logits_; }  // [n_vocab, n]; the only one whose data are not kept

    struct Attention {
        AttentionCall call;
        ggml_tensor* output = nullptr;
    };
    const std::map<int, Attention>& attentions() const { return attentions_; }  // by layer

    size_t kept_bytes() const { return kept_->bytes(); }

  private:
    struct Batch;
    class Memory;
    void require_separate_layers() const;

    const int n_;
    std::unique_ptr<Batch> batch_;
    std::unique_ptr<llm_graph_result> result_;
    std::vector<ggml_tensor*> outputs_;
    ggml_tensor *hidden_ = nullptr, *logits_ = nullptr;
    std::map<int, Attention> attentions_;
    std::unique_ptr<Kept> kept_;
};

}  // namespace crumb::llama

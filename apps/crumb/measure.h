// What crumb eval has an engine do. Nothing here knows of files or tables.
#pragma once

#include "session.h"

#include "eval/ledger.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace crumb::app {

// A way to keep K and V: a recipe with its windows, or llama.cpp's own cache.
struct Variant {
    std::string label;
    std::optional<llama::KvOptions> kv;
    ggml_type stock = GGML_TYPE_F16;  // of llama.cpp's cache

    bool base() const { return !kv && stock == GGML_TYPE_F16; }
};

using Tokens = std::vector<llama_token>;
using Report = std::function<void(size_t tokens)>;  // so many more have been read

inline constexpr int kTimedTokens = 16;  // decoded one by one after a window, for the speed

// 16 bit and variants walk through the same tokens side by side, ubatch by ubatch, so that 16 bit is run once for all of
// them and no logits are kept. Memory: a KV cache and two ubatches of logits for each.
class Lockstep {
  public:
    // shape.n_ctx: window + kTimedTokens
    Lockstep(llama_model* model, const llama::ContextOptions& shape, std::span<const Variant> variants);

    // `tokens`: a window and kTimedTokens that follow it. Positions from `first` on that have a successor in the window
    // count. Records of 16 bit, then of each variant.
    std::vector<WindowRecord> run(std::span<const llama_token> tokens, int first, const Report& report);

  private:
    llama::ContextOptions shape_;
    int n_vocab_;
    std::vector<llama::ContextPtr> contexts_;  // 16 bit, then the variants
};

// Bytes that one context of Lockstep takes, besides its KV cache: logits in the graph and in the output, activations.
size_t context_bytes(const llama_model* model, int ubatch);

// Reads the prefix once and asks each question in a fork of it.
std::vector<Answer> ask(llama_model* model, const llama::ContextOptions& shape, const Variant& variant, const Haystack& haystack,
                        const Report& report);

// Reads the prompt, then goes on token by token, always with the most likely one; ends of text do not end it. With
// `follow`: along those tokens, noting where it would have gone elsewhere.
TrajectoryRecord generate(llama_model* model, const llama::ContextOptions& shape, const Variant& variant, std::span<const llama_token> prompt,
                          int n_tokens, const Tokens* follow, const Report& report);

// Every KV head of every layer, from the keys of these tokens (the first 64 left out).
std::vector<KeyShape> key_shapes(llama_model* model, const llama::ContextOptions& shape, std::span<const llama_token> tokens, const Report& report);

}  // namespace crumb::app

// Tiny models with random weights of the graph families that the gradient metric supports.
#pragma once

#include "tiny_gguf.h"

namespace crumb::llama {

struct TinyShape {
    int64_t layers = 3, embd = 64, heads = 4, heads_kv = 2, dim = 16, ff = 96, vocab = 48;
};

// `biases`: of every projection. `fused`: Q, K and V in one matrix, and the gate with what it gates. `layer_norm`: with
// biases, and a feed-forward part without a gate. `gemma`: norms of Q and K and behind both parts.
struct TinyFamily {
    const char* architecture;
    bool biases = false, fused = false, layer_norm = false, gemma = false;
};

inline void tiny_model(const TinyFamily& f, const std::filesystem::path& path, const TinyShape& s = {}) {
    TinyGguf gguf(f.architecture);
    gguf.set("vocab_size", uint32_t(s.vocab));
    gguf.set("context_length", uint32_t(4096));
    gguf.set("embedding_length", uint32_t(s.embd));
    gguf.set("block_count", uint32_t(s.layers));
    gguf.set("feed_forward_length", uint32_t(s.ff));
    gguf.set("attention.head_count", uint32_t(s.heads));
    gguf.set("attention.head_count_kv", uint32_t(s.heads_kv));
    gguf.set("attention.key_length", uint32_t(s.dim));
    gguf.set("attention.value_length", uint32_t(s.dim));
    gguf.set("rope.dimension_count", uint32_t(s.dim));
    gguf.set(f.layer_norm ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon", 1e-5f);

    const auto matrix = [&](const std::string& name, int64_t in, int64_t out, bool bias) {
        gguf.tensor(name + ".weight", {in, out}, 1.2f / std::sqrt(float(in)));
        if (bias) { gguf.tensor(name + ".bias", {out}, 0.2f); }
    };
    const auto norm = [&](const std::string& name, int64_t d) {
        gguf.tensor(name + ".weight", {d}, 0.1f, 1.0f);
        if (f.layer_norm) { gguf.tensor(name + ".bias", {d}, 0.1f); }
    };
    const int64_t q = s.heads * s.dim, kv = s.heads_kv * s.dim;
    gguf.tensor("token_embd.weight", {s.embd, s.vocab}, 1.0f);
    norm("output_norm", s.embd);
    matrix("output", s.embd, s.vocab, false);
    for (int64_t il = 0; il < s.layers; ++il) {
        const std::string blk = "blk." + std::to_string(il) + ".";
        norm(blk + "attn_norm", s.embd);
        if (f.fused) {
            matrix(blk + "attn_qkv", s.embd, q + 2 * kv, f.biases);
        } else {
            matrix(blk + "attn_q", s.embd, q, f.biases);
            matrix(blk + "attn_k", s.embd, kv, f.biases);
            matrix(blk + "attn_v", s.embd, kv, f.biases);
        }
        matrix(blk + "attn_output", q, s.embd, f.layer_norm);
        norm(blk + "ffn_norm", s.embd);
        if (f.gemma) {
            norm(blk + "attn_q_norm", s.dim);
            norm(blk + "attn_k_norm", s.dim);
            norm(blk + "post_attention_norm", s.embd);
            norm(blk + "post_ffw_norm", s.embd);
        }
        if (!f.fused && !f.layer_norm) { matrix(blk + "ffn_gate", s.embd, s.ff, false); }
        matrix(blk + "ffn_up", s.embd, f.fused ? 2 * s.ff : s.ff, f.layer_norm);
        matrix(blk + "ffn_down", s.ff, s.embd, f.layer_norm);
    }
    if (f.gemma) {  // layer 2 of 3 sees everything
        gguf.set("attention.sliding_window", uint32_t(200));
        gguf.set("attention.sliding_window_pattern", uint32_t(3));
    }
    gguf.write(path);
}

inline constexpr TinyFamily kTinyLlama{"llama"};
inline constexpr TinyFamily kTinyQwen2{.architecture = "qwen2", .biases = true};
inline constexpr TinyFamily kTinyGemma3{.architecture = "gemma3", .gemma = true};
inline constexpr TinyFamily kTinyPhi3{.architecture = "phi3", .fused = true};
inline constexpr TinyFamily kTinyStarcoder2{.architecture = "starcoder2", .biases = true, .layer_norm = true};

}  // namespace crumb::llama

// Models and text that `make test` fetched, and what the tests ask of an engine.
#pragma once

#include "session.h"

#include <crumb/error.h>
#include <crumb/eval.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <thread>

namespace crumb::llama {

inline const std::filesystem::path kCache = CRUMB_CACHE;

inline std::filesystem::path model_path(const std::string& name) {
    const auto path = kCache / "models" / name;
    if (!std::filesystem::exists(path)) { fail("{} is missing: run make test, which fetches it", path.string()); }
    return path;
}

inline const char* const kSmolLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf";
inline const char* const kGemma3 = "gemma-3-270m-Q4_K_M.gguf";

// The same model with F32 weights. llama.cpp quantises activations for quantised weights, which turns the last bit of a
// sum into a step; with F32 weights two engines that sum in another order stay close. Made once per build folder.
inline std::filesystem::path f32_copy(const std::string& name) {
    const std::filesystem::path target = std::filesystem::path(CRUMB_SCRATCH) / (name + ".f32.gguf");
    if (!std::filesystem::exists(target)) {
        auto params = llama_model_quantize_default_params();
        params.ftype = LLAMA_FTYPE_ALL_F32;
        params.allow_requantize = true;
        const std::filesystem::path part = target.string() + ".part";
        if (llama_model_quantize(model_path(name).c_str(), part.c_str(), &params) != 0) { fail("cannot write {}", part.string()); }
        std::filesystem::rename(part, target);
    }
    return target;
}

inline std::vector<llama_token> text_tokens(const llama_model* model, const std::string& domain, size_t n) {
    // Some tokenizers take the square of the length: no more text than is needed, at most 8 bytes a token.
    const auto text = read_text(kCache / "text" / "evaluation" / (domain + ".txt")).substr(0, n * 8);
    auto tokens = tokenize(model, text, true, false);
    if (tokens.size() < n) { fail("{} has {} tokens, {} are needed", domain, tokens.size(), n); }
    tokens.resize(n);
    return tokens;
}

inline KvOptions kv(const std::string& recipe, int sink = 64, int recent = 256) {
    KvOptions options;
    options.recipe = recipe;
    options.sink = sink;
    options.recent = recent;
    return options;
}

// Parameters of a context for tests that need several sequences; more threads than cores would wait for each other.
inline llama_context_params several_sequences(int n_ctx, int n_ubatch, int n_sequences) {
    auto params = llama_context_default_params();
    params.n_ctx = n_ctx;
    params.n_ubatch = n_ubatch;
    params.n_batch = n_ctx;
    params.n_seq_max = n_sequences;
    params.n_threads = params.n_threads_batch = int(std::max(1u, std::thread::hardware_concurrency()));
    return params;
}

inline int n_vocab(const llama_context* context) { return llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context))); }

inline std::vector<float> logits(llama_context* context, int row) {
    const float* data = llama_get_logits_ith(context, row);
    return {data, data + n_vocab(context)};
}

inline llama_token top(const std::vector<float>& l) { return llama_token(std::max_element(l.begin(), l.end()) - l.begin()); }

inline double nll(const std::vector<float>& l, llama_token token) {
    const float m = *std::max_element(l.begin(), l.end());
    double sum = 0;
    for (const float x : l) { sum += std::exp(double(x) - m); }
    return std::log(sum) + m - l[token];
}

// KL(base || other), nats a token.
inline double mean_divergence(const std::vector<std::vector<float>>& base, const std::vector<std::vector<float>>& other) {
    DivergenceSum sum;
    for (size_t i = 0; i < base.size(); ++i) { sum.add(base[i], other[i], 0); }
    return sum.result().mean_kld.value;
}

inline std::vector<llama_token> greedy(llama_context* context, int position, int n) {
    std::vector<llama_token> out;
    llama_token token = top(logits(context, -1));
    for (int i = 0; i < n; ++i) {
        out.push_back(token);
        decode(context, std::span(&token, 1), position + i, true);
        token = top(logits(context, -1));
    }
    return out;
}

inline std::vector<uint8_t> state_of(llama_context* context, llama_seq_id id) {
    std::vector<uint8_t> state(llama_state_seq_get_size(context, id));
    state.resize(llama_state_seq_get_data(context, state.data(), state.size(), id));
    return state;
}

// What the cache wrote of it: llama.cpp puts its magic number and the sequence's id in front.
inline std::vector<uint8_t> cached(llama_context* context, llama_seq_id id) {
    auto state = state_of(context, id);
    state.erase(state.begin(), state.begin() + 2 * sizeof(uint32_t));
    return state;
}

}  // namespace crumb::llama

// A model and its contexts as values that clean up after themselves, for the commands that drive llama.cpp directly.
#pragma once

#include "kv.h"

#include "llama.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace crumb::llama {

struct FreeModel {
    void operator()(llama_model* model) const { llama_model_free(model); }
};
struct FreeContext {
    void operator()(llama_context* context) const { llama_free(context); }
};
using ModelPtr = std::unique_ptr<llama_model, FreeModel>;
using ContextPtr = std::unique_ptr<llama_context, FreeContext>;

// llama.cpp's own log is silent unless something went wrong.
void quiet_log();

// Throws Error if the file is no model that llama.cpp can load. `mapped`: weights stay in main memory as the file has
// them, ready at once and readable by others than llama.cpp; `all`: where and how they compute fastest.
enum class Load : uint8_t { all, mapped };
ModelPtr load_model(const std::filesystem::path& file, Load what = Load::all);

struct ContextOptions {
    int n_ctx = 4096;
    int n_ubatch = 512;
    int n_threads = 0;  // 0: all cores
    int n_sequences = 1;  // they share n_ctx
    bool kv_offload = false;  // crumb's cache lies where its layers are; otherwise on the CPU, where every recipe runs
    ggml_type stock_type = GGML_TYPE_F16;  // of llama.cpp's own cache
    ggml_backend_sched_eval_callback observe = nullptr;
    void* observer = nullptr;
};

// With crumb's cache, or llama.cpp's own F16 one for nullopt. Throws Error with the reason of a refusal.
ContextPtr new_context(llama_model* model, const ContextOptions& options, const std::optional<KvOptions>& kv);

std::vector<llama_token> tokenize(const llama_model* model, const std::string& text, bool add_special, bool parse_special);
std::string detokenize(const llama_model* model, std::span<const llama_token> tokens);

// At most `most` bytes from its beginning. Throws Error if it cannot be read, or is no text in UTF-8 or another code whose
// characters have no zero bytes: a tokenizer would take those for tokens.
std::string read_text(const std::filesystem::path& file, size_t most = SIZE_MAX);
// The beginning of a text, enough for n tokens, whole characters of UTF-8.
std::string read_beginning(const std::filesystem::path& file, size_t n_tokens);

// Appends tokens to a sequence; `last_only`: logits of the last token alone. Throws Error if the engine fails.
void decode(llama_context* context, std::span<const llama_token> tokens, int position, bool last_only, llama_seq_id sequence = 0);

}  // namespace crumb::llama

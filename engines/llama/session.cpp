#include "session.h"

#include <crumb/error.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <thread>

namespace crumb::llama {

void quiet_log() {
    llama_log_set(
        [](ggml_log_level level, const char* text, void*) {
            if (level == GGML_LOG_LEVEL_ERROR) { std::fputs(text, stderr); }
        },
        nullptr);
}

ModelPtr load_model(const std::filesystem::path& file, Load what) {
    if (!std::filesystem::exists(file)) { fail("there is no model file {}", file.string()); }
    llama_backend_init();
    use_kv(std::nullopt);  // installs the observer that remembers the file
    auto params = llama_model_default_params();
    if (what == Load::mapped) {
        params.use_extra_bufts = false;  // which repack
        params.n_gpu_layers = 0;
    }
    ModelPtr model(llama_model_load_from_file(file.c_str(), params));
    if (!model) { fail("{} is not a GGUF model that llama.cpp can load (its message is above)", file.string()); }
    return model;
}

ContextPtr new_context(llama_model* model, const ContextOptions& options, const std::optional<KvOptions>& kv) {
    use_kv(kv);
    auto params = llama_context_default_params();
    params.n_ctx = options.n_ctx;
    params.n_batch = options.n_ubatch;
    params.n_ubatch = options.n_ubatch;
    params.n_seq_max = options.n_sequences;
    params.kv_unified = options.n_sequences > 1;
    params.n_threads = params.n_threads_batch =
        options.n_threads > 0 ? options.n_threads : int(std::max(1u, std::thread::hardware_concurrency()));
    params.offload_kqv = !kv || options.kv_offload;
    if (!kv) { params.type_k = params.type_v = options.stock_type; }
    params.cb_eval = options.observe;
    params.cb_eval_user_data = options.observer;
    params.no_perf = true;
    ContextPtr context(llama_init_from_model(model, params));
    if (!context) {
        const auto why = last_refusal();
        fail("{}", kv && !why.empty() ? why : "llama.cpp could not create a context (its message is above)");
    }
    return context;
}

std::vector<llama_token> tokenize(const llama_model* model, const std::string& text, bool add_special, bool parse_special) {
    const auto* vocab = llama_model_get_vocab(model);
    std::vector<llama_token> tokens(text.size() + 8);
    const int n = llama_tokenize(vocab, text.data(), int(text.size()), tokens.data(), int(tokens.size()), add_special, parse_special);
    if (n < 0) { fail("a text of {} bytes could not be tokenised", text.size()); }
    tokens.resize(n);
    return tokens;
}

std::string detokenize(const llama_model* model, std::span<const llama_token> tokens) {
    const auto* vocab = llama_model_get_vocab(model);
    std::string text(tokens.size() * 16 + 64, '\0');
    int n = llama_detokenize(vocab, tokens.data(), int(tokens.size()), text.data(), int(text.size()), false, true);
    if (n < 0) {
        text.resize(-n);
        n = llama_detokenize(vocab, tokens.data(), int(tokens.size()), text.data(), int(text.size()), false, true);
    }
    text.resize(std::max(0, n));
    return text;
}

std::string read_text(const std::filesystem::path& file, size_t most) {
    std::error_code error;
    if (std::filesystem::is_directory(file, error)) { fail("{} is a folder: name the text files in it", file.string()); }
    std::ifstream in(file, std::ios::binary);
    std::string text;
    std::array<char, 1 << 16> buffer;
    while (text.size() < most && (in.read(buffer.data(), std::streamsize(std::min(buffer.size(), most - text.size()))), in.gcount() > 0)) {
        text.append(buffer.data(), size_t(in.gcount()));
    }
    if (!in.is_open() || in.bad()) { fail("cannot read the text file {}", file.string()); }
    if (text.starts_with("\xff\xfe") || text.starts_with("\xfe\xff")) {
        fail("{} is in UTF-16: make it UTF-8, as with\n    iconv -f UTF-16 -t UTF-8 {} > text.txt", file.string(), file.string());
    }
    if (const size_t zero = text.find('\0'); zero != std::string::npos) {
        fail("{} is no text: byte {} is zero, as in binary files and UTF-16. Give a file of UTF-8 text", file.string(), zero);
    }
    return text;
}

std::string read_beginning(const std::filesystem::path& file, size_t n_tokens) {
    // Languages need three to five bytes a token, and some tokenizers take the square of the length in time.
    const size_t most = 8 * n_tokens;
    std::string text = read_text(file, most + 1);
    if (text.size() > most) {
        size_t end = most;
        while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) { --end; }  // not inside a character
        text.resize(end);
    }
    return text;
}

void decode(llama_context* context, std::span<const llama_token> tokens, int position, bool last_only,
            llama_seq_id sequence) {
    llama_batch batch = llama_batch_init(int(tokens.size()), 0, 1);
    for (size_t i = 0; i < tokens.size(); ++i) {
        batch.token[i] = tokens[i];
        batch.pos[i] = position + int(i);
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = !last_only || i + 1 == tokens.size();
    }
    batch.n_tokens = int(tokens.size());
    const int status = llama_decode(context, batch);
    llama_batch_free(batch);
    if (status != 0) {
        fail("llama.cpp could not process {} tokens at position {} (status {}); the context holds {}", tokens.size(), position, status,
             llama_n_ctx(context));
    }
}

}  // namespace crumb::llama

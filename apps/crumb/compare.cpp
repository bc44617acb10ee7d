// One question about one document, answered twice: with 16-bit KV and with --kv. Then both contexts walk through the
// document again side by side for the divergence of every next-token distribution.
#include "command_line.h"
#include "commands.h"
#include "progress.h"
#include "session.h"

#include <crumb/error.h>
#include <crumb/eval.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace crumb::app {

namespace {

struct Answer {
    std::string text;
    double prompt_per_second = 0;
    double generated_per_second = 0;
};

std::string chat_prompt(const llama_model* model, const std::string& message) {
    const char* format = llama_model_chat_template(model, nullptr);
    const llama_chat_message chat[] = {{"user", message.c_str()}};
    std::string prompt(message.size() * 2 + 1024, '\0');
    const int n = format ? llama_chat_apply_template(format, chat, 1, true, prompt.data(), int(prompt.size())) : -1;
    if (n < 0 || size_t(n) > prompt.size()) { return message; }  // a base model: the question as it is
    prompt.resize(n);
    return prompt;
}

llama_token most_likely(llama_context* context, int n_vocab) {
    const float* logits = llama_get_logits_ith(context, -1);
    return llama_token(std::max_element(logits, logits + n_vocab) - logits);
}

void show(llama::Progress& progress, size_t done, size_t all) { progress.at(double(done), fmt::format("{} of {} tokens", done, all)); }

Answer answer(const std::string& kv, const llama_model* model, llama_context* context, std::span<const llama_token> prompt,
              int n_predict, int n_ubatch) {
    llama::Progress progress("reading the document with " + kv, double(prompt.size()));
    using clock = std::chrono::steady_clock;
    const auto* vocab = llama_model_get_vocab(model);
    const int n_vocab = llama_vocab_n_tokens(vocab);
    const auto start = clock::now();
    for (size_t at = 0; at < prompt.size(); at += n_ubatch) {
        const auto step = prompt.subspan(at, std::min<size_t>(n_ubatch, prompt.size() - at));
        llama::decode(context, step, int(at), true);
        show(progress, at + step.size(), prompt.size());
    }
    const auto read = clock::now();
    std::vector<llama_token> tokens;
    for (int i = 0; i < n_predict; ++i) {
        const llama_token token = most_likely(context, n_vocab);
        if (llama_vocab_is_eog(vocab, token)) { break; }
        tokens.push_back(token);
        llama::decode(context, std::span(&tokens.back(), 1), int(prompt.size()) + i, true);
    }
    const auto written = clock::now();
    const auto rate = [](size_t n, auto span) { return double(n) / std::max(1e-9, std::chrono::duration<double>(span).count()); };
    return {llama::detokenize(model, tokens), rate(prompt.size(), read - start), rate(tokens.size(), written - read)};
}

}  // namespace

int compare(int argc, char** argv) {
    CLI::App app{"One question about a document, 16-bit KV beside --kv", "crumb compare"};
    KvArguments arguments = take_kv_arguments(argc, argv);
    std::filesystem::path file, document;
    std::string question = "Summarise the text above in two sentences.";
    int n_predict = 96, threads = 0, ubatch = 512;
    app.add_option("-m,--model", file, "GGUF model")->required();
    app.add_option("-f,--file", document, "the document")->required();
    app.add_option("-p,--prompt", question, "the question")->capture_default_str();
    app.add_option("-n,--predict", n_predict, "longest answer in tokens")->capture_default_str()->check(CLI::Range(1, 1 << 20));
    app.add_option("--ubatch-size", ubatch, "tokens of a step")->capture_default_str()->check(CLI::Range(1, 8192));
    app.add_option("-t,--threads", threads, "threads (default: all cores)");
    if (const auto status = parse(app, arguments.rest)) { return *status; }
    if (!arguments.kv) { fail("crumb compare needs --kv RECIPE; the flags are:\n{}", kKvHelp); }

    llama::quiet_log();
    const auto model = llama::load_model(file);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
    const auto text = llama::tokenize(model.get(), llama::read_text(document), true, false);
    const auto prompt =
        llama::tokenize(model.get(), chat_prompt(model.get(), llama::read_text(document) + "\n\n" + question), true, true);
    const int n_ctx = int(std::max(prompt.size() + n_predict, text.size()) + 63) / 64 * 64;
    const llama::ContextOptions shape{.n_ctx = n_ctx, .n_ubatch = ubatch, .n_threads = threads};

    std::printf("document: %s, %zu tokens with the question\nquestion: %s\n\n", document.filename().c_str(), prompt.size(),
                question.c_str());
    const auto base = llama::new_context(model.get(), shape, std::nullopt);
    const auto coded = llama::new_context(model.get(), shape, arguments.kv);
    const auto bytes = llama::kv_status()->bytes;
    const Answer a = answer("16-bit KV", model.get(), base.get(), prompt, n_predict, ubatch);
    std::printf("--- 16-bit KV\n%s\n\n", a.text.c_str());
    std::fflush(stdout);
    const Answer b = answer("--kv " + arguments.kv->recipe, model.get(), coded.get(), prompt, n_predict, ubatch);
    std::printf("--- --kv %s\n%s\n\n", arguments.kv->recipe.c_str(), b.text.c_str());
    std::fflush(stdout);

    llama::Progress progress("comparing the distributions", double(text.size()));
    DivergenceSum divergence;
    llama_memory_clear(llama_get_memory(base.get()), true);
    llama_memory_clear(llama_get_memory(coded.get()), true);
    const int first = arguments.kv->sink + arguments.kv->recent + kPageTokens;
    for (size_t at = 0; at < text.size(); at += ubatch) {
        const auto tokens = std::span(text).subspan(at, std::min<size_t>(ubatch, text.size() - at));
        llama::decode(base.get(), tokens, int(at), false);
        llama::decode(coded.get(), tokens, int(at), false);
        for (size_t i = 0; i < tokens.size() && at + i + 1 < text.size(); ++i) {
            if (int(at + i) < first) { continue; }
            divergence.add({llama_get_logits_ith(base.get(), int(i)), size_t(n_vocab)},
                           {llama_get_logits_ith(coded.get(), int(i)), size_t(n_vocab)}, text[at + i + 1]);
        }
        show(progress, at + tokens.size(), text.size());
    }
    const Divergence d = divergence.result();
    const std::string mib16 = fmt::format("{:.1f} MiB", bytes.bf16_equivalent / 1048576.0), mib = fmt::format("{:.1f} MiB", bytes.total() / 1048576.0);
    std::printf("|                                   | 16 bit       | %-12s |\n|---|---|---|\n", arguments.kv->recipe.c_str());
    std::printf("| KV cache, %6d tokens           | %-12s | %-12s |\n", n_ctx, mib16.c_str(), mib.c_str());
    std::printf("| bits per element, windows included| %-12.3f | %-12.3f |\n", 16.0, bytes.effective_bits);
    std::printf("| bits per element of a page        | %-12.3f | %-12.3f |\n", 16.0, bytes.bits_per_element);
    std::printf("| prompt tokens a second            | %-12.1f | %-12.1f |\n", a.prompt_per_second, b.prompt_per_second);
    std::printf("| generated tokens a second         | %-12.1f | %-12.1f |\n", a.generated_per_second, b.generated_per_second);
    std::printf("| Mean KLD over the document        | %-12.5f | %-12.5f |\n", 0.0, d.mean_kld.value);
    std::printf("| Same top p                        | %-12.4f | %-12.4f |\n", 1.0, d.same_top.value);
    std::printf("| perplexity of the document        | %-12.4f | %-12.4f |\n", d.ppl_base, d.ppl);
    return 0;
}

}  // namespace crumb::app

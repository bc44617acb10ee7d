// One question about one document, answered with 16-bit KV and with each recipe of --kv. Then all contexts walk through the
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
    if (!format) { return message; }  // a base model: the question as it is
    const auto apply = [&] { return llama_chat_apply_template(format, chat, 1, true, prompt.data(), int(prompt.size())); };
    int n = apply();
    if (n > int(prompt.size())) {
        prompt.resize(size_t(n));
        n = apply();
    }
    if (n < 0) {
        std::fprintf(stderr, "the question is asked without a chat template: llama.cpp does not know the model's\n");
        return message;
    }
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

// What one way to keep K and V came to.
struct Column {
    std::string name;
    llama::ContextPtr context;
    double mib = 0, page_bits = 16, effective_bits = 16;
    Answer answer;
    DivergenceSum divergence;
};

// --kv A,B as --kv A and --kv B, which are arguments of their own. One without --kv if there is none.
std::vector<KvArguments> take_several(int argc, char** argv) {
    std::vector<std::string> recipes = {""};
    int at = -1;  // of the value
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        const bool joined = argument.starts_with("--kv=");
        if (!joined && (argument != "--kv" || i + 1 == argc)) { continue; }
        at = joined ? i : i + 1;
        recipes = CLI::detail::split(joined ? argument.substr(5) : argv[at], ',');
    }
    std::vector<KvArguments> several;
    for (auto& recipe : recipes) {
        std::vector<std::string> arguments(argv, argv + argc);
        if (at >= 0) { arguments[at] = arguments[at].starts_with("--kv=") ? "--kv=" + recipe : recipe; }
        std::vector<char*> pointers;
        for (auto& argument : arguments) { pointers.push_back(argument.data()); }
        several.push_back(take_kv_arguments(int(pointers.size()), pointers.data()));
        // One artefact is for those that need it.
        auto& kv = several.back().kv;
        if (kv && recipes.size() > 1 && kv->recipe != llama::kAuto && !find_recipe(kv->recipe).needs_artefact()) { kv->artefact.clear(); }
    }
    return several;
}

void print_row(const char* what, const std::vector<Column>& columns, auto value) {
    std::printf("| %-35s |", what);
    for (const Column& column : columns) { std::printf(" %12s |", std::string(value(column)).c_str()); }
    std::printf("\n");
}

void print_table(const std::vector<Column>& columns, int n_ctx) {
    print_row("", columns, [](const Column& c) { return c.name; });
    std::printf("|---|");
    for (size_t i = 0; i < columns.size(); ++i) { std::printf("---:|"); }
    std::printf("\n");
    print_row(fmt::format("KV cache, {} tokens", n_ctx).c_str(), columns, [](const Column& c) { return fmt::format("{:.1f} MiB", c.mib); });
    print_row("bits per element, windows included", columns, [](const Column& c) { return fmt::format("{:.3f}", c.effective_bits); });
    print_row("bits per element of a page", columns, [](const Column& c) { return fmt::format("{:.3f}", c.page_bits); });
    print_row("prompt tokens a second", columns, [](const Column& c) { return fmt::format("{:.1f}", c.answer.prompt_per_second); });
    print_row("generated tokens a second", columns, [](const Column& c) { return fmt::format("{:.1f}", c.answer.generated_per_second); });
    print_row("Mean KLD over the document", columns, [](const Column& c) { return fmt::format("{:.5f}", c.divergence.result().mean_kld.value); });
    print_row("Same top p", columns, [](const Column& c) { return fmt::format("{:.4f}", c.divergence.result().same_top.value); });
    print_row("perplexity of the document", columns, [](const Column& c) { return fmt::format("{:.4f}", c.divergence.result().ppl); });
}

}  // namespace

int compare(int argc, char** argv) {
    CLI::App app{"One question about a document, 16-bit KV beside recipes (--kv oscar,planes)", "crumb compare"};
    const std::vector<KvArguments> several = take_several(argc, argv);
    std::filesystem::path file, document;
    std::string question = "Summarise the text above in two sentences.";
    int n_predict = 96, threads = 0, ubatch = 512;
    app.footer(kKvHelp);
    app.add_option("-m,--model", file, "GGUF model")->required();
    app.add_option("-f,--file", document, "the document")->required();
    app.add_option("-p,--prompt", question, "the question")->capture_default_str();
    app.add_option("-n,--predict", n_predict, "longest answer in tokens")->capture_default_str()->check(CLI::Range(1, 1 << 20));
    app.add_option("--ubatch-size", ubatch, "tokens of a step")->capture_default_str()->check(CLI::Range(1, 8192));
    add_threads(app, threads);
    if (const auto status = parse(app, several.front().rest)) { return *status; }
    if (!several.front().kv) { fail("crumb compare needs --kv RECIPE; the flags are:\n{}", kKvHelp); }
    std::vector<std::string> recipes;
    for (const KvArguments& arguments : several) { recipes.push_back(arguments.kv->recipe); }
    require_once("--kv", recipes);

    llama::quiet_log();
    const auto model = llama::load_model(file);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
    const auto text = llama::tokenize(model.get(), llama::read_text(document), true, false);
    const auto prompt =
        llama::tokenize(model.get(), chat_prompt(model.get(), llama::read_text(document) + "\n\n" + question), true, true);
    int exact = 0;
    for (const KvArguments& arguments : several) { exact = std::max(exact, arguments.kv->sink + arguments.kv->recent); }
    const int first = exact + kPageTokens;  // position whose query reads a code, whatever page it is in
    if (text.size() < size_t(first) + 2) {
        fail("the document has {} tokens, and the divergence counts from token {} on, behind the {} that stay 16 bit: take a longer document, or smaller "
             "--kv-sink and --kv-recent",
             text.size(), first, exact);
    }
    const int n_ctx = int(std::max(prompt.size() + n_predict, text.size()) + 63) / 64 * 64;
    const llama::ContextOptions shape{.n_ctx = n_ctx, .n_ubatch = ubatch, .n_threads = threads};

    std::printf("document: %s, %zu tokens with the question\nquestion: %s\n\n", document.filename().c_str(), prompt.size(),
                question.c_str());
    std::vector<Column> columns;
    columns.push_back({.name = "16 bit", .context = llama::new_context(model.get(), shape, std::nullopt), .answer = {}, .divergence = {}});
    for (const KvArguments& arguments : several) {
        Column column{.name = arguments.kv->recipe, .context = llama::new_context(model.get(), shape, arguments.kv), .answer = {}, .divergence = {}};
        const auto bytes = llama::kv_status()->bytes;
        column.mib = double(bytes.total()) / 1048576.0;
        column.page_bits = bytes.bits_per_element;
        column.effective_bits = bytes.effective_bits;
        columns.front().mib = double(bytes.bf16_equivalent) / 1048576.0;
        columns.push_back(std::move(column));
    }
    for (Column& column : columns) {
        column.answer = answer(column.name, model.get(), column.context.get(), prompt, n_predict, ubatch);
        std::printf("--- %s\n%s\n\n", column.name.c_str(), column.answer.text.c_str());
        std::fflush(stdout);
    }

    llama::Progress progress("comparing the distributions", double(text.size()));
    for (const Column& column : columns) { llama_memory_clear(llama_get_memory(column.context.get()), true); }
    for (size_t at = 0; at < text.size(); at += ubatch) {
        const auto tokens = std::span(text).subspan(at, std::min<size_t>(ubatch, text.size() - at));
        for (const Column& column : columns) { llama::decode(column.context.get(), tokens, int(at), false); }
        for (size_t i = 0; i < tokens.size() && at + i + 1 < text.size(); ++i) {
            if (int(at + i) < first) { continue; }
            const auto logits = [&](const Column& c) { return std::span<const float>(llama_get_logits_ith(c.context.get(), int(i)), size_t(n_vocab)); };
            for (Column& column : columns) { column.divergence.add(logits(columns.front()), logits(column), text[at + i + 1]); }
        }
        show(progress, at + tokens.size(), text.size());
    }
    print_table(columns, n_ctx);
    return 0;
}

}  // namespace crumb::app

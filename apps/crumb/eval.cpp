// Teacher-forced divergence of recipes from 16-bit KV. All contexts walk through the same tokens side by side, ubatch by
// ubatch, so no logits are kept: memory is one ubatch of logits a recipe. The texts should not be those of calibration.
#include "command_line.h"
#include "commands.h"
#include "session.h"

#include <crumb/error.h>
#include <crumb/eval.h>

#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <unistd.h>

namespace crumb::app {

namespace {

struct Options {
    std::filesystem::path model;
    std::vector<std::filesystem::path> texts;
    std::vector<std::string> recipes;
    std::filesystem::path artefact, json;
    int window = 8192;
    int windows = 1;
    int first = 512;
    int threads = 0;
    int ubatch = 512;
    std::optional<int> sink, recent;
    std::string windows_of = "equal";
    bool allow_slow = false;
    std::string prefill = "position";
};

struct Column {
    std::string name;
    llama::ContextPtr context;
    double bits = 0;  // of the pages; 16 for the control
    int sink = 0, recent = 0;
    std::vector<DivergenceSum> by_text;
};

void progress(const std::string& what, size_t done, size_t all, std::chrono::steady_clock::time_point start) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const double left = done ? seconds / double(done) * double(all - done) : 0;
    std::fprintf(stderr, isatty(2) ? "\r%s: %zu of %zu tokens, %.0f s left   " : "%s: %zu of %zu tokens, %.0f s left\n", what.c_str(),
                 done, all, left);
    if (isatty(2) && done == all) { std::fputc('\n', stderr); }
}

nlohmann::ordered_json as_json(const Divergence& d) {
    return {{"positions", d.positions}, {"mean_kld", d.mean_kld},   {"mean_kld_error", d.mean_kld_error}, {"kld_99.9", d.kld_999},
            {"kld_99", d.kld_99},       {"median_kld", d.median_kld}, {"max_kld", d.max_kld},               {"ppl", d.ppl},
            {"ppl_base", d.ppl_base},   {"same_top_p", d.same_top}};
}

void print_row(const std::string& recipe, double bits, const std::string& text, const Divergence& d) {
    std::printf("| %-14s | %6.3f | %-12s | %9.5f ± %7.5f | %9.4f | %8.4f | %8.4f | %10.5f | %6.2f %% |\n", recipe.c_str(), bits,
                text.c_str(), d.mean_kld, d.mean_kld_error, d.kld_999, d.ppl, d.ppl_base, d.ppl / d.ppl_base, 100 * d.same_top);
}

}  // namespace

int eval(int argc, char** argv) {
    CLI::App app{"KL divergence, perplexity and same top p of recipes against 16-bit KV, over the same tokens", "crumb eval"};
    Options o;
    app.add_option("-m,--model", o.model, "GGUF model")->required();
    app.add_option("-f,--file", o.texts, "texts, one or more files; not those of calibration")->required();
    app.add_option("--kv", o.recipes, "recipes, comma separated")->delimiter(',')->required();
    app.add_option("--kv-artifact", o.artefact, "artefact (default: beside the model)");
    app.add_option("--kv-sink", o.sink, "first tokens that stay 16 bit");
    app.add_option("--kv-recent", o.recent, "last tokens that stay 16 bit");
    app.add_option("--kv-windows", o.windows_of, "equal: 64 and 256 for all recipes; paper: those of each recipe's paper")
        ->capture_default_str()
        ->check(CLI::IsMember({"equal", "paper"}));
    app.add_flag("--kv-allow-slow", o.allow_slow, "run recipes whose pages attention has to decode");
    app.add_option("--kv-prefill", o.prefill, "position or exact")->capture_default_str()->check(CLI::IsMember({"position", "exact"}));
    app.add_option("-c,--ctx-size", o.window, "tokens of a window")->capture_default_str()->check(CLI::Range(64, 1 << 22));
    app.add_option("--windows", o.windows, "windows of each text")->capture_default_str()->check(CLI::Range(1, 1000));
    app.add_option("--first", o.first, "first position of a window that counts")->capture_default_str()->check(CLI::NonNegativeNumber);
    app.add_option("--ubatch-size", o.ubatch, "tokens of a step")->capture_default_str()->check(CLI::Range(1, 8192));
    app.add_option("-t,--threads", o.threads, "threads (default: all cores)");
    app.add_option("--json", o.json, "write the table here as well");
    if (const auto status = parse(app, {argv, argv + argc})) { return *status; }
    if (o.first + 1 >= o.window) { fail("--first {} leaves nothing of a window of {} tokens", o.first, o.window); }

    llama::quiet_log();
    const auto model = llama::load_model(o.model);
    const auto* vocab = llama_model_get_vocab(model.get());
    const int n_vocab = llama_vocab_n_tokens(vocab);

    std::vector<std::vector<llama_token>> texts;
    for (const auto& file : o.texts) {
        auto tokens = llama::tokenize(model.get(), llama::read_text(file), false, false);
        const size_t wanted = size_t(o.window) * o.windows;
        if (tokens.size() < wanted) {
            fail("{} has {} tokens, {} windows of {} need {}: take a longer text, or a smaller -c or --windows", file.string(),
                 tokens.size(), o.windows, o.window, wanted);
        }
        tokens.resize(wanted);
        texts.push_back(std::move(tokens));
    }

    const llama::ContextOptions shape{.n_ctx = o.window, .n_ubatch = o.ubatch, .n_threads = o.threads};
    const auto base = llama::new_context(model.get(), shape, std::nullopt);
    std::vector<Column> columns;
    for (const auto& name : o.recipes) {
        llama::KvOptions kv;
        const bool automatic = name == llama::kAuto;
        kv.recipe = automatic ? name : label(find_recipe(name));
        kv.artefact = automatic || find_recipe(name).needs_artefact() ? o.artefact : std::filesystem::path{};
        const Windows windows = o.windows_of == "paper" && !automatic ? find_recipe(name).paper : Windows{};
        kv.sink = o.sink.value_or(windows.sink);
        kv.recent = o.recent.value_or(windows.recent);
        kv.allow_slow = o.allow_slow;
        kv.prefill = o.prefill == "exact" ? PrefillRule::exact : PrefillRule::position;
        Column column{name, llama::new_context(model.get(), shape, kv), 0, kv.sink, kv.recent, std::vector<DivergenceSum>(texts.size())};
        column.bits = llama::kv_status()->bytes.bits_per_element;
        columns.push_back(std::move(column));
    }

    const auto start = std::chrono::steady_clock::now();
    const size_t all = texts.size() * size_t(o.window) * o.windows;
    size_t done = 0;
    for (size_t t = 0; t < texts.size(); ++t) {
        for (int w = 0; w < o.windows; ++w) {
            std::vector<llama_token> window(texts[t].begin() + size_t(w) * o.window, texts[t].begin() + size_t(w + 1) * o.window);
            if (llama_vocab_get_add_bos(vocab)) { window[0] = llama_vocab_bos(vocab); }
            llama_memory_clear(llama_get_memory(base.get()), true);
            for (auto& column : columns) { llama_memory_clear(llama_get_memory(column.context.get()), true); }
            for (int at = 0; at < o.window; at += o.ubatch) {
                const int n = std::min(o.ubatch, o.window - at);
                const std::span tokens(window.data() + at, n);
                llama::decode(base.get(), tokens, at, false);
                for (auto& column : columns) {
                    llama::decode(column.context.get(), tokens, at, false);
                    for (int i = std::max(0, o.first - at); i < n && at + i + 1 < o.window; ++i) {
                        column.by_text[t].add({llama_get_logits_ith(base.get(), i), size_t(n_vocab)},
                                              {llama_get_logits_ith(column.context.get(), i), size_t(n_vocab)}, window[at + i + 1]);
                    }
                }
                done += n;
                progress("eval", done, all, start);
            }
        }
    }

    std::printf("| recipe         |   bits | text         |       Mean KLD            |  99.9%%KLD |   PPL(Q) | PPL(base)| Q/base    "
                " | Same top p |\n|---|---|---|---|---|---|---|---|---|\n");
    nlohmann::ordered_json json = {{"model", o.model.filename().string()}, {"window", o.window}, {"windows", o.windows},
                                   {"first", o.first},   {"ubatch", o.ubatch}, {"kv_windows", o.windows_of},
                                   {"prefill", o.prefill}, {"rows", nlohmann::ordered_json::array()}};
    for (auto& column : columns) {
        DivergenceSum sum;
        for (size_t t = 0; t <= texts.size(); ++t) {
            const bool total = t == texts.size();
            if (total && texts.size() == 1) { break; }
            if (!total) { sum.merge(column.by_text[t]); }
            const Divergence d = total ? sum.result() : column.by_text[t].result();
            const std::string text = total ? "all" : o.texts[t].stem().string();
            print_row(column.name, column.bits, text, d);
            auto row = as_json(d);
            row["recipe"] = column.name;
            row["bits_per_element"] = column.bits;
            row["sink"] = column.sink;
            row["recent"] = column.recent;
            row["text"] = text;
            json["rows"].push_back(std::move(row));
        }
    }
    if (!o.json.empty()) {
        std::ofstream out(o.json);
        if (!(out << json.dump(2) << '\n')) { fail("cannot write {}", o.json.string()); }
    }
    return 0;
}

}  // namespace crumb::app

// The verdict on the user's own model: what each recipe does to its distribution, its memory and its speed, measured in one
// run over the same tokens, and kept, so that the next run only does what is missing.
#include "command_line.h"
#include "commands.h"
#include "evaluation.h"
#include "texts.h"

#include "base/whole_file.h"
#include "eval/report.h"

#include <crumb/error.h>

#include <charconv>
#include <cstdio>

namespace crumb::app {

namespace {

// How the outputs begin, by which a file of an earlier run is known and may be replaced.
constexpr std::string_view kPageStart = "<!DOCTYPE html>", kRowsStart = "{\"kind\":\"run\"";

std::optional<std::vector<int>> layers_of(const std::vector<std::string>& names) {
    if (names.empty()) { return std::nullopt; }
    std::vector<int> layers;
    for (const auto& name : names) {
        if (name == "all") { return std::vector<int>{}; }
        int layer = -1;
        const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
        if (error != std::errc{} || end != name.data() + name.size()) { fail("--layers takes numbers or all, not '{}'", name); }
        layers.push_back(layer);
    }
    return layers;
}

void list_recipes() {
    for (const auto& recipe : recipes()) {
        std::printf("%-16.*s %-9s %-5s %.*s\n", int(recipe.name.size()), recipe.name.data(), recipe.needs_artefact() ? "artefact" : "", recipe.slow() ? "slow" : "",
                    int(recipe.summary.size()), recipe.summary.data());
    }
    for (const auto& stock : kStocks) { std::printf("%-32s llama.cpp's own cache\n", stock.name); }
    std::printf("artefact: wants what crumb calibrate writes; slow: attention has to decode it, --kv-allow-slow runs it\n");
}

}  // namespace

int eval(int argc, char** argv) {
    CLI::App app{"What recipes do to a model's distribution, memory and speed, beside 16-bit KV, over the same tokens", "crumb eval"};
    EvaluationOptions o;
    std::filesystem::path json, html;
    std::vector<std::string> probes, layers;
    std::string prefill = "position", windows_of = "equal";
    bool list = false;
    app.add_flag("--list", list, "name the recipes");
    app.add_option("-m,--model", o.model, "GGUF model");
    app.add_option("--kv", o.recipes, "recipes, comma separated; q8_0 and q4_0 are llama.cpp's own caches")->delimiter(',');
    app.add_flag("--sweep", o.sweep, "all recipes that this model allows");
    app.add_option("-f,--file", o.texts, "texts, one or more domains; not those of calibration (default: what tools/fetch.py text fetched)");
    app.add_option("-c,--ctx-size", o.contexts, "tokens of a window, one or more, comma separated (8192)")->delimiter(',')->check(CLI::Range(64, 1 << 22));
    app.add_option("--windows", o.windows, "windows of each text")->capture_default_str()->check(CLI::Range(1, 1000));
    app.add_option("--first", o.first, "first position of a window that counts (512, or half a window if that is less)")->check(CLI::Range(0, 1 << 22));
    app.add_option("--layers", layers, "what these layers cost alone: numbers, or all; with --ablate K and V apart")
        ->delimiter(',');
    app.add_flag("--ablate", o.ablate, "K alone, V alone, and each recipe without each of its stages and windows");
    CLI::Option* const retrieval = app.add_flag("--retrieval", o.retrieval, "probes: facts hidden in prose, by depth, at each context");
    app.add_option("--probes", probes, "single, multi-key, multi-value, tracing (all)")->delimiter(',')->needs(retrieval);
    app.add_option("--haystacks", o.haystacks, "haystacks of each probe and context")->capture_default_str()->check(CLI::Range(1, 1000))->needs(retrieval);
    app.add_option("--haystack", o.haystack, "text that hides the facts (default: the fetched prose)")->needs(retrieval);
    app.add_option("--generate", o.generate, "tokens of greedy text to compare, 500 or more say something")->check(CLI::Range(1, 1 << 20));
    app.add_option("--kv-artifact", o.artefact, "artefact (default: beside the model)");
    app.add_option("--kv-sink", o.sink, "first tokens that stay 16 bit")->check(CLI::Range(0, 1 << 20));
    app.add_option("--kv-recent", o.recent, "last tokens that stay 16 bit")->check(CLI::Range(0, 1 << 20));
    app.add_option("--kv-windows", windows_of, "equal: 64 and 256 for all recipes; paper: those of each recipe's paper")
        ->capture_default_str()
        ->check(CLI::IsMember({"equal", "paper"}));
    app.add_flag("--kv-allow-slow", o.allow_slow, "run recipes whose pages attention has to decode");
    app.add_option("--kv-attention", o.attention, "what reads codes: auto, an instruction set, or decoded (slow), to check the others against")->capture_default_str();
    app.add_flag("--kv-offload", o.kv_offload, "cache and attention on the GPU, where its layers are (default: on the CPU, which has every recipe)");
    app.add_option("--kv-prefill", prefill, "position or exact")->capture_default_str()->check(CLI::IsMember({"position", "exact"}));
    app.add_option("--ubatch-size", o.ubatch, "tokens of a step")->capture_default_str()->check(CLI::Range(1, 8192));
    add_threads(app, o.threads);
    app.add_option("--memory", o.memory, "MiB for the caches and logits of recipes that run side by side")->capture_default_str()->check(CLI::Range(1, 1 << 24));
    app.add_option("--results", o.results, "what has been measured is kept here and not measured again (default: MODEL.eval.jsonl in this folder)");
    app.add_option("--json", json, "write the tables here, a JSON object a line");
    app.add_option("--html", html, "write one page with plots here");
    if (const auto status = parse(app, {argv, argv + argc})) { return *status; }
    if (list) {
        list_recipes();
        return 0;
    }
    if (o.model.empty()) { fail("crumb eval needs a model: -m MODEL.gguf"); }
    if (o.recipes.empty() && !o.sweep) { fail("which recipes? --kv NAME,NAME or --sweep for all; crumb eval --list names them"); }
    if (!o.recipes.empty() && o.sweep) { fail("--sweep runs all recipes, --kv names some: leave out one of them"); }
    o.layers = layers_of(layers);
    for (const auto& probe : probes) { o.probes.push_back(find_probe(probe)); }
    if (o.probes.empty()) { o.probes.assign(std::begin(kProbes), std::end(kProbes)); }
    if (o.contexts.empty()) { o.contexts = {8192}; }
    if (o.texts.empty()) { o.texts = fetched_texts("evaluation"); }
    if (o.haystack.empty() && o.retrieval) { o.haystack = fetched_texts("evaluation")[1]; }
    if (o.results.empty()) { o.results = o.model.stem().string() + ".eval.jsonl"; }
    require_once("--kv", o.recipes);
    require_once("--layers", layers);
    require_once("--probes", probes);
    require_once("-c", o.contexts);
    require_different_texts(o.texts);
    o.prefill = prefill == "exact" ? PrefillRule::exact : PrefillRule::position;
    o.paper_windows = windows_of == "paper";
    o.key_shapes = !html.empty();

    require_different({{"--results", o.results}, {"--json", json}, {"--html", html}});
    if (!json.empty()) { require_replaceable(json, 0, kRowsStart, "a table of crumb eval"); }
    if (!html.empty()) { require_replaceable(html, 0, kPageStart, "a page of crumb eval"); }
    const Verdict verdict = evaluate(o);
    std::fputs(terminal(verdict).c_str(), stdout);
    if (!json.empty()) { write_whole_file(json, json_lines(verdict)); }
    if (!html.empty()) { write_whole_file(html, page(verdict)); }
    std::printf("measurements: %s\n", o.results.c_str());
    return 0;
}

}  // namespace crumb::app

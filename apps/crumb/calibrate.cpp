#include "base/whole_file.h"
#include "calibration.h"
#include "command_line.h"
#include "commands.h"
#include "session.h"
#include "texts.h"

#include <crumb/artefact.h>
#include <crumb/error.h>

#include <cstdint>
#include <cstdio>

namespace crumb::app {

int calibrate(int argc, char** argv) {
    CLI::App app{"Measure a model's K and V while it reads texts, and write its artefact", "crumb calibrate"};
    llama::CalibrationOptions o;
    std::string k_target(name(o.method.k)), v_target(name(o.method.v)), composition(name(o.method.composition));
    app.add_option("-m,--model", o.model, "GGUF model")->required();
    app.add_option("-f,--file", o.texts, "texts to read, several domains if you can: prose, technical, code, chat, your own "
                                       "(default: what tools/fetch.py text fetched)");
    app.add_flag_callback("--no-chat", [&] { o.chat = false; }, "leave out the chats that are made of the first text with the model's chat template");
    app.add_option("-o,--output", o.output, "artefact (default: MODEL.crumb.safetensors beside the model, where --kv looks for it)");
    app.add_option("--tokens", o.tokens, "tokens to read, of all texts together")->capture_default_str()->check(CLI::Range(1, 1 << 30));
    app.add_option("-c,--ctx-size", o.window, "tokens of a window; each begins a new sequence")->capture_default_str()->check(CLI::Range(128, 1 << 20));
    app.add_option("--ubatch-size", o.ubatch, "tokens of a step")->capture_default_str()->check(CLI::Range(1, 8192));
    app.add_option("--skip", o.skip, "first tokens of each window that are left out: sinks")->capture_default_str()->check(CLI::Range(0, 1 << 20));
    add_threads(app, o.n_threads);
    app.add_option("--k-target", k_target, "whose eigenvectors rotate K: qqt, ktk")->capture_default_str();
    app.add_option("--v-target", v_target, "whose eigenvectors rotate V: sst, sst_true, vtv")->capture_default_str();
    app.add_option("--composition", composition, "r_h_pbr, r_h, h_pbr, h, r, pbr")->capture_default_str();
    app.add_flag("--per-head", o.method.per_head, "a rotation per KV head instead of one per layer");
    app.add_option("--metric", o.metric,
                   "how 'planes' weighs errors: none (squared, relative to the energy of a layer's K or V), local (what they do to "
                   "their layer's output), gradient (what they do to the model's predictions; one backward pass)")
        ->capture_default_str()->check(CLI::IsMember({"none", "local", "gradient"}));
    auto* seed = app.add_option("--metric-seed", o.seed, "of --metric gradient: draws the labels")->capture_default_str()->check(CLI::Range(int64_t{0}, INT64_MAX));
    auto* clip = app.add_option("--metric-clip", o.clip, "of --metric gradient: tokens' gradients are cut to this times their median length; 0: none")
        ->capture_default_str()->check(CLI::Range(0.0, 1e6));
    auto* checkpoint = app.add_option("--checkpoint", o.checkpoint, "of --metric gradient: what it goes on from (default: OUTPUT.gradient)");
    if (const auto status = parse(app, {argv, argv + argc})) { return *status; }
    for (const CLI::Option* option : {seed, clip, checkpoint}) {
        if (*option && o.metric != "gradient") {
            fail("{} is of --metric gradient, and this is --metric {}: leave out one of them", option->get_name(), o.metric);
        }
    }
    if (o.texts.empty()) { o.texts = fetched_texts("calibration"); }
    o.method.k = find_key_target(k_target);
    o.method.v = find_value_target(v_target);
    o.method.composition = find_composition(composition);

    const auto path = o.output.empty() ? llama::default_artefact(o.model) : o.output;
    require_different({{"-o", path}, {"--checkpoint", o.checkpoint}});
    require_artefact_output(path);

    for (const auto& text : o.texts) { llama::read_text(text, 64 * size_t(o.tokens)); }  // is it one?
    require_different_texts(o.texts);

    llama::quiet_log();
    const Artefact artefact = llama::calibrate(o);
    std::printf("wrote %s: %s, %zu layers, %llu tokens count of the %d that --tokens asks for, hash %s\n", path.string().c_str(),
                artefact.provenance.method.c_str(), artefact.layers.size(), static_cast<unsigned long long>(artefact.provenance.tokens), o.tokens,
                artefact.hash().c_str());
    return 0;
}

}  // namespace crumb::app

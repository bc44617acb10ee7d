#include "calibration.h"

#include <crumb/error.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "calibrate/fingerprint.h"
#include "calibrate/text_windows.h"
#include "gradient.h"
#include "kv.h"
#include "model_identity.h"
#include "observer.h"
#include "progress.h"
#include "projections.h"
#include "session.h"

namespace crumb::llama {

namespace {

// Said once: the artefact names chats only if they were read.
std::string without_chats(const char* why) {
    std::fprintf(stderr, "chats: none are read, %s (--no-chat says no more of it)\n", why);
    return {};
}

// Paragraphs as turns of chats, each of a few questions and answers, in the model's own template; empty if there can be none.
// What the words say does not matter, the marks between them do: attention reads them in every chat.
std::string as_chats(const llama_model* model, const std::string& text) {
    constexpr size_t kShortest = 80, kLongest = 1200, kTurns = 6;
    const char* chat_template = llama_model_chat_template(model, nullptr);
    if (!chat_template) { return without_chats("the model has no chat template"); }
    std::vector<std::string> paragraphs;
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find("\n\n", at), text.size());
        if (end - at >= kShortest && end - at <= kLongest) { paragraphs.push_back(text.substr(at, end - at)); }
        at = end + 2;
    }
    if (paragraphs.size() < kTurns) { return without_chats("the first text has fewer than 6 paragraphs of 80 to 1,200 bytes"); }
    std::string chats;
    for (size_t first = 0; first + kTurns <= paragraphs.size(); first += kTurns) {
        std::vector<llama_chat_message> turns;
        size_t room = 256;
        for (size_t i = 0; i < kTurns; ++i) {
            turns.push_back({i % 2 ? "assistant" : "user", paragraphs[first + i].c_str()});
            room += 2 * paragraphs[first + i].size() + 64;
        }
        std::string chat(room, '\0');
        const int n = llama_chat_apply_template(chat_template, turns.data(), turns.size(), false, chat.data(), int(room));
        if (n < 0 || size_t(n) > room) { return without_chats("llama.cpp does not know the model's chat template"); }
        chats.append(chat, 0, size_t(n));
    }
    return chats;
}

// `chat`: whether there are chats, one more text.
TextWindows windows_of(const llama_model* model, const CalibrationOptions& o, bool& chat) {
    const auto* vocab = llama_model_get_vocab(model);
    std::vector<std::vector<llama_token>> texts;
    std::string first;
    for (const auto& file : o.texts) {
        auto text = read_beginning(file, o.tokens);
        texts.push_back(tokenize(model, text, false, false));
        if (first.empty()) { first = std::move(text); }
    }
    const std::string chats = o.chat ? as_chats(model, first) : std::string();
    chat = !chats.empty();
    if (chat) { texts.push_back(tokenize(model, chats, false, true)); }
    WindowRule rule = {.tokens = size_t(o.tokens), .window = o.window, .skip = o.skip, .begin = {}};
    if (llama_vocab_get_add_bos(vocab)) {
        rule.begin = llama_vocab_bos(vocab);
    }
    return text_windows(texts, rule);
}

void check(const CalibrationOptions& o) {
    if (o.texts.empty()) {
        fail("calibration needs texts: give one or more files with -f");
    }
    if (o.window <= o.skip || o.window < 2) {
        fail("windows of {} tokens of which the first {} are left out leave nothing: give a larger window", o.window,
             o.skip);
    }
    if (o.ubatch < 1 || o.tokens < 1) {
        fail("{} tokens in steps of {}: both must be at least 1", o.tokens, o.ubatch);
    }
    if (o.metric != "none" && o.metric != "local" && o.metric != "gradient") {
        fail("there is no metric '{}': type --metric none, local or gradient", o.metric);
    }
    if (!(o.clip >= 0)) {
        fail("rows' gradients cannot be clipped at {} times their median length: give a positive number, or 0 for no "
             "clipping",
             o.clip);
    }
}

void require_enough(uint64_t used, size_t read, const CalibrationOptions& o) {
    if (used >= kFewTokens) {
        return;
    }
    // Windows end where no more than the skipped tokens of one are left of --tokens, or where the texts end.
    const auto remedy = size_t(o.tokens) > read + size_t(o.skip) ? "longer texts, or more of them" : "a larger --tokens";
    const auto text = fmt::format("{}, of {} that are read (the first {} of each window do not count)", used, read, o.skip);
    if (used < kLeastTokens) {
        fail("calibration needs at least {} tokens that count and has {}: give {}", kLeastTokens, text, remedy);
    }
    std::fprintf(stderr, "warning: calibration has few tokens that count: %s. %d or more are better: give %s\n", text.c_str(), kFewTokens, remedy);
}

// What will be read, and why windows are shorter than was asked for.
void print_plan(const std::vector<std::vector<llama_token>>& windows, size_t n_texts, uint64_t used, const CalibrationOptions& o) {
    const size_t longest = std::ranges::max(windows, {}, &std::vector<llama_token>::size).size();
    std::fprintf(stderr, "reading %zu window%s of %s%zu tokens from %zu text%s; %llu tokens count (not the first %d of a window); metric %s%s\n", windows.size(),
                 windows.size() == 1 ? "" : "s", windows.size() == 1 ? "" : "up to ", longest, n_texts, n_texts == 1 ? "" : "s",
                 static_cast<unsigned long long>(used), o.skip, o.metric.c_str(),
                 o.metric == "gradient" ? ": 32,768 tokens take half an hour with a model of 135M, hours with larger ones (--metric none: minutes)" : "");
    if (longest < size_t(o.window)) {
        const bool split = n_texts * size_t(o.window) > size_t(o.tokens);
        std::fprintf(stderr, "warning: windows are shorter than the %d tokens of -c: %s\n", o.window,
                     split ? fmt::format("--tokens {} are divided among {}; {} give each text a whole one", o.tokens,
                                         n_texts == 1 ? "one text" : fmt::format("{} texts", n_texts), n_texts * size_t(o.window)).c_str()
                           : "no text is that long");
    }
}

// Layers that a cache codes.
std::vector<int> coded_layers(const llama_model& model) {
    KvOptions kv;
    kv.recipe = "bf16";
    const CacheConfig config = cache_geometry(model, kv, {.n_ctx = kPageTokens});
    std::vector<int> layers;
    for (size_t i = 0; i < config.layers.size(); ++i) {
        if (config.layers[i].stores && config.layers[i].window == 0) {
            layers.push_back(int(i));
        }
    }
    return layers;
}

// The name, and what it was measured with.
std::string describe_metric(const CalibrationOptions& o) {
    if (o.metric != "gradient") {
        return o.metric;
    }
    return fmt::format("gradient (seed {}{})", o.seed, o.clip > 0 ? fmt::format(", clip {}", o.clip) : "");
}

}  // namespace

Artefact calibrate(const CalibrationOptions& o) {
    check(o);
    const auto output = o.output.empty() ? default_artefact(o.model) : o.output;
    const ModelPtr mapped = load_model(o.model, Load::mapped);
    const std::vector<int> coded = coded_layers(*mapped);
    bool chat = false;
    const auto [windows, folds] = windows_of(mapped.get(), o, chat);

    Provenance provenance;
    Fingerprint tokens;
    size_t read = 0;
    for (const auto& window : windows) {
        tokens.add_value(uint64_t(window.size()));
        tokens.add(std::as_bytes(std::span(window)));
        provenance.sketch.add(window);
        read += window.size();
    }
    provenance.text_hash = tokens.hex();
    provenance.tokens = read - windows.size() * size_t(o.skip);
    require_enough(provenance.tokens, read, o);
    print_plan(windows, o.texts.size() + size_t(chat), provenance.tokens, o);
    for (const auto& file : o.texts) {
        provenance.texts += (provenance.texts.empty() ? "" : ", ") + file.filename().string();
    }
    if (chat) { provenance.texts += ", chats"; }
    provenance.method = fmt::format("{}; planes, metric {}", describe(o.method), describe_metric(o));
    provenance.model = identify(*mapped, o.model);

    const int n_threads = o.n_threads > 0 ? o.n_threads : int(std::max(1u, std::thread::hardware_concurrency()));
    const FarRule rule;
    const auto checkpoint = o.checkpoint.empty() ? std::filesystem::path(output) += ".gradient" : o.checkpoint;
    std::vector<Metric> metrics;
    if (o.metric == "gradient") {
        metrics = gradient_metrics(mapped.get(), windows, folds,
                                   {.rule = rule,
                                    .seed = o.seed,
                                    .clip = o.clip,
                                    .n_threads = n_threads,
                                    .checkpoint = checkpoint,
                                    .model_hash = provenance.model.hash});
    }
    LocalMetric local(rule.sink, rule.recent, n_threads);
    if (o.metric == "local") {
        set_projections(local, *mapped);
    }

    const ModelPtr model = load_model(o.model);
    Moments moments(o.skip, n_threads);
    Observer observer(moments);
    const ContextPtr context = new_context(model.get(),
                                           {.n_ctx = o.window,
                                            .n_ubatch = o.ubatch,
                                            .n_threads = n_threads,
                                            .observe = Observer::callback,
                                            .observer = &observer},
                                           std::nullopt);
    const size_t n_first = o.method.v == Target::sst ? std::min(o.texts.size(), windows.size()) : 0;
    for (const auto& window : std::span(windows).first(n_first)) {
        read += window.size();
    }
    Progress progress("calibrating", double(read));
    size_t done = 0;
    const auto observe = [&, &windows = windows, &folds = folds](size_t n) {
        for (size_t i = 0; i < n; ++i) {
            const auto& window = windows[i];
            llama_memory_clear(llama_get_memory(context.get()), true);
            moments.begin_sequence(folds[i]);
            local.begin_sequence(folds[i]);
            for (size_t at = 0; at < window.size(); at += o.ubatch) {
                const auto step = std::span(window).subspan(at, std::min(size_t(o.ubatch), window.size() - at));
                decode(context.get(), step, int(at), true);
                observer.rethrow();
                done += step.size();
                progress.at(double(done), fmt::format("{} of {} tokens, {:.0f} tokens/s", done, read,
                                                      double(done) / progress.seconds()));
            }
        }
    };
    // sst weighs values by what queries make of their keys; the queries of one window of each text are enough for that.
    if (n_first > 0) {
        observe(n_first);
        moments.fix_weights();
    }
    if (o.metric == "local") {
        observer.also_measure(local);
    }
    observe(windows.size());
    observer.require_all(*model);
    if (o.metric == "local") {
        metrics = local.metrics();
    }
    std::fprintf(stderr, "fitting rotations and bases of %zu layers\n", coded.size());
    Artefact artefact = fit(moments, o.method, std::move(provenance));
    add_planes(artefact, moments, coded, metrics, n_threads);
    write_artefact(artefact, output);
    if (o.metric == "gradient") {
        std::filesystem::remove(checkpoint);
    }
    return artefact;
}

}  // namespace crumb::llama

#include "evaluation_task.h"

#include "calibrate/fingerprint.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <thread>

namespace crumb::app {

namespace {

constexpr int kFewBlocks = 8;  // of a text: a bootstrap over fewer says little

std::string processor() {
    std::ifstream in("/proc/cpuinfo");
    for (std::string line; std::getline(in, line);) {
        const size_t colon = line.find(": ");
        if (line.starts_with("model name") && colon != std::string::npos) { return line.substr(colon + 2); }
    }
    return "unknown";
}

// The version and what was built from it: another build may code otherwise.
std::string program() {
    Fingerprint fingerprint;
    std::ifstream in("/proc/self/exe", std::ios::binary);
    std::string buffer(1 << 20, '\0');
    while (in.read(buffer.data(), std::streamsize(buffer.size())), in.gcount() > 0) {
        fingerprint.add(std::as_bytes(std::span(buffer.data(), size_t(in.gcount()))));
    }
    return std::string(CRUMB_VERSION) + " " + fingerprint.hex().substr(0, 12);
}

}  // namespace

std::string hash(std::span<const llama_token> tokens) {
    Fingerprint fingerprint;
    fingerprint.add(std::as_bytes(tokens));
    return fingerprint.hex();
}

Evaluation::Evaluation(const EvaluationOptions& o)
    : o_(o), threads_(o.threads > 0 ? o.threads : int(std::max(1u, std::thread::hardware_concurrency()))), processor_(processor()), program_(program()), ledger_(o.results) {
    for (const int context : o.contexts) {
        if (first(context) + 1 >= context) { fail("--first {} leaves nothing of a window of {} tokens", first(context), context); }
    }
    llama::quiet_log();
    model_ = llama::load_model(o.model);
    identity_ = llama::identify(*model_, o.model);
}

void Evaluation::choose_variants() {
    std::vector<std::string> names = o_.recipes;
    if (o_.sweep) {
        for (const auto& stock : kStocks) { names.emplace_back(stock.name); }
        std::vector<std::string_view> slow;
        for (const auto& recipe : recipes()) {
            if (recipe.slow() && !o_.allow_slow && !o_.kv_offload) {  // a GPU has kernels of some, and is asked below
                slow.push_back(recipe.name);
            } else {
                names.emplace_back(recipe.name);
            }
        }
        if (!slow.empty()) { verdict_.notes.push_back(fmt::format("left out {}: they have no fast attention, --kv-allow-slow runs them", fmt::join(slow, ", "))); }
    }
    const auto path = o_.artefact.empty() ? llama::default_artefact(o_.model) : o_.artefact;
    if (o_.sweep && !std::filesystem::exists(path)) {
        const auto wants = std::ranges::stable_partition(names, [](const std::string& name) {
            return std::ranges::find(kStocks, name, &Stock::name) != std::end(kStocks) || !find_recipe(name).needs_artefact();
        });
        verdict_.notes.push_back(fmt::format("left out {}: they need an artefact for this model, and there is none at {}: make one with\n    crumb calibrate -m {}",
                                             fmt::join(wants, ", "), path.string(), o_.model.string()));
        names.erase(wants.begin(), wants.end());
    }
    for (const auto& name : names) {
        if (const auto stock = std::ranges::find(kStocks, name, &Stock::name); stock != std::end(kStocks)) {
            variants_.push_back({name, std::nullopt, stock->type});
            continue;
        }
        llama::KvOptions kv;
        kv.recipe = name;
        kv.prefill = o_.prefill;
        kv.allow_slow = o_.allow_slow;
        kv.attention = o_.attention;
        kv.announce = false;
        try {
            const bool automatic = name == llama::kAuto;
            const Windows windows = o_.paper_windows && !automatic ? find_recipe(name).paper : Windows{};
            kv.sink = o_.sink.value_or(windows.sink);
            kv.recent = o_.recent.value_or(windows.recent);
            if (automatic ? std::filesystem::exists(path) : find_recipe(name).needs_artefact()) {
                kv.artefact = automatic ? o_.artefact : path;  // auto looks beside the model by itself, and does without
                if (!artefact_ && std::filesystem::exists(path)) {
                    artefact_ = read_artefact(path);
                    artefact_->require(identity_);
                    artefact_hash_ = artefact_->hash();
                }
            }
            // A context of the smallest size: whatever the engine refuses, it refuses now.
            llama::new_context(model_.get(), shape(std::max(64, kv.sink + kv.recent)), kv);
            variants_.push_back({name, kv});
        } catch (const Error& e) {
            if (!o_.sweep) { throw; }
            verdict_.notes.push_back(fmt::format("left out {}: {}", name, e.what()));
        }
    }
    if (variants_.empty()) { fail("no recipe can run on this model:\n{}", fmt::join(verdict_.notes, "\n")); }
}

// Positions of a window that count and whose query reads a code.
int Evaluation::reading_positions(const Variant& variant, int context) const {
    int reading = 0;
    for (int t = first(context); t + 1 < context; ++t) {
        const int newest = o_.prefill == PrefillRule::exact ? t - t % o_.ubatch : t;
        reading += coded_edge(newest, variant.kv->recent) > variant.kv->sink;
    }
    return reading;
}

// Where no code is read a recipe looks as good as 16 bit. Known before anything is measured.
void Evaluation::require_codes() {
    for (const int context : o_.contexts) {
        if (o_.generate >= context) { fail("--generate {} at -c {} leaves no prompt: take a larger -c, or generate less", o_.generate, context); }
        if (const int trained = llama_model_n_ctx_train(model_.get()); context > trained) {
            verdict_.notes.push_back(fmt::format("{} tokens are more than the {} that the model was trained for: its own answers may mean little there", context, trained));
        }
        constexpr int kBlock = int(kBlockPositions);
        if (const int64_t blocks = (int64_t(o_.windows) * (context - 1 - first(context)) + kBlock - 1) / kBlock; blocks < kFewBlocks) {
            verdict_.notes.push_back(fmt::format("at {} the ± of a text is of {} block{} of {} positions: below {} it may be far off, give more --windows or a larger -c", context,
                                                 blocks, blocks == 1 ? "" : "s", kBlock, kFewBlocks));
        }
        std::map<int, std::vector<std::string>> few;  // by positions that read
        for (const auto& variant : variants_) {
            if (!variant.kv) { continue; }
            const int sink = variant.kv->sink, recent = variant.kv->recent, counted = context - 1 - first(context);
            const int reading = reading_positions(variant, context);
            if (reading == 0) {
                fail("-c {}: with the first {} and the last {} tokens at 16 bit, none of the {} positions that count reads a code of {}. Take -c {} or "
                     "more, or smaller --kv-sink and --kv-recent",
                     context, sink, recent, counted, variant.label, 256 * ((2 * (sink + recent) + 511) / 256));
            }
            if (2 * reading < counted) { few[reading].push_back(variant.label); }
            if (const int prompt = context - o_.generate; o_.generate && prompt <= sink + recent) {
                fail("--generate {} at {} tokens leaves a prompt of {}, which is inside the {} tokens that stay 16 bit: take a larger -c", o_.generate,
                     context, prompt, sink + recent);
            }
        }
        for (const auto& [reading, labels] : few) {
            verdict_.notes.push_back(fmt::format("at {} only {} of the {} positions that count read codes of {}: they look better here than they are, take a larger -c",
                                                 context, reading, context - 1 - first(context), fmt::join(labels, ", ")));
        }
    }
}

std::string Evaluation::windows_text() const {
    std::set<std::string> windows;
    std::vector<std::string> named;
    for (const auto& v : variants_) {
        if (!v.kv) { continue; }
        windows.insert(fmt::format("sink {} + recent {}", v.kv->sink, v.kv->recent));
        named.push_back(fmt::format("{} {} + {}", v.label, v.kv->sink, v.kv->recent));
    }
    if (windows.empty()) { return "no tokens"; }
    return windows.size() == 1 ? *windows.begin() : fmt::format("sink + recent ({})", fmt::join(named, ", "));
}

void Evaluation::describe_setting() {
    auto& lines = verdict_.setting;
    verdict_.model = fmt::format("{} ({})", o_.model.filename().string(), identity_.architecture);
    lines.push_back(fmt::format("windows: {} of each text and context, positions from {} on; {} stay 16 bit; prefill {}; attention {}", o_.windows,
                                o_.first ? std::to_string(*o_.first) : "512 (half of shorter windows)", windows_text(),
                                o_.prefill == PrefillRule::exact ? "exact" : "position", o_.kv_offload ? "on the GPU" : o_.attention));
    lines.push_back("16 bit, q8_0, q4_0: llama.cpp's own caches; ±: one standard error, bootstrap over blocks of " + std::to_string(kBlockPositions) + " positions");
    lines.push_back(fmt::format("speed: {} thread{}, ubatch {}, {}; pp over whole windows with all logits, tg of {} tokens after them", threads_, threads_ == 1 ? "" : "s", o_.ubatch,
                                processor_, kTimedTokens - 1));
    lines.push_back(fmt::format("model hash {}, crumb {}", identity_.hash, program_));
    if (artefact_) {
        const auto& p = artefact_->provenance;
        lines.push_back(fmt::format("artefact {}: {}, {} tokens of {}", artefact_hash_, p.method, p.tokens, p.texts));
        if (p.sketch.empty()) {
            verdict_.notes.push_back(fmt::format("the artefact does not say which text it was calibrated on (files: {}): make sure that it is none of these, or calibrate anew",
                                                 p.texts.empty() ? "unknown" : p.texts));
        }
    }
}

Key Evaluation::key(const Variant& variant, const std::string& text, const std::string& tokens, int context) const {
    Key key = {{"model", identity_.hash}, {"recipe", variant.label}, {"text", text},
               {"tokens", tokens},        {"program", program_},     {"processor", processor_},
               {"context", std::to_string(context)},  {"ubatch", std::to_string(o_.ubatch)}, {"threads", std::to_string(threads_)}};
    if (variant.kv) {
        key["artefact"] = reads_artefact(variant) ? artefact_hash_ : "";
        key["sink"] = std::to_string(variant.kv->sink);
        key["recent"] = std::to_string(variant.kv->recent);
        key["prefill"] = variant.kv->prefill == PrefillRule::exact ? "exact" : "position";
        if (variant.kv->attention != "auto") { key["attention"] = variant.kv->attention; }
        if (o_.kv_offload) { key["attention"] = "on the GPU"; }
        if (variant.kv->only_layer >= 0) { key["only_layer"] = std::to_string(variant.kv->only_layer); }
    }
    return key;
}

Key Evaluation::window_key(const Variant& variant, const Text& text, size_t window, int context) const {
    Key result = key(variant, text.name, hash(text.windows[window]), context);
    result["window"] = std::to_string(window);
    result["first"] = std::to_string(first(context));
    return result;
}

Cost Evaluation::cost(const Variant& variant, int context) const {
    llama::KvOptions bf16;
    bf16.recipe = "bf16";
    const CacheBytes bytes = cache_bytes(llama::cache_geometry(*model_, variant.kv.value_or(bf16), {.n_ctx = context, .n_ubatch = o_.ubatch}));
    if (variant.kv) { return {bytes.bits_per_element, bytes.effective_bits, bytes.total(), bytes.bf16_equivalent}; }
    const double bits = 8.0 * double(ggml_type_size(variant.stock)) / double(ggml_blck_size(variant.stock));
    return {bits, bits, size_t(double(bytes.bf16_equivalent) * bits / 16), bytes.bf16_equivalent};
}

std::vector<Variant> Evaluation::everything() const {
    std::vector<Variant> all = {base_};
    all.insert(all.end(), variants_.begin(), variants_.end());
    return all;
}

Verdict Evaluation::run() {
    choose_variants();
    require_codes();
    for (const auto& variant : variants_) {
        if (o_.layers && variant.kv) { layers_alone(variant); }
    }
    // Whatever is too short is refused before hours of work, at the last context as well as at the first.
    std::vector<std::vector<Text>> texts_of;
    for (const int context : o_.contexts) {
        texts_of.push_back(read_texts(context));
        for (const Probe probe : o_.retrieval ? o_.probes : std::vector<Probe>{}) { haystacks(probe, context); }
    }
    describe_setting();
    for (size_t i = 0; i < o_.contexts.size(); ++i) {
        const int context = o_.contexts[i];
        const auto& texts = texts_of[i];
        measure_windows(context, texts, variants_);
        sum_up_windows(context, texts);
        if ((o_.layers || o_.ablate) && verdict_.parts.empty()) { parts(context, texts.front()); }
        if (o_.retrieval) { retrieval(context); }
        if (o_.generate) { trajectories(context, texts); }
        if (o_.key_shapes && verdict_.keys.empty()) { key_shapes(texts.front()); }
    }
    mark_fronts(verdict_.rows);
    return std::move(verdict_);
}

Verdict evaluate(const EvaluationOptions& options) { return Evaluation(options).run(); }

}  // namespace crumb::app

#include "evaluation.h"

#include "measure.h"
#include "model_identity.h"
#include "progress.h"
#include "texts.h"

#include "calibrate/fingerprint.h"

#include <crumb/artefact.h>
#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <thread>

namespace crumb::app {

namespace {

constexpr const char* kBase = "16 bit";
constexpr int kKeyTokens = 2048;     // that key shapes are taken from
constexpr double kFewShared = 0.01;  // of sampled runs: boilerplate that many texts have

std::string hash(std::span<const llama_token> tokens) {
    Fingerprint fingerprint;
    fingerprint.add(std::as_bytes(tokens));
    return fingerprint.hex();
}

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

class Progress {
public:
    Progress(std::string what, size_t all) : progress_(std::move(what), double(all)), all_(all) {}

    void operator()(size_t tokens) {
        done_ += tokens;
        progress_.at(double(done_), fmt::format("{} of {} tokens", done_, all_));
    }

private:
    llama::Progress progress_;
    const size_t all_;
    size_t done_ = 0;
};

struct Text {
    std::string name;
    std::vector<Tokens> windows;  // each with kTimedTokens more
};

class Evaluation {
public:
    explicit Evaluation(const EvaluationOptions& o);
    Verdict run();

private:
    void choose_variants();
    int reading_positions(const Variant& variant, int context) const;
    void require_codes();
    std::string windows_text() const;
    void describe_setting();
    std::vector<Text> read_texts(int context) const;
    llama::ContextOptions shape(int n_ctx) const { return {.n_ctx = n_ctx, .n_ubatch = o_.ubatch, .n_threads = threads_}; }
    int first(int context) const { return o_.first.value_or(std::min(512, context / 2)); }
    Key key(const Variant& variant, const std::string& text, const std::string& tokens, int context) const;
    Key window_key(const Variant& variant, const Text& text, size_t window, int context) const;
    Cost cost(const Variant& variant, int context) const;
    std::vector<Variant> everything() const;

    void measure_windows(int context, const std::vector<Text>& texts, std::span<const Variant> variants);
    void measure_group(int context, const std::vector<Text>& texts, std::span<const Variant> group);
    void sum_up_windows(int context, const std::vector<Text>& texts);
    bool reads_artefact(const Variant& variant) const {
        return artefact_ && variant.kv && (!variant.kv->artefact.empty() || variant.label == llama::kAuto);
    }
    std::optional<double> calibrated_on(const Variant& variant, const std::vector<const Text*>& texts) const;
    std::vector<int> layers_alone(const Variant& variant) const;
    void parts(int context, const Text& text);
    void retrieval(int context);
    void trajectories(int context, const std::vector<Text>& texts);
    void key_shapes(const Text& text);

    const EvaluationOptions& o_;
    const int threads_;
    const std::string processor_ = processor(), program_ = program();
    Ledger ledger_;
    llama::ModelPtr model_;
    ModelIdentity identity_;
    std::optional<Artefact> artefact_;
    std::string artefact_hash_;
    const Variant base_{kBase, std::nullopt};
    std::vector<Variant> variants_;
    Verdict verdict_;
};

Evaluation::Evaluation(const EvaluationOptions& o)
    : o_(o), threads_(o.threads > 0 ? o.threads : int(std::max(1u, std::thread::hardware_concurrency()))), ledger_(o.results) {
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
        for (const auto& recipe : recipes()) { names.emplace_back(recipe.name); }
    }
    const auto path = o_.artefact.empty() ? llama::default_artefact(o_.model) : o_.artefact;
    for (const auto& name : names) {
        llama::KvOptions kv;
        kv.recipe = name;
        kv.prefill = o_.prefill;
        kv.allow_slow = o_.allow_slow;
        kv.attention = o_.attention;
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
        for (const auto& variant : variants_) {
            const int sink = variant.kv->sink, recent = variant.kv->recent, counted = context - 1 - first(context);
            const int reading = reading_positions(variant, context);
            if (reading == 0) {
                fail("-c {}: with the first {} and the last {} tokens at 16 bit, none of the {} positions that count reads a code of {}. Take -c {} or "
                     "more, or smaller --kv-sink and --kv-recent",
                     context, sink, recent, counted, variant.label, 256 * ((2 * (sink + recent) + 511) / 256));
            }
            if (2 * reading < counted) {
                verdict_.notes.push_back(fmt::format("{} at {}: only {} of the {} positions that count read codes, so it looks better here than it is: take a larger -c",
                                                     variant.label, context, reading, counted));
            }
            if (const int prompt = context - o_.generate; o_.generate && prompt <= sink + recent) {
                fail("--generate {} at {} tokens leaves a prompt of {}, which is inside the {} tokens that stay 16 bit: take a larger -c", o_.generate,
                     context, prompt, sink + recent);
            }
        }
    }
}

std::string Evaluation::windows_text() const {
    const auto& kv = *variants_.front().kv;
    const bool same = std::ranges::all_of(variants_, [&](const Variant& v) { return v.kv->sink == kv.sink && v.kv->recent == kv.recent; });
    if (same) { return fmt::format("sink {} + recent {}", kv.sink, kv.recent); }
    std::string text;
    for (const auto& v : variants_) { text += fmt::format("{}{} {} + {}", text.empty() ? "sink + recent (" : ", ", v.label, v.kv->sink, v.kv->recent); }
    return text + ")";
}

void Evaluation::describe_setting() {
    auto& lines = verdict_.setting;
    verdict_.model = fmt::format("{} ({})", o_.model.filename().string(), identity_.architecture);
    lines.push_back(fmt::format("windows: {} of each text and context, positions from {} on; {} stay 16 bit; prefill {}; attention {}", o_.windows,
                                o_.first ? std::to_string(*o_.first) : "512 (half of shorter windows)", windows_text(),
                                o_.prefill == PrefillRule::exact ? "exact" : "position", o_.attention));
    lines.push_back("16 bit: llama.cpp's F16 cache; ±: one standard error, bootstrap over blocks of " + std::to_string(kBlockPositions) + " positions");
    lines.push_back(fmt::format("speed: {} threads, ubatch {}, {}; pp over whole windows with all logits, tg of {} tokens after them", threads_, o_.ubatch,
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

std::vector<Text> Evaluation::read_texts(int context) const {
    const auto* vocab = llama_model_get_vocab(model_.get());
    std::vector<Text> texts;
    for (const auto& file : o_.texts) {
        const auto tokens = first_tokens(model_.get(), file, size_t(context) * o_.windows + kTimedTokens);
        Text text{file.stem().string(), {}};
        for (int w = 0; w < o_.windows; ++w) {
            const auto begin = tokens.begin() + std::ptrdiff_t(w) * context;
            text.windows.emplace_back(begin, begin + context + kTimedTokens);
            if (llama_vocab_get_add_bos(vocab)) { text.windows.back()[0] = llama_vocab_bos(vocab); }
        }
        texts.push_back(std::move(text));
    }
    return texts;
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
    const CacheBytes bytes = cache_bytes(llama::cache_geometry(*model_, variant.kv.value_or(bf16), context, 1, o_.ubatch));
    if (!variant.kv) { return {16, 16, bytes.bf16_equivalent, bytes.bf16_equivalent}; }
    return {bytes.bits_per_element, bytes.effective_bits, bytes.total(), bytes.bf16_equivalent};
}

std::vector<Variant> Evaluation::everything() const {
    std::vector<Variant> all = {base_};
    all.insert(all.end(), variants_.begin(), variants_.end());
    return all;
}

// Recipes that lack a window run beside 16 bit, as many together as --memory holds.
void Evaluation::measure_windows(int context, const std::vector<Text>& texts, std::span<const Variant> variants) {
    std::vector<Variant> group;
    const size_t budget = o_.memory << 20, overhead = context_bytes(model_.get(), o_.ubatch);
    const size_t base = cost(base_, context).bytes + overhead;
    size_t bytes = base;
    const auto flush = [&] {
        if (!group.empty()) {
            std::fprintf(stderr, "%d tokens: 16 bit and %zu variants side by side, about %zu MiB\n", context, group.size(), bytes >> 20);
            measure_group(context, texts, group);
        }
        group.clear();
        bytes = base;
    };
    for (const auto& variant : variants) {
        bool lacks = false;
        for (const Text& text : texts) {
            for (size_t w = 0; w < text.windows.size(); ++w) {
                lacks = lacks || !ledger_.window(window_key(variant, text, w, context)) || !ledger_.window(window_key(base_, text, w, context));
            }
        }
        if (!lacks) { continue; }
        const size_t more = cost(variant, context).bytes + overhead;
        if (bytes + more > budget) { flush(); }
        group.push_back(variant);
        bytes += more;
    }
    flush();
}

void Evaluation::measure_group(int context, const std::vector<Text>& texts, std::span<const Variant> group) {
    std::vector<Variant> all = {base_};
    all.insert(all.end(), group.begin(), group.end());
    struct Missing {
        const Text* text;
        size_t window;
    };
    std::vector<Missing> missing;
    for (const Text& text : texts) {
        for (size_t w = 0; w < text.windows.size(); ++w) {
            if (std::ranges::any_of(all, [&](const Variant& v) { return !ledger_.window(window_key(v, text, w, context)); })) {
                missing.push_back({&text, w});
            }
        }
    }
    Lockstep lockstep(model_.get(), shape(context + kTimedTokens), group);
    Progress progress("windows", missing.size() * all.size() * size_t(context));
    for (const auto& [text, w] : missing) {
        const auto records = lockstep.run(text->windows[w], first(context), std::ref(progress));
        for (size_t i = 0; i < all.size(); ++i) {
            const Key key = window_key(all[i], *text, w, context);
            if (!ledger_.window(key)) { ledger_.add(key, records[i]); }
        }
    }
}

std::optional<double> Evaluation::calibrated_on(const Variant& variant, const std::vector<const Text*>& texts) const {
    if (!reads_artefact(variant) || artefact_->provenance.sketch.empty()) { return std::nullopt; }
    double sum = 0;
    size_t n = 0;
    for (const Text* text : texts) {
        for (const auto& window : text->windows) {
            if (const auto share = artefact_->provenance.sketch.share(window)) {
                sum += *share;
                ++n;
            }
        }
    }
    const double share = n ? sum / double(n) : 0;
    return n ? std::optional(share > kFewShared ? share : 0) : std::nullopt;
}

void Evaluation::sum_up_windows(int context, const std::vector<Text>& texts) {
    for (const auto& variant : everything()) {
        DivergenceSum all;
        std::vector<const Text*> all_texts;
        double all_prompt = 0, all_generated = 0;
        size_t all_windows = 0;
        for (const Text& text : texts) {
            DivergenceSum sum;
            double prompt = 0, generated = 0;  // seconds a token
            for (size_t w = 0; w < text.windows.size(); ++w) {
                const auto record = ledger_.window(window_key(variant, text, w, context));
                CRUMB_ASSERT(record);
                sum.merge(record->divergence);
                prompt += 1 / record->speed.prompt;
                generated += 1 / record->speed.generated;
            }
            const size_t n = text.windows.size();
            const auto share = calibrated_on(variant, {&text});
            if (share.value_or(0) > 0) {
                verdict_.notes.push_back(fmt::format("! {} at {}: the artefact was calibrated on {:.0f} % of this text, so {} looks better here than it is", text.name,
                                                     context, 100 * *share, variant.label));
            }
            verdict_.rows.push_back({variant.label, text.name, context, cost(variant, context), {double(n) / prompt, double(n) / generated}, sum.result(), share, false});
            all.merge(sum);
            all_texts.push_back(&text);
            all_prompt += prompt;
            all_generated += generated;
            all_windows += n;
        }
        if (texts.size() > 1) {
            verdict_.rows.push_back({variant.label, "all", context, cost(variant, context), {double(all_windows) / all_prompt, double(all_windows) / all_generated},
                                     all.result(), calibrated_on(variant, all_texts), false});
        }
    }
}

// Layers that --layers names, or all that a recipe codes.
std::vector<int> Evaluation::layers_alone(const Variant& variant) const {
    const auto layers = llama::cache_geometry(*model_, *variant.kv, o_.contexts.front(), 1, o_.ubatch).layers;
    const auto coded = [&](int il) { return layers[il].stores && !layers[il].window; };
    std::vector<int> result;
    for (int il = 0; o_.layers->empty() && il < int(layers.size()); ++il) {
        if (coded(il)) { result.push_back(il); }
    }
    for (const int il : *o_.layers) {
        if (il < 0 || il >= int(layers.size())) { fail("--layers {}: this model has layers 0 to {}", il, layers.size() - 1); }
        if (!coded(il)) { fail("--layers {}: this layer of this model stays at 16 bit", il); }
        result.push_back(il);
    }
    return result;
}

// One window of one text: each layer coded alone, and the recipe without each of its windows.
void Evaluation::parts(int context, const Text& text) {
    const std::vector<Text> window = {{text.name, {text.windows.front()}}};
    struct Part {
        std::string name;
        int layer;
        Variant variant;
    };
    std::vector<Part> parts;
    for (const auto& variant : variants_) {
        const auto add = [&](const std::string& name, int layer, auto change) {
            Variant changed = variant;
            change(*changed.kv);
            parts.push_back({name, layer, std::move(changed)});
        };
        add("all of it", -1, [](auto&) {});
        if (variant.kv->sink) { add("no sinks", -1, [](auto& kv) { kv.sink = 0; }); }
        if (variant.kv->recent) { add("no recent window", -1, [](auto& kv) { kv.recent = 0; }); }
        for (const int il : layers_alone(variant)) {
            add("K and V", il, [&](auto& kv) { kv.only_layer = il; });
        }
    }
    std::vector<Variant> changed;
    for (const auto& part : parts) { changed.push_back(part.variant); }
    measure_windows(context, window, changed);
    for (const auto& part : parts) {
        const auto record = ledger_.window(window_key(part.variant, window.front(), 0, context));
        CRUMB_ASSERT(record);
        verdict_.parts.push_back({part.variant.label, part.name, part.layer, context, record->divergence.result()});
    }
}

void Evaluation::retrieval(int context) {
    const auto* vocab = llama_model_get_vocab(model_.get());
    const auto hay = paragraphs(llama::read_text(o_.haystack));
    const Tokens begin(llama_vocab_get_add_bos(vocab) ? 1 : 0, llama_vocab_bos(vocab));
    const auto tokenize = [&](const std::string& text) { return llama::tokenize(model_.get(), text, false, false); };
    for (const Probe probe : o_.probes) {
        std::vector<Haystack> haystacks;
        std::vector<std::string> hashes;
        for (int i = 0; i < o_.haystacks; ++i) {
            haystacks.push_back(build_haystack(probe, context, uint64_t(i) + 1, hay, begin, tokenize));
            Tokens everything = haystacks.back().prefix;
            for (const auto& q : haystacks.back().questions) {
                everything.insert(everything.end(), q.prompt.begin(), q.prompt.end());
                everything.insert(everything.end(), q.answer.begin(), q.answer.end());
            }
            hashes.push_back(hash(everything));
        }
        const auto haystack_key = [&](const Variant& variant, size_t i) {
            Key result = key(variant, o_.haystack.stem().string(), hashes[i], context);
            result["probe"] = name(probe);
            return result;
        };
        const auto all = everything();
        size_t tokens = 0;
        for (const auto& variant : all) {
            for (size_t i = 0; i < haystacks.size(); ++i) {
                if (ledger_.retrieval(haystack_key(variant, i))) { continue; }
                tokens += haystacks[i].prefix.size();
                for (const auto& q : haystacks[i].questions) { tokens += q.prompt.size() + q.answer.size(); }
            }
        }
        Progress progress(fmt::format("retrieval, {}", name(probe)), tokens);
        for (const auto& variant : all) {
            RetrievalRow row{variant.label, std::string(name(probe)), context, cost(variant, context), {}, {}};
            for (size_t i = 0; i < haystacks.size(); ++i) {
                const Key k = haystack_key(variant, i);
                // Room for the blocks that a fork copies before it writes to them.
                if (!ledger_.retrieval(k)) { ledger_.add(k, ask(model_.get(), shape(context + 512), variant, haystacks[i], std::ref(progress))); }
                const auto answers = *ledger_.retrieval(k);
                for (const Answer& answer : answers) {
                    row.all.add(answer);
                    row.by_depth[std::clamp(int(answer.depth * kDepthBins), 0, kDepthBins - 1)].add(answer);
                }
            }
            verdict_.retrieval.push_back(row);
        }
    }
}

void Evaluation::trajectories(int context, const std::vector<Text>& texts) {
    const int prompt_tokens = context - o_.generate;
    for (const Text& text : texts) {
        const auto prompt = std::span(text.windows[0]).first(prompt_tokens);
        const auto trajectory_key = [&](const Variant& variant, const Tokens& follow) {
            Key result = key(variant, text.name, hash(prompt), context);
            result["generate"] = std::to_string(o_.generate);
            if (variant.kv) { result["follow"] = hash(follow); }
            return result;
        };
        Tokens follow;
        for (const auto& variant : everything()) {
            const Key k = trajectory_key(variant, follow);
            if (!ledger_.trajectory(k)) {
                Progress progress(fmt::format("greedy text of {}", variant.label), size_t(context));
                ledger_.add(k, generate(model_.get(), shape(context), variant, prompt, o_.generate, variant.kv ? &follow : nullptr, std::ref(progress)));
            }
            const auto record = *ledger_.trajectory(k);
            TrajectoryRow row{variant.label, text.name, context, cost(variant, context), record.speed, size_t(o_.generate), size_t(o_.generate), 1};
            if (variant.kv) {
                row.first_divergence = size_t(std::ranges::find(record.agrees, false) - record.agrees.begin());
                row.agreement = double(std::ranges::count(record.agrees, true)) / double(o_.generate);
            } else {
                follow = record.tokens;
            }
            verdict_.trajectories.push_back(row);
        }
    }
}

void Evaluation::key_shapes(const Text& text) {
    const auto tokens = std::span(text.windows[0]).first(std::min<size_t>(kKeyTokens, text.windows[0].size()));
    const Key k = key(base_, text.name, hash(tokens), int(tokens.size()));
    if (!ledger_.keys(k)) {
        Progress progress("keys", tokens.size());
        ledger_.add(k, crumb::app::key_shapes(model_.get(), shape(int(tokens.size())), tokens, std::ref(progress)));
    }
    verdict_.keys = *ledger_.keys(k);
}

Verdict Evaluation::run() {
    choose_variants();
    require_codes();
    if (o_.layers) { layers_alone(variants_.front()); }
    describe_setting();
    for (const int context : o_.contexts) {
        const auto texts = read_texts(context);
        measure_windows(context, texts, variants_);
        sum_up_windows(context, texts);
        if (o_.layers && verdict_.parts.empty()) { parts(context, texts.front()); }
        if (o_.retrieval) { retrieval(context); }
        if (o_.generate) { trajectories(context, texts); }
        if (o_.key_shapes && verdict_.keys.empty()) { key_shapes(texts.front()); }
    }
    mark_fronts(verdict_.rows);
    return std::move(verdict_);
}

}  // namespace

Verdict evaluate(const EvaluationOptions& options) { return Evaluation(options).run(); }

}  // namespace crumb::app

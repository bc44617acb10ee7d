#include "evaluation_task.h"
#include "texts.h"

#include <algorithm>
#include <cstdio>

namespace crumb::app {

namespace {

constexpr double kFewShared = 0.01;  // of sampled runs: boilerplate that many texts have

}  // namespace

std::vector<Text> Evaluation::read_texts(int context) const {
    const auto* vocab = llama_model_get_vocab(model_.get());
    std::vector<Text> texts;
    const auto names = text_names(o_.texts);
    for (size_t i = 0; i < names.size(); ++i) {
        const auto tokens = first_tokens(model_.get(), o_.texts[i], size_t(context) * o_.windows + kTimedTokens);
        Text text{names[i], {}};
        for (int w = 0; w < o_.windows; ++w) {
            const auto begin = tokens.begin() + std::ptrdiff_t(w) * context;
            text.windows.emplace_back(begin, begin + context + kTimedTokens);
            if (llama_vocab_get_add_bos(vocab)) { text.windows.back()[0] = llama_vocab_bos(vocab); }
        }
        texts.push_back(std::move(text));
    }
    return texts;
}

// Recipes that lack a window run beside 16 bit, as many together as --memory holds.
void Evaluation::measure_windows(int context, const std::vector<Text>& texts, std::span<const Variant> variants) {
    struct Group {
        std::vector<Variant> variants;
        size_t bytes;
    };
    std::vector<Group> groups;
    const size_t budget = o_.memory << 20, overhead = context_bytes(model_.get(), o_.ubatch);
    const size_t base = cost(base_, context).bytes + overhead;
    for (const auto& variant : variants) {
        bool lacks = false;
        for (const Text& text : texts) {
            for (size_t w = 0; w < text.windows.size(); ++w) {
                lacks = lacks || !ledger_.window(window_key(variant, text, w, context)) || !ledger_.window(window_key(base_, text, w, context));
            }
        }
        if (!lacks) { continue; }
        const size_t more = cost(variant, context).bytes + overhead;
        if (groups.empty() || (groups.back().bytes + more > budget && !groups.back().variants.empty())) { groups.push_back({{}, base}); }
        groups.back().variants.push_back(variant);
        groups.back().bytes += more;
    }
    for (size_t i = 0; i < groups.size(); ++i) {
        const auto& [group, bytes] = groups[i];
        std::fprintf(stderr, "%d tokens, round %zu of %zu: 16 bit and %zu variant%s side by side, about %zu MiB\n", context, i + 1, groups.size(), group.size(),
                     group.size() == 1 ? "" : "s", bytes >> 20);
        measure_group(context, texts, group);
    }
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
    const auto layers = llama::cache_geometry(*model_, *variant.kv, {.n_ctx = o_.contexts.front(), .n_ubatch = o_.ubatch}).layers;
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

std::vector<Part> Evaluation::parts_of(const Variant& variant) const {
    const bool automatic = variant.label == llama::kAuto;
    const std::vector<Recipe> changed = automatic ? std::vector<Recipe>{} : ablations(find_recipe(variant.label));
    std::vector<Part> parts = {{"all of it", -1, variant}};
    const auto add = [&](const std::string& name, int layer) -> llama::KvOptions& { return *parts.emplace_back(name, layer, variant).variant.kv; };
    const auto add_recipe = [&](const std::string& name, int layer, const Recipe& recipe) -> llama::KvOptions& {
        auto& kv = add(name, layer);
        kv.recipe = parts.back().variant.label = label(recipe);
        if (!recipe.needs_artefact()) { kv.artefact.clear(); }
        return kv;
    };
    const auto what = [&](const Recipe& recipe) {
        return recipe.name.ends_with(":paper") ? std::string("with its key mean") : std::string(recipe.summary.substr(recipe.summary.find(' ') + 1));
    };
    if (o_.ablate) {
        for (const Recipe& recipe : changed) { add_recipe(what(recipe), -1, recipe); }
        if (variant.kv->sink) { add("no sinks", -1).sink = 0; }
        if (variant.kv->recent) { add("no recent window", -1).recent = 0; }
    }
    const auto side_alone = [](const Recipe& recipe) { return recipe.name.ends_with(":K") ? "K" : recipe.name.ends_with(":V") ? "V" : nullptr; };
    for (const int il : o_.layers ? layers_alone(variant) : std::vector<int>{}) {
        const bool sides = o_.ablate && !changed.empty();
        if (!sides) { add("K and V", il).only_layer = il; }
        for (const Recipe& recipe : changed) {
            if (const char* side = side_alone(recipe); sides && side) { add_recipe(side, il, recipe).only_layer = il; }
        }
    }
    return parts;
}

// One window of one text.
void Evaluation::parts(int context, const Text& text) {
    const std::vector<Text> window = {{text.name, {text.windows.front()}}};
    for (const auto& variant : variants_) {
        if (!variant.kv) { continue; }
        const std::vector<Part> parts = parts_of(variant);
        std::vector<Variant> changed;
        for (const auto& part : parts) { changed.push_back(part.variant); }
        measure_windows(context, window, changed);
        for (const auto& part : parts) {
            const auto record = ledger_.window(window_key(part.variant, window.front(), 0, context));
            CRUMB_ASSERT(record);
            verdict_.parts.push_back({variant.label, part.name, part.layer, context, record->divergence.result()});
        }
    }
}

}  // namespace crumb::app

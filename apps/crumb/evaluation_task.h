// One run of crumb eval: what it is asked for, what is known already, and what comes of it. evaluation.cpp chooses recipes
// and names measurements, evaluation_windows.cpp measures distributions, evaluation_probes.cpp what a user would notice.
#pragma once

#include "evaluation.h"
#include "measure.h"
#include "model_identity.h"
#include "progress.h"

#include <crumb/artefact.h>
#include <crumb/error.h>

namespace crumb::app {

std::string hash(std::span<const llama_token> tokens);

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

// A recipe changed so that its measure says what a part of it is worth.
struct Part {
    std::string name;
    int layer;  // -1: all
    Variant variant;
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
    llama::ContextOptions shape(int n_ctx) const { return {.n_ctx = n_ctx, .n_ubatch = o_.ubatch, .n_threads = threads_, .kv_offload = o_.kv_offload}; }
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
    std::vector<Part> parts_of(const Variant& variant) const;
    void parts(int context, const Text& text);
    std::vector<Haystack> haystacks(Probe probe, int context) const;
    void retrieval(int context);
    void trajectories(int context, const std::vector<Text>& texts);
    void key_shapes(const Text& text);

    const EvaluationOptions& o_;
    const int threads_;
    const std::string processor_, program_;
    Ledger ledger_;
    llama::ModelPtr model_;
    ModelIdentity identity_;
    std::optional<Artefact> artefact_;
    std::string artefact_hash_;
    const Variant base_{"16 bit", std::nullopt};
    std::vector<Variant> variants_;
    Verdict verdict_;
};

}  // namespace crumb::app

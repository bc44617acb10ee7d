#include "evaluation_task.h"
#include "texts.h"

#include <algorithm>

namespace crumb::app {

namespace {

constexpr int kKeyTokens = 2048;  // that key shapes are taken from

}  // namespace

std::vector<Haystack> Evaluation::haystacks(Probe probe, int context) const {
    const auto* vocab = llama_model_get_vocab(model_.get());
    const auto hay = paragraphs(llama::read_text(o_.haystack));
    const Tokens begin(llama_vocab_get_add_bos(vocab) ? 1 : 0, llama_vocab_bos(vocab));
    const auto tokenize = [&](const std::string& text) { return llama::tokenize(model_.get(), text, false, false); };
    std::vector<Haystack> result;
    for (int i = 0; i < o_.haystacks; ++i) {
        result.push_back(build_haystack(probe, context, uint64_t(i) + 1, hay, begin, tokenize));
        for (const auto& q : result.back().questions) {
            const size_t tokens = q.prompt.size() + q.answer.size();
            if (tokens > size_t(o_.ubatch)) { fail("a question of {} tokens needs --ubatch-size {}", tokens, tokens); }
        }
    }
    return result;
}

void Evaluation::retrieval(int context) {
    for (const Probe probe : o_.probes) {
        const std::vector<Haystack> haystacks = this->haystacks(probe, context);
        std::vector<std::string> hashes;
        for (const Haystack& haystack : haystacks) {
            Tokens everything = haystack.prefix;
            for (const auto& q : haystack.questions) {
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
            if (!variant.base()) { result["follow"] = hash(follow); }
            return result;
        };
        Tokens follow;
        for (const auto& variant : everything()) {
            const Key k = trajectory_key(variant, follow);
            if (!ledger_.trajectory(k)) {
                Progress progress(fmt::format("greedy text of {}", variant.label), size_t(context));
                ledger_.add(k, generate(model_.get(), shape(context), variant, prompt, o_.generate, variant.base() ? nullptr : &follow, std::ref(progress)));
            }
            const auto record = *ledger_.trajectory(k);
            TrajectoryRow row{variant.label, text.name, context, cost(variant, context), record.speed, size_t(o_.generate), size_t(o_.generate), 1};
            if (!variant.base()) {
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

}  // namespace crumb::app

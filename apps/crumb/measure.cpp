#include "measure.h"

#include "observer.h"

#include <crumb/error.h>

#include <algorithm>
#include <chrono>

namespace crumb::app {

namespace {

using Clock = std::chrono::steady_clock;

int vocabulary(const llama_model* model) { return llama_vocab_n_tokens(llama_model_get_vocab(model)); }

// Adds the time of one decode call, results included.
void timed_decode(double& seconds, llama_context* context, std::span<const llama_token> tokens, int at, bool last_only) {
    const auto start = Clock::now();
    llama::decode(context, tokens, at, last_only);
    llama_synchronize(context);
    seconds += std::chrono::duration<double>(Clock::now() - start).count();
}

llama::ContextPtr open(llama_model* model, llama::ContextOptions shape, const Variant& variant) {
    shape.stock_type = variant.stock;
    return llama::new_context(model, shape, variant.kv);
}

double rate(size_t tokens, double seconds) { return seconds > 0 ? double(tokens) / seconds : 0; }

std::span<const float> logits(llama_context* context, int row, int n_vocab) {
    return {llama_get_logits_ith(context, row), size_t(n_vocab)};
}

llama_token most_likely(std::span<const float> logits) { return llama_token(std::ranges::max_element(logits) - logits.begin()); }

// Reads tokens from position 0; logits of the last alone.
double read_prompt(llama_context* context, std::span<const llama_token> tokens, int ubatch, const Report& report) {
    double seconds = 0;
    for (size_t at = 0; at < tokens.size(); at += ubatch) {
        const auto step = tokens.subspan(at, std::min<size_t>(ubatch, tokens.size() - at));
        timed_decode(seconds, context, step, int(at), true);
        report(step.size());
    }
    return seconds;
}

}  // namespace

Lockstep::Lockstep(llama_model* model, const llama::ContextOptions& shape, std::span<const Variant> variants)
    : shape_(shape), n_vocab_(vocabulary(model)) {
    contexts_.push_back(llama::new_context(model, shape, std::nullopt));
    for (const auto& variant : variants) { contexts_.push_back(open(model, shape, variant)); }
}

std::vector<WindowRecord> Lockstep::run(std::span<const llama_token> tokens, int first, const Report& report) {
    CRUMB_ASSERT(tokens.size() > size_t(kTimedTokens));
    const int window = int(tokens.size()) - kTimedTokens;
    std::vector<WindowRecord> records(contexts_.size());
    std::vector<double> seconds(contexts_.size(), 0.0);
    llama_context* base = contexts_.front().get();
    for (const auto& context : contexts_) { llama_memory_clear(llama_get_memory(context.get()), true); }
    for (int at = 0; at < window; at += shape_.n_ubatch) {
        const int n = std::min(shape_.n_ubatch, window - at);
        for (size_t c = 0; c < contexts_.size(); ++c) {
            llama_context* context = contexts_[c].get();
            timed_decode(seconds[c], context, tokens.subspan(at, n), at, false);
            for (int i = std::max(0, first - at); i < n && at + i + 1 < window; ++i) {
                records[c].divergence.add(logits(base, i, n_vocab_), logits(context, i, n_vocab_), tokens[at + i + 1]);
            }
            report(n);
        }
    }
    for (size_t c = 0; c < contexts_.size(); ++c) {
        double each = 0, warm_up = 0;
        timed_decode(warm_up, contexts_[c].get(), tokens.subspan(window, 1), window, true);
        for (int i = 1; i < kTimedTokens; ++i) { timed_decode(each, contexts_[c].get(), tokens.subspan(window + i, 1), window + i, true); }
        records[c].speed = {rate(window, seconds[c]), rate(kTimedTokens - 1, each)};
    }
    return records;
}

size_t context_bytes(const llama_model* model, int ubatch) {
    constexpr size_t activations = 24;  // rows of n_embd floats that are alive at once, feed-forward included: a round guess
    return size_t(ubatch) * sizeof(float) * (2 * size_t(vocabulary(model)) + activations * size_t(llama_model_n_embd(model)));
}

std::vector<Answer> ask(llama_model* model, const llama::ContextOptions& shape, const Variant& variant, const Haystack& haystack,
                        const Report& report) {
    constexpr llama_seq_id kPrefix = 0, kFork = 1;
    auto two = shape;
    two.n_sequences = 2;
    const auto context = open(model, two, variant);
    auto* memory = llama_get_memory(context.get());
    const int n_vocab = vocabulary(model), length = int(haystack.prefix.size());
    read_prompt(context.get(), haystack.prefix, shape.n_ubatch, report);
    std::vector<Answer> answers;
    for (const auto& question : haystack.questions) {
        Tokens tokens = question.prompt;
        tokens.insert(tokens.end(), question.answer.begin(), question.answer.end());
        CRUMB_ASSERT(tokens.size() <= size_t(shape.n_ubatch));
        llama_memory_seq_cp(memory, kPrefix, kFork, -1, -1);
        llama::decode(context.get(), tokens, length, false, kFork);
        Answer answer{question.depth, true, 0};
        for (size_t i = 0; i < question.answer.size(); ++i) {
            const auto row = logits(context.get(), int(question.prompt.size() + i) - 1, n_vocab);
            const TokenAnswer token = judge(row, question.answer[i]);
            answer.right = answer.right && token.top;
            answer.nll += token.nll / double(question.answer.size());
        }
        if (!llama_memory_seq_rm(memory, kFork, -1, -1)) { fail("a forked question could not be dropped from the cache"); }
        answers.push_back(answer);
        report(tokens.size());
    }
    return answers;
}

TrajectoryRecord generate(llama_model* model, const llama::ContextOptions& shape, const Variant& variant, std::span<const llama_token> prompt,
                          int n_tokens, const Tokens* follow, const Report& report) {
    CRUMB_ASSERT(!follow || int(follow->size()) >= n_tokens);
    const auto context = open(model, shape, variant);
    const int n_vocab = vocabulary(model);
    TrajectoryRecord record;
    const double reading = read_prompt(context.get(), prompt, shape.n_ubatch, report);
    double writing = 0;
    for (int i = 0; i < n_tokens; ++i) {
        const llama_token top = most_likely(logits(context.get(), -1, n_vocab));
        if (follow) {
            record.agrees.push_back(top == (*follow)[i]);
        } else {
            record.tokens.push_back(top);
        }
        const llama_token next = follow ? (*follow)[i] : top;
        timed_decode(writing, context.get(), std::span(&next, 1), int(prompt.size()) + i, true);
        report(1);
    }
    record.speed = {rate(prompt.size(), reading), rate(n_tokens, writing)};
    return record;
}

std::vector<KeyShape> key_shapes(llama_model* model, const llama::ContextOptions& shape, std::span<const llama_token> tokens, const Report& report) {
    Moments moments(64, std::max(1, shape.n_threads));
    llama::Observer observer(moments);
    auto watched = shape;
    watched.observe = llama::Observer::callback;
    watched.observer = &observer;
    const auto context = llama::new_context(model, watched, std::nullopt);
    moments.begin_sequence();
    read_prompt(context.get(), tokens, shape.n_ubatch, report);
    observer.rethrow();
    std::vector<KeyShape> shapes;
    for (const int layer : moments.layers()) {
        const LayerShape& s = moments.shape(layer);
        for (int head = 0; head < s.n_head_kv; ++head) { shapes.push_back(key_shape(moments.head(layer, head), s.dim_k, layer, head)); }
    }
    return shapes;
}

}  // namespace crumb::app

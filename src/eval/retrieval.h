// Retrieval probes: facts with five-digit numbers hidden in prose, and questions after it whose answers the model either
// continues with, digit by digit, or not. One haystack holds many facts of one kind; its prefix is read once, and each
// question is a fork of it. Answers are teacher-forced: a question counts if every token of the answer is the most likely
// one given those before it. No sampling, no parsing of what a model chose to say.
//
//   single      8 facts that are unlike each other: a locker, a bell, a telescope ...
//   multi_key   32 codes of places, all of one form: the others distract
//   multi_value 8 places with 4 numbers each, asked for all 4 in their order
//   tracing     8 variables with a number, each handed on twice; the last of the chain is asked for
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace crumb {

enum class Probe : uint8_t { single, multi_key, multi_value, tracing };
inline constexpr Probe kProbes[] = {Probe::single, Probe::multi_key, Probe::multi_value, Probe::tracing};

std::string_view name(Probe probe);
Probe find_probe(std::string_view name);  // throws Error that lists the names

struct Question {
    double depth = 0;  // where its fact begins, 0 (the start) to 1; of several facts, the first
    std::vector<int32_t> prompt;
    std::vector<int32_t> answer;
};

struct Haystack {
    std::vector<int32_t> prefix;
    std::vector<Question> questions;
};

using Tokenize = std::function<std::vector<int32_t>(const std::string&)>;

// Paragraphs of a text that suit as hay: 200 to 900 bytes, line breaks made spaces.
std::vector<std::string> paragraphs(const std::string& text);

// A haystack such that its prefix and its longest question fit into `length` tokens, with facts evenly spread over it and
// hay in an order that depends on the seed. `begin` opens the prefix (BOS, or nothing). Hay is repeated if there is too
// little of it. Throws Error if there is none, or if the facts alone do not fit.
Haystack build_haystack(Probe probe, int length, uint64_t seed, std::span<const std::string> hay, std::span<const int32_t> begin,
                        const Tokenize& tokenize);

// What one question gave.
struct Answer {
    double depth = 0;
    bool right = false;  // all tokens
    double nll = 0;      // nats a token of the answer
};

// Feeds one more position of an answer: whether the wanted token is on top, and its negative log likelihood.
struct TokenAnswer {
    bool top = false;
    double nll = 0;
};
TokenAnswer judge(std::span<const float> logits, int32_t wanted);

}  // namespace crumb

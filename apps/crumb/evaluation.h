// crumb eval without its flags and files: which measurements there are, which are missing, and what they add up to.
#pragma once

#include "kv.h"

#include "eval/verdict.h"

#include <ggml.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace crumb::app {

// llama.cpp's own caches of fewer bits that have a name here.
struct Stock {
    const char* name;
    ggml_type type;
};
inline constexpr Stock kStocks[] = {{"q8_0", GGML_TYPE_Q8_0}, {"q4_0", GGML_TYPE_Q4_0}};

struct EvaluationOptions {
    std::filesystem::path model, artefact, results, haystack;
    std::vector<std::string> recipes;
    bool sweep = false;
    std::vector<std::filesystem::path> texts;
    std::vector<int> contexts;
    int windows = 1;
    std::optional<int> first;  // default: min(512, context / 2)
    std::optional<std::vector<int>> layers;  // coded alone, one after the other; none named: every one
    bool ablate = false, retrieval = false, key_shapes = false;
    std::vector<Probe> probes;
    int haystacks = 4;
    int generate = 0;
    std::optional<int> sink, recent;  // default: 64 and 256, or with paper_windows those of each recipe's paper
    bool paper_windows = false;
    bool allow_slow = false;
    std::string attention = "auto";
    bool kv_offload = false;
    PrefillRule prefill = PrefillRule::position;
    int ubatch = 512;
    int threads = 0;
    size_t memory = 4096;  // MiB
};

// Measures what options.results does not hold yet, adds it there, and sums up. Progress goes to stderr. Throws Error.
Verdict evaluate(const EvaluationOptions& options);

}  // namespace crumb::app

// Calibration of a GGUF model: it reads texts in windows while an observer sums its moments. One artefact serves all
// recipes that need one.
#pragma once

#include <crumb/calibrate.h>

#include <filesystem>
#include <string>
#include <vector>

namespace crumb::llama {

struct CalibrationOptions {
    std::filesystem::path model;
    std::vector<std::filesystem::path> texts;
    bool chat = true;  // one more text: paragraphs of the first as turns of a chat, if llama.cpp knows the model's template
    std::filesystem::path output;  // empty: default_artefact() of the model
    RotationMethod method;
    std::string metric = "gradient";  // what `planes` weighs errors with: none, local, gradient
    uint64_t seed = 0;            // of gradient: whose labels are drawn
    double clip = 3;              // of gradient: see GradientOptions
    std::filesystem::path checkpoint;  // of gradient; empty: the output with .gradient behind it
    int tokens = 32768;  // to read, of all texts together; means need some thousands, rotations little more
    int window = 4096;   // tokens of a window: each begins a new sequence
    int ubatch = 512;
    int skip = 64;      // first tokens of each window that moments leave out: sinks
    int n_threads = 0;  // 0: all cores
};

// Fewer tokens give a file that loads and is bad; this many are the least, and below the second number there is a
// warning.
inline constexpr int kLeastTokens = 2000, kFewTokens = 5000;

// Reads, fits and writes. Windows are taken from the texts in turn, so that each has its share; the same model, texts
// and options give the same artefact. The checkpoint of a gradient goes when the artefact is written. Progress and warnings go to stderr. Throws Error.
Artefact calibrate(const CalibrationOptions& options);

}  // namespace crumb::llama

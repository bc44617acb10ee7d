// How calibration divides texts into windows, each of which is a sequence of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace crumb {

inline constexpr int kShortestWindow = 256;

struct WindowRule {
    size_t tokens = 32768;         // of all windows together, at most
    int window = 4096;             // tokens of one
    int skip = 64;                 // of which the first do not count: shorter windows are left out
    std::optional<int32_t> begin;  // the token that begins each
};

struct TextWindows {
    std::vector<std::vector<int32_t>> tokens;
    std::vector<int> folds;  // by window, of kFolds (crumb/calibrate.h); a text alternates
};

// Window i of every text, then window i + 1 of every text, until there are enough tokens. Where there are too few tokens
// for a whole window of every text, windows are shorter, down to kShortestWindow, so that all texts are read.
TextWindows text_windows(std::span<const std::vector<int32_t>> texts, const WindowRule& rule);

}  // namespace crumb

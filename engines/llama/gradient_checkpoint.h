// What a gradient run has done so far, so that it can be stopped at any moment and goes on where it was: one file,
// written anew after each window under a temporary name and renamed. Its size does not depend on the windows (30 MB for
// Qwen2.5-Coder-1.5B).
//
//   "crumb gradient 2\n"
//   lines "NAME VALUE\n": what the sums belong to, and a run with other values must not add to
//   "windows N\n": that are done
//   for each part of the text: "layers L\n" (0: no window yet), L lines "layer NUMBER HEADS D_K D_V TOKENS\n"
//   for each part, layer and KV head: the sums of g^T g for K and for V, doubles
//   XXH3-128 of all that, 32 hexadecimal digits
#pragma once

#include <crumb/calibrate.h>
#include <crumb/metric.h>

#include <array>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace crumb::llama {

// Sums, not means, over the tokens of the windows that are done.
struct GradientSums {
    size_t windows = 0;
    std::array<Metric, kFolds> parts;  // of the text
};

// Names and values in order, for example {"model", "4f..."}; neither holds a line end, names no blank.
using Identity = std::vector<std::pair<std::string, std::string>>;

// Throws Error unless a checkpoint may be written to `file`: it can be made, or is one already. Asked before the work.
void require_checkpoint_output(const std::filesystem::path& file);

void write_checkpoint(const std::filesystem::path& file, const Identity& identity, const GradientSums& sums);

// Without windows if there is no such file. Throws Error if it is damaged, of another format, or belongs to something else:
// then the text names what differs, and both values.
GradientSums read_checkpoint(const std::filesystem::path& file, const Identity& identity);

}  // namespace crumb::llama

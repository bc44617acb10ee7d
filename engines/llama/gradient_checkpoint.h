// What a gradient run has done so far, so that it can be stopped at any moment and goes on where it was: one file,
// written anew after each window under a temporary name and renamed.
//
//   "crumb gradient 1\n"
//   lines "NAME VALUE\n": what the sums belong to, and a run with other values must not add to
//   "windows N\n", "layers L\n", L lines "layer NUMBER HEADS D_K D_V\n"
//   per window: tokens u64, then for each layer and KV head the sums of g^T g for K and for V, doubles
//   XXH3-128 of all that, 32 hexadecimal digits
#pragma once

#include <crumb/metric.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace crumb::llama {

// Sums, not means, over the tokens of one window.
using WindowSums = Metric;

// Names and values in order, for example {"model", "4f..."}; neither holds a line end, names no blank.
using Identity = std::vector<std::pair<std::string, std::string>>;

void write_checkpoint(const std::filesystem::path& file, const Identity& identity,
                      const std::vector<WindowSums>& windows);

// Empty if there is no such file. Throws Error if it is damaged, or belongs to something else: then the text names what
// differs, and both values.
std::vector<WindowSums> read_checkpoint(const std::filesystem::path& file, const Identity& identity);

}  // namespace crumb::llama

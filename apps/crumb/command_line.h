// Parsing of our own subcommands: CLI11, with llama.cpp's two-letter short flags (-ub, -np, -kvu) on top, which it cannot name.
#pragma once

#include <CLI/CLI.hpp>

#include <optional>
#include <string>
#include <vector>

namespace crumb::app {

inline constexpr int kUsageError = 2;  // exit status

// Parses `arguments` (the first is the command's name). An exit status if there is nothing left to do: --help, or a wrong
// flag, which has been explained.
std::optional<int> parse(CLI::App& app, std::vector<std::string> arguments);

}  // namespace crumb::app

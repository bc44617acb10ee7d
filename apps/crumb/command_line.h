// Parsing of our own subcommands: CLI11, with llama.cpp's two-letter short flags (-ub, -np, -kvu) on top, which it cannot name.
#pragma once

#include <CLI/CLI.hpp>

#include <crumb/error.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace crumb::app {

inline constexpr int kUsageError = 2;  // exit status

// Parses `arguments` (the first is the command's name). An exit status if there is nothing left to do: --help, or a wrong
// flag, which has been explained.
std::optional<int> parse(CLI::App& app, std::vector<std::string> arguments);

// -t. The engine has room for 512 threads, and threads that wait for each other in turns on few cores take minutes a step:
// at most four a core.
void add_threads(CLI::App& app, int& threads, const std::string& help = "threads (default: all cores)");

// A list of which each is measured: throws Error if something was named twice.
template <class T>
void require_once(const char* flag, const std::vector<T>& values) {
    for (auto value = values.begin(); value != values.end(); ++value) {
        if (std::find(values.begin(), value, *value) != value) { fail("{} names {} twice: once is enough", flag, *value); }
    }
}

}  // namespace crumb::app

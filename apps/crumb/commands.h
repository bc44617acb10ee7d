// The subcommands. Each takes its own name as argv[0], returns an exit status and may throw crumb::Error.
#pragma once

#include "kv.h"

#include <optional>
#include <string>
#include <vector>

namespace crumb::app {

extern const char* const kKvHelp;

// llama.cpp's tools, with our flags taken out of their argument list first.
int run(int argc, char** argv);
int chat(int argc, char** argv);
int serve(int argc, char** argv);
int perplexity(int argc, char** argv);
int bench(int argc, char** argv);
int batched_bench(int argc, char** argv);
int quantize(int argc, char** argv);

// Ours.
int attn_bench(int argc, char** argv);
int calibrate(int argc, char** argv);
int depth_bench(int argc, char** argv);
int compare(int argc, char** argv);
int eval(int argc, char** argv);
int inspect(int argc, char** argv);
int rotations(int argc, char** argv);

// What --kv and its companions said, and the arguments that are left for llama.cpp. Throws Error on a missing or bad
// value, and on flags of llama.cpp that contradict --kv, naming both.
struct KvArguments {
    std::optional<llama::KvOptions> kv;
    bool shift = false;  // a server's context that is full drops its middle, and what is behind it is computed again
    std::vector<std::string> rest;
};
KvArguments take_kv_arguments(int argc, char** argv);

}  // namespace crumb::app

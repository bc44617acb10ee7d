// crumb: llama.cpp's own tools with a 2-bit KV cache under them, and ours beside them.
#include "commands.h"

#include <crumb/error.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <span>

namespace {

struct Command {
    const char* name;
    int (*run)(int argc, char** argv);
    const char* summary;
};

constexpr Command kCommands[] = {
    {"run", crumb::app::run, "complete a prompt (llama-completion)"},
    {"chat", crumb::app::chat, "chat in the terminal (llama-cli)"},
    {"serve", crumb::app::serve, "OpenAI-compatible server (llama-server)"},
    {"perplexity", crumb::app::perplexity, "perplexity and KL divergence (llama-perplexity)"},
    {"bench", crumb::app::bench, "speed at depth (llama-bench)"},
    {"batched-bench", crumb::app::batched_bench, "speed of many sequences (llama-batched-bench)"},
    {"quantize", crumb::app::quantize, "change the type of a model's weights (llama-quantize)"},
    {"attn-bench", crumb::app::attn_bench, "time of one attention layer against ggml's, in one process"},
    {"depth-bench", crumb::app::depth_bench, "speed at depths of one growing prompt, and of many sequences"},
    {"calibrate", crumb::app::calibrate, "measure a model's K and V and write its artefact"},
    {"compare", crumb::app::compare, "one question, 16-bit KV beside --kv: texts, speed, bytes, divergence"},
    {"eval", crumb::app::eval, "KL divergence, perplexity and same top p of recipes against 16-bit KV"},
    {"inspect", crumb::app::inspect, "what a model's KV is, what a recipe costs, what is in an artefact or a page"},
    {"rotations", crumb::app::rotations, "official OSCAR rotation files and GGUF tensors in and out"},
};

void help(std::FILE* out) {
    std::fprintf(out,
                 "crumb %s: an LLM's KV cache in about two bits per element\n\n"
                 "usage: crumb COMMAND [flags]\n\n",
                 CRUMB_VERSION);
    for (const auto& command : kCommands) { std::fprintf(out, "  %-14s %s\n", command.name, command.summary); }
    std::fprintf(out,
                 "\nCommands of llama.cpp take all its flags, and:\n%s\n"
                 "crumb COMMAND --help says more.\n",
                 crumb::app::kKvHelp);
}

int dispatch(int argc, char** argv) {
    if (argc < 2) {
        help(stderr);
        return 2;
    }
    const char* name = argv[1];
    if (!std::strcmp(name, "--help") || !std::strcmp(name, "-h") || !std::strcmp(name, "help")) {
        help(stdout);
        return 0;
    }
    if (!std::strcmp(name, "--version") || !std::strcmp(name, "version")) {
        std::printf("crumb %s\n", CRUMB_VERSION);
        return 0;
    }
    for (const auto& command : kCommands) {
        if (std::strcmp(name, command.name) != 0) { continue; }
        try {
            return command.run(argc - 1, argv + 1);
        } catch (const std::bad_alloc&) {
            std::fprintf(stderr, "crumb %s: error: there is not enough memory for this: lower the sizes that were asked for\n", name);
            return 1;
        } catch (const std::exception& e) {
            std::fprintf(stderr, "crumb %s: error: %s\n", name, e.what());
            return 1;
        }
    }
    std::fprintf(stderr, "crumb: error: unknown command '%s'; crumb --help lists them\n", name);
    return 2;
}

}  // namespace

int main(int argc, char** argv) {
    const int status = dispatch(argc, argv);
    errno = 0;
    if (const bool flushed = std::fflush(stdout) == 0; (!flushed || std::ferror(stdout)) && status == 0) {
        std::fprintf(stderr, "crumb: error: standard output could not be written%s%s\n", errno ? ": " : "", errno ? std::strerror(errno) : "");
        return 1;
    }
    return status;
}

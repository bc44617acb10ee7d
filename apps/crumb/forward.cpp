// llama.cpp's tools as they are: their functions are called with every flag but ours.
#include "commands.h"

#include <crumb/error.h>

#include <cstdio>
#include <string_view>

int llama_completion(int argc, char** argv);
int llama_cli(int argc, char** argv);
int llama_server(int argc, char** argv);
int llama_perplexity(int argc, char** argv);
int llama_bench(int argc, char** argv);
int llama_batched_bench(int argc, char** argv);
int llama_quantize(int argc, char** argv);

namespace crumb::app {

namespace {

int forward(int argc, char** argv, int (*tool)(int, char**)) {
    KvArguments arguments = take_kv_arguments(argc, argv);
    for (const auto& argument : arguments.rest) {
        if (argument == "--help" || argument == "-h") { std::printf("crumb's own flags:\n%s\n", kKvHelp); }
    }
    llama::use_kv(arguments.kv);
    std::vector<char*> rest;
    for (auto& argument : arguments.rest) { rest.push_back(argument.data()); }
    rest.push_back(nullptr);
    const int status = tool(int(rest.size()) - 1, rest.data());
    if (const auto why = llama::last_refusal(); arguments.kv && status != 0 && !why.empty()) {
        std::fprintf(stderr, "crumb %s: error: %s\n", argv[0], why.c_str());
    }
    return status;
}

}  // namespace

int run(int argc, char** argv) { return forward(argc, argv, llama_completion); }
int chat(int argc, char** argv) { return forward(argc, argv, llama_cli); }
int serve(int argc, char** argv) { return forward(argc, argv, llama_server); }
int perplexity(int argc, char** argv) { return forward(argc, argv, llama_perplexity); }
int bench(int argc, char** argv) { return forward(argc, argv, llama_bench); }
int batched_bench(int argc, char** argv) { return forward(argc, argv, llama_batched_bench); }
int quantize(int argc, char** argv) {
    if (take_kv_arguments(argc, argv).kv) { fail("quantize changes weights and keeps no KV cache: leave --kv out"); }
    return forward(argc, argv, llama_quantize);
}

}  // namespace crumb::app

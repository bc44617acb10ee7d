// llama.cpp's tools as they are: their functions are called with every flag but ours.
#include "commands.h"
#include "pages.h"
#include "serving.h"

#include "server-context.h"
#include "server-http.h"

#include <crumb/error.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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

int forward(const char* name, KvArguments arguments, int (*tool)(int, char**)) {
    for (const auto& argument : arguments.rest) {
        if (argument == "--help" || argument == "-h") { std::printf("crumb's own flags:\n%s\n", kKvHelp); }
    }
    llama::use_kv(arguments.kv);
    std::vector<char*> rest;
    for (auto& argument : arguments.rest) { rest.push_back(argument.data()); }
    rest.push_back(nullptr);
    const int status = tool(int(rest.size()) - 1, rest.data());
    if (const auto why = llama::last_refusal(); arguments.kv && status != 0 && !why.empty()) {
        std::fprintf(stderr, "crumb %s: error: %s\n", name, why.c_str());
    }
    return status;
}

int forward(int argc, char** argv, int (*tool)(int, char**)) {
    KvArguments arguments = take_kv_arguments(argc, argv);
    if (arguments.kv && arguments.kv->memory > 0) { fail("--kv-memory is for crumb serve: elsewhere -c says how much is needed"); }
    if (arguments.shift) { fail("--kv-shift is for crumb serve: elsewhere an answer ends with its context"); }
    return forward(argv[0], std::move(arguments), tool);
}

}  // namespace

int run(int argc, char** argv) { return forward(argc, argv, llama_completion); }
int chat(int argc, char** argv) { return forward(argc, argv, llama_cli); }

// A server finds what it still has in the cache itself. llama.cpp's own store of prompts would hold the same pages twice,
// so it is off unless it is asked for; and with --kv-memory all requests share one pool.
int serve(int argc, char** argv) {
    KvArguments kv = take_kv_arguments(argc, argv);
    if (kv.kv) {
        const auto given = [&](std::initializer_list<std::string_view> names, const char* environment) {
            return std::getenv(environment) || std::ranges::any_of(kv.rest, [&](const std::string& argument) {
                       return std::ranges::find(names, std::string_view(argument).substr(0, argument.find('='))) != names.end();
                   });
        };
        if (!given({"--cache-ram", "-cram"}, "LLAMA_ARG_CACHE_RAM")) { kv.rest.insert(kv.rest.end(), {"--cache-ram", "0"}); }
        if (kv.kv->memory > 0 && !given({"--kv-unified", "-kvu"}, "LLAMA_ARG_KV_UNIFIED")) { kv.rest.push_back("--kv-unified"); }
        kv.kv->kept_windows = llama::kServedWindows;
        server_set_kv_memory(&llama::serving(kv.shift));
    }
    const std::string html = "text/html; charset=utf-8";
    server_http_set_pages({{"/", html, true, [] { return std::string(chat_page); }},
                           {"/kv", html, true, [] { return std::string(kv_page); }},
                           {"/kv.json", "application/json", false, llama::kv_now}});
    return forward(argv[0], std::move(kv), llama_server);
}
int perplexity(int argc, char** argv) { return forward(argc, argv, llama_perplexity); }
int bench(int argc, char** argv) { return forward(argc, argv, llama_bench); }
int batched_bench(int argc, char** argv) { return forward(argc, argv, llama_batched_bench); }
int quantize(int argc, char** argv) {
    if (take_kv_arguments(argc, argv).kv) { fail("quantize changes weights and keeps no KV cache: leave --kv out"); }
    return forward(argc, argv, llama_quantize);
}

}  // namespace crumb::app

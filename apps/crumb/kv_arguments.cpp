#include "commands.h"

#include <crumb/error.h>
#include <crumb/recipe.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <span>

namespace crumb::app {

const char* const kKvHelp =
    "  --kv RECIPE           keep the KV cache in a crumb cache (crumb inspect --recipes lists them); auto: planes if it\n"
    "                        was calibrated, else the best that needs no calibration\n"
    "  --kv-artifact FILE    what crumb calibrate wrote (default: MODEL.crumb.safetensors beside the model)\n"
    "  --kv-sink N           first tokens that stay 16 bit (64)\n"
    "  --kv-recent N         last tokens that stay 16 bit (256)\n"
    "  --kv-windows WHOSE    equal: 64 and 256, the same for all recipes (default); paper: those of the recipe's paper\n"
    "  --kv-allow-slow       run recipes whose pages attention has to decode (crumb inspect --recipes names them)\n"
    "  --kv-attention HOW    what reads codes: auto (default), an instruction set (portable, neon, avx2, avx-vnni, avx512,\n"
    "                        amx), or decoded: pages become numbers first, slow, to check the others against\n"
    "  --kv-prefill RULE     position: what a token sees depends on positions alone (default)\n"
    "                        exact: tokens of one ubatch see each other at 16 bit, as in the papers\n"
    "  --kv-sliding FORM     of layers with a sliding window: bf16 (default); q8: rows of 8 bits; pages: as other layers, of all\n"
    "                        tokens; auto: what takes the fewest bytes. What each takes is said at start\n"
    "  --kv-memory BYTES     size of the KV cache of a server (K, M and G are understood); -c is then the longest\n"
    "                        request, and -np how many may run at once, as far as they fit\n"
    "  --kv-host-memory BYTES  so much of the pages of layers on a GPU lies in main memory, which the GPU reads over its bus:\n"
    "                        what the GPU's own memory does not hold. Slower, for contexts that do not fit\n"
    "  --kv-reuse RULE       exact: a prompt starts from what the server still has where the answer is that of a\n"
    "                        cold start (default); codes: also where the recent window is known as codes only\n"
    "  --kv-shift RULE       refuse: an answer of a server ends where its context does (default); reprefill: the context drops\n"
    "                        its middle (llama.cpp's n_keep and n_discard), what is behind it is computed again, and it goes on\n"
    "  --kv-verify N         check attention of every Nth token against exact K and V, which are kept beside the codes\n"
    "                        (16 bit more memory): crumb serve shows the drift in /kv and /metrics\n";

namespace {

constexpr std::string_view kOurs[] = {"--kv",         "--kv-artifact",   "--kv-sink",      "--kv-recent", "--kv-prefill",
                                      "--kv-windows", "--kv-allow-slow", "--kv-attention", "--kv-memory", "--kv-reuse",
                                      "--kv-shift",   "--kv-verify",     "--kv-sliding", "--kv-host-memory"};

int count(const std::string& flag, const std::string& value) {
    int n = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), n);
    if (error != std::errc{} || end != value.data() + value.size() || n < 0 || n > (1 << 20)) {
        fail("{} takes a whole number from 0 to {}, not '{}'", flag, 1 << 20, value);
    }
    return n;
}

PrefillRule prefill_rule(const std::string& value) {
    if (value == "position") { return PrefillRule::position; }
    if (value == "exact") { return PrefillRule::exact; }
    fail("--kv-prefill takes position or exact, not '{}'", value);
}

bool paper_windows(const std::string& value) {
    if (value != "equal" && value != "paper") { fail("--kv-windows takes equal or paper, not '{}'", value); }
    return value == "paper";
}

ReuseRule reuse_rule(const std::string& value) {
    if (value == "exact") { return ReuseRule::exact; }
    if (value == "codes") { return ReuseRule::codes; }
    fail("--kv-reuse takes exact or codes, not '{}'", value);
}

std::optional<SlidingForm> sliding_form(const std::string& value) {
    if (value == "auto") { return std::nullopt; }
    for (const SlidingForm form : kSlidingForms) {
        if (value == name(form)) { return form; }
    }
    fail("--kv-sliding takes bf16, q8, pages or auto, not '{}'", value);
}

bool shift_rule(const std::string& value) {
    if (value != "refuse" && value != "reprefill") { fail("--kv-shift takes refuse or reprefill, not '{}'", value); }
    return value == "reprefill";
}

// 1500000, 800M, 1.5G
size_t byte_count(const std::string& flag, const std::string& value) {
    double n = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), n);
    const std::string_view unit(end, size_t(value.data() + value.size() - end));
    const std::string_view units[] = {"", "K", "M", "G", "T"};
    const auto* found = std::ranges::find(units, unit);
    const double bytes = error == std::errc{} && found != std::end(units) ? std::ldexp(n, 10 * int(found - units)) : 0;
    if (!(bytes >= 1 && bytes < 0x1p50)) { fail("{} takes a number of bytes as 800M or 1.5G, not '{}'", flag, value); }
    return size_t(bytes);
}

// Flags of llama.cpp that ask for what a coded cache cannot do.
struct Conflict {
    std::vector<std::string_view> flags;
    const char* environment;
    std::string_view why;
};

const Conflict kConflicts[] = {
    {{"-ctk", "--cache-type-k"}, "LLAMA_ARG_CACHE_TYPE_K", "--kv decides how keys are kept"},
    {{"-ctv", "--cache-type-v"}, "LLAMA_ARG_CACHE_TYPE_V", "--kv decides how values are kept"},
    {{"--context-shift"}, "LLAMA_ARG_CONTEXT_SHIFT",
     "the positions of coded keys cannot be shifted (crumb serve computes them again with --kv-shift reprefill)"},
    {{"--cache-reuse"}, "LLAMA_ARG_CACHE_REUSE", "the positions of coded keys cannot be shifted"},
    {{"-gan", "--grp-attn-n"}, "LLAMA_ARG_GRP_ATTN_N", "self-extend changes the positions of coded keys"},
    {{"-gaw", "--grp-attn-w"}, "LLAMA_ARG_GRP_ATTN_W", "self-extend changes the positions of coded keys"},
};

// The same of --kv-shift reprefill.
const Conflict kShiftConflicts[] = {
    {{"-mm", "--mmproj", "-mmu", "--mmproj-url"}, "LLAMA_ARG_MMPROJ", "what is computed again is text, an image has no tokens to do it from"},
};

bool means_off(std::string_view value) {
    constexpr std::string_view kOff[] = {"", "0", "false", "off", "disabled"};
    return std::ranges::find(kOff, value) != std::end(kOff);
}

void refuse_conflicts(const std::vector<std::string>& arguments, std::span<const Conflict> conflicts, const std::string& asked) {
    for (const auto& conflict : conflicts) {
        for (const auto& argument : arguments) {
            const std::string_view name = std::string_view(argument).substr(0, argument.find('='));
            for (const auto flag : conflict.flags) {
                if (name == flag) { fail("{} does not go with {}: {}; leave out one of them", flag, asked, conflict.why); }
            }
        }
        if (const char* value = std::getenv(conflict.environment); value && !means_off(value)) {
            fail("the environment variable {}={} does not go with {}: {}; unset it", conflict.environment, value, asked, conflict.why);
        }
    }
}

}  // namespace

KvArguments take_kv_arguments(int argc, char** argv) {
    KvArguments result;
    llama::KvOptions options;
    std::string first_companion;
    bool asked = false, paper = false;
    std::optional<int> sink, recent;
    for (int i = 0; i < argc; ++i) {
        const std::string argument = argv[i];
        const size_t equals = argument.find('=');
        const std::string flag = argument.substr(0, equals);
        // Other flags that begin with --kv- are llama.cpp's, or its to refuse.
        if (std::ranges::find(kOurs, flag) == std::end(kOurs)) {
            result.rest.push_back(argument);
            continue;
        }
        if (flag != "--kv" && first_companion.empty()) { first_companion = flag; }
        if (flag == "--kv-allow-slow") {
            if (equals != std::string::npos) { fail("{} takes no value", flag); }
            options.allow_slow = true;
            continue;
        }
        std::string value;
        if (equals != std::string::npos) {
            value = argument.substr(equals + 1);
        } else if (i + 1 < argc) {
            value = argv[++i];
        } else {
            fail("{} needs a value", flag);
        }
        if (flag == "--kv") {
            options.recipe = value == llama::kAuto ? value : label(find_recipe(value));
            asked = true;
        } else if (flag == "--kv-artifact") {
            if (value.empty()) { fail("--kv-artifact needs the name of a file; leave it out for the one beside the model"); }
            options.artefact = value;
        } else if (flag == "--kv-sink") {
            sink = count(flag, value);
        } else if (flag == "--kv-recent") {
            recent = count(flag, value);
        } else if (flag == "--kv-attention") {
            options.attention = value;
        } else if (flag == "--kv-windows") {
            paper = paper_windows(value);
        } else if (flag == "--kv-memory") {
            options.memory = byte_count(flag, value);
        } else if (flag == "--kv-host-memory") {
            options.host_memory = byte_count(flag, value);
        } else if (flag == "--kv-verify") {
            options.verify = count(flag, value);
        } else if (flag == "--kv-reuse") {
            options.reuse = reuse_rule(value);
        } else if (flag == "--kv-sliding") {
            options.sliding = sliding_form(value);
        } else if (flag == "--kv-shift") {
            result.shift = shift_rule(value);
        } else {
            options.prefill = prefill_rule(value);
        }
    }
    if (!asked && !first_companion.empty()) { fail("{} was given without --kv RECIPE", first_companion); }
    if (asked) {
        refuse_conflicts(result.rest, kConflicts, "--kv " + options.recipe);
        if (result.shift) { refuse_conflicts(result.rest, kShiftConflicts, "--kv-shift reprefill"); }
        const bool automatic = options.recipe == llama::kAuto;
        const Windows windows = paper && !automatic ? find_recipe(options.recipe).paper : Windows{};
        options.sink = sink.value_or(windows.sink);
        options.recent = recent.value_or(windows.recent);
        result.kv = std::move(options);
    }
    return result;
}

}  // namespace crumb::app

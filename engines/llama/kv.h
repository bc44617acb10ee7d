// llama.cpp with crumb as its KV memory: what a context created from now on gets.
#pragma once

#include "verify.h"

#include <crumb/cache.h>

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

struct llama_model;

namespace crumb::llama {

struct KvOptions {
    std::string recipe;              // a name that find_recipe() takes, or kAuto
    std::filesystem::path artefact;  // empty: default_artefact() of the model file, if it exists
    int sink = 64;
    int recent = 256;
    PrefillRule prefill = PrefillRule::position;
    bool allow_slow = false;         // recipes without a kernel that reads their codes in place
    std::string attention = "auto";  // what reads codes: an instruction set by name(Isa), or kDecoded
    int only_layer = -1;  // to measure it: this layer alone is coded, all others stay BF16; -1: all are coded
    ReuseRule reuse = ReuseRule::exact;
    std::optional<SlidingForm> sliding = SlidingForm::bf16;  // of sliding-window layers; nullopt: the cheapest of form_costs()
    size_t memory = 0;       // bytes of the cache; 0: what context and sequences ask for
    size_t host_memory = 0;  // bytes of the pages of layers on a GPU that lie in main memory, at most
    int verify = 0;          // check every Nth token against exact K and V (verify.h); 0: none
    bool announce = true;    // say on stderr what the cache of a context holds
    int kept_windows = 0;    // of prefixes that a server may find again, beside those of sequences; at most one a sequence
};
inline constexpr int kServedWindows = 4;  // kept_windows of `crumb serve`

// `planes` where there is an artefact for it, else the best recipe that needs none; describe() says which, and why.
inline constexpr std::string_view kAuto = "auto";

// Attention that makes numbers of pages first: slow, and what the kernels of a whole model are held against.
inline constexpr std::string_view kDecoded = "decoded";

// Contexts that llama.cpp creates after this call keep their K and V in a crumb cache; nullopt: in llama.cpp's own. A
// context that crumb cannot serve (architecture, head size, missing or foreign artefact) fails to be created, and
// last_refusal() says why and what to type.
void use_kv(std::optional<KvOptions> options);
std::string last_refusal();
void remember_refusal(std::string why);

// Where `crumb calibrate` puts an artefact and where a context looks for one: MODEL.gguf -> MODEL.crumb.safetensors.
std::filesystem::path default_artefact(const std::filesystem::path& model_file);

// The file that a model was loaded from; empty if it came from elsewhere.
std::filesystem::path model_file(const llama_model* model);

// What attention needs beside the cache: the maps of all layers, and the working memory of its threads.
struct WorkingBytes {
    size_t maps = 0;
    size_t attention = 0;
};

// What a context is asked for, as llama.cpp understands it: n_ctx tokens (0: what the model was trained on) of all sequences
// together, divided among them unless they share it (`unified`).
struct ContextRequest {
    int n_ctx = 0;
    int n_sequences = 1;
    bool unified = false;
    int n_batch = 2048;
    int n_ubatch = 512;
    int n_threads = 1;
};

// Sizes and layers of the cache that a context of `model` would get on the CPU, without tables. Reads an artefact only if
// the pages of the recipe depend on it. Throws Error for what --kv does not support.
CacheConfig cache_geometry(const llama_model& model, const KvOptions& options, const ContextRequest& request);

// At the largest steps that there can be, for n_threads threads. Recipes that are slow() take more, layer by layer.
WorkingBytes working_bytes(const llama_model& model, const CacheConfig& config, int n_threads);

// What a form of all sliding-window layers costs: their part of the cache, and what attention of the whole model takes
// beside it (WorkingBytes). Empty if there are none. --kv-sliding auto takes the least sum.
struct FormCost {
    SlidingForm form;
    size_t cache = 0;
    size_t beside = 0;
};
std::vector<FormCost> form_costs(const llama_model& model, const CacheConfig& config, int n_threads);

// Which layers have sliding windows, how they are kept, and what other forms cost. Only where there are some.
std::string describe_sliding(const CacheConfig& config, std::span<const FormCost> costs);

// One line: recipe, bits, bytes against 16 bit, artefact, layers kept at other types and why.
std::string describe(const CacheConfig& config, std::span<const FormCost> costs);

// Prompts that a server gave to the cache.
struct PromptCounters {
    uint64_t tokens = 0;
    uint64_t found = 0;  // in the cache, in their own slot or elsewhere
};

// What the newest live crumb cache holds, and has counted as of its last step; nullopt if there is none.
struct KvStatus {
    CacheBytes bytes;
    CacheCounters counters;
    WorkingBytes working;
    PromptCounters prompts;
    std::vector<SequenceStatus> sequences;
    std::optional<Drift> drift;  // with `verify`
};
std::optional<KvStatus> kv_status();
// The same of the oldest: a server creates the cache of its model first, then that of a draft.
std::optional<KvStatus> served_status();

// The oldest one as JSON; "null" if there is none. kv_properties(): recipe, sizes, what is in use, layers. kv_now(): what
// changes, and every sequence that holds something.
std::string kv_properties();
std::string kv_now();

}  // namespace crumb::llama

#include "kv.h"

#include "geometry.h"
#include "memory.h"
#include "model_identity.h"

#include "llama-impl.h"

#include <crumb/artefact.h>
#include <crumb/error.h>

#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <unordered_map>

namespace crumb::llama {

namespace {

// llama.cpp's factory is a plain function pointer, so what it reads is global: set once by the program before it loads.
struct Global {
    std::mutex mutex;
    std::optional<KvOptions> options;
    std::string refusal;
    std::unordered_map<const llama_model*, std::filesystem::path> files;
    std::vector<const Memory*> live;  // the oldest first
    bool served = false;              // with these options there was one
};

Global& global() {
    static Global instance;
    return instance;
}

// Forgets itself when llama.cpp frees the context.
class TrackedMemory : public Memory {
public:
    using Memory::Memory;
    ~TrackedMemory() override {
        std::lock_guard lock(global().mutex);
        std::erase(global().live, this);
    }
};

std::optional<Artefact> find_artefact(const llama_model& model, const KvOptions& options, const Recipe& recipe) {
    if (!recipe.needs_artefact()) {
        if (!options.artefact.empty()) {
            fail("--kv {} needs no artefact, but --kv-artifact {} was given: leave it out, or choose a recipe that uses it",
                 recipe.name, options.artefact.string());
        }
        return std::nullopt;
    }
    const auto file = model_file(&model);
    const auto path = options.artefact.empty() ? default_artefact(file) : options.artefact;
    if (path.empty() || !std::filesystem::exists(path)) {
        fail("--kv {} needs an artefact for this model, and there is none at {}: make one with\n"
             "    crumb calibrate -m {}\nor choose a recipe that needs none (crumb inspect --recipes)",
             recipe.name, path.empty() ? "the usual place" : path.string(), file.empty() ? "MODEL.gguf" : file.string());
    }
    Artefact artefact = read_artefact(path);
    try {
        artefact.require(identify(model, file));
    } catch (const Error& e) {
        if (options.artefact.empty() || default_artefact(file) == path) { throw; }
        fail("{}\n(--kv-artifact names one file for every model that is loaded. With a draft model leave it out: each then has\n"
             "the artefact beside it, MODEL.crumb.safetensors)", e.what());
    }
    return artefact;
}

// The best recipe that needs no artefact.
constexpr std::string_view kUncalibrated = "had2";

struct Choice {
    Recipe recipe;
    std::string why;  // empty unless it was chosen here
};

Choice choose(const llama_model& model, const KvOptions& options) {
    if (options.recipe != kAuto) { return {find_recipe(options.recipe), {}}; }
    const auto file = model_file(&model);
    const auto path = options.artefact.empty() ? default_artefact(file) : options.artefact;
    const bool exists = !path.empty() && std::filesystem::exists(path);
    if (exists && read_artefact(path).has_planes()) { return {find_recipe("planes"), "its artefact is there"}; }
    const auto command = fmt::format("crumb calibrate -m {}", file.empty() ? "MODEL.gguf" : file.string());
    if (!options.artefact.empty()) {
        fail("--kv auto: the artefact {} {}: make one with\n    {}\nor leave --kv-artifact out", path.string(),
             exists ? "has no bases of 'planes'" : "does not exist", command);
    }
    // A bias of the keys is a mean that one gain a token cannot hold: such models collapse.
    const bool biased = std::ranges::any_of(model.layers, [](const auto& layer) { return layer.wk_b || layer.wqkv_b; });
    if (biased) {
        fail("--kv auto: the keys of this model have a bias, and no recipe without calibration is fit for that: type\n    {}", command);
    }
    return {find_recipe(kUncalibrated), fmt::format("there is no artefact with 'planes' at {}, '{}' makes one",
                                                    path.empty() ? "the usual place" : path.string(), command)};
}

// Where layers attend.
struct Places {
    bool cpu = false, device = false;
};

Places places(const llama_model& model, const llama_cparams& cparams, const std::vector<int>& owner) {
    Places found;
    for (size_t il = 0; il < owner.size(); ++il) {
        if (owner[il] < 0) { continue; }
        ggml_backend_dev_t device = cparams.offload_kqv ? model.dev_layer(int(il)) : nullptr;
        (device && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU ? found.device : found.cpu) = true;
    }
    return found;
}

void add_tables(CacheConfig& config, const llama_model& model, const Artefact* artefact) {
    set_tables(config, artefact);
    if (artefact) { config.artefact_hash = artefact->hash(); }
    // Saved states name the weights that they belong to, calibrated or not.
    if (const auto file = model_file(&model); artefact || !file.empty()) {
        config.model_hash = artefact ? artefact->provenance.model.hash : weights_hash(file);
    }
}

// The pools are reserved at start and become physical as they fill: too large a context would end by the kernel's hand,
// in the middle of an answer.
void require_memory(size_t bytes, const CacheConfig& config) {
    const auto machine = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
    if (bytes > machine) {
        fail("a KV cache of {} tokens (-np {}) takes {:.1f} MiB with {}, and this machine has {:.1f} MiB of memory: lower {}",
             config.tokens_total, config.n_sequences, double(bytes) / 1048576.0, label(config.recipe), double(machine) / 1048576.0,
             config.memory > 0 ? "--kv-memory" : "-c or -np, or choose a recipe of fewer bits");
    }
}

constexpr const char* kTilesRefused = " (this CPU has AMX, and Linux refuses this process its tiles)";

AttentionChoice attention_choice(const std::string& text) {
    if (text == "auto") { return {}; }
    if (text == kDecoded) { return {.decode_pages = true}; }
    std::string names = fmt::format("auto, {}", kDecoded);
    for (const Isa isa : kIsas) {
        if (!supported(isa)) { continue; }
        if (text == name(isa)) { return {.isa = isa}; }
        names += fmt::format(", {}", name(isa));
    }
    fail("--kv-attention takes {} on this machine, not '{}'{}", names, text, text == name(Isa::amx) && tiles_refused() ? kTilesRefused : "");
}

// On a GPU the kernels that there are read such pages in place, and without one a layer is refused there.
void refuse_slow(const Recipe& recipe, const KvOptions& options, bool on_cpu) {
    if (recipe.slow() && on_cpu && !options.allow_slow) {
        fail("--kv {} has no fast attention on the CPU: its pages are decoded for every query, and attention over them takes some 3 times as "
             "long in a prompt and 50 times as long for a token. Add --kv-allow-slow to run it all the same, for example to compare it",
             label(recipe));
    }
}

// A window as long as the context keeps a layer exact, whatever the others do. Called when formats and tables are made: what
// the layer gets does not depend on being alone.
void code_only(CacheConfig& config, int only) {
    if (only >= int(config.layers.size()) || !config.layers[only].stores || config.layers[only].window) {
        fail("layer {} has no KV cache that could be coded", only);
    }
    for (size_t il = 0; il < config.layers.size(); ++il) {
        auto& layer = config.layers[il];
        if (int(il) == only) { continue; }
        layer.form = SlidingForm::bf16;
        if (layer.window == 0) { layer.window = int(config.tokens_per_sequence); }
    }
}

llama_memory_i* create(const llama_model& model, const llama_memory_params& params, const llama_cparams& cparams,
                       const llama_memory_i::layer_filter_cb& filter, const llama_memory_i::layer_reuse_cb& reuse) {
    auto& g = global();
    try {
        CRUMB_ASSERT(g.options);
        g.refusal.clear();
        for (const ggml_type type : {params.type_k, params.type_v}) {
            if (type != GGML_TYPE_F16) {
                fail("cache type {} was asked for together with --kv {}: --kv replaces the KV cache, leave out -ctk and -ctv (of a draft model -ctkd and -ctvd)",
                     ggml_type_name(type), g.options->recipe);
            }
        }
        ModelLayers layers = layers_of(model, filter, reuse);
        ContextSizes sizes{.per_sequence = cparams.kv_unified ? cparams.n_ctx : cparams.n_ctx_seq,
                           .n_sequences = int(std::max<uint32_t>(cparams.n_seq_max, 1)),
                           .n_ubatch = int(cparams.n_ubatch),
                           .n_threads = std::max(cparams.n_threads, cparams.n_threads_batch)};
        sizes.total = std::max<int64_t>(cparams.n_ctx, sizes.per_sequence);
        const Choice choice = choose(model, *g.options);
        const auto [on_cpu, on_gpu] = places(model, cparams, layers.owner);
        refuse_slow(choice.recipe, *g.options, on_cpu);
        const auto artefact = find_artefact(model, *g.options, choice.recipe);
        CacheConfig config = geometry(model, *g.options, choice.recipe, layers.layers, sizes, artefact ? &*artefact : nullptr, on_gpu);
        if (config.memory > 0 && !g.live.empty()) {
            fail("--kv-memory is for one model, and a draft has a KV cache of its own: leave it out, -c and -np size both");
        }
        add_tables(config, model, artefact ? &*artefact : nullptr);
        auto cuda = CudaLayers::make(model, cparams, config, layers.owner, !model.hparams.no_alloc);
        if (cuda && (g.options->verify > 0 || g.options->attention != "auto")) {
            fail("{} is for attention on the CPU, and there are {}: add --no-kv-offload",
                 g.options->verify > 0 ? "--kv-verify" : "--kv-attention", cuda->describe());
        }
        if (!cuda && g.options->host_memory > 0) {
            fail("--kv-host-memory moves pages from a GPU's memory to main memory, and no layer has its cache on a GPU: leave it out, or put layers there "
                 "(-ngl, in a build with -DCRUMB_CUDA=ON, without --no-kv-offload)");
        }
        size_t elsewhere = 0;
        for (const auto& [type, bytes] : cuda ? cuda->bytes() : std::map<ggml_backend_buffer_type_t, size_t>{}) { elsewhere += bytes; }
        require_memory(cache_bytes(config).total() - elsewhere, config);
        if (g.options->verify > 0) { require_memory(cache_bytes(Verify::exact_config(config)).total(), config); }
        std::string line = describe(config, on_gpu ? std::vector<FormCost>{} : form_costs(model, config, sizes.n_threads));
        if (cuda) { line += ", " + cuda->describe(); }
        if (cuda && !g.options->sliding && sliding_form(config)) { line += ", where --kv-sliding auto is bf16"; }
        if (g.options->attention != "auto") { line += fmt::format(", attention {}", g.options->attention); }
        else if (on_cpu && tiles_refused()) { line += fmt::format(", attention {}{}", name(best_isa()), kTilesRefused); }
        if (g.options->verify > 0) {
            line += fmt::format(", every {}th token checked against exact K and V, which takes {:.1f} MiB more", g.options->verify,
                                double(cache_bytes(Verify::exact_config(config)).total()) / 1048576.0);
        }
        if (g.options->sliding != SlidingForm::bf16 && !sliding_form(config)) { line += ", no sliding-window layers for --kv-sliding"; }
        if (!choice.why.empty()) { line += fmt::format(", chosen by --kv auto: {}", choice.why); }
        if (g.options->only_layer >= 0) {
            code_only(config, g.options->only_layer);
            line += fmt::format("; to measure it, layer {} alone is coded", g.options->only_layer);
        }
        auto memory = std::make_unique<TrackedMemory>(model, cparams, std::move(config), std::move(layers.owner), std::move(cuda),
                                                      attention_choice(g.options->attention), g.options->verify);
        if (!model.hparams.no_alloc) {
            const int64_t tokens = memory->bytes().tokens;
            if (g.options->announce) {
                const int64_t longest = memory->cache().longest_promise();
                const auto limit = g.options->memory > 0 && longest < sizes.per_sequence ? fmt::format("; a request alone has room for {}", longest) : "";
                std::fprintf(stderr, "%s\nKV cache size: %lld tokens; maximum concurrency for %lld tokens per request: %.2fx%s\n", line.c_str(),
                             (long long)tokens, (long long)sizes.per_sequence, double(tokens) / double(sizes.per_sequence), limit.c_str());
            }
            std::lock_guard lock(g.mutex);
            g.live.push_back(memory.get());
            g.served = true;
        }
        return memory.release();
    } catch (const std::exception& e) {
        std::lock_guard lock(g.mutex);
        g.refusal = e.what();
        // llama.cpp prints what it catches, twice where it also asked how much memory would do; commands print the reason once, last.
        // Nobody does for a server that slept and does not wake.
        if (g.served) { throw; }
        throw Error("refused by --kv, for the reason that comes last");
    }
}

// Models for which llama.cpp makes no KV cache, or not only one: the factory is never asked, and a hook of ours ends the
// creation of their context with llama.cpp's own words. Empty for the others.
std::string without_kv_cache(const llama_model& model) {
    const auto because = [&](std::string_view what) {
        return fmt::format("architecture '{}': {}; run without --kv", architecture(model), what);
    };
    if (llama_model_is_recurrent(&model)) { return because("a recurrent state is no KV cache"); }
    if (llama_model_is_hybrid(&model)) { return because("recurrent layers beside a KV cache are not supported by --kv"); }
    if (!model.hparams.causal_attn) { return because("encoders and diffusion models keep no KV cache"); }
    return {};
}

void observe_load(const llama_model* model, const char* path) {
    std::lock_guard lock(global().mutex);
    global().files[model] = path;
    global().refusal = without_kv_cache(*model);
}

}  // namespace

void use_kv(std::optional<KvOptions> options) {
    global().options = std::move(options);
    global().served = false;
    llama_memory_set_factory(global().options ? create : nullptr);
    llama_model_set_load_observer(observe_load);
}

std::string last_refusal() {
    std::lock_guard lock(global().mutex);
    return global().refusal;
}

void remember_refusal(std::string why) {
    std::lock_guard lock(global().mutex);
    global().refusal = std::move(why);
}

std::filesystem::path default_artefact(const std::filesystem::path& model_file) {
    if (model_file.empty()) { return {}; }
    auto path = model_file;
    return path.replace_extension(".crumb.safetensors");
}

std::filesystem::path model_file(const llama_model* model) {
    std::lock_guard lock(global().mutex);
    const auto found = global().files.find(model);
    return found == global().files.end() ? std::filesystem::path{} : found->second;
}

CacheConfig cache_geometry(const llama_model& model, const KvOptions& options, const ContextRequest& request) {
    // As llama_context resolves it.
    const auto padded = [](int64_t n) { return (n + 255) / 256 * 256; };
    const int64_t asked = request.n_ctx > 0 ? request.n_ctx : model.hparams.n_ctx_train;
    ContextSizes sizes{.n_sequences = request.n_sequences,
                       .n_ubatch = int(std::min<int64_t>({asked, request.n_batch, request.n_ubatch})),
                       .n_threads = request.n_threads};
    sizes.per_sequence = padded(request.unified ? asked : padded(asked) / request.n_sequences);
    sizes.total = request.unified ? sizes.per_sequence : sizes.per_sequence * request.n_sequences;
    const auto layers = layers_of(model, nullptr, nullptr).layers;
    const Recipe recipe = choose(model, options).recipe;
    // Of the recipes with an artefact only those with a budget have pages that depend on it; of the others sizes can be told
    // before there is one. What there is, or was named, must fit all the same.
    const bool wanted = recipe.budgeted() || !options.artefact.empty() || std::filesystem::exists(default_artefact(model_file(&model)));
    const auto artefact = wanted ? find_artefact(model, options, recipe) : std::nullopt;
    return geometry(model, options, recipe, layers, sizes, artefact ? &*artefact : nullptr, false);
}

std::optional<KvStatus> kv_status() {
    std::lock_guard lock(global().mutex);
    if (global().live.empty()) { return std::nullopt; }
    return global().live.back()->status();
}

std::optional<KvStatus> served_status() {
    std::lock_guard lock(global().mutex);
    if (global().live.empty()) { return std::nullopt; }
    return global().live.front()->status();
}

namespace {

nlohmann::ordered_json sizes(const CacheConfig& config, const KvStatus& now) {
    const CacheBytes& bytes = now.bytes;
    return {
        {"recipe", label(config.recipe)},
        {"bits_per_element", bytes.bits_per_element},
        {"bits_effective", bytes.effective_bits},
        {"sink", config.sink},
        {"recent", config.recent},
        {"prefill", config.prefill == PrefillRule::exact ? "exact" : "position"},
        {"reuse", config.reuse == ReuseRule::exact ? "exact" : "codes"},
        {"artefact", config.artefact_hash},
        {"bytes", {{"total", bytes.total()}, {"pages", bytes.coded}, {"windows", bytes.exact}, {"sliding_windows", bytes.window},
                   {"at_16_bit", bytes.bf16_equivalent}}},
        {"capacity_tokens", bytes.tokens},
        {"tokens_per_request", config.tokens_per_sequence},
        {"pages", {{"total", now.counters.blocks_total}, {"in_use", now.counters.blocks_in_use},
                   {"shared", now.counters.shared_blocks}, {"kept", now.counters.kept_blocks},
                   {"in_main_memory", now.counters.host_blocks_in_use}}},
    };
}

}  // namespace

std::string kv_properties() {
    std::lock_guard lock(global().mutex);
    if (global().live.empty()) { return "null"; }
    const Memory& memory = *global().live.front();
    const CacheConfig& config = memory.config();
    nlohmann::ordered_json json = sizes(config, memory.status()), layers = nlohmann::ordered_json::array();
    for (size_t il = 0; il < config.layers.size(); ++il) {
        const CacheLayer& layer = config.layers[il];
        if (!layer.stores) { continue; }
        layers.push_back({{"layer", il},
                          {"type", layer.coded() ? label(config.recipe) : std::string(name(layer.form))},
                          {"heads", layer.n_head_kv},
                          {"dim_k", layer.dim_k},
                          {"dim_v", layer.dim_v},
                          {"reason", layer.window == 0 ? "sees the whole context" : fmt::format("sees {} tokens", layer.window)}});
    }
    json["layers"] = std::move(layers);
    if (const auto taken = sliding_form(config)) {
        nlohmann::ordered_json bytes;
        for (const SlidingForm form : kSlidingForms) {
            if (const auto n = sliding_bytes(config, form)) { bytes[name(form)] = *n; }
        }
        json["sliding_windows"] = {{"form", name(*taken)}, {"bytes", std::move(bytes)}};
    }
    return json.dump();
}

std::string kv_now() {
    std::lock_guard lock(global().mutex);
    if (global().live.empty()) { return "null"; }
    const Memory& memory = *global().live.front();
    const KvStatus now = memory.status();
    nlohmann::ordered_json json = sizes(memory.config(), now), sequences = nlohmann::ordered_json::array();
    for (size_t id = 0; id < now.sequences.size(); ++id) {
        const SequenceStatus& s = now.sequences[id];
        if (s.length == 0) { continue; }
        sequences.push_back({{"slot", id}, {"tokens", s.length}, {"sinks", s.sinks}, {"coded", s.coded}, {"shared", s.shared},
                             {"recent", s.recent}, {"sliding_window", s.window}, {"bytes", s.bytes}, {"bytes_at_16_bit", s.bytes_at_16_bit}});
    }
    json["bytes_in_use"] = now.counters.bytes_in_use;
    if (now.drift) {
        const Drift& d = *now.drift;
        json["drift"] = {{"rows", d.rows}, {"mean", d.rows ? d.sum / double(d.rows) : 0.0}, {"worst", d.worst}};
    }
    json["slots"] = now.sequences.size();
    json["sequences"] = std::move(sequences);
    json["counters"] = {{"prompt_tokens", now.prompts.tokens}, {"prompt_tokens_found", now.prompts.found},
                        {"evicted", now.counters.evicted_blocks}, {"demoted", now.counters.demoted_blocks},
                        {"aged_early", now.counters.aged_early_tokens}, {"saturated", now.counters.encoded.saturated}};
    return json.dump();
}

}  // namespace crumb::llama

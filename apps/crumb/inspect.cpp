// What is there and what it costs, without running anything: recipes, a model's KV, a recipe at a context, an artefact, a
// page. Every size comes from the functions that lay out pages and allocate caches.
#include "command_line.h"
#include "commands.h"
#include "session.h"

#include "common.h"

#include <crumb/artefact.h>
#include <crumb/error.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>

namespace crumb::app {

namespace {

double mib(size_t bytes) { return double(bytes) / 1048576.0; }

// Lines of at most 100 columns, indented by four.
std::string wrapped(std::string_view text) {
    std::string result, line;
    while (!text.empty()) {
        const size_t end = std::min(text.find(' '), text.size());
        const auto word = text.substr(0, end);
        if (!line.empty() && line.size() + word.size() + 1 > 96) {
            result += "    " + line + "\n";
            line.clear();
        }
        line.append(line.empty() ? "" : " ").append(word);
        text.remove_prefix(std::min(end + 1, text.size()));
    }
    return line.empty() ? result : result + "    " + line + "\n";
}

void print_recipes() {
    std::printf("--kv              bits at D=128  artefact  speed  paper's windows\n");
    for (const auto& recipe : recipes()) {
        const double bits = recipe.budgeted() ? recipe.rate : page_format(recipe, 128, 128).bits_per_element();
        std::printf("\n%-16.*s  %13.3f  %-8s  %-5s  %3d + %d\n", int(recipe.name.size()), recipe.name.data(), bits,
                    recipe.needs_artefact() ? "yes" : "no", recipe.slow() ? "slow" : "", recipe.paper.sink, recipe.paper.recent);
        std::fputs(wrapped(recipe.summary).c_str(), stdout);
        std::fputs(wrapped(recipe.source).c_str(), stdout);
    }
    std::printf("\nWindows: first and last tokens that stay 16 bit, 64 + 256 for all unless --kv-windows paper. Slow\n"
                "recipes need --kv-allow-slow. For measurements NAME:K and NAME:V code one side alone, the other at\n"
                "8 bits, and NAME:no-map, NAME:no-clip ... leave a stage out.\n");
}

void print_geometry(const CacheConfig& config) {
    struct Kind {
        int heads, dim_k, dim_v, window;
        auto operator<=>(const Kind&) const = default;
    };
    std::map<Kind, std::vector<int>> kinds;
    int without = 0;
    for (size_t il = 0; il < config.layers.size(); ++il) {
        const auto& layer = config.layers[il];
        if (layer.stores) {
            kinds[{layer.n_head_kv, layer.dim_k, layer.dim_v, layer.window}].push_back(int(il));
        } else {
            ++without;
        }
    }
    std::printf("layers of the model: %zu\n", config.layers.size());
    for (const auto& [kind, layers] : kinds) {
        std::printf("  %zu with %d KV head%s, K %d, V %d a head, %s; %.1f KiB a token at 16 bit:", layers.size(), kind.heads,
                    kind.heads == 1 ? "" : "s", kind.dim_k, kind.dim_v,
                    kind.window ? fmt::format("a window of {} tokens", kind.window).c_str() : "the whole context",
                    double(layers.size()) * kind.heads * (kind.dim_k + kind.dim_v) * 2 / 1024.0);
        for (const int il : layers) { std::printf(" %d", il); }
        std::printf("\n");
    }
    if (without) { std::printf("  %d without K and V of their own\n", without); }
}

// A way to run the model, and the cache that it takes.
struct Use {
    std::string name;
    CacheConfig config;
    llama::WorkingBytes working;
    std::vector<llama::FormCost> forms;  // of sliding windows
    size_t exact = 0;                    // of --kv-verify
    CacheBytes bytes = cache_bytes(config);

    // What 16 bit takes.
    double times() const { return double(bytes.bf16_equivalent) / double(bytes.total()); }
};

Use use_of(const llama_model& model, std::string name, const llama::KvOptions& kv, const llama::ContextRequest& request) {
    CacheConfig config = llama::cache_geometry(model, kv, request);
    const auto working = llama::working_bytes(model, config, request.n_threads);
    auto forms = llama::form_costs(model, config, request.n_threads);
    const size_t exact = kv.verify > 0 ? cache_bytes(llama::Verify::exact_config(config)).total() : 0;
    return {std::move(name), std::move(config), working, std::move(forms), exact};
}

void print_pages(const CacheConfig& config) {
    struct Kind {
        PageFormat format;
        int heads = 0;
        std::string layers;
    };
    std::vector<Kind> kinds;
    for (size_t il = 0; il < config.layers.size(); ++il) {
        const auto& layer = config.layers[il];
        if (!layer.coded()) { continue; }
        auto kind = std::ranges::find(kinds, config.formats[il], &Kind::format);
        if (kind == kinds.end()) { kind = kinds.insert(kind, Kind{config.formats[il], 0, {}}); }
        kind->heads += layer.n_head_kv;
        kind->layers += fmt::format(" {}", il);
    }
    for (const auto& [format, heads, layers] : kinds) {
        const size_t codes = format.coded() ? format.key_info() : format.bytes();
        std::printf("  page (%d tokens of a head, K and V): %zu bytes = %zu codes + %zu side information, %.3f bits an element; %d heads",
                    format.tokens, format.bytes(), codes, format.bytes() - codes, format.bits_per_element(), heads);
        if (kinds.size() > 1) {
            std::printf("; K %d planes%s, V %d planes%s, layers%s", format.k.planes, format.k.mean ? " + mean" : "", format.v.planes,
                        format.v.mean ? " + mean" : "", layers.c_str());
        }
        std::printf("\n");
    }
}

// A column a use.
void print_cost(const std::vector<Use>& uses, int threads) {
    const CacheConfig& config = uses.front().config;
    std::printf("\n--kv %s, sink %d, recent %d, steps of %d tokens, %d thread%s:\n", label(config.recipe).c_str(), config.sink, config.recent,
                config.max_step_tokens, threads, threads == 1 ? "" : "s");
    print_pages(config);
    const auto line = [&](const char* what, auto number, const char* format, const char* note = "") {
        std::printf("  %-27s", what);
        for (const Use& use : uses) { std::printf("  %18s", fmt::format(fmt::runtime(format), number(use)).c_str()); }
        std::printf("%s%s\n", *note ? "   " : "", note);
    };
    const auto size = [&](const char* what, auto bytes, const char* note = "") {
        line(what, [&](const Use& use) { return mib(bytes(use)); }, "{:.2f} MiB", note);
    };
    line("", [](const Use& use) { return use.name; }, "{}");
    line("requests at once", [](const Use& use) { return use.config.n_sequences; }, "{}");
    line("tokens of a request", [](const Use& use) { return use.config.tokens_per_sequence; }, "{}");
    line("tokens together", [](const Use& use) { return use.bytes.tokens; }, "{}");
    size("pages", [](const Use& use) { return use.bytes.coded; });
    size("sinks and recent tokens", [](const Use& use) { return use.bytes.exact; }, "BF16");
    size("sliding windows", [](const Use& use) { return use.bytes.window; });
    size("together", [](const Use& use) { return use.bytes.total(); }, "allocated at start, nothing grows with the context");
    size("beside it, maps", [](const Use& use) { return use.working.maps; });
    size("and working memory", [](const Use& use) { return use.working.attention; },
         config.recipe.slow() ? "at most; decoded pages, some MiB, are not counted" : "at most");
    if (uses.front().exact > 0) { size("for --kv-verify", [](const Use& use) { return use.exact; }, "exact K and V"); }
    size("16-bit KV", [](const Use& use) { return use.bytes.bf16_equivalent; });
    line("16 bit takes, times as much", [](const Use& use) { return use.times(); }, "{:.2f}");
    line("bits an element", [](const Use& use) { return use.bytes.effective_bits; }, "{:.3f}",
         fmt::format("windows included; pages alone {:.3f}", uses.front().bytes.bits_per_element).c_str());
    for (const Use& use : uses) {
        if (sliding_form(use.config)) { std::printf("  %s: %s\n", use.name.c_str(), llama::describe_sliding(use.config, use.forms).c_str()); }
        if (config.recipe.coded() && use.times() < 1) {
            std::printf("  %s: 16 bit would be smaller, for every request has exact windows. What helps:%s%s a larger -c\n",
                        use.name.c_str(), use.config.n_sequences > 1 ? " -np 1 (fewer requests at once)," : "",
                        sliding_form(use.config) == SlidingForm::bf16 ? " --kv-sliding q8 (8 bits)," : "");
        }
    }
}

const char* checked(Artefact::Checked what) {
    switch (what) {
        case Artefact::Checked::nothing: return "no checksum: an older crumb wrote this file";
        case Artefact::Checked::tensors: return "agrees with the tensors; none of the metadata: an older crumb wrote this file";
        case Artefact::Checked::all: return "agrees with tensors and metadata";
    }
    CRUMB_ASSERT(false);
}

void print_artefact(const std::filesystem::path& file) {
    const Artefact artefact = read_artefact(file);
    const auto& p = artefact.provenance;
    std::printf("artefact %s\n  hash         %s\n  model        %s (%s, %d layers, %d / %d heads, K %d, V %d)\n  model hash   %s\n"
                "  method       %s\n  tokens       %llu of %s\n  text hash    %s\n  made by      %s\n  checksum     %s\n",
                file.string().c_str(), artefact.hash().c_str(), p.model.name.c_str(), p.model.architecture.c_str(), p.model.n_layer,
                p.model.n_head, p.model.n_head_kv, p.model.dim_k, p.model.dim_v, p.model.hash.c_str(), p.method.c_str(),
                static_cast<unsigned long long>(p.tokens), p.texts.c_str(), p.text_hash.c_str(), p.created_by.c_str(),
                checked(artefact.checked));
    for (const auto& [il, layer] : artefact.layers) {
        std::printf("  layer %-3d    key mean %d x %d, K rotation %d x %d x %d, V rotation %d x %d x %d", il, layer.k_mean.heads,
                    layer.k_mean.dim, layer.k_rotation.heads, layer.k_rotation.dim, layer.k_rotation.dim, layer.v_rotation.heads,
                    layer.v_rotation.dim, layer.v_rotation.dim);
        if (layer.k_planes.present()) {
            std::printf("; planes: K%s%s, V%s", layer.k_planes.mean.present() ? " centred" : "",
                        layer.k_planes.page_step.present() ? " page means" : " plain",
                        layer.v_planes.page_step.present() ? " page means" : " plain");
        }
        std::printf("\n");
    }
}

// Codes and side information as they stand; values need the tables of a layer and are the cache's business.
void print_page(const std::filesystem::path& file, const Recipe& recipe, int dim) {
    const PageFormat format = page_format(recipe, dim, dim);
    std::vector<std::byte> page(format.bytes());
    std::ifstream in(file, std::ios::binary | std::ios::ate);
    if (!in || !std::filesystem::is_regular_file(file)) { fail("cannot read the page file {}: there is no such file", file.string()); }
    if (size_t(in.tellg()) != page.size()) {
        fail("{} has {} bytes, a page of --kv {} with head size {} has {}", file.string(), size_t(in.tellg()), recipe.name, dim, page.size());
    }
    in.seekg(0);
    in.read(reinterpret_cast<char*>(page.data()), std::streamsize(page.size()));
    if (!format.coded()) {
        for (int t = 0; t < kPageTokens; ++t) {
            std::printf("token %2d  K %12.5g %12.5g ...  V %12.5g %12.5g ...\n", t, to_float(key_at(format, page.data(), t, 0)),
                        to_float(key_at(format, page.data(), t, 1)), to_float(value_at(format, page.data(), t, 0)),
                        to_float(value_at(format, page.data(), t, 1)));
        }
        return;
    }
    if (!format.planar()) { fail("--page shows pages with a scale or gain a token; {} has parameters of groups", recipe.name); }
    std::vector<uint8_t> k(size_t(kPageTokens) * format.k.planes), v(size_t(kPageTokens) * format.v.planes);
    unpack_keys(format.k.planes, page.data() + format.key_codes(), k);
    unpack_values(format.v.planes, page.data() + format.value_codes(), v);
    SideTables k_side, v_side;
    k_side.format = format.k;
    v_side.format = format.v;
    const auto digits = [](const uint8_t* codes, int n) {
        std::string text;
        for (int i = 0; i < n; ++i) { text += char('0' + codes[i]); }
        return text;
    };
    for (int t = 0; t < kPageTokens; ++t) {
        const TokenInfo ki = key_info_at(format, k_side, page.data(), t), vi = value_info_at(format, v_side, page.data(), t);
        std::printf("token %2d  K scale %11.5g zero %11.5g digits %s\n          V scale %11.5g zero %11.5g digits %s\n", t, ki.scale, ki.zero,
                    digits(&k[size_t(t) * format.k.planes], format.k.planes).c_str(), vi.scale, vi.zero,
                    digits(&v[size_t(t) * format.v.planes], format.v.planes).c_str());
    }
}

}  // namespace

int inspect(int argc, char** argv) {
    CLI::App app{"What a model's KV is, what a recipe costs, what is in an artefact or a page", "crumb inspect"};
    KvArguments arguments = take_kv_arguments(argc, argv);
    if (arguments.kv && arguments.kv->host_memory > 0) { fail("--kv-host-memory changes no sizes, it says where pages lie: leave it out"); }
    std::filesystem::path model_file, artefact, page;
    bool list = false;
    int n_parallel = -1, head_dim = 128;
    llama::ContextRequest request{.n_threads = common_cpu_get_num_math()};
    app.footer(kKvHelp);
    app.add_flag("--recipes", list, "list the recipes");
    app.add_option("-m,--model", model_file, "GGUF model: its KV geometry, and what --kv costs");
    app.add_option("-c,--ctx-size", request.n_ctx, "as of crumb serve: tokens of all requests together, 0: what the model was trained on")
        ->capture_default_str()->check(CLI::Range(0, 1 << 24));
    app.add_option("--parallel", n_parallel, "-np of crumb serve: requests at once (-1: 4, which share the tokens)")
        ->capture_default_str()->check(CLI::Range(-1, 256));
    app.add_flag("--kv-unified", request.unified, "-kvu of crumb serve: requests share the tokens, and each may have them all");
    app.add_option("-b,--batch-size", request.n_batch, "tokens of a call")->capture_default_str()->check(CLI::Range(1, 1 << 20));
    app.add_option("--ubatch-size", request.n_ubatch, "tokens of a step")->capture_default_str()->check(CLI::Range(1, 1 << 20));
    app.add_option("-t,--threads", request.n_threads, "threads")->capture_default_str()->check(CLI::Range(1, 4096));
    app.add_option("--artifact", artefact, "an artefact's provenance");
    app.add_option("--page", page, "a page's bytes, decoded (with --kv and --head-dim)");
    app.add_option("--head-dim", head_dim, "head size of --page")->capture_default_str();
    if (const auto status = parse(app, arguments.rest)) { return *status; }
    if (!list && model_file.empty() && artefact.empty() && page.empty()) { fail("nothing to inspect; crumb inspect --help lists what can be"); }
    if (n_parallel == 0) { fail("-np 0: no request could run; give 1 or more, or leave it out"); }
    if (!page.empty() && !arguments.kv) { fail("--page needs --kv RECIPE to know the format"); }
    if (!page.empty() && find_recipe(arguments.kv->recipe).budgeted()) {
        fail("pages of --kv {} differ by layer and model, so --page cannot tell what this one is", arguments.kv->recipe);
    }

    if (list) { print_recipes(); }
    if (!artefact.empty()) { print_artefact(artefact); }
    if (!page.empty()) { print_page(page, find_recipe(arguments.kv->recipe), head_dim); }
    if (!model_file.empty()) {
        llama::quiet_log();
        const auto model = llama::load_model(model_file, llama::Load::mapped);
        llama::KvOptions bf16;
        bf16.recipe = "bf16";
        const llama::KvOptions kv = arguments.kv.value_or(bf16);
        // As crumb serve reads its flags.
        llama::ContextRequest served = request;
        served.n_sequences = n_parallel > 0 ? n_parallel : 4;
        served.unified = request.unified || n_parallel < 0 || kv.memory > 0;
        llama::KvOptions serve = kv;
        serve.kept_windows = llama::kServedWindows;
        print_geometry(llama::cache_geometry(*model, serve, served));
        if (arguments.kv) {
            std::vector<Use> uses{use_of(*model, "crumb serve", serve, served)};
            if (kv.memory == 0) { uses.push_back(use_of(*model, "crumb run, chat", kv, request)); }
            print_cost(uses, request.n_threads);
            const Recipe& recipe = uses.front().config.recipe;
            if (const auto beside = llama::default_artefact(model_file);
                recipe.needs_artefact() && kv.artefact.empty() && !std::filesystem::exists(beside)) {
                std::printf("  to run it, make its artefact %s: crumb calibrate -m %s\n", beside.c_str(), model_file.c_str());
            }
        }
    }
    return 0;
}

}  // namespace crumb::app

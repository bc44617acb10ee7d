#include "geometry.h"

#include "llama-arch.h"

#include <crumb/attention.h>
#include <crumb/error.h>

#include <algorithm>

namespace crumb::llama {

namespace {

void refuse_unsupported(const llama_model& model) {
    const auto& hparams = model.hparams;
    const auto refuse = [&](std::string_view what) {
        fail("architecture '{}': {}; run without --kv", architecture(model), what);
    };
    if (hparams.is_mla()) { refuse("latent KV (MLA) has no page format"); }
    switch (model.arch) {
        case LLM_ARCH_T5: refuse("encoder-decoder models are not supported by --kv"); break;
        case LLM_ARCH_GROK: refuse("its scaled and capped logits are not supported by --kv"); break;
        case LLM_ARCH_GEMMA4_ASSISTANT: refuse("a draft that reads the KV of another model is not supported by --kv"); break;
        case LLM_ARCH_DFLASH: refuse("drafts that reach into the KV cache are not supported by --kv"); break;
        default: break;
    }
    if (hparams.swa_type != LLAMA_SWA_TYPE_NONE && hparams.swa_type != LLAMA_SWA_TYPE_STANDARD) {
        refuse("chunked and symmetric sliding windows are not supported by --kv");
    }
}

SlidingForm cheapest(const std::vector<FormCost>& costs) {
    return std::ranges::min_element(costs, {}, [](const FormCost& cost) { return cost.cache + cost.beside; })->form;
}

size_t size_of(const AttentionMaps& maps) {
    size_t bytes = 0;
    for (const auto& head : maps.heads) { bytes += (head.k.size() + head.v.size()) * sizeof(bf16); }
    return bytes;
}

}  // namespace

std::string architecture(const llama_model& model) { return llm_arch_name(model.arch); }

ModelLayers layers_of(const llama_model& model, const llama_memory_i::layer_filter_cb& filter,
                      const llama_memory_i::layer_reuse_cb& reuse) {
    refuse_unsupported(model);
    const auto& hparams = model.hparams;
    ModelLayers result;
    const int n_layer = hparams.n_layer_all;
    result.layers.resize(n_layer);
    result.owner.assign(n_layer, -1);
    for (int il = 0; il < n_layer; ++il) {
        CacheLayer& layer = result.layers[il];
        layer.stores = false;
        if ((filter && !filter(il)) || hparams.n_head_kv(il) == 0) { continue; }
        const int from = reuse ? reuse(il) : -1;
        result.owner[il] = from >= 0 ? from : il;
        if (from >= 0) { continue; }
        layer.stores = true;
        layer.n_head_kv = hparams.n_head_kv(il);
        layer.dim_k = hparams.n_embd_head_k(il);
        layer.dim_v = hparams.n_embd_head_v(il);
        layer.window = hparams.swa_type == LLAMA_SWA_TYPE_STANDARD && hparams.is_swa(il) ? int(hparams.n_swa) : 0;
        if (hparams.n_head(il) % layer.n_head_kv != 0) {
            fail("layer {}: {} query heads do not share {} KV heads evenly; run without --kv", il, hparams.n_head(il), layer.n_head_kv);
        }
    }
    return result;
}

CacheConfig geometry(const llama_model& model, const KvOptions& options, const Recipe& recipe, const std::vector<CacheLayer>& layers,
                     const ContextSizes& sizes, const Artefact* artefact, bool on_device) {
    CacheConfig config;
    config.recipe = recipe;
    config.layers = layers;
    config.sink = options.sink;
    config.recent = options.recent;
    config.prefill = options.prefill;
    config.reuse = options.reuse;
    config.memory = options.memory;
    config.host_memory = options.host_memory;
    config.spare_windows = std::min(options.kept_windows, sizes.n_sequences);
    config.n_sequences = sizes.n_sequences;
    config.tokens_per_sequence = sizes.per_sequence;
    config.tokens_total = sizes.total;
    config.max_step_tokens = sizes.n_ubatch;
    set_formats(config, artefact);
    if (sliding_form(config) && !on_device) {
        set_sliding_form(config, options.sliding ? *options.sliding : cheapest(form_costs(model, config, sizes.n_threads)));
    } else if (sliding_form(config) && options.sliding.value_or(SlidingForm::bf16) != SlidingForm::bf16) {
        fail("--kv-sliding {} is for layers on the CPU, on a GPU sliding windows are BF16: leave it out, or add --no-kv-offload",
             name(*options.sliding));
    }
    return config;
}

WorkingBytes working_bytes(const llama_model& model, const CacheConfig& config, int n_threads) {
    // A token of every sequence, and chunks of a prompt of any size, at contexts that double: few rows are split into ranges,
    // whose number grows with the context.
    const auto plan_at = [&](int64_t end, int n_rows, bool one_sequence) {
        std::vector<QueryRow> rows;
        for (int i = 0; i < n_rows; ++i) {
            const auto position = int32_t(one_sequence ? std::max<int64_t>(0, end - n_rows + i) : end - 1);
            rows.push_back({.sequence = one_sequence ? 0 : uint32_t(i), .token = uint32_t(i), .position = position, .begin = 0,
                            .coded_end = coded_edge(position, config.recent), .end = position + 1});
        }
        return AttentionPlan(std::move(rows), config.sink);
    };
    std::vector<AttentionPlan> plans;
    for (int64_t end = 1;; end = std::min(2 * end, config.tokens_per_sequence)) {
        plans.push_back(plan_at(end, config.n_sequences, false));
        const int most = int(std::min<int64_t>(config.max_step_tokens, end));
        for (int n_rows = 1;; n_rows = std::min(2 * n_rows, most)) {
            plans.push_back(plan_at(end, n_rows, true));
            if (n_rows >= most) { break; }
        }
        if (end >= config.tokens_per_sequence) { break; }
    }
    WorkingBytes bytes;
    CacheConfig plain = config;  // the layers whose tables need no artefact, with one head
    for (auto& layer : plain.layers) {
        layer.n_head_kv = 1;
        layer.stores = layer.stores && (layer.windowed() || !config.recipe.needs_artefact());
    }
    set_tables(plain, nullptr);
    AttentionWork work;
    for (size_t il = 0; il < config.layers.size(); ++il) {
        const auto& layer = config.layers[il];
        if (!layer.stores) { continue; }
        const PageFormat format = layer.has_codes() ? config.formats[il] : bf16_format(layer.dim_k, layer.dim_v);
        if (format.coded()) {
            bytes.maps += layer.n_head_kv * (plain.layers[il].stores ? size_of(attention_maps(plain.tables[il])) : attention_map_bytes(format));
        }
        for (const auto& plan : plans) { work.prepare(plan, int(model.hparams.n_head(il)), layer.n_head_kv, format, n_threads); }
    }
    bytes.attention = work.bytes();
    return bytes;
}

std::vector<FormCost> form_costs(const llama_model& model, const CacheConfig& config, int n_threads) {
    std::vector<FormCost> costs;
    for (const SlidingForm form : kSlidingForms) {
        const auto cache = sliding_form(config) ? sliding_bytes(config, form) : std::nullopt;
        if (!cache) { continue; }
        CacheConfig other = config;
        set_sliding_form(other, form);
        const WorkingBytes beside = working_bytes(model, other, n_threads);
        costs.push_back({form, *cache, beside.maps + beside.attention});
    }
    return costs;
}

std::string describe_sliding(const CacheConfig& config, std::span<const FormCost> costs) {
    int layers = 0, window = 0;
    for (const auto& layer : config.layers) {
        layers += layer.stores && layer.window > 0;
        window = std::max(window, layer.window);
    }
    const SlidingForm taken = *sliding_form(config);
    std::string text = fmt::format("{} sliding-window layers ({} tokens) {}: {:.1f} MiB", layers, window,
                                   taken == SlidingForm::bf16 ? "stay BF16"
                                   : taken == SlidingForm::q8 ? "in 8 bits"
                                                              : fmt::format("in pages of {}", label(config.recipe)),
                                   double(sliding_bytes(config, taken).value()) / 1048576.0);
    std::string others;
    for (const auto& [form, cache, beside] : costs) {
        const auto both = fmt::format("{:.1f} MiB beside", double(beside) / 1048576.0);
        if (form == taken) {
            text += " and " + both;
        } else {
            others += fmt::format("{}{} {:.1f} and {:.1f}", others.empty() ? "" : ", ", name(form), double(cache) / 1048576.0, double(beside) / 1048576.0);
        }
    }
    return others.empty() ? text : fmt::format("{} (--kv-sliding {})", text, others);
}

std::string describe(const CacheConfig& config, std::span<const FormCost> costs) {
    const CacheBytes bytes = cache_bytes(config);
    const auto coded = std::ranges::count_if(config.layers, [](const CacheLayer& l) { return l.stores && l.window == 0; });
    std::string text = fmt::format(
        "kv: {}, {:.3f} bits per element ({:.3f} at {} tokens, windows included), sink {} + recent {} in BF16, {:.1f} MiB instead of "
        "{:.1f} MiB at 16 bit ({:.1f}x), {} layers",
        label(config.recipe), bytes.bits_per_element, bytes.effective_bits, bytes.tokens, config.sink, config.recent,
        bytes.total() / 1048576.0, bytes.bf16_equivalent / 1048576.0, double(bytes.bf16_equivalent) / double(bytes.total()), coded);
    if (sliding_form(config)) { text += ", " + describe_sliding(config, costs); }
    if (config.prefill == PrefillRule::exact) { text += ", prefill exact (results depend on -ub)"; }
    if (config.recipe.slow()) { text += ", attention on the CPU decodes pages (slow)"; }
    if (!config.artefact_hash.empty()) { text += fmt::format(", artefact {}", config.artefact_hash.substr(0, 12)); }
    return text;
}

}  // namespace crumb::llama

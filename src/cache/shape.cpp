#include "cache/shape.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cache/extent.h"

namespace crumb {
namespace {

constexpr int64_t kMostTokens = int64_t(1) << 30;  // positions and sums of two of them are int32_t

void check_settings(const CacheConfig& c) {
    CRUMB_ASSERT(c.formats.size() == c.layers.size() && c.n_sequences >= 1 && c.max_step_tokens >= 1);
    const auto in_range = [](std::string_view what, int64_t value, int64_t least, std::string_view flag) {
        if (value < least || value > kMostTokens) {
            fail("{} is {}: it must lie between {} and {} ({})", what, value, least, kMostTokens, flag);
        }
    };
    in_range("the number of exact tokens at the start", c.sink, 0, "--kv-sink");
    in_range("the number of recent exact tokens", c.recent, 0, "--kv-recent");
    in_range("the context of a sequence", c.tokens_per_sequence, 1, "-c");
    in_range("the context of all sequences", c.tokens_total, 1, "-c");
    if (c.tokens_total < c.tokens_per_sequence) {
        fail("a sequence may become {} tokens long, but all sequences together have room for {}: raise -c",
             c.tokens_per_sequence, c.tokens_total);
    }
    if (c.recipe.page_tokens > kPageTokens && c.recent < c.recipe.page_tokens - kPageTokens) {
        fail("--kv {} has pages of {} tokens: at least {} recent tokens must stay exact (--kv-recent), not {}",
             c.recipe.name, c.recipe.page_tokens, c.recipe.page_tokens - kPageTokens, c.recent);
    }
    for (size_t i = 0; i < c.layers.size(); i++) {
        const CacheLayer& layer = c.layers[i];
        if (layer.stores && (layer.n_head_kv < 1 || layer.window < 0 || layer.window > kMostTokens)) {
            fail("layer {} has {} KV heads and a window of {}: this model is not supported", i, layer.n_head_kv,
                 layer.window);
        }
    }
}

double bits(size_t bytes, size_t elements) { return elements == 0 ? 0.0 : 8.0 * double(bytes) / double(elements); }

std::vector<CodedLayer> coded_layers(const CacheConfig& config) {
    std::vector<CodedLayer> coded;
    for (size_t i = 0; i < config.layers.size(); i++) {
        const CacheLayer& layer = config.layers[i];
        if (layer.coded()) {
            coded.push_back({int(i), layer.n_head_kv, layer.dim_k, layer.dim_v});
        }
    }
    return coded;
}

void add_slabs(CacheShape& shape, const CacheConfig& config) {
    for (size_t i = 0; i < config.layers.size(); i++) {
        const CacheLayer& layer = config.layers[i];
        if (!layer.stores) {
            continue;
        }
        const PageFormat exact = bf16_format(layer.dim_k, layer.dim_v);
        check(exact);
        if (layer.windowed()) {
            shape.window.slabs[i] = {layer.has_codes() ? config.formats[i] : exact, layer.n_head_kv};
        } else {
            shape.exact.slabs[i] = {exact, layer.n_head_kv};
            const PageFormat& coded = config.formats[i];
            CRUMB_ASSERT(coded.k.dim == layer.dim_k && coded.v.dim == layer.dim_v);
            shape.coded.slabs[i] = {coded, layer.n_head_kv};
        }
    }
}

// Coded blocks that fit into `memory` beside the windows. Less than a block a sequence is of no use.
int64_t blocks_within(size_t memory, const CacheShape& shape, int64_t n_sequences, int page_tokens) {
    const size_t windows = shape.exact.bytes() + shape.window.bytes(), block = shape.coded.block_bytes();
    const auto mib = [](size_t bytes) { return double(bytes) / (1 << 20); };
    const size_t least = windows + size_t(2 * n_sequences) * block;
    if (memory < least) {
        fail("--kv-memory {:.1f}M is too little: with -np {} the windows take {:.1f} MiB, and {:.2f} MiB hold {} "
             "tokens; give at least {:.0f}M, or a smaller -np",
             mib(memory), n_sequences, mib(windows), mib(block), page_tokens, std::ceil(mib(least)));
    }
    return block == 0 ? 0 : int64_t((memory - windows) / block);
}

// Blocks whose pages of devices' layers fit into `memory`.
int64_t host_blocks(size_t memory, const PoolShape& coded, std::span<DeviceMemory* const> devices) {
    size_t block = 0;
    for (size_t i = 0; i < devices.size(); i++) {
        block += devices[i] ? coded.slabs[i].stride() : 0;
    }
    return block == 0 ? 0 : std::min(coded.n_blocks, int64_t(memory / block));
}

bool has_sliding_pages(const Recipe& recipe) { return recipe.coded() && !recipe.needs_artefact(); }

}  // namespace

const Recipe& sliding_recipe() {
    static const Recipe recipe = find_recipe("q8:paper");
    return recipe;
}

const Recipe& recipe_of(const CacheConfig& config, const CacheLayer& layer) {
    return layer.coded() ? config.recipe : sliding_recipe();
}

std::string_view name(SlidingForm form) {
    constexpr std::string_view kNames[] = {"bf16", "q8", "pages"};
    return kNames[size_t(form)];
}

std::optional<size_t> sliding_bytes(const CacheConfig& config, SlidingForm form) {
    if (form == SlidingForm::pages && !has_sliding_pages(config.recipe)) {
        return std::nullopt;
    }
    CacheConfig sliding = config;
    sliding.memory = 0;
    for (CacheLayer& layer : sliding.layers) {
        layer.stores = layer.stores && layer.window > 0;
        layer.form = form;
    }
    set_formats(sliding, nullptr);
    const std::vector<size_t> bytes = layer_bytes(sliding);
    return std::accumulate(bytes.begin(), bytes.end(), size_t(0));
}

void set_sliding_form(CacheConfig& config, SlidingForm form) {
    if (form == SlidingForm::pages && !has_sliding_pages(config.recipe)) {
        fail("sliding-window layers cannot have pages of '{}' ({}): take q8 or bf16 for them", label(config.recipe),
             config.recipe.coded() ? "its bases are calibrated for layers that see everything" : "they would save nothing");
    }
    config.formats.resize(config.layers.size());
    for (size_t i = 0; i < config.layers.size(); i++) {
        CacheLayer& layer = config.layers[i];
        if (layer.window > 0 && layer.stores) {
            layer.form = form;
            config.formats[i] = layer.has_codes() ? page_format(recipe_of(config, layer), layer.dim_k, layer.dim_v) : PageFormat{};
        }
    }
}

std::optional<SlidingForm> sliding_form(const CacheConfig& config) {
    const auto layer = std::ranges::find_if(config.layers, [](const CacheLayer& l) { return l.stores && l.window > 0; });
    return layer == config.layers.end() ? std::nullopt : std::optional(layer->form);
}

void set_formats(CacheConfig& config, const Artefact* artefact) {
    const std::vector<CodedLayer> coded = coded_layers(config);
    const std::vector<PageFormat> formats =
        coded.empty() ? std::vector<PageFormat>{} : page_formats(config.recipe, coded, artefact);
    config.formats.assign(config.layers.size(), {});
    for (size_t i = 0; i < coded.size(); i++) {
        config.formats[coded[i].layer] = formats[i];
    }
    for (size_t i = 0; i < config.layers.size(); i++) {
        const CacheLayer& layer = config.layers[i];
        if (layer.windowed() && layer.has_codes()) {
            config.formats[i] = page_format(sliding_recipe(), layer.dim_k, layer.dim_v);
        }
    }
}

void set_tables(CacheConfig& config, const Artefact* artefact) {
    config.tables.assign(config.layers.size(), {});
    for (size_t i = 0; i < config.layers.size(); i++) {
        const CacheLayer& layer = config.layers[i];
        const Recipe& recipe = recipe_of(config, layer);
        if (layer.has_codes() && recipe.coded()) {
            config.tables[i] = layer_tables(recipe, int(i), layer.n_head_kv, config.formats[i], artefact);
        }
    }
}

CacheShape shape_of(const CacheConfig& config) {
    check_settings(config);
    const Rules rules(config);
    const MostBlocks most = most_blocks(rules);
    const int64_t n = config.n_sequences;
    const int64_t step = config.max_step_tokens / kPageTokens;
    const int64_t all = n * blocks_for(config.tokens_per_sequence);
    CacheShape shape{
        .coded = {"coded", std::min(n * most.coded, rules.pages_for(config.tokens_total) + n), {}},
        .exact = {"exact", std::min(n * most.exact + step, all) + config.spare_windows * most.exact, {}},
        .window = {"sliding-window",
                   most.window == 0 ? 0 : std::min(n * most.window + step, all) + config.spare_windows * most.window,
                   {}},
    };
    for (PoolShape* pool : {&shape.coded, &shape.exact, &shape.window}) {
        pool->slabs.resize(config.layers.size());
    }
    add_slabs(shape, config);
    if (config.memory > 0) {
        shape.coded.n_blocks = blocks_within(config.memory, shape, n, config.recipe.page_tokens);
    }
    shape.coded.n_host_blocks = host_blocks(config.host_memory, shape.coded, config.devices);
    for (const PoolShape* pool : {&shape.coded, &shape.exact, &shape.window}) {
        if (pool->n_blocks >= kNoBlock) {
            fail("a KV cache of {} tokens with -np {} has too many blocks: lower {}", config.tokens_total, n,
                 config.memory > 0 ? "--kv-memory" : "-c or -np");
        }
    }
    return shape;
}

// A block a sequence stays aside (room.cpp); sinks and windows are exact and need none.
int64_t capacity_of(const CacheConfig& config, int64_t coded_blocks) {
    if (config.memory == 0) {
        return config.tokens_total;
    }
    const int64_t n = config.n_sequences, longest = config.tokens_per_sequence;
    const int64_t exact = std::min<int64_t>(longest, round_down(config.sink) + config.recent);
    return std::min(n * longest, std::max<int64_t>(0, coded_blocks - n) * config.recipe.page_tokens + n * exact);
}

std::vector<size_t> layer_bytes(const CacheConfig& config) {
    const CacheShape shape = shape_of(config);
    std::vector<size_t> bytes(config.layers.size());
    for (const PoolShape* pool : {&shape.coded, &shape.exact, &shape.window}) {
        for (size_t i = 0; i < bytes.size(); i++) {
            bytes[i] += size_t(pool->n_blocks) * pool->slabs[i].stride();
        }
    }
    return bytes;
}

std::vector<size_t> host_bytes(const CacheConfig& config) {
    const PoolShape coded = shape_of(config).coded;
    std::vector<size_t> bytes(config.layers.size());
    for (size_t i = 0; i < config.devices.size(); i++) {
        bytes[i] = config.devices[i] ? size_t(coded.n_host_blocks) * coded.slabs[i].stride() : 0;
    }
    return bytes;
}

CacheBytes cache_bytes(const CacheConfig& config) {
    const CacheShape shape = shape_of(config);
    CacheBytes bytes{.coded = shape.coded.bytes(), .exact = shape.exact.bytes(), .window = shape.window.bytes()};
    bytes.tokens = capacity_of(config, shape.coded.n_blocks);
    size_t page_bytes = 0, page_elements = 0, elements = 0;
    for (size_t i = 0; i < config.layers.size(); i++) {
        const CacheLayer& layer = config.layers[i];
        if (!layer.stores) {
            continue;
        }
        const size_t per_token = size_t(layer.n_head_kv) * size_t(layer.dim_k + layer.dim_v);
        const int64_t windows = config.n_sequences * std::min<int64_t>(layer.window, config.tokens_per_sequence);
        elements += per_token * size_t(layer.window > 0 ? windows : bytes.tokens);
        page_bytes += shape.coded.slabs[i].stride();
        page_elements += layer.coded() ? per_token * config.recipe.page_tokens : 0;
    }
    bytes.bf16_equivalent = 2 * elements;
    bytes.bits_per_element = bits(page_bytes, page_elements);
    bytes.effective_bits = bits(bytes.total(), elements);
    return bytes;
}

}  // namespace crumb

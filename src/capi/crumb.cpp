// The C functions: arguments are checked, a backend does the work, exceptions become statuses.
#include <crumb/artefact.h>

#include <algorithm>
#include <memory>
#include <span>

#include "capi/layer.h"

namespace crumb::capi {

namespace {

thread_local std::string last_error;

}  // namespace

crumb_status failed(crumb_status status, const char* text) {
    try {
        last_error = text;
    } catch (...) {
        last_error.clear();
    }
    return status;
}

const Backend& backend(crumb_backend which) {
    if (which == CRUMB_CPU) return cpu_backend;
    if (which != CRUMB_CUDA) fail("there is no backend {}: take CRUMB_CPU or CRUMB_CUDA", int(which));
    if (!cuda_backend()) {
        throw Unsupported("this build has no CUDA backend: configure it with -DCRUMB_CUDA=ON, or take CRUMB_CPU");
    }
    return *cuda_backend();
}

void check(const crumb_layer_shape& s) {
    if (s.n_head_kv < 1 || s.n_head < 1 || s.n_head % s.n_head_kv != 0) {
        fail("{} query heads over {} KV heads: the first must be a multiple of the second", s.n_head, s.n_head_kv);
    }
    if (s.dim_k < 1 || s.dim_v < 1) fail("heads of {} channels of K and {} of V: there must be one at least", s.dim_k, s.dim_v);
}

namespace {

void check(const crumb_threads* threads) {
    if (threads && threads->n < 1) fail("a pool of {} threads: there must be one at least", threads->n);
    if (threads) need(threads->run, "threads->run");
}

void check(const crumb_step& step) {
    if (step.n_tiles < 1 || step.rows_per_tile < 1) {
        fail("a step of {} tiles of {} rows: there must be at least one tile, of one row", step.n_tiles, step.rows_per_tile);
    }
    if (step.backend == CRUMB_CUDA && step.multiprocessors < 1) {
        fail("{} multiprocessors: say how many the device has", step.multiprocessors);
    }
    if (step.sink < 0) fail("a sink of {} tokens: there must be 0 or more", step.sink);
    check(step.threads);
}

Recipe planar_recipe(const char* name) {
    const Recipe recipe = find_recipe(name);
    if (!recipe.coded()) fail("recipe '{}' has no codes: there is nothing for crumb to do", name);
    if (recipe.slow()) {
        std::string others;
        for (const Recipe& other : recipes()) {
            if (other.coded() && !other.slow()) others.append(others.empty() ? "" : ", ").append(other.name);
        }
        throw Unsupported(fmt::format(
            "recipe '{}' has parameters that belong to groups of channels or tokens, or a table of levels: no kernel reads such "
            "pages in place. Take one of: {}", name, others));
    }
    return recipe;
}

void check_pointers(const crumb_step& step) {
    check(step);
    need(step.rows, "rows");
    need(step.coded_ids, "coded_ids");
    need(step.exact_ids, "exact_ids");
}

}  // namespace

}  // namespace crumb::capi

using namespace crumb;
using namespace crumb::capi;

extern "C" {

const char* crumb_version(void) { return CRUMB_VERSION; }
const char* crumb_error(void) { return last_error.c_str(); }

int crumb_has_backend(crumb_backend which) {
    return which == CRUMB_CPU || (which == CRUMB_CUDA && cuda_backend() != nullptr);
}

crumb_status crumb_layers_create(const char* name, const char* file, const crumb_layer_shape* shapes, int n_layers,
                                 crumb_layer** layers) {
    return guard([&] {
        if (n_layers < 1) fail("{} layers: there must be one at least", n_layers);
        const std::span<const crumb_layer_shape> wanted(&need(shapes, "shapes"), size_t(n_layers));
        std::fill_n(&need(layers, "layers"), n_layers, nullptr);
        const Recipe recipe = planar_recipe(&need(name, "recipe"));
        const std::unique_ptr<const Artefact> artefact(file ? new Artefact(read_artefact(file)) : nullptr);
        std::vector<CodedLayer> coded;
        for (const crumb_layer_shape& s : wanted) {
            check(s);
            coded.push_back({s.layer, s.n_head_kv, s.dim_k, s.dim_v});
        }
        const std::vector<PageFormat> formats = page_formats(recipe, coded, artefact.get());
        std::vector<std::unique_ptr<crumb_layer>> made;
        for (size_t i = 0; i < wanted.size(); i++) {
            const crumb_layer_shape& s = wanted[i];
            std::vector<HeadTables> tables = layer_tables(recipe, s.layer, s.n_head_kv, formats[i], artefact.get());
            AttentionMaps maps = attention_maps(tables);
            made.emplace_back(new crumb_layer{recipe, formats[i], std::move(tables), std::move(maps), s.layer, s.n_head,
                                              s.n_head_kv, s.scale, s.softcap});
        }
        std::ranges::transform(made, layers, [](std::unique_ptr<crumb_layer>& layer) { return layer.release(); });
    });
}

void crumb_layer_destroy(crumb_layer* layer) { delete layer; }

crumb_status crumb_layer_slice(const crumb_layer* layer, int first, int n, int n_group, crumb_layer** slice) {
    return guard([&] {
        const crumb_layer& whole = need(layer, "layer");
        need(slice, "slice") = nullptr;
        if (first < 0 || n < 1 || first > whole.n_head_kv - n) {
            fail("KV heads {} to {} of a layer of {}: a slice is some of its heads", first, first + n, whole.n_head_kv);
        }
        if (n_group < 1) fail("{} query heads a KV head: there must be one at least", n_group);
        std::vector<HeadTables> tables(whole.tables.begin() + first, whole.tables.begin() + first + n);
        AttentionMaps maps = attention_maps(tables);
        *slice = new crumb_layer{whole.recipe, whole.format, std::move(tables), std::move(maps), whole.number, n * n_group, n,
                                 whole.scale, whole.softcap};
    });
}

crumb_layer_shape crumb_shape(const crumb_layer* layer) {
    return {layer->number,       layer->n_head, layer->n_head_kv, layer->format.k.dim,
            layer->format.v.dim, layer->scale,  layer->softcap};
}

size_t crumb_block_bytes(const crumb_layer* layer) { return size_t(layer->n_head_kv) * layer->format.bytes(); }

size_t crumb_exact_block_bytes(const crumb_layer* layer) {
    return size_t(layer->n_head_kv) * bf16_format(layer->format.k.dim, layer->format.v.dim).bytes();
}

double crumb_bits_per_element(const crumb_layer* layer) { return layer->format.bits_per_element(); }

crumb_status crumb_tables_bytes(const crumb_layer* layer, size_t* bytes) {
    return guard([&] { need(bytes, "bytes") = tables_bytes(need(layer, "layer")); });
}

crumb_status crumb_tables_write(const crumb_layer* layer, void* tables, size_t bytes) {
    return guard([&] { tables_write(need(layer, "layer"), &need(static_cast<char*>(tables), "tables"), bytes); });
}

crumb_status crumb_workspace_bytes(const crumb_layer* layer, const crumb_step* step, size_t* bytes) {
    return guard([&] {
        check(need(step, "step"));
        backend(step->backend).workspace_bytes(need(layer, "layer"), *step, need(bytes, "bytes"));
    });
}

crumb_status crumb_plan(const crumb_layer* layer, const crumb_step* step, void* stream) {
    return guard([&] {
        check_pointers(need(step, "step"));
        backend(step->backend).plan(need(layer, "layer"), *step, stream);
    });
}

crumb_status crumb_attend(const crumb_layer* layer, const crumb_step* step, const crumb_io* io, void* stream) {
    return guard([&] {
        check_pointers(need(step, "step"));
        need(need(io, "io").q, "q");
        need(io->out, "out");
        backend(step->backend).attend(need(layer, "layer"), *step, *io, stream);
    });
}

crumb_status crumb_store(const crumb_layer* layer, const crumb_rows* rows, void* stream) {
    return guard([&] {
        need(need(rows, "rows").k, "k");
        need(rows->v, "v");
        need(rows->blocks, "blocks");
        need(rows->slots, "slots");
        if (rows->n_tokens < 0) fail("{} tokens to store: there must be 0 or more", rows->n_tokens);
        backend(rows->backend).store(need(layer, "layer"), *rows, stream);
    });
}

crumb_status crumb_encode(const crumb_layer* layer, const crumb_encode_batch* batch, void* stream) {
    return guard([&] {
        need(need(batch, "batch").jobs, "jobs");
        need(batch->counts, "counts");
        if (batch->n_jobs < 0) fail("{} jobs: there must be 0 or more", batch->n_jobs);
        check(batch->threads);
        backend(batch->backend).encode(need(layer, "layer"), *batch, stream);
    });
}

crumb_status crumb_copy(crumb_backend which, size_t block_bytes, void* to, size_t to_stride, const uint32_t* to_ids,
                        const void* from, size_t from_stride, const uint32_t* from_ids, size_t n, void* stream) {
    return guard([&] {
        if (n == 0) return;
        backend(which).copy(block_bytes, &need(static_cast<std::byte*>(to), "to"), to_stride, &need(to_ids, "to_ids"),
                            &need(static_cast<const std::byte*>(from), "from"), from_stride, &need(from_ids, "from_ids"), n,
                            stream);
    });
}

}  // extern "C"

// The C functions: arguments are checked, a backend does the work, exceptions become statuses.
#include <crumb/artefact.h>

#include <memory>

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

namespace {

void check(const crumb_step& step) {
    if (step.n_tiles < 1 || step.rows_per_tile < 1 || step.rows_per_tile > 8) {
        fail("a step of {} tiles of {} rows: there must be at least one tile, of 1 to 8 rows", step.n_tiles, step.rows_per_tile);
    }
    if (step.multiprocessors < 1) {
        fail("{} multiprocessors: say how many the device has (CPU: how many threads to use)", step.multiprocessors);
    }
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

crumb_status crumb_layer_create(const crumb_layer_options* options, crumb_layer** layer) {
    return guard([&] {
        const crumb_layer_options& o = need(options, "options");
        need(layer, "layer") = nullptr;
        need(o.recipe, "recipe");
        if (o.n_head_kv < 1 || o.n_head < 1 || o.n_head % o.n_head_kv != 0) {
            fail("{} query heads over {} KV heads: the first must be a multiple of the second", o.n_head, o.n_head_kv);
        }
        const Recipe recipe = find_recipe(o.recipe);
        if (!recipe.coded()) fail("recipe '{}' has no codes: there is nothing for crumb to do", o.recipe);
        if (recipe.budgeted()) {
            throw Unsupported(fmt::format(
                "recipe '{}' spends one budget over all layers of a model; a layer alone takes recipes whose pages follow from "
                "the head sizes, like 'had2'", o.recipe));
        }
        const PageFormat format = page_format(recipe, o.dim_k, o.dim_v);
        if (!format.planar()) {
            throw Unsupported(fmt::format(
                "recipe '{}' has parameters that belong to groups of channels or tokens: its pages are no plain planes, and the C "
                "API reads none but those", o.recipe));
        }
        const std::unique_ptr<const Artefact> artefact(o.artefact ? new Artefact(read_artefact(o.artefact)) : nullptr);
        std::vector<HeadTables> tables = layer_tables(recipe, o.layer, o.n_head_kv, format, artefact.get());
        AttentionMaps maps = attention_maps(tables);
        *layer = new crumb_layer{recipe, format, std::move(tables), std::move(maps), o.n_head, o.n_head_kv, o.scale, o.softcap};
    });
}

void crumb_layer_destroy(crumb_layer* layer) { delete layer; }

size_t crumb_block_bytes(const crumb_layer* layer) { return size_t(layer->n_head_kv) * layer->format.bytes(); }

size_t crumb_exact_block_bytes(const crumb_layer* layer) {
    return size_t(layer->n_head_kv) * bf16_format(layer->format.k.dim, layer->format.v.dim).bytes();
}

double crumb_bits_per_element(const crumb_layer* layer) { return layer->format.bits_per_element(); }

crumb_status crumb_tables_bytes(const crumb_layer* layer, size_t* bytes) {
    return guard([&] { backend(CRUMB_CUDA).tables_bytes(need(layer, "layer"), need(bytes, "bytes")); });
}

crumb_status crumb_tables_write(const crumb_layer* layer, void* tables, size_t bytes) {
    return guard([&] { backend(CRUMB_CUDA).tables_write(need(layer, "layer"), &need(static_cast<char*>(tables), "tables"), bytes); });
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
        backend(rows->backend).store(need(layer, "layer"), *rows, stream);
    });
}

crumb_status crumb_encode(const crumb_layer* layer, const crumb_encode_batch* batch, void* stream) {
    return guard([&] {
        need(need(batch, "batch").jobs, "jobs");
        need(batch->counts, "counts");
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

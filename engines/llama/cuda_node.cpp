#include "cuda_node.h"

#include <crumb/error.h>

#include "ggml.h"

namespace crumb::llama {

static_assert(sizeof(EncodeBlock) == sizeof(crumb_encode_job) && sizeof(EncodeBlock) == sizeof(cuda::EncodeJob) &&
              sizeof(QueryRow) == sizeof(crumb_row));

namespace {

// K and V of the step, sources `first` and `first + 1` of the node.
cuda::RowArgs rows_of(const Node& node, const ggml_tensor* tensor, int first, const uint32_t* words) {
    const Layer& layer = *node.layer;
    const StepLayout& layout = *node.layout;
    const ggml_tensor *k = tensor->src[first], *v = tensor->src[first + 1];
    const auto floats = [](size_t bytes) { return bytes / sizeof(float); };
    return {.k = static_cast<const float*>(k->data), .v = static_cast<const float*>(v->data),
            .k_token_stride = floats(k->nb[2]), .k_head_stride = floats(k->nb[1]),
            .v_token_stride = floats(v->nb[2]), .v_head_stride = floats(v->nb[1]),
            .stores = reinterpret_cast<const StoreRow*>(words + (layer.windowed ? layout.window_stores : layout.stores)),
            .n_stores = layout.n_stores, .dim_k = layer.shape.format.k.dim, .dim_v = layer.shape.format.v.dim,
            .n_head_kv = layer.shape.n_head_kv, .exact = reinterpret_cast<cuda::u8*>(node.exact),
            .exact_stride = layer.exact_stride};
}

void point(crumb_step& step, const Node& node, const uint32_t* words, const std::vector<size_t>& rows, const Workspace& workspace) {
    const StepLayout& layout = *node.layout;
    step.rows = reinterpret_cast<const crumb_row*>(words + rows[node.plan]);
    step.coded_ids = words + layout.coded_ids;
    step.exact_ids = words + (node.layer->windowed ? layout.window_ids : layout.exact_ids);
    step.n_sequences = size_t(layout.n_sequences), step.ids_stride = layout.ids_stride;
    step.sink = node.sink;
    step.workspace = workspace.memory, step.workspace_bytes = workspace.bytes;
}

}  // namespace

const capi::Backend& kernels() {
    const capi::Backend* backend = capi::cuda_backend();
    CRUMB_ASSERT(backend);
    return *backend;
}

crumb_encode_batch batch_of(const Layer& layer, const StepLayout& layout, const uint32_t* words, std::byte* coded, const std::byte* exact) {
    return {.backend = CRUMB_CUDA, .n_jobs = layout.n_jobs,
            .jobs = words ? reinterpret_cast<const crumb_encode_job*>(words + layout.jobs) : nullptr, .exact = exact,
            .exact_stride = layer.exact_stride, .coded = coded, .coded_stride = layer.coded_stride,
            .tables = layer.tables, .counts = layer.device->counts, .threads = nullptr};
}

crumb_step tiles_of(const StepLayout& layout, const Device& device) {
    crumb_step step = {};
    step.backend = CRUMB_CUDA;
    step.n_tiles = layout.n_tiles, step.rows_per_tile = layout.rows_per_tile;
    step.multiprocessors = device.multiprocessors;
    return step;
}

crumb_step chunks_of(const StepLayout& layout, const Device& device) {
    crumb_step step = tiles_of(layout, device);
    step.n_tiles = layout.n_chunks, step.rows_per_tile = layout.rows_per_chunk, step.chunk_blocks = size_t(layout.chunk_blocks);
    return step;
}

void launch_node(const Node& node, ggml_tensor* tensor, void* stream) {
    const Layer& layer = *node.layer;
    const StepLayout& layout = *node.layout;
    const uint32_t* words = static_cast<const uint32_t*>(tensor->src[kWords]->data);
    const auto* jobs = reinterpret_cast<const cuda::EncodeJob*>(words + layout.jobs);
    if (node.begins && layout.encodes_first) { cuda::launch_encode_layers(layer.device->encoders, jobs, layout.n_jobs, stream); }

    cuda::RowArgs rows;
    if (node.stores) { rows = rows_of(node, tensor, kFirstRow, words); }
    const bool encodes_now = node.stores && !layer.windowed && !layout.encodes_first;
    if (encodes_now || layout.n_tiles == 0 || !cuda::few_rows(rows.n_stores)) {
        cuda::launch_rows(rows, stream);
        require(cudaGetLastError(), "rows");
        rows.n_stores = 0;
    }
    if (encodes_now) { kernels().encode(layer.shape, batch_of(layer, layout, words, node.coded, node.exact), stream); }

    const ggml_tensor* q = tensor->src[0];
    const ggml_tensor* sinks = tensor->src[kFirstRow + (node.stores ? 2 : 0)];
    const crumb_io io = {.coded = node.coded, .coded_stride = layer.coded_stride, .exact = node.exact,
                         .exact_stride = layer.exact_stride, .tables = layer.tables,
                         .sinks = sinks ? static_cast<const float*>(sinks->data) : nullptr,
                         .q = static_cast<const float*>(q->data), .q_token_stride = q->nb[2] / sizeof(float),
                         .q_head_stride = q->nb[1] / sizeof(float), .out = static_cast<float*>(tensor->data),
                         .out_stride = tensor->nb[1] / sizeof(float)};
    if (layout.n_tiles > 0) {
        crumb_step step = tiles_of(layout, *layer.device);
        point(step, node, words, layout.rows, node.workspace);
        if (node.plans) { kernels().plan(layer.shape, step, stream); }
        capi::attend_storing(layer.shape, step, io, rows, stream);
    }
    if (layout.n_chunks > 0) {  // their memory is that of all kinds: the plan, a small part, is made for each layer
        crumb_step step = chunks_of(layout, *layer.device);
        point(step, node, words, layout.chunk_rows, node.chunks);
        kernels().plan(layer.shape, step, stream);
        kernels().attend(layer.shape, step, io, stream);
    }
}

}  // namespace crumb::llama

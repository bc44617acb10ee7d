#include "gradient_compute.h"

#include <crumb/error.h>

#include <algorithm>

#include "ggml-cpu.h"

namespace crumb::llama {

namespace {

constexpr size_t kMostNodes = 1 << 16;

ggml_cgraph* graph_of(ggml_context* context, const std::vector<ggml_tensor*>& results) {
    ggml_cgraph* graph = ggml_new_graph_custom(context, kMostNodes, false);
    for (ggml_tensor* result : results) {
        ggml_build_forward_expand(graph, result);
    }
    return graph;
}

}  // namespace

ggml_context_ptr new_descriptions(size_t n) {
    return ggml_context_ptr(ggml_init({n * ggml_tensor_overhead(), nullptr, true}));
}

Kept::Kept(ggml_context* context, const std::vector<ggml_tensor*>& tensors) {
    for (ggml_tensor* tensor : tensors) {
        allocate(tensor);
    }
    for (ggml_tensor* t = ggml_get_first_tensor(context); t; t = ggml_get_next_tensor(context, t)) {
        if (t->op == GGML_OP_NONE && !t->buffer && !t->view_src) {
            allocate(t);
        }
    }
}

void Kept::allocate(ggml_tensor* tensor) {
    ggml_backend_buffer_type_t type = ggml_backend_cpu_buffer_type();
    const size_t size = ggml_nbytes(tensor) + ggml_backend_buft_get_alignment(type);
    ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(type, size));
    if (!buffer) {
        fail("no memory for {} MiB", size >> 20);
    }
    ggml_backend_tensor_alloc(buffer.get(), tensor, ggml_backend_buffer_get_base(buffer.get()));
    buffers_.push_back(std::move(buffer));
    bytes_ += size;
}

Compute::Compute(int n_threads)
    : cpu_(ggml_backend_cpu_init()), scratch_(ggml_gallocr_new(ggml_backend_cpu_buffer_type())) {
    ggml_backend_cpu_set_n_threads(cpu_.get(), n_threads);
}

size_t Compute::scratch_bytes() const { return ggml_gallocr_get_buffer_size(scratch_.get(), 0); }

void Compute::run(const std::vector<ggml_tensor*>& results, const std::function<void()>& read,
                  const std::vector<ggml_tensor*>& order) {
    const ggml_context_ptr descriptions(
        ggml_init({ggml_graph_overhead_custom(kMostNodes, false) + ggml_tensor_overhead(), nullptr, true}));
    for (ggml_tensor* result : results) {
        ggml_set_output(result);
    }
    std::vector<ggml_tensor*> all = order;
    all.insert(all.end(), results.begin(), results.end());
    ggml_cgraph* graph = graph_of(descriptions.get(), all);
    std::vector<ggml_tensor*> borrowed;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        if (!ggml_graph_node(graph, i)->buffer) {
            borrowed.push_back(ggml_graph_node(graph, i));
        }
    }
    const bool room = ggml_gallocr_alloc_graph(scratch_.get(), graph);
    const bool done = room && ggml_backend_graph_compute(cpu_.get(), graph) == GGML_STATUS_SUCCESS;
    if (done && read) {
        read();
    }
    for (ggml_tensor* tensor : borrowed) {
        tensor->buffer = nullptr;
        tensor->data = nullptr;
    }
    if (!done) {
        fail("no memory for a graph of {} nodes: give shorter windows (-c) or less threads (-t)", borrowed.size());
    }
}

Cut::Cut(ggml_tensor* tensor) : tensor_(tensor) {
    if (tensor_) {
        saved_ = *tensor_;
        tensor_->op = GGML_OP_NONE;
        std::fill(std::begin(tensor_->src), std::end(tensor_->src), nullptr);
    }
}

Cut::~Cut() {
    if (tensor_) {
        tensor_->op = saved_.op;
        std::copy(std::begin(saved_.src), std::end(saved_.src), tensor_->src);
    }
}

std::vector<ggml_tensor*> nodes_of(ggml_tensor* result) {
    const ggml_context_ptr descriptions(
        ggml_init({ggml_graph_overhead_custom(kMostNodes, false) + ggml_tensor_overhead(), nullptr, true}));
    ggml_cgraph* graph = graph_of(descriptions.get(), {result});
    return {ggml_graph_nodes(graph), ggml_graph_nodes(graph) + ggml_graph_n_nodes(graph)};
}

}  // namespace crumb::llama

// The cache that a context of a model gets, from the model's own numbers: layers, sizes, the form of sliding windows, and
// what attention takes beside it. One path for contexts that are created and for those that are only asked about.
#pragma once

#include "kv.h"

#include "llama-memory.h"
#include "llama-model.h"

#include <crumb/artefact.h>

#include <span>
#include <string>
#include <vector>

namespace crumb::llama {

std::string architecture(const llama_model& model);

struct ModelLayers {
    std::vector<CacheLayer> layers;
    std::vector<int> owner;  // by layer: the layer whose K and V it reads; -1: none
};
// Null callbacks: all layers, each with its own K and V. Throws Error for architectures that --kv does not support.
ModelLayers layers_of(const llama_model& model, const llama_memory_i::layer_filter_cb& filter, const llama_memory_i::layer_reuse_cb& reuse);

// Of a context, as llama.cpp has resolved what it was asked for.
struct ContextSizes {
    int64_t per_sequence = 0;  // tokens
    int64_t total = 0;         // of all sequences together
    int n_sequences = 1;
    int n_ubatch = 512;
    int n_threads = 1;
};

// Everything but tables. `artefact`: for recipes whose page formats depend on it. `on_device`: some layer attends on a GPU.
// Throws Error for a form of sliding windows that is not there.
CacheConfig geometry(const llama_model& model, const KvOptions& options, const Recipe& recipe, const std::vector<CacheLayer>& layers,
                     const ContextSizes& sizes, const Artefact* artefact, bool on_device);

}  // namespace crumb::llama

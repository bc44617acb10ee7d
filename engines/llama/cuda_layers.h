// Layers whose K, V and attention stay on a CUDA device: those that llama.cpp put there, unless it was told to keep the KV
// cache on the CPU (--no-kv-offload). Their graph nodes are launched on the backend's stream and recorded in its CUDA graphs,
// so nothing waits and nothing is allocated at a launch, and all that changes from step to step lies in one graph input.
//
//   words                    what the step asks (StepLayout), sent once to every device
//   attend(q, words, k, v)   a node a layer: pages that become due (all layers' in the first node, or this layer's), plan (in
//                            the first layer of its kind), rows into BF16 blocks and query map, pages, output map
#pragma once

#include <crumb/cache.h>

#include "llama-cparams.h"
#include "llama-graph.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <map>
#include <memory>
#include <vector>

namespace crumb::llama {

class CudaLayers {
public:
    // Null: no layer is on a device. Throws Error for what has no kernel, and what to type. `allocate` false: a dry run.
    static std::unique_ptr<CudaLayers> make(const llama_model& model, const llama_cparams& cparams, const CacheConfig& config,
                                            const std::vector<int>& owner, bool allocate);
    virtual ~CudaLayers() = default;

    virtual bool has(int layer) const = 0;
    virtual int chunk_rows() const = 0;  // as CacheConfig has it
    virtual std::vector<DeviceMemory*> memories() const = 0;  // as CacheConfig has it
    virtual std::map<ggml_backend_buffer_type_t, size_t> bytes() const = 0;  // of the blocks
    virtual size_t working_bytes() const = 0;
    virtual std::string describe() const = 0;

    // In every graph, before its layers. `cache` null or `largest`: a graph that is built to see how large it is.
    virtual void build_input(const llm_graph_context& graph, const Cache* cache, bool largest) = 0;
    virtual ggml_tensor* build_attn(const llm_graph_context& graph, const llama_attn_args& args, const Cache* cache) = 0;
};

}  // namespace crumb::llama

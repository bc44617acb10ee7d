// llama_memory_i over crumb::Cache. Graph of one layer:
//   store(k, v) -> token          writes the ubatch into the cache and encodes what is due
//   attend(q, token) -> out       reads the cache
// ggml puts a barrier between two nodes, so `attend` sees everything that `store` wrote. Both run on all threads of the
// engine's pool. Nothing in the graph depends on how full the cache is: graphs are reused from step to step with the
// userdata they were built with, so userdata points at objects that the memory owns, and all that changes per step is set
// in apply().
#pragma once

#include "kv.h"

#include "llama-cparams.h"
#include "llama-graph.h"
#include "llama-hparams.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <map>
#include <memory>
#include <vector>

namespace crumb::llama {

// Which code reads coded pages.
struct AttentionChoice {
    Isa isa = best_isa();
    bool decode_pages = false;
};

class Memory : public llama_memory_i {
public:
    Memory(const llama_model& model, const llama_cparams& cparams, CacheConfig config, std::vector<int> owner,
           const AttentionChoice& attention);
    ~Memory() override;

    llama_memory_context_ptr init_batch(llama_batch_allocr& balloc, uint32_t n_ubatch, bool embd_all) override;
    llama_memory_context_ptr init_full() override;
    llama_memory_context_ptr init_update(llama_context* context, bool optimize) override;

    bool get_can_shift() const override { return false; }
    void clear(bool data) override;
    bool seq_rm(llama_seq_id id, llama_pos p0, llama_pos p1) override;
    void seq_cp(llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1) override;
    void seq_keep(llama_seq_id id) override;
    void seq_add(llama_seq_id id, llama_pos p0, llama_pos p1, llama_pos shift) override;
    void seq_div(llama_seq_id id, llama_pos p0, llama_pos p1, int d) override;
    llama_pos seq_pos_min(llama_seq_id id) const override;
    llama_pos seq_pos_max(llama_seq_id id) const override;
    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;
    void state_write(llama_io_write_i& io, llama_seq_id id, llama_state_seq_flags flags) const override;
    void state_read(llama_io_read_i& io, llama_seq_id id, llama_state_seq_flags flags) override;

    bool fits(const std::vector<llama_ubatch>& ubatches) const;
    bool apply(const llama_ubatch& ubatch);
    ggml_tensor* build_attn(const llm_graph_context& graph, const llama_attn_args& args);

    const Cache& cache() const { return *cache_; }
    WorkingBytes working() const;

private:
    // What the two nodes of a layer need. Owned here because graphs outlive the step that built them.
    struct LayerNode {
        Memory* memory;
        int layer;
        AttentionLayer attention;
        AttentionMaps maps;
    };
    static void run_store(ggml_tensor* node, int thread, int n_threads, void* userdata);
    static void run_attend(ggml_tensor* node, int thread, int n_threads, void* userdata);

    LayerNode& layer_node(const llama_attn_args& args);
    std::vector<Append> appends(const llama_ubatch& ubatch) const;
    std::pair<llama_seq_id, llama_seq_id> sequences(llama_seq_id id) const;

    const llama_model& model_;
    const llama_cparams& cparams_;
    const AttentionChoice attention_;
    const std::vector<int> owner_;  // by layer: the layer whose K and V it reads, -1: none
    CacheBytes planned_;
    std::unique_ptr<Cache> cache_;  // null in a dry run (memory fitting), which allocates nothing
    std::vector<std::unique_ptr<LayerNode>> nodes_;
    AttentionWork work_;  // of all layers, one after the other
    bool causal_ = true;
};

}  // namespace crumb::llama

// llama_memory_i over crumb::Cache. Graph of one layer:
//   store(k, v) -> token          writes the ubatch into the cache and encodes what is due
//   attend(q, token) -> out       reads the cache
// ggml puts a barrier between two nodes, so `attend` sees everything that `store` wrote. Both run on all threads of the
// engine's pool. Nothing in the graph depends on how full the cache is: graphs are reused from step to step with the
// userdata they were built with, so userdata points at objects that the memory owns, and all that changes per step is set
// in apply(). Layers on a CUDA device have nodes of their own (cuda_layers.h).
#pragma once

#include "kv.h"

#include "cuda_layers.h"
#include "verify.h"

#include "llama-cparams.h"
#include "llama-graph.h"
#include "llama-hparams.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace crumb::llama {

// Which code reads coded pages.
struct AttentionChoice {
    Isa isa = best_isa();
    bool decode_pages = false;
};

class Memory : public llama_memory_i {
public:
    // `cuda`: null if all layers are on the CPU. `verify`: as KvOptions has it.
    Memory(const llama_model& model, const llama_cparams& cparams, CacheConfig config, std::vector<int> owner,
           std::unique_ptr<CudaLayers> cuda, const AttentionChoice& attention, int verify);
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
    // `largest`: the graph of no step, to see how large graphs become.
    void build_input(const llm_graph_context& graph, bool largest);
    ggml_tensor* build_attn(const llm_graph_context& graph, const llama_attn_args& args);

    Cache& cache() { return *cache_; }
    // For the server: begin_prompt() before a prompt is given to a sequence, then reuse() as often as others may have
    // computed more of it, or keep() once. Both as Cache has them.
    void begin_prompt(llama_seq_id id);
    int32_t reuse(llama_seq_id id, const std::vector<llama_token>& tokens, int32_t own, uint64_t salt, int32_t common);
    int32_t keep(llama_seq_id id, int32_t n_prompt, int32_t own);
    // Ids of the tokens of a state that state_write() wrote of one sequence; throws Error.
    std::vector<int32_t> saved_ids(const Cache::Read& read) const;
    // As of the last call, from any thread.
    KvStatus status() const;
    CacheBytes bytes() const { return cache_->bytes(); }
    const CacheConfig& config() const { return cache_->config(); }
    WorkingBytes working() const;

private:
    // What the nodes of a layer need. Owned here because graphs outlive the step that built them.
    struct LayerNode {
        Memory* memory;
        int layer;
        AttentionLayer attention;
        AttentionMaps maps;
        AttentionLayer exact;  // the same over BF16, to verify
        AttentionMaps exact_maps;
    };
    static void run_store(ggml_tensor* node, int thread, int n_threads, void* userdata);
    static void run_attend(ggml_tensor* node, int thread, int n_threads, void* userdata);
    static void run_exact(ggml_tensor* node, int thread, int n_threads, void* userdata);
    static void run_compare(ggml_tensor* node, int thread, int n_threads, void* userdata);

    void verify(const llm_graph_context& graph, LayerNode& node, ggml_tensor* out);

    bool crop(llama_seq_id id, int32_t length);
    void count();
    void count_prompt(llama_seq_id id, int32_t n_prompt, int32_t own, int32_t found);
    LayerNode& layer_node(const llama_attn_args& args);
    std::vector<Append> appends(const llama_ubatch& ubatch) const;
    std::pair<llama_seq_id, llama_seq_id> sequences(llama_seq_id id) const;

    const llama_model& model_;
    const llama_cparams& cparams_;
    const AttentionChoice attention_;
    const std::vector<int> owner_;  // by layer: the layer whose K and V it reads, -1: none
    CacheBytes planned_;
    mutable std::mutex counting_;
    KvStatus status_;
    std::vector<char> begins_;  // by sequence: its prompt was not looked for yet
    std::unique_ptr<CudaLayers> cuda_;  // before the cache, which has blocks in its memory
    std::unique_ptr<Cache> cache_;  // null in a dry run (memory fitting), which allocates nothing
    std::unique_ptr<Verify> verify_;
    std::vector<std::unique_ptr<LayerNode>> nodes_;
    AttentionWork work_;  // of all layers, one after the other
    bool causal_ = true;
};

}  // namespace crumb::llama

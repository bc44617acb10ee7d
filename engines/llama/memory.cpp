#include "memory.h"

#include "kv.h"

#include "llama-batch.h"
#include "llama-impl.h"
#include "llama-io.h"

#include <crumb/error.h>

#include <algorithm>
#include <utility>

namespace crumb::llama {

namespace {

// The ubatches of one llama_decode call. Without any: the reserve pass, which builds graphs and runs none.
class Context : public llama_memory_context_i {
public:
    Context(Memory* memory, llama_memory_status status) : memory_(memory), status_(status) {}
    Context(Memory* memory, std::vector<llama_ubatch> ubatches)
        : memory_(memory), status_(LLAMA_MEMORY_STATUS_SUCCESS), ubatches_(std::move(ubatches)) {}

    bool next() override { return ++current_ < ubatches_.size(); }
    bool apply() override { return ubatches_.empty() || memory_->apply(ubatches_[current_]); }
    const llama_ubatch& get_ubatch() const override { return ubatches_.at(current_); }
    llama_memory_status get_status() const override { return status_; }

    bool has_attn() const override { return true; }
    void build_attn_inp(const llm_graph_context& graph) const override { memory_->build_input(graph, ubatches_.empty()); }
    ggml_tensor* build_attn(const llm_graph_context& graph, const llama_attn_args& args) const override {
        return memory_->build_attn(graph, args);
    }

private:
    Memory* memory_;
    llama_memory_status status_;
    std::vector<llama_ubatch> ubatches_;
    size_t current_ = 0;
};

RowSource rows(const ggml_tensor* t) {
    return {static_cast<const float*>(t->data), t->nb[2] / sizeof(float), t->nb[1] / sizeof(float)};
}

}  // namespace

Memory::Memory(const llama_model& model, const llama_cparams& cparams, CacheConfig config, std::vector<int> owner,
               std::unique_ptr<CudaLayers> cuda, const AttentionChoice& attention, int verify)
    : model_(model), cparams_(cparams), attention_(attention), owner_(std::move(owner)), planned_(cache_bytes(config)), cuda_(std::move(cuda)) {
    if (cuda_) {
        config.devices = cuda_->memories();
        config.chunk_rows = cuda_->chunk_rows();
    }
    if (model.hparams.no_alloc) { return; }
    begins_.resize(config.n_sequences);
    if (verify > 0) { verify_ = std::make_unique<Verify>(config, verify); }
    cache_ = std::make_unique<Cache>(std::move(config));
    count();
}

Memory::~Memory() = default;

llama_memory_context_ptr Memory::init_batch(llama_batch_allocr& balloc, uint32_t n_ubatch, bool) {
    balloc.split_reset();
    // A token of several sequences is stored in each of them: a step has room for n_ubatch rows, not n_ubatch tokens.
    const llama_batch& batch = balloc.get_batch();
    int copies = 1;
    for (int32_t i = 0; i < batch.n_tokens; ++i) { copies = std::max(copies, batch.n_seq_id[i]); }
    const uint32_t n_tokens = std::max<uint32_t>(1, n_ubatch / copies);
    std::vector<llama_ubatch> ubatches;
    for (;;) {
        // Sequences of any length may share a ubatch: attention follows the sequence of each token.
        auto ubatch = balloc.split_simple(n_tokens);
        if (ubatch.n_tokens == 0) { break; }
        if (ubatch.embd && ubatch.is_pos_2d()) {
            LLAMA_LOG_ERROR("crumb: image positions (M-RoPE) are not supported by --kv; run without --kv\n");
            return std::make_unique<Context>(this, LLAMA_MEMORY_STATUS_FAILED_COMPUTE);
        }
        ubatches.push_back(std::move(ubatch));
    }
    if (balloc.get_n_used() < balloc.get_n_tokens() || !fits(ubatches)) {
        return std::make_unique<Context>(this, LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    }
    return std::make_unique<Context>(this, std::move(ubatches));
}

llama_memory_context_ptr Memory::init_full() {
    return std::make_unique<Context>(this, LLAMA_MEMORY_STATUS_SUCCESS);
}

llama_memory_context_ptr Memory::init_update(llama_context*, bool) {
    return std::make_unique<Context>(this, LLAMA_MEMORY_STATUS_NO_UPDATE);
}

std::vector<Append> Memory::appends(const llama_ubatch& ubatch) const {
    std::vector<Append> result;
    for (uint32_t t = 0; t < ubatch.n_tokens; ++t) {
        for (int j = 0; j < ubatch.n_seq_id[t]; ++j) {
            // A token of several sequences is stored in all of them and attends in the first: they are equal up to it.
            result.push_back({uint32_t(ubatch.seq_id[t][j]), t, j == 0, ubatch.token ? ubatch.token[t] : -1});
        }
    }
    return result;
}

bool Memory::fits(const std::vector<llama_ubatch>& ubatches) const {
    std::vector<Append> all;
    for (const auto& ubatch : ubatches) {
        const auto some = appends(ubatch);
        all.insert(all.end(), some.begin(), some.end());
    }
    return !cache_ || cache_->fits(all);
}

bool Memory::apply(const llama_ubatch& ubatch) {
    std::vector<int32_t> next(cache_->config().n_sequences);
    for (uint32_t s = 0; s < next.size(); ++s) { next[s] = cache_->length(s); }
    for (uint32_t t = 0; t < ubatch.n_tokens; ++t) {
        for (int j = 0; j < ubatch.n_seq_id[t]; ++j) {
            const auto s = ubatch.seq_id[t][j];
            if (ubatch.pos[t] != next[s]++) {
                LLAMA_LOG_ERROR("crumb: token at position %d of sequence %d, but %d is next: positions must follow each other\n",
                                int(ubatch.pos[t]), int(s), int(next[s] - 1));
                return false;
            }
        }
    }
    causal_ = cparams_.causal_attn;
    if (!cache_->begin(appends(ubatch), causal_)) { return false; }
    const int n_threads = std::max(cparams_.n_threads, cparams_.n_threads_batch);
    if (verify_) {
        verify_->begin(appends(ubatch), causal_, *cache_);
        for (auto& node : nodes_) {
            if (verify_->checks(owner_[node->layer])) { verify_->prepare(node->exact, n_threads); }
        }
    }
    for (auto& node : nodes_) {
        const auto& a = node->attention;
        work_.prepare(cache_->plan(owner_[node->layer]), a.n_head, a.n_head_kv, a.format, n_threads);
    }
    count();
    return true;
}

WorkingBytes Memory::working() const {
    WorkingBytes bytes{.attention = work_.bytes() + (cuda_ ? cuda_->working_bytes() : 0)};
    for (const auto& node : nodes_) {
        for (const auto& head : node->maps.heads) { bytes.maps += (head.k.size() + head.v.size()) * sizeof(bf16); }
    }
    return bytes;
}

Memory::LayerNode& Memory::layer_node(const llama_attn_args& args) {
    for (auto& node : nodes_) {
        if (node->layer == args.il) {
            CRUMB_ASSERT(node->attention.scale == args.kq_scale);
            return *node;
        }
    }
    const auto& hparams = model_.hparams;
    auto node = std::make_unique<LayerNode>();
    node->memory = this;
    node->layer = args.il;
    auto& a = node->attention;
    const int owner = owner_.at(args.il);
    a.n_head = hparams.n_head(args.il);
    a.n_head_kv = hparams.n_head_kv(owner);
    if (cache_) {
        const auto& config = cache_->config();
        const auto& layer = config.layers[owner];
        const bool coded = layer.has_codes();
        a.format = coded ? config.formats[owner] : bf16_format(layer.dim_k, layer.dim_v);
        if (coded) {
            a.tables = config.tables[owner];
            node->maps = attention_maps(a.tables);
            a.maps = &node->maps;
            a.decode_pages = attention_.decode_pages;
        }
    }
    a.scale = args.kq_scale;
    a.softcap = hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;
    a.alibi_max_bias = hparams.use_alibi ? hparams.f_max_alibi_bias : 0.0f;
    if (verify_ && verify_->checks(owner)) {
        const auto& config = verify_->cache().config();
        node->exact = a;
        node->exact.format = config.formats[owner];
        node->exact.tables = config.tables[owner];
        node->exact_maps = attention_maps(node->exact.tables);
        node->exact.maps = &node->exact_maps;
    }
    nodes_.push_back(std::move(node));
    return *nodes_.back();
}

void Memory::build_input(const llm_graph_context& graph, bool largest) {
    if (cuda_) { cuda_->build_input(graph, cache_.get(), largest); }
}

ggml_tensor* Memory::build_attn(const llm_graph_context& graph, const llama_attn_args& args) {
    if (args.kq_b) { fail("layer {}: a bias on the attention logits is not supported by --kv; run without --kv", args.il); }
    if (cparams_.training) { fail("training is not supported by --kv; run without --kv"); }
    const int owner = owner_.at(args.il);
    if (owner < 0) { fail("layer {} attends but has no K and V in the configuration", args.il); }
    for (const auto* t : {args.q, args.k, args.v}) {
        if (t && (t->type != GGML_TYPE_F32 || t->nb[0] != sizeof(float))) {
            fail("layer {}: Q, K and V must be F32 rows, this model gives {}; run without --kv", args.il, ggml_type_name(t->type));
        }
    }
    if (cuda_ && cuda_->has(args.il)) { return cuda_->build_attn(graph, args, cache_.get()); }
    LayerNode& node = layer_node(args);
    const int64_t dim_v = model_.hparams.n_embd_head_v(args.il);

    ggml_tensor* inputs[3] = {args.q};
    int n = 1;
    if (args.k && args.v) {
        ggml_tensor* kv[2] = {args.k, args.v};
        ggml_tensor* stored =
            ggml_custom_4d(graph.ctx0, GGML_TYPE_I32, 1, 1, 1, 1, kv, 2, run_store, GGML_N_TASKS_MAX, &node);
        graph.cb(stored, "kv_stored", args.il);
        ggml_build_forward_expand(graph.gf, stored);
        inputs[n++] = stored;
    }
    if (args.sinks) { inputs[n++] = args.sinks; }
    ggml_tensor* out = ggml_custom_4d(graph.ctx0, GGML_TYPE_F32, dim_v * node.attention.n_head, args.q->ne[2], 1, 1, inputs, n,
                                      run_attend, GGML_N_TASKS_MAX, &node);
    if (verify_ && verify_->checks(owner)) { verify(graph, node, out); }
    return out;
}

// Two more nodes: the same attention over exact K and V, and the difference.
void Memory::verify(const llm_graph_context& graph, LayerNode& node, ggml_tensor* out) {
    ggml_tensor* inputs[GGML_MAX_SRC] = {};
    int n = 0;
    for (; n < GGML_MAX_SRC && out->src[n]; ++n) { inputs[n] = out->src[n]; }
    ggml_tensor* exact =
        ggml_custom_4d(graph.ctx0, GGML_TYPE_F32, out->ne[0], out->ne[1], 1, 1, inputs, n, run_exact, GGML_N_TASKS_MAX, &node);
    ggml_tensor* both[2] = {out, exact};
    ggml_build_forward_expand(graph.gf, ggml_custom_4d(graph.ctx0, GGML_TYPE_I32, 1, 1, 1, 1, both, 2, run_compare, 1, &node));
}

void Memory::run_store(ggml_tensor* node, int thread, int n_threads, void* userdata) {
    const auto& layer = *static_cast<LayerNode*>(userdata);
    layer.memory->cache_->store(layer.layer, rows(node->src[0]), rows(node->src[1]), thread, n_threads);
    if (auto& verify = layer.memory->verify_; verify && verify->checks(layer.layer)) {
        verify->store(layer.layer, rows(node->src[0]), rows(node->src[1]), thread, n_threads);
    }
}

namespace {

// Logits without a value, of models that have them, come last.
const float* sinks_of(const ggml_tensor* node) {
    const float* sinks = nullptr;
    for (int i = 1; i < 3; ++i) {
        const auto* t = node->src[i];
        if (t && t->op != GGML_OP_CUSTOM) { sinks = static_cast<const float*>(t->data); }
    }
    return sinks;
}

AttentionIo io_of(ggml_tensor* node) {
    const RowSource q = rows(node->src[0]);
    return {q.data, q.token_stride, q.head_stride, static_cast<float*>(node->data), node->nb[1] / sizeof(float)};
}

}  // namespace

void Memory::run_attend(ggml_tensor* node, int thread, int n_threads, void* userdata) {
    auto& layer = *static_cast<LayerNode*>(userdata);
    const Cache& cache = *layer.memory->cache_;
    AttentionLayer attention = layer.attention;
    attention.sinks = sinks_of(node);
    const int owner = layer.memory->owner_[layer.layer];
    attend(layer.memory->attention_.isa, attention, cache.plan(owner), cache.views(owner), io_of(node), layer.memory->work_, thread, n_threads);
}

void Memory::run_exact(ggml_tensor* node, int thread, int n_threads, void* userdata) {
    auto& layer = *static_cast<LayerNode*>(userdata);
    AttentionLayer attention = layer.exact;
    attention.sinks = sinks_of(node);
    layer.memory->verify_->attend(attention, layer.memory->owner_[layer.layer], io_of(node), thread, n_threads);
}

void Memory::run_compare(ggml_tensor* node, int, int, void* userdata) {
    auto& layer = *static_cast<LayerNode*>(userdata);
    const ggml_tensor *out = node->src[0], *exact = node->src[1];
    layer.memory->verify_->compare(static_cast<const float*>(out->data), out->nb[1] / sizeof(float),
                                   static_cast<const float*>(exact->data), exact->nb[1] / sizeof(float), size_t(out->ne[0]));
}

// --- what the server asks

void Memory::begin_prompt(llama_seq_id id) { begins_.at(id) = true; }

int32_t Memory::reuse(llama_seq_id id, const std::vector<llama_token>& tokens, int32_t own, uint64_t salt, int32_t common) {
    const int32_t length = cache_->reuse(id, tokens, own, salt, common);
    if (verify_) { verify_->reuse(id, tokens, own, salt, common, length); }
    count_prompt(id, int32_t(tokens.size()), own, length);
    count();
    return length;
}

int32_t Memory::keep(llama_seq_id id, int32_t n_prompt, int32_t own) {
    const int32_t length = cache_->keep(id, own, n_prompt);
    count_prompt(id, n_prompt, own, length);
    return length;
}

void Memory::count_prompt(llama_seq_id id, int32_t n_prompt, int32_t own, int32_t found) {
    std::lock_guard lock(counting_);
    const bool begins = std::exchange(begins_.at(id), false);
    status_.prompts.tokens += begins ? n_prompt : 0;
    status_.prompts.found += begins ? found : std::max(0, found - own);
}

KvStatus Memory::status() const {
    std::lock_guard lock(counting_);
    KvStatus status = status_;
    if (verify_) { status.drift = verify_->drift(); }
    return status;
}

// Between steps, when no thread is at work in the cache.
void Memory::count() {
    std::lock_guard lock(counting_);
    status_.bytes = cache_->bytes();
    status_.counters = cache_->counters();
    status_.working = working();
    status_.sequences.resize(cache_->config().n_sequences);
    for (size_t s = 0; s < status_.sequences.size(); ++s) { status_.sequences[s] = cache_->status(uint32_t(s)); }
}

// --- sequences

std::pair<llama_seq_id, llama_seq_id> Memory::sequences(llama_seq_id id) const {
    const llama_seq_id n = cache_ ? cache_->config().n_sequences : 0;
    return id < 0 ? std::pair{0, n} : std::pair{id, std::min(id + 1, n)};
}

void Memory::clear(bool) {
    const auto [first, last] = sequences(-1);
    for (auto s = first; s < last; ++s) { crop(s, 0); }
    if (cache_) { count(); }
}

bool Memory::crop(llama_seq_id id, int32_t length) {
    const bool done = cache_->crop(id, length);
    if (done && verify_) { verify_->crop(id, length); }
    return done;
}

// Only the end of a sequence can go: what lies in the middle of a coded page cannot be cut out.
bool Memory::seq_rm(llama_seq_id id, llama_pos p0, llama_pos p1) {
    bool all = true;
    const auto [first, last] = sequences(id);
    for (auto s = first; s < last; ++s) {
        const int32_t length = cache_->length(s), from = std::max(p0, 0);
        if (from >= length || (p1 >= 0 && p1 <= from)) { continue; }
        all = (p1 < 0 || p1 >= length) && crop(s, from) && all;
    }
    if (cache_) { count(); }
    return all;
}

void Memory::seq_cp(llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1) {
    if (from == to || !cache_) { return; }
    const int32_t length = cache_->length(from);
    const int32_t end = p1 < 0 ? length : std::min(p1, length);
    if (p0 > 0) { fail("seq_cp from position {}: only a prefix of a sequence can be copied with --kv", p0); }
    if (!cache_->fork(from, to, end)) {
        fail("seq_cp of the first {} of {} tokens: the sliding windows at that position are gone (lowest: {})", end, length,
             cache_->lowest_crop(from));
    }
    if (verify_) { verify_->fork(from, to, end); }
    count();
}

void Memory::seq_keep(llama_seq_id id) {
    const auto [first, last] = sequences(-1);
    for (auto s = first; s < last; ++s) {
        if (s != id) { crop(s, 0); }
    }
}

void Memory::seq_add(llama_seq_id, llama_pos, llama_pos, llama_pos shift) {
    if (shift != 0) { fail("positions of coded keys cannot be shifted: run without --context-shift, --cache-reuse and self-extend"); }
}

void Memory::seq_div(llama_seq_id, llama_pos, llama_pos, int d) {
    if (d != 1) { fail("positions of coded keys cannot be divided: run without self-extend (-gan, -gaw)"); }
}

// The server asks whether the sliding windows reach back far enough before it rewinds a slot.
llama_pos Memory::seq_pos_min(llama_seq_id id) const {
    if (!cache_ || cache_->length(id) == 0) { return -1; }
    const int32_t lowest = cache_->lowest_crop(id);
    return lowest == 0 ? 0 : std::max(0, lowest - int32_t(model_.hparams.n_swa) + 1);
}

llama_pos Memory::seq_pos_max(llama_seq_id id) const { return cache_ ? cache_->length(id) - 1 : -1; }

std::map<ggml_backend_buffer_type_t, size_t> Memory::memory_breakdown() const {
    std::map<ggml_backend_buffer_type_t, size_t> result;
    if (cuda_) { result = cuda_->bytes(); }
    size_t elsewhere = 0;
    for (const auto& [type, bytes] : result) { elsewhere += bytes; }
    result[ggml_backend_cpu_buffer_type()] += planned_.total() - elsewhere;
    return result;
}

// --- state (slot files, the server's prompt cache, checkpoints)

void Memory::state_write(llama_io_write_i& io, llama_seq_id id, llama_state_seq_flags flags) const {
    const bool windows_only = flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    const auto [first, last] = sequences(id);
    const uint32_t n = last - first;
    io.write(&n, sizeof n);
    for (auto s = first; s < last; ++s) {
        cache_->save(s, [&](const void* data, size_t size) { io.write(data, size); }, windows_only);
    }
}

std::vector<int32_t> Memory::saved_ids(const Cache::Read& read) const {
    uint32_t n = 0;
    read(&n, sizeof n);
    if (n != 1) { fail("the saved state is damaged, or not of one sequence: it says that it holds {}", n); }
    return cache_->saved_ids(read);
}

void Memory::state_read(llama_io_read_i& io, llama_seq_id id, llama_state_seq_flags flags) {
    const bool windows_only = flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    const auto [first, last] = sequences(id);
    uint32_t n = 0;
    io.read(&n, sizeof n);
    if (n != uint32_t(last - first)) { fail("the saved state holds {} sequences, wanted: {} (or it is damaged)", n, last - first); }
    try {
        for (auto s = first; s < last; ++s) {
            cache_->restore(s, [&](void* data, size_t size) { io.read(data, size); }, windows_only);
            if (verify_) { verify_->crop(s, windows_only ? cache_->length(s) : 0); }
        }
    } catch (const std::exception& e) {
        remember_refusal(e.what());
        throw;
    }
    count();
}

}  // namespace crumb::llama

#include "gradient_graph.h"

#include <crumb/error.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "ggml.h"
#include "llama-adapter.h"
#include "llama-arch.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-memory.h"
#include "llama-model.h"

namespace crumb::llama {

namespace {

// llama.cpp asks for a KV cache with this, and is told to make its own: that it asked is what there is to know.
struct Asked {
    bool asked = false;
    bool shares = false;
};
thread_local Asked* g_asked = nullptr;

llama_memory_i* note_and_decline(const llama_model& model, const llama_memory_params&, const llama_cparams&,
                                 const llama_memory_i::layer_filter_cb&, const llama_memory_i::layer_reuse_cb& reuse) {
    g_asked->asked = true;
    for (int il = 0; reuse && il < int(model.hparams.n_layer()); ++il) {
        g_asked->shares |= reuse(il) >= 0;
    }
    return nullptr;
}

const char* obstacle(const llama_model& model) {
    const auto& h = model.hparams;
    if (llama_model_has_encoder(&model)) {
        return "it is an encoder, or has one";
    }
    if (h.is_mla()) {
        return "latent attention (MLA) is not supported";
    }
    if (h.n_expert > 0) {
        return "a mixture of experts is not supported";
    }
    if (h.attn_soft_cap) {
        return "soft caps on the attention logits are not supported";
    }
    if (h.use_alibi || h.f_max_alibi_bias > 0) {
        return "ALiBi is not supported";
    }
    if (h.n_pos_per_embd() > 1) {
        return "several positions a token (M-RoPE) are not supported";
    }
    if (h.swa_type != LLAMA_SWA_TYPE_NONE && h.swa_type != LLAMA_SWA_TYPE_STANDARD) {
        return "chunked and symmetric sliding windows are not supported";
    }
    if (!h.causal_attn) {
        return "attention that is not causal is not supported";
    }
    for (int il = 0; il < int(h.n_layer()); ++il) {
        if (h.is_recr(il)) {
            return "recurrent layers are not supported";
        }
        if (!h.has_kv(il)) {
            return "layers that read the K and V of others are not supported";
        }
    }
    switch (model.arch) {
        case LLM_ARCH_GROK: return "its scaled and capped logits are not supported";
        case LLM_ARCH_GEMMA4_ASSISTANT:
        case LLM_ARCH_DFLASH: return "drafts that read another model's K and V are not supported";
        default: return nullptr;
    }
}

}  // namespace

ContextPtr plain_context(llama_model* model) {
    if (const char* what = obstacle(*model)) {
        fail("{}", what);
    }
    auto params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = 64;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.no_perf = true;
    Asked asked;
    g_asked = &asked;
    llama_memory_set_factory(note_and_decline);
    ContextPtr context(llama_init_from_model(model, params));
    use_kv(std::nullopt);
    g_asked = nullptr;
    if (!asked.asked) {
        fail("its memory is neither a plain nor a sliding-window KV cache");
    }
    if (asked.shares) {
        fail("layers that read the K and V of others are not supported");
    }
    if (!context) {
        fail("llama.cpp could not create a context (its message is above)");
    }
    return context;
}

std::vector<int> attention_windows(const llama_model& model) {
    const auto& h = model.hparams;
    std::vector<int> windows;
    for (int il = 0; il < int(h.n_layer()); ++il) {
        windows.push_back(h.swa_type == LLAMA_SWA_TYPE_STANDARD && h.is_swa(il) ? int(h.n_swa) : 0);
    }
    return windows;
}

// One sequence at positions 0 .. n, all of which are read.
struct WindowGraph::Batch {
    explicit Batch(int n) : tokens(n), positions(n), counts(n, 1), ids(n, &id), index(LLAMA_MAX_SEQ, -1), read(n, 1) {
        for (int i = 0; i < n; ++i) {
            positions[i] = i;
        }
        index[0] = 0;
        ubatch = {};
        ubatch.b_equal_seqs = 1;
        ubatch.n_tokens = ubatch.n_seq_tokens = uint32_t(n);
        ubatch.n_seqs = ubatch.n_seqs_unq = ubatch.n_pos = 1;
        ubatch.token = tokens.data();
        ubatch.pos = positions.data();
        ubatch.n_seq_id = counts.data();
        ubatch.seq_id = ids.data();
        ubatch.seq_id_unq = &id;
        ubatch.seq_idx = index.data();
        ubatch.output = read.data();
    }

    llama_seq_id id = 0;
    std::vector<llama_token> tokens;
    std::vector<llama_pos> positions;
    std::vector<int32_t> counts;
    std::vector<llama_seq_id*> ids;
    std::vector<int32_t> index;
    std::vector<int8_t> read;
    llama_ubatch ubatch;
};

class WindowGraph::Memory : public llama_memory_context_i {
  public:
    Memory(WindowGraph& graph, const Attend& attend, std::vector<int> windows)
        : graph_(graph), attend_(attend), windows_(std::move(windows)) {}

    bool next() override { return false; }
    bool apply() override { return true; }
    const llama_ubatch& get_ubatch() const override { return graph_.batch_->ubatch; }
    llama_memory_status get_status() const override { return LLAMA_MEMORY_STATUS_SUCCESS; }
    bool has_attn() const override { return true; }

    ggml_tensor* build_attn(const llm_graph_context& llm, const llama_attn_args& a) const override {
        if (!a.k || !a.v) {
            fail("layer {} reads the K and V of another, which is not supported", a.il);
        }
        if (a.kq_b) {
            fail("layer {} has a bias on its attention logits, which is not supported", a.il);
        }
        if (a.sinks) {
            fail("layer {} has attention sinks, which are not supported", a.il);
        }
        for (const auto* t : {a.q, a.k, a.v}) {
            if (t->type != GGML_TYPE_F32 || t->nb[0] != sizeof(float) || t->ne[2] != graph_.n_ || t->ne[3] != 1) {
                fail("layer {}: Q, K and V are not F32 rows of {} tokens", a.il, graph_.n_);
            }
        }
        if (graph_.attentions_.contains(a.il) || a.q->ne[1] % a.k->ne[1] != 0 || a.k->ne[1] != a.v->ne[1] ||
            a.q->ne[0] != a.k->ne[0]) {
            fail("layer {}: this kind of attention is not supported", a.il);
        }
        Attention attention{{a.q, a.k, a.v, a.kq_scale, a.il, windows_.at(a.il)}};
        attention.output = attend_(llm.ctx0, attention.call);
        return graph_.attentions_.emplace(a.il, attention).first->second.output;
    }

  private:
    WindowGraph& graph_;
    const Attend& attend_;
    const std::vector<int> windows_;
};

WindowGraph::WindowGraph(llama_context* context, int n_tokens, Attend attend)
    : n_(n_tokens), batch_(std::make_unique<Batch>(n_tokens)) {
    const llama_model& model = context->get_model();
    const int n_layer = int(model.hparams.n_layer());
    outputs_.resize(n_layer);
    const size_t blocks = size_t(n_ + WindowAttention::kBlock - 1) / WindowAttention::kBlock;
    result_ = std::make_unique<llm_graph_result>(int64_t(4096 + n_layer * (256 + 16 * blocks)));

    const Memory memory(*this, attend, attention_windows(model));
    llama_adapter_cvec no_vector;
    llama_adapter_loras no_loras;
    llm_graph_params params{};
    params.arch = model.arch;
    params.hparams = model.hparams;
    params.cparams = context->get_cparams();
    params.cparams.n_ctx = params.cparams.n_ctx_seq = uint32_t(n_);
    params.ubatch = batch_->ubatch;
    params.gtype = LLM_GRAPH_TYPE_DEFAULT;
    params.sched = context->get_sched();
    params.cvec = &no_vector;
    params.loras = &no_loras;
    params.mctx = &memory;
    params.n_outputs = uint32_t(n_);
    params.res = result_.get();
    params.cb = [&](const llama_ubatch&, ggml_tensor* tensor, const char* name, int il) {
        if (il >= 0) {
            ggml_format_name(tensor, "%s-%d", name, il);
        } else {
            ggml_set_name(tensor, name);
        }
        if (il >= 0 && il < n_layer && !std::strcmp(name, "l_out")) {
            outputs_[il] = tensor;
        }
    };
    model.build_graph(params);
    hidden_ = result_->get_embd();
    logits_ = result_->get_logits();
    for (int il = 0; il < n_layer; ++il) {
        if (!outputs_[il] || outputs_[il]->view_src || outputs_[il]->type != GGML_TYPE_F32) {
            fail("its graph has no output of layer {} (l_out-{}) to be cut at", il, il);
        }
    }
    if (!hidden_ || !logits_) {
        fail("it has no head that predicts tokens");
    }
    for (int il = 0; il < n_layer; ++il) {
        if (!ggml_are_same_shape(outputs_[il], hidden_) || !ggml_is_contiguous(outputs_[il])) {
            fail("layer {} has an output of another shape than the others", il);
        }
    }
    require_separate_layers();

    std::vector<ggml_tensor*> kept = outputs_;
    kept.push_back(hidden_);
    kept_ = std::make_unique<Kept>(result_->get_ctx(), kept);
}

WindowGraph::~WindowGraph() = default;

void WindowGraph::set_tokens(std::span<const llama_token> tokens) {
    CRUMB_ASSERT(int(tokens.size()) == n_);
    std::copy(tokens.begin(), tokens.end(), batch_->tokens.begin());
    result_->set_inputs(&batch_->ubatch);
}

void WindowGraph::require_separate_layers() const {
    std::vector<std::unique_ptr<Cut>> cuts;
    std::unordered_map<const ggml_tensor*, int> attends;
    for (const auto& [layer, attention] : attentions_) {
        attends[attention.output] = layer;
    }
    for (int il = 0; il <= n_layer(); ++il) {
        std::unordered_set<const ggml_tensor*> others(outputs_.begin(), outputs_.end());
        others.erase(input(il));
        others.erase(output(il));
        for (const ggml_tensor* node : nodes_of(output(il))) {
            const auto found = attends.find(node);
            if (found != attends.end() && found->second != il) {
                fail("layer {} reads the attention of layer {} by another way than its output", il, found->second);
            }
            for (const ggml_tensor* source : node->src) {
                if (source && others.contains(source)) {
                    fail("layer {} reads {}, and not only the output of the layer before it", il, source->name);
                }
            }
        }
        cuts.push_back(std::make_unique<Cut>(output(il)));
    }
}

}  // namespace crumb::llama

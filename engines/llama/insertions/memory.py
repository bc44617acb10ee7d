"""A memory of another library: its factory, its attention in the graph, and the models that are loaded."""
from insertions.hook import Hook

MEMORY_H = "src/llama-memory.h"
MODEL_CPP = "src/llama-model.cpp"
LLAMA_CPP = "src/llama.cpp"
GRAPH_H = "src/llama-graph.h"
GRAPH_CPP = "src/llama-graph.cpp"

MEMORY_TYPES = """\
struct llama_model;
struct llama_cparams;
"""

MEMORY_ARGS = """\
// what one attention layer hands to a memory that computes attention itself
struct llama_attn_args {
    ggml_tensor * q;        // [n_embd_head_k, n_head,    n_tokens]
    ggml_tensor * k;        // [n_embd_head_k, n_head_kv, n_tokens], or nullptr: layer il reads the keys of another layer
    ggml_tensor * v;        // [n_embd_head_v, n_head_kv, n_tokens], or nullptr: same
    ggml_tensor * kq_b;     // bias added to the logits, or nullptr
    ggml_tensor * sinks;    // one more logit per head, or nullptr
    float         kq_scale;
    int           il;
};

"""

MEMORY_VIRTUALS = """
    // a memory may bring its own storage and attention (paged, quantised, remote, ...):
    // then it returns true here, and the two functions below replace masks, KV copies and build_attn_mha()
    virtual bool has_attn() const { return false; }

    // called once per graph, before build_attn(): add the graph inputs that build_attn() reads, if any
    virtual void build_attn_inp(const llm_graph_context & /*graph*/) const {}

    // store k and v, and return softmax(kq_scale*q*k^T)*v as F32 [n_embd_head_v*n_head, n_tokens]
    virtual ggml_tensor * build_attn(const llm_graph_context & /*graph*/, const llama_attn_args & /*args*/) const { return nullptr; }
"""

MEMORY_FACTORY = """
// external memory: asked first wherever a plain (or sliding-window) KV cache would be created
// returns nullptr to decline, throws to refuse; filter and reuse are as for llama_kv_cache
// once a factory is set, a model whose memory is of another kind is refused (it would silently run without)
using llama_memory_factory = llama_memory_i * (*)(
        const llama_model                     & model,
        const llama_memory_params             & params,
        const llama_cparams                   & cparams,
        const llama_memory_i::layer_filter_cb & filter,
        const llama_memory_i::layer_reuse_cb  & reuse);

LLAMA_API void llama_memory_set_factory(llama_memory_factory factory);

// told of every model that has been loaded from a file: calibration belongs to a file, and a model forgets its own
using llama_model_load_observer = void (*)(const llama_model * model, const char * path);

LLAMA_API void llama_model_set_load_observer(llama_model_load_observer observer);
"""

MODEL_FACTORY = """\
static llama_memory_factory g_memory_factory = nullptr;

void llama_memory_set_factory(llama_memory_factory factory) {
    g_memory_factory = factory;
}

"""

MODEL_ASKED = """\
    bool factory_asked = false; // an external memory was offered this model
"""

MODEL_CREATE = """\
                    if (g_memory_factory) {
                        factory_asked = true;
                        res = g_memory_factory(*this, params, cparams, filter, reuse);
                        if (res) {
                            break;
                        }
                    }

"""

MODEL_REFUSE = """\
    if (g_memory_factory && !factory_asked) {
        delete res;
        throw std::runtime_error(format(
            "external KV memory: architecture '%s' is not supported, its memory is neither a plain nor a sliding-window KV cache",
            llm_arch_name(arch)));
    }

"""

LOAD_OBSERVER = """\
static llama_model_load_observer g_load_observer = nullptr;

void llama_model_set_load_observer(llama_model_load_observer observer) {
    g_load_observer = observer;
}

"""

LOAD_OBSERVE = """\
    if (g_load_observer) {
        g_load_observer(model, path_model.c_str());
    }

"""

GRAPH_TYPES = """\
struct llama_attn_args;
"""

GRAPH_DECLARE = """\
    // attention computed by the memory itself, see llama_memory_context_i::has_attn()
    ggml_tensor * build_attn_ext(
            ggml_tensor * wo,
            ggml_tensor * wo_b,
            ggml_tensor * wo_s,
            const llama_attn_args & args) const;

"""

GRAPH_DEFINE = """\
ggml_tensor * llm_graph_context::build_attn_ext(
        ggml_tensor * wo,
        ggml_tensor * wo_b,
        ggml_tensor * wo_s,
        const llama_attn_args & args) const {
    ggml_build_forward_expand(gf, args.q);
    if (args.v) {
        ggml_build_forward_expand(gf, args.v);
    }
    if (args.k) {
        ggml_build_forward_expand(gf, args.k);
    }

    ggml_tensor * cur = mctx->build_attn(*this, args);
    cb(cur, "kqv_out", args.il);
    ggml_build_forward_expand(gf, cur);

    if (wo) {
        const bool prec_f32 = arch == LLM_ARCH_GLM4 || arch == LLM_ARCH_GLM4_MOE || arch == LLM_ARCH_JAIS2;
        cur = build_lora_mm(wo, cur, prec_f32 ? nullptr : wo_s);
        if (prec_f32) {
            ggml_prec_set_acc(cur, GGML_PREC_F32);
            cur = wo_s ? ggml_mul(ctx0, cur, wo_s) : cur;
        }
    }

    return wo_b ? ggml_add(ctx0, cur, wo_b) : cur;
}

"""

GRAPH_INPUT = """\
    if (mctx->has_attn()) {
        mctx->build_attn_inp(*this);
        return nullptr;
    }

"""

GRAPH_ATTEND = """\
    if (mctx->has_attn()) {
        return build_attn_ext(wo, wo_b, wo_s, { q_cur, k_cur, v_cur, kq_b, sinks, kq_scale, il });
    }

"""

CREATE_MEMORY = r"^llama_memory_i \* llama_model::create_memory\("
LOAD_FROM_FILE = r"^static struct llama_model \* llama_model_load_from_file_impl\("

HOOKS = [
    Hook("memory types", MEMORY_H, "behind", r"^struct llama_ubatch;\n", MEMORY_TYPES),
    Hook("attention arguments", MEMORY_H, "before",
         r"^// the interface for managing the memory context during batch processing\n", MEMORY_ARGS),
    Hook("attention by the memory", MEMORY_H, "behind", r"^ *virtual llama_memory_status get_status\(\) const = 0;\n",
         MEMORY_VIRTUALS, after=r"^struct llama_memory_context_i \{"),
    Hook("factory declaration", MEMORY_H, "behind", r"\Z", MEMORY_FACTORY),
    Hook("factory", MODEL_CPP, "before", CREATE_MEMORY, MODEL_FACTORY),
    Hook("factory flag", MODEL_CPP, "behind", r"^    llama_memory_i \* res;\n", MODEL_ASKED, after=CREATE_MEMORY),
    Hook("factory call", MODEL_CPP, "before",
         r"^ *if \(hparams\.swa_type != LLAMA_SWA_TYPE_NONE\) \{\n *GGML_ASSERT\(hparams\.is_swa_any", MODEL_CREATE,
         after=r"llama_kv_cache::layer_share_cb share = nullptr;"),
    Hook("refusal of other memories", MODEL_CPP, "before", r"^    return res;\n\}\n", MODEL_REFUSE, after=CREATE_MEMORY),
    Hook("load observer", LLAMA_CPP, "before", LOAD_FROM_FILE, LOAD_OBSERVER),
    Hook("load observed", LLAMA_CPP, "before", r"^    return model;\n\}\n", LOAD_OBSERVE, after=LOAD_FROM_FILE),
    Hook("graph types", GRAPH_H, "behind", r"^struct llama_memory_context_i;\n", GRAPH_TYPES),
    Hook("graph declaration", GRAPH_H, "before",
         r"^ *llm_graph_input_attn_no_cache \* build_attn_inp_no_cache\(\) const;\n", GRAPH_DECLARE),
    Hook("graph definition", GRAPH_CPP, "before",
         r"^llm_graph_input_attn_no_cache \* llm_graph_context::build_attn_inp_no_cache\(", GRAPH_DEFINE),
    Hook("graph input, plain", GRAPH_CPP, "behind",
         r"^llm_graph_input_attn_kv \* llm_graph_context::build_attn_inp_kv\(\) const \{\n", GRAPH_INPUT),
    Hook("graph input, sliding window", GRAPH_CPP, "behind",
         r"^llm_graph_input_attn_kv_iswa \* llm_graph_context::build_attn_inp_kv_iswa\(\) const \{\n", GRAPH_INPUT),
    Hook("attention, plain", GRAPH_CPP, "behind",
         r"^ *llm_graph_input_attn_kv \* inp,\n(?:[^\n{]*\n)*?[^\n{]*il\) const \{\n", GRAPH_ATTEND),
    Hook("attention, sliding window", GRAPH_CPP, "behind",
         r"^ *llm_graph_input_attn_kv_iswa \* inp,\n(?:[^\n{]*\n)*?[^\n{]*il\) const \{\n", GRAPH_ATTEND),
]

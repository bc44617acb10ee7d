#!/usr/bin/env python3
"""Insert crumb's hooks into a llama.cpp source tree. Lines are only added, never changed or removed.

usage: hooks.py LLAMA_CPP_FOLDER [--cuda] [--check]

With the hooks, a library can register a factory (llama_memory_set_factory) that is asked wherever llama.cpp would
create a plain or sliding-window KV cache, and the memory it returns may store K and V and attend by itself. The server
asks such a memory (server_set_kv_memory) what it can start a prompt from and whether a request has room, and shows what
it says of itself in /props and /metrics. It also serves pages of another library (server_http_set_pages).
--cuda adds the hooks that let such a library run its nodes on llama.cpp's CUDA streams.

Each hook has a name, a file, an anchor (a regular expression) and the text that goes before or behind it. The tree
must be exactly the release that the hooks were written for: an anchor that is missing or found twice stops everything
with the hook's name before any file is written. Applying twice does nothing. --check says what would be done.
"""
import argparse
import dataclasses
import os
import pathlib
import re
import sys


@dataclasses.dataclass(frozen=True)
class Hook:
    name: str
    file: str
    where: str  # "before" or "behind" the anchor
    anchor: str
    text: str
    after: str = ""  # look for the first anchor behind the only match of this; without it the anchor is the only match


class Refused(Exception):
    pass


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

SERVER_DECLARE = """\
// a KV memory of another library, as the server talks to it; calls come from the main loop, except props() and metrics()
struct server_kv_memory {
    enum verdict { ADMIT, WAIT, REFUSE };

    virtual ~server_kv_memory() = default;

    // make the sequence hold the longest start of these tokens that can be had, at most all but one; of its own tokens
    // the first n_own are known to be theirs. sequences of different salts share nothing. other prompts are likely to
    // begin with the first n_common of the tokens too
    virtual int32_t reuse(llama_context * ctx, int id, const llama_tokens & tokens, int32_t n_own, uint64_t salt, int32_t n_common) = 0;
    // how many of its own first n_own tokens the sequence can keep for a prompt of n_prompt, where no others are looked for
    virtual int32_t keep(llama_context * ctx, int id, int32_t n_prompt, int32_t n_own) = 0;

    // room for a prompt and n_predict more tokens (-1: not known), until release(). tokens: of the prompt, so that what
    // others compute meanwhile is kept for it; none if they are not only text. why: what a refusal says
    virtual verdict admit(llama_context * ctx, int id, const llama_tokens & tokens, int32_t n_prompt, int32_t n_predict, std::string & why) = 0;
    virtual void release(llama_context * ctx, int id) = 0;
    virtual bool has_room(llama_context * ctx, int id, int32_t n_tokens) = 0;

    // whether the state that follows behind n_bytes of a file belongs to these tokens
    virtual bool matches(llama_context * ctx, const std::string & path, size_t n_bytes, const llama_tokens & tokens) = 0;
    virtual std::string refusal() = 0; // why the last state did not match or was not restored; nothing was changed

    virtual std::string props()   = 0; // JSON
    virtual std::string metrics() = 0; // Prometheus
};

// before the server starts; nullptr: there is none
void server_set_kv_memory(server_kv_memory * memory);

"""

SERVER_DEFINE = """\
static server_kv_memory * g_kv_memory = nullptr;

void server_set_kv_memory(server_kv_memory * memory) {
    g_kv_memory = memory;
}

// a slot file appears under its name only when it is whole
static bool server_kv_finish_save(const std::string & part, const std::string & path, size_t n_written) {
    std::error_code error;
    if (n_written > 0 && std::filesystem::file_size(part, error) == n_written && !error) {
        std::filesystem::rename(part, path, error);
        if (!error) {
            return true;
        }
    }
    std::error_code ignored;
    std::filesystem::remove(part, ignored);
    return false;
}

// the tokens that a slot file says it is of, as they are in a sequence; false: they are damaged
static bool server_kv_read_tokens(const std::string & path, size_t n_packed, bool has_mtmd, llama_tokens & tokens) {
    llama_tokens packed(n_packed);
    std::ifstream file(path, std::ios::binary);
    file.seekg(3 * sizeof(uint32_t));
    if (!file.read(reinterpret_cast<char *>(packed.data()), packed.size() * sizeof(llama_token))) {
        return false;
    }
    try {
        const server_tokens read = server_tokens::deserialize(packed, has_mtmd);
        for (size_t i = 0; i < read.size(); i++) {
            tokens.push_back(read[i]);
        }
    } catch (const std::exception &) {
        return false;
    }
    return true;
}

"""

SERVER_RELEASE = """\
            if (g_kv_memory) {
                g_kv_memory->release(ctx_tgt, id);
            }

"""

SERVER_HELPERS = """\
    std::map<int, server_task> kv_waiting; // for room, the oldest first

    // what the prompt of the slot's task can start from: n_past tokens of the slot, or others that the KV memory has
    int reuse_prefix(server_slot & slot, int n_past) {
        const auto & input = slot.task->tokens;
        if (!g_kv_memory || !slot.task->params.cache_prompt || !slot.task->need_sampling()) {
            return n_past;
        }
        if (slot.ctx_dft || input.has_mtmd) {
            // the draft, and what is not text, are not looked for elsewhere
            const int n_keep = g_kv_memory->keep(slot.ctx_tgt, slot.id, input.size(), n_past);
            return n_keep < n_past && input.has_mtmd ? 0 : n_keep; // never a part of an image
        }
        uint64_t salt = 0;
        for (const auto & lora : slot.lora) {
            if (lora.scale != 0.0f) {
                salt = salt * 31 + std::hash<std::string>{}(lora.path + ":" + std::to_string(lora.scale));
            }
        }
        if (lora_all_alora(slot.lora)) {
            salt = ~(uint64_t) slot.task->id; // applies to some of the tokens only
        }
        int n_common = 0; // what comes before the first message of a user
        for (const auto & span : slot.task->params.message_spans.spans) {
            if (span.role == COMMON_CHAT_ROLE_USER) {
                n_common = (int) span.pos;
                break;
            }
        }
        const llama_tokens & tokens = input.get_tokens();
        const int n = g_kv_memory->reuse(slot.ctx_tgt, slot.id, tokens, n_past, salt, n_common);
        slot.prompt.tokens.keep_first(std::min(n, n_past));
        for (int i = slot.prompt.n_tokens(); i < n; i++) {
            slot.prompt.tokens.push_back(tokens[i]);
        }
        return n;
    }

    // the least recently used slot that is idle and holds something, but for one
    bool clear_idle_slot(const server_slot & but) {
        server_slot * idle = nullptr;
        for (auto & slot : slots) {
            if (&slot != &but && !slot.is_processing() && slot.prompt.n_tokens() > 0 && (!idle || slot.t_last_used < idle->t_last_used)) {
                idle = &slot;
            }
        }
        if (idle) {
            idle->prompt_clear();
        }
        return idle != nullptr;
    }

    void retry_waiting() {
        if (!kv_waiting.empty()) {
            server_task task = std::move(kv_waiting.begin()->second);
            kv_waiting.erase(kv_waiting.begin());
            queue_tasks.post(std::move(task), true);
        }
    }

    // false: the task waits for room, behind those that came before it, or was refused
    bool admit_task(server_task & task, const server_slot & slot) {
        if (!g_kv_memory || !task.need_sampling()) {
            return true;
        }
        int n_busy = 0;
        for (auto & other : slots) {
            n_busy += other.is_processing();
            if (!other.is_processing()) {
                g_kv_memory->release(ctx_tgt, other.id); // a task that was admitted and could not be launched
            }
        }
        const int id = task.id;
        if (!kv_waiting.empty() && kv_waiting.begin()->first < id) {
            kv_waiting.emplace(id, std::move(task));
            return false;
        }
        std::string why;
        const llama_tokens none;
        const bool is_text = task.params.cache_prompt && !task.tokens.has_mtmd;
        const int n_predict = task.params.n_predict != -1 ? task.params.n_predict : params_base.n_predict;
        auto verdict = server_kv_memory::WAIT;
        do {
            verdict = g_kv_memory->admit(ctx_tgt, slot.id, is_text ? task.tokens.get_tokens() : none, task.n_tokens(), n_predict, why);
        } while (verdict == server_kv_memory::WAIT && clear_idle_slot(slot));
        if (verdict == server_kv_memory::WAIT) {
            SLT_INF(slot, "task %d waits for room in the KV memory\\n", id);
            kv_waiting.emplace(id, std::move(task));
            return false;
        }
        if (n_busy == 0 || n_busy + 1 < (int) slots.size()) {
            retry_waiting(); // there may be room for one more
        }
        if (verdict == server_kv_memory::REFUSE) {
            send_error(id, why, ERROR_TYPE_EXCEED_CONTEXT_SIZE, std::max(1, task.n_tokens()), slot.n_ctx);
        }
        return verdict == server_kv_memory::ADMIT;
    }

"""

SERVER_RETRY = """\
                retry_waiting();
"""

SERVER_CANCEL = """\
                    if (kv_waiting.erase(task.id_target) > 0) {
                        retry_waiting();
                    }
"""

SERVER_WAITING = """\
                    res->n_tasks_deferred   += kv_waiting.size();
"""

SERVER_ADMIT = """\
                    if (!admit_task(task, *slot)) {
                        break;
                    }

"""

SERVER_START = """\
                        n_past = reuse_prefix(slot, n_past);

"""

SERVER_CATCH_UP = """\
                    // another slot may have computed more of the same text meanwhile
                    if (const int n_have = slot.prompt.n_tokens(), n_now = reuse_prefix(slot, n_have); n_now > n_have) {
                        slot.stats.n_prompt_cached += n_now - n_have;
                        metrics.add_prompt_cached(n_now - n_have);
                    }

"""

SERVER_LIMIT = """\
        while (g_kv_memory && slot.has_next_token && !g_kv_memory->has_room(ctx_tgt, slot.id, 1 + (spec ? common_speculative_n_max(spec.get()) : 0))) {
            if (clear_idle_slot(slot)) {
                continue;
            }
            slot.truncated      = true;
            slot.stop           = STOP_TYPE_LIMIT;
            slot.has_next_token = false;

            SLT_WRN(slot, "stopped because the KV memory is full, n_tokens = %d, n_gen = %d\\n", slot.prompt.n_tokens(), (int) slot.stats.n_gen);
        }

"""

SERVER_SAVE = """\
                    const std::string filepath_whole = filepath;
                    if (g_kv_memory) {
                        filepath += ".part";
                    }

"""

SERVER_SAVED = """\
                    if (g_kv_memory && !server_kv_finish_save(filepath, filepath_whole, nwrite)) {
                        send_error(task, "Unable to save slot: " + filepath_whole + " could not be written", ERROR_TYPE_SERVER);
                        break;
                    }
"""

SERVER_RESTORE = """\
                            llama_tokens tokens;
                            const size_t n_bytes = 3 * sizeof(uint32_t) + packed.size() * sizeof(llama_token);
                            if (g_kv_memory && (!server_kv_read_tokens(filepath, packed.size(), mctx != nullptr, tokens) ||
                                                !g_kv_memory->matches(ctx_tgt, filepath, n_bytes, tokens))) {
                                send_error(task, "Unable to restore slot: " + g_kv_memory->refusal(), ERROR_TYPE_INVALID_REQUEST);
                                break;
                            }
"""

SERVER_NOT_RESTORED = """\
                            if (g_kv_memory) {
                                send_error(task, "Unable to restore slot: " + g_kv_memory->refusal(), ERROR_TYPE_INVALID_REQUEST);
                                break;
                            }
"""

SERVER_PROPS = """\
    if (g_kv_memory) {
        props["kv_cache"] = json::parse(g_kv_memory->props());
    }
"""

SERVER_METRICS = """\
            if (g_kv_memory) {
                res->data += g_kv_memory->metrics();
            }
"""

HTTP_DECLARE = """\
// a page of another library
struct server_http_page {
    std::string path;
    std::string content_type;
    bool        is_public; // without API key, while the model loads too, and not with --no-ui
    std::function<std::string()> content; // called by any thread
};

// before the server starts
void server_http_set_pages(std::vector<server_http_page> pages);

"""

HTTP_DEFINE = """\
static std::vector<server_http_page> g_pages;

void server_http_set_pages(std::vector<server_http_page> pages) {
    g_pages = std::move(pages);
}

"""

HTTP_PUBLIC = """\
        for (const auto & page : g_pages) {
            if (page.is_public) {
                paths.insert(page.path);
            }
        }
"""

HTTP_SERVE = """\
    for (const auto & page : g_pages) {
        if (params.ui || !page.is_public) {
            srv->Get(params.api_prefix + page.path, [&page](const httplib::Request &, httplib::Response & res) {
                res.set_header("Cache-Control", "no-cache");
                res.set_content(page.content(), page.content_type);
            });
        }
    }

"""

CUDA_DECLARE = """\
// let another library run GGML_OP_CUSTOM nodes on CUDA
//   supports: whether it runs this node on this device (otherwise the node goes to the CPU)
//   launch:   enqueue the node on the stream; must not synchronise, and may be captured once and replayed many times
typedef bool (*ggml_backend_cuda_custom_supports_t)(int device, const struct ggml_tensor * op);
typedef void (*ggml_backend_cuda_custom_launch_t)  (int device, struct ggml_tensor * op, void * stream);

GGML_BACKEND_API void ggml_backend_cuda_set_custom(ggml_backend_cuda_custom_supports_t supports, ggml_backend_cuda_custom_launch_t launch);

"""

CUDA_DEFINE = """\
static ggml_backend_cuda_custom_supports_t g_custom_supports = nullptr;
static ggml_backend_cuda_custom_launch_t   g_custom_launch   = nullptr;

void ggml_backend_cuda_set_custom(ggml_backend_cuda_custom_supports_t supports, ggml_backend_cuda_custom_launch_t launch) {
    g_custom_supports = supports;
    g_custom_launch   = launch;
}

"""

CUDA_RUN = """\
        case GGML_OP_CUSTOM:
            g_custom_launch(ctx.device, dst, (void *) ctx.stream());
            break;
"""

CUDA_SUPPORTS = """\
        case GGML_OP_CUSTOM:
            return g_custom_supports && g_custom_launch && g_custom_supports(dev_ctx->device, op);
"""

CUDA_LOOKUP = """\
    if (strcmp(name, "ggml_backend_cuda_set_custom") == 0) {
        return (void *)ggml_backend_cuda_set_custom;
    }
"""

MEMORY_H = "src/llama-memory.h"
MODEL_CPP = "src/llama-model.cpp"
LLAMA_CPP = "src/llama.cpp"
GRAPH_H = "src/llama-graph.h"
GRAPH_CPP = "src/llama-graph.cpp"
SERVER_H = "tools/server/server-context.h"
SERVER_CPP = "tools/server/server-context.cpp"
HTTP_H = "tools/server/server-http.h"
HTTP_CPP = "tools/server/server-http.cpp"
CUDA_H = "ggml/include/ggml-cuda.h"
CUDA_CU = "ggml/src/ggml-cuda/ggml-cuda.cu"

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
    Hook("server declaration", SERVER_H, "before", r"^struct server_context_impl; // private implementation\n", SERVER_DECLARE),
    Hook("server definition", SERVER_CPP, "before", r"^enum slot_state \{\n", SERVER_DEFINE),
    Hook("slot release", SERVER_CPP, "before", r"^            callback_on_reset\(\*this\);\n", SERVER_RELEASE),
    Hook("server helpers", SERVER_CPP, "before", r"^    server_slot \* get_slot_by_id\(int id_slot\) \{\n", SERVER_HELPERS),
    Hook("room while generating", SERVER_CPP, "before", r"^        // check the limits\n", SERVER_LIMIT),
    Hook("waiting, a slot is free", SERVER_CPP, "behind", r"^ *queue_tasks\.pop_deferred_task\(id_slot\);\n", SERVER_RETRY),
    Hook("waiting, cancelled", SERVER_CPP, "behind", r"^ *case SERVER_TASK_TYPE_CANCEL:\n *\{\n", SERVER_CANCEL),
    Hook("waiting, counted", SERVER_CPP, "behind", r"^ *res->n_tasks_deferred *= [^\n]*\n", SERVER_WAITING),
    Hook("admission", SERVER_CPP, "before", r"^                    if \(task\.is_parent\(\)\) \{\n", SERVER_ADMIT),
    Hook("slot file, begun", SERVER_CPP, "before", r"^ *GGML_ASSERT\(packed\.size\(\) % sizeof\(llama_token\) == 0\);\n", SERVER_SAVE),
    Hook("slot file, whole", SERVER_CPP, "before", r"^ *if \(nwrite == 0\) \{\n", SERVER_SAVED),
    Hook("slot file, of its tokens", SERVER_CPP, "behind", r"^ *packed\.resize\(std::max<size_t>\(1, n_packed\)\);\n", SERVER_RESTORE),
    Hook("slot file, refused", SERVER_CPP, "before", r"^ *throw std::runtime_error\(\"No available space in KV cache or invalid",
         SERVER_NOT_RESTORED),
    Hook("prefix, at the start", SERVER_CPP, "before", r"^                        // \[TAG_PROMPT_LOGITS\]\n", SERVER_START),
    Hook("prefix, later", SERVER_CPP, "before", r"^ *// truncate any tokens that are beyond n_past for this slot\n", SERVER_CATCH_UP),
    Hook("properties", SERVER_CPP, "before", r"^    if \(params\.use_jinja\) \{\n", SERVER_PROPS,
         after=r"^static json get_res_props\("),
    Hook("page declaration", HTTP_H, "before", r"^struct server_http_context \{\n", HTTP_DECLARE),
    Hook("page definition", HTTP_CPP, "before", r"^class server_http_context::Impl \{\n", HTTP_DEFINE),
    Hook("public pages", HTTP_CPP, "behind", r"^ *std::unordered_set<std::string> paths \{ \"/\" \};\n", HTTP_PUBLIC),
    Hook("pages", HTTP_CPP, "before", r"^    // a browser that used the built-in UI keeps its service worker", HTTP_SERVE),
    Hook("metrics, asleep", SERVER_CPP, "behind", r"^            res->data = tmp\.to_metrics\(\);\n", SERVER_METRICS),
    Hook("metrics", SERVER_CPP, "behind", r"^            res->data = res_task->to_metrics\(\);\n", SERVER_METRICS),
]

CUDA_HOOKS = [
    Hook("CUDA declaration", CUDA_H, "before", r"^GGML_BACKEND_API ggml_backend_reg_t ggml_backend_cuda_reg\(", CUDA_DECLARE),
    Hook("CUDA definition", CUDA_CU, "before", r"^static bool ggml_cuda_compute_forward\(", CUDA_DEFINE),
    Hook("CUDA launch", CUDA_CU, "before", r"^ *case GGML_OP_FLASH_ATTN_EXT:\n *ggml_cuda_flash_attn_ext\(", CUDA_RUN,
         after=r"^static bool ggml_cuda_compute_forward\("),
    Hook("CUDA support", CUDA_CU, "before", r"^ *case GGML_OP_FLASH_ATTN_EXT:\n *return", CUDA_SUPPORTS,
         after=r"^static bool ggml_backend_cuda_device_supports_op\("),
    Hook("CUDA lookup", CUDA_CU, "before", r"^ *return nullptr;\n", CUDA_LOOKUP,
         after=r"^static void \* ggml_backend_cuda_reg_get_proc_address\("),
]


def refuse(hook, why):
    raise Refused(f"hook '{hook.name}' does not fit {hook.file}: {why}\n"
                  f"  this is not the llama.cpp that the hooks were written for; nothing was written")


def place(hook, text):
    """Where the hook's text goes, and whether it is there already."""
    start = 0
    if hook.after:
        found = list(re.finditer(hook.after, text, re.M))
        if len(found) != 1:
            refuse(hook, f"{len(found)} matches of {hook.after!r}")
        start = found[0].end()
    found = [match for match in re.finditer(hook.anchor, text[start:], re.M)]
    if not found or (len(found) > 1 and not hook.after):
        refuse(hook, f"{len(found)} matches of {hook.anchor!r}")
    at = start + (found[0].start() if hook.where == "before" else found[0].end())
    around = text[max(0, at - len(hook.text)):at] if hook.where == "before" else text[at:at + len(hook.text)]
    if hook.where == "behind" and hook.anchor == r"\Z":
        around = text[max(0, at - len(hook.text)):]
    return at, around == hook.text


def plan(root, hooks):
    """The new text of each file, as {file: (text, lines added)}. Reads, never writes."""
    texts, edits, present = {}, {}, {}
    for hook in hooks:
        if hook.file not in texts:
            try:
                texts[hook.file] = (root / hook.file).read_text(encoding="utf-8")
            except OSError as error:
                refuse(hook, error.strerror)
            edits[hook.file] = []
        at, there = place(hook, texts[hook.file])
        if not there:
            edits[hook.file].append((at, hook))
        # files are written whole: some of their hooks without the others are those of another version of this script
        if present.setdefault(hook.file, there) != there:
            refuse(hook, "other hooks are there, and it is not: start from an unchanged tree")
    out = {}
    for file, text in texts.items():
        for at, hook in sorted(edits[file], key=lambda edit: -edit[0]):
            text = text[:at] + hook.text + text[at:]
        for hook in hooks:
            if hook.file == file and not place(hook, text)[1]:
                refuse(hook, "two hooks meet at one place")
        out[file] = text, sum(hook.text.count("\n") for _, hook in edits[file])
    return out


def write(path, text):
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def main(argv):
    parser = argparse.ArgumentParser(prog="hooks.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--cuda", action="store_true", help="the CUDA hooks as well")
    parser.add_argument("--check", action="store_true", help="say what would be done, write nothing")
    args = parser.parse_args(argv)
    try:
        planned = plan(args.folder, HOOKS + (CUDA_HOOKS if args.cuda else []))
    except Refused as refused:
        print(f"hooks: error: {refused}", file=sys.stderr)
        return 1
    for file, (text, lines) in planned.items():
        if lines and not args.check:
            write(args.folder / file, text)
        print(f"hooks: {file}: " + (f"{lines} lines" if lines else "already there"))
    total = sum(lines for _, lines in planned.values())
    print(f"hooks: {total} lines " + ("would be added" if args.check else "added"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

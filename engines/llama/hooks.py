#!/usr/bin/env python3
"""Insert crumb's hooks into a llama.cpp source tree. Lines are only added, never changed or removed.

usage: hooks.py LLAMA_CPP_FOLDER [--cuda] [--check]

With the hooks, a library can register a factory (llama_memory_set_factory) that is asked wherever llama.cpp would
create a plain or sliding-window KV cache, and the memory it returns may store K and V and attend by itself.
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

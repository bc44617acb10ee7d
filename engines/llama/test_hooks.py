#!/usr/bin/env python3
"""hooks.py on a made-up tree: the smallest text that has every anchor."""
import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import hooks  # noqa: E402
from insertions import cuda, http, memory, server  # noqa: E402

TREE = {
    memory.MEMORY_H: """\
struct llama_ubatch;

// the interface for managing the memory context during batch processing
struct llama_memory_context_i {
    virtual llama_memory_status get_status() const = 0;
};
""",
    memory.MODEL_CPP: """\
int unrelated() {
    llama_memory_i * res;
    return res;
}

llama_memory_i * llama_model::create_memory(const llama_memory_params & params) const {
    llama_memory_i * res;
    switch (arch) {
        default:
            {
                    llama_kv_cache::layer_share_cb share = nullptr;

                    if (hparams.swa_type != LLAMA_SWA_TYPE_NONE) {
                        GGML_ASSERT(hparams.is_swa_any());
                    }
            }
    }
    return res;
}
""",
    memory.LLAMA_CPP: """\
static struct llama_model * llama_model_load_from_file_impl(
        const std::string & path_model) {
    if (path_model.empty()) {
        return nullptr;
    }

    return model;
}
""",
    memory.GRAPH_H: """\
struct llama_memory_context_i;
struct llm_graph_context {
    llm_graph_input_attn_no_cache * build_attn_inp_no_cache() const;
};
""",
    memory.GRAPH_CPP: """\
llm_graph_input_attn_no_cache * llm_graph_context::build_attn_inp_no_cache() const {
}

llm_graph_input_attn_kv * llm_graph_context::build_attn_inp_kv() const {
}

ggml_tensor * llm_graph_context::build_attn(
        llm_graph_input_attn_kv * inp,
        ggml_tensor * q_cur,
            float     kq_scale,
            int       il) const {
}

llm_graph_input_attn_kv_iswa * llm_graph_context::build_attn_inp_kv_iswa() const {
}

ggml_tensor * llm_graph_context::build_attn(
        llm_graph_input_attn_kv_iswa * inp,
        ggml_tensor * q_cur,
            int       il) const {
}
""",
    server.SERVER_H: """\
struct server_context_impl; // private implementation
""",
    server.SERVER_CPP: """\
enum slot_state {
};
struct server_slot {
    // generation props
    void reset() {
        truncated      = false;
    }
    void release() {
            callback_on_reset(*this);
    }
};
            slot.callback_on_release = [this](int id_slot) {
                queue_tasks.pop_deferred_task(id_slot);
            };
    bool load_model() {
        if (llama_model_n_swa(model_tgt) == 0) {
        }
    }
    server_slot * get_slot_by_id(int id_slot) {
    }
    bool process_token() {
        // check the limits
    }
                    if (task.is_parent()) {
                    }
    void pre_decode() {
                if (slot.task->is_parent() || slot.task->is_child()) {
                    send_error(slot, "context shift cannot be used for shared prompt", ERROR_TYPE_SERVER);
                }
            // check if we can batch this slot with the previous one
            if (!slot_batched) {
                // check if we can batch this slot with the previous one
                // this slot still has a prompt to be processed
    }
            case SERVER_TASK_TYPE_CANCEL:
                {
                } break;
                    res->n_tasks_deferred    = queue_tasks.queue_tasks_deferred_size();
                    res->metrics             = metrics;
                    GGML_ASSERT(packed.size() % sizeof(llama_token) == 0);
                    if (nwrite == 0) {
                    }
                            packed.resize(std::max<size_t>(1, n_packed));
                        if (nread == 0) {
                            throw std::runtime_error("No available space in KV cache or invalid slot save file");
                        // [TAG_PROMPT_LOGITS]
                    // truncate any tokens that are beyond n_past for this slot
static json get_res_props(const server_context_meta & meta) {
    if (params.use_jinja) {
    }
}
            res->data = tmp.to_metrics();
            res->data = res_task->to_metrics();
        std::string action = req.get_param("action");
""",
    http.HTTP_H: """\
struct server_http_context {
};
""",
    http.HTTP_CPP: """\
class server_http_context::Impl {
};
        std::unordered_set<std::string> paths { "/" };
        return paths;
    // a browser that used the built-in UI keeps its service worker, so it shows the old UI
""",
    http.SERVER_MAIN: """\
        } catch (const std::exception & e) {
            // treat other exceptions as server error (500)
            error = ERROR_TYPE_SERVER;
        } catch (const std::exception & e) {
            SRV_ERR("got another exception");
""",
    cuda.CUDA_H: """\
GGML_BACKEND_API ggml_backend_reg_t ggml_backend_cuda_reg(void);
""",
    cuda.CUDA_CU: """\
static bool ggml_cuda_compute_forward(ggml_backend_cuda_context & ctx, struct ggml_tensor * dst) {
        case GGML_OP_FLASH_ATTN_EXT:
            ggml_cuda_flash_attn_ext(ctx, dst);
}
static void * ggml_backend_cuda_reg_get_proc_address(ggml_backend_reg_t reg, const char * name) {
    return nullptr;
}
static bool ggml_backend_cuda_device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
        case GGML_OP_FLASH_ATTN_EXT:
            return ggml_cuda_flash_attn_ext_supported(dev_ctx->device, op);
}
""",
}


class Hooks(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name, text in TREE.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)

    def run_hooks(self, *flags):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = hooks.main([str(self.root), *flags])
        return code, out.getvalue(), err.getvalue()

    def files(self):
        return {path.relative_to(self.root).as_posix(): path.read_text() for path in self.root.rglob("*") if path.is_file()}

    def edit(self, name, old, new):
        text = (self.root / name).read_text()
        self.assertIn(old, text)
        (self.root / name).write_text(text.replace(old, new))

    def assert_refused(self, hook, *flags):
        before = self.files()
        code, _, err = self.run_hooks(*flags)
        self.assertEqual(code, 1)
        self.assertIn(f"hook '{hook}'", err)
        self.assertIn("nothing was written", err)
        self.assertEqual(self.files(), before)

    def test_adds_every_text_and_removes_no_line(self):
        code, out, _ = self.run_hooks("--cuda")
        self.assertEqual(code, 0)
        after = self.files()
        self.assertEqual(set(after), set(TREE))
        for hook in hooks.HOOKS + hooks.CUDA_HOOKS:
            self.assertIn(hook.text, after[hook.file])
        added = 0
        for name, text in TREE.items():
            lines = iter(after[name].splitlines())
            for line in text.splitlines():  # the old lines, in their order, among the new ones
                self.assertIn(line, lines)
            added += after[name].count("\n") - text.count("\n")
        self.assertIn(f"{added} lines added", out)

    def test_order_inside_create_memory(self):
        self.run_hooks()
        text = self.files()[memory.MODEL_CPP]
        places = [text.index(piece) for piece in (
            "int unrelated()", "static llama_memory_factory g_memory_factory", "llama_model::create_memory(", memory.MODEL_ASKED,
            "layer_share_cb share", "factory_asked = true", "if (hparams.swa_type", "!factory_asked")]
        self.assertEqual(places, sorted(places))

    def test_cuda_files_are_left_alone_without_the_flag(self):
        self.run_hooks()
        after = self.files()
        for name in (cuda.CUDA_H, cuda.CUDA_CU):
            self.assertEqual(after[name], TREE[name])

    def test_twice_is_once(self):
        self.run_hooks()
        once = self.files()
        code, out, _ = self.run_hooks()
        self.assertEqual(code, 0)
        self.assertIn("0 lines added", out)
        self.assertEqual(self.files(), once)

    def test_cuda_can_follow(self):
        self.run_hooks()
        self.run_hooks("--cuda")
        later = self.files()
        self.setUp()
        self.run_hooks("--cuda")
        self.assertEqual(self.files(), later)

    def test_check_writes_nothing(self):
        code, out, _ = self.run_hooks("--check", "--cuda")
        self.assertEqual(code, 0)
        self.assertIn("would be added", out)
        self.assertEqual(self.files(), TREE)

    def test_every_anchor_that_moved_names_its_hook(self):
        for hook in hooks.HOOKS + hooks.CUDA_HOOKS:
            if hook.anchor == r"\Z":
                continue
            with self.subTest(hook.name):
                self.setUp()
                self.edit(hook.file, self.anchor_text(hook), "// moved\n")
                before = self.files()
                code, _, err = self.run_hooks("--cuda")
                self.assertEqual(code, 1)
                named = [other.name for other in hooks.HOOKS + hooks.CUDA_HOOKS if f"hook '{other.name}'" in err]
                self.assertEqual(len(named), 1)
                self.assertIn(self.hook(named[0]).file, err)
                # hooks that share an anchor fail together: the first is named
                self.assertIn(hook.name, [named[0]] + [other.name for other in hooks.HOOKS + hooks.CUDA_HOOKS
                                                       if hook.anchor in (self.hook(named[0]).anchor, self.hook(named[0]).after)
                                                       or other.after == hook.anchor])
                self.assertEqual(self.files(), before)

    @staticmethod
    def hook(name):
        return next(hook for hook in hooks.HOOKS + hooks.CUDA_HOOKS if hook.name == name)

    @staticmethod
    def anchor_text(hook):
        import re
        text = TREE[hook.file]
        start = re.search(hook.after, text, re.M).end() if hook.after else 0
        return re.compile(hook.anchor, re.M).search(text, start)[0]

    def test_moved_anchor(self):
        self.edit(memory.GRAPH_CPP, "llm_graph_context::build_attn_inp_kv() const", "llm_graph_context::build_attn_inp_kv2() const")
        self.assert_refused("graph input, plain")

    def test_doubled_anchor(self):
        self.edit(memory.MEMORY_H, "struct llama_ubatch;\n", "struct llama_ubatch;\nstruct llama_ubatch;\n")
        self.assert_refused("memory types")

    def test_last_file_refuses_before_the_first_is_written(self):
        self.edit(cuda.CUDA_CU, "    return nullptr;\n", "    return NULL;\n")
        self.assert_refused("CUDA lookup", "--cuda")
        self.assertEqual(self.run_hooks()[0], 0)

    def test_list_is_all_that_is_inserted(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(hooks.main(["--list"]), 0)
        listed = out.getvalue()
        for hook in hooks.HOOKS:
            self.assertIn(repr(hook.text), listed)
        self.assertNotIn(repr(cuda.HOOKS[0].text), listed)

    def test_missing_file(self):
        (self.root / memory.GRAPH_H).unlink()
        self.assert_refused("graph types")

    def test_hooks_of_another_version(self):
        self.run_hooks()
        self.edit(memory.MODEL_CPP, memory.MODEL_ASKED, "")
        self.assert_refused("factory flag")


if __name__ == "__main__":
    unittest.main()

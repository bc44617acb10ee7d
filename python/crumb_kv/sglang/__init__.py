"""crumb for SGLang: an attention backend whose KV pool is pages of a recipe.

    python -m sglang.launch_server --model-path MODEL --attention-backend crumb --page-size 64 \\
        --json-model-override-args '{"crumb": {"recipe": "had2"}}'

SGLang finds register() by the entry point sglang.srt.plugins and calls it in every process, before it reads its arguments. Only
the hooks of its own registry are used. Without the options they leave everything as it was.
"""

from importlib.metadata import version

from .options import BACKEND, check_version

_SIZES = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_CELL = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"


def register():
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_make_backend)
    try:
        check_version(version("sglang"))
    except ValueError:  # said when the backend is asked for: SGLang only logs what a plug-in raises here
        return

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import pool

    HookRegistry.register(f"{_SIZES}.configure", pool.begin, HookType.BEFORE)
    HookRegistry.register(f"{_SIZES}._profile_available_bytes", pool.without_windows, HookType.AROUND)
    HookRegistry.register(f"{_SIZES}._resolve_kv_pool_class", pool.pool_class, HookType.AROUND)
    HookRegistry.register(f"{_CELL}._compute_cell_size", pool.bytes_of_a_token, HookType.AROUND)


def _make_backend(runner):
    check_version(version("sglang"))
    from .backend import CrumbBackend

    return CrumbBackend(runner)

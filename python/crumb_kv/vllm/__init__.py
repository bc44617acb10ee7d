"""crumb for vLLM: an attention backend whose KV cache is pages of a recipe.

    vllm serve MODEL --additional-config '{"crumb": {"recipe": "had2"}}'

vLLM finds register() by the entry point vllm.general_plugins and calls it in every process. It only names the backend: what runs
without the options is vLLM's own (backend.py).
"""


def register():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = "crumb_kv.vllm.backend.Backend"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    register_backend(AttentionBackendEnum.CPU_ATTN, path)  # the CPU platform of vLLM takes no other name

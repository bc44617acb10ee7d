"""crumb for vLLM: an attention backend whose KV cache is pages of a recipe.

    vllm serve MODEL --additional-config '{"crumb": {"recipe": "had2"}}'

vLLM finds register() by the entry point vllm.general_plugins and calls it in every process. It puts a name of ours before each of
vLLM's backends: with the options all of them are crumb's, whichever vLLM would take on this device, and without them vLLM's own
(backend.py).
"""


def register():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for backend in AttentionBackendEnum:
        if backend.value == "":  # names that have no class
            continue
        register_backend(backend, f"crumb_kv.vllm.backend.{backend.name}")

"""The KV pool, and what SGLang's hooks do: they size it and name its class. Token i of the pool is row i % 64 of page i // 64; page 0
belongs to nobody, as in SGLang's own pools."""

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from ..blocks import PAGE
from .served import served_by


class CrumbPool(MHATokenToKVPool):
    """uint8 [pages, block_bytes] a layer. There is a class of it for each model, with its Served."""

    served = None

    def _create_buffers(self):
        pages = self.size // PAGE + 1
        numbers = range(self.start_layer, self.start_layer + self.layer_num)
        self.coded = {number: torch.zeros(pages, self.served.coders[number].block_bytes, dtype=torch.uint8) for number in numbers}
        self.k_buffer, self.v_buffer = list(self.coded.values()), []
        self.served.take_windows()
        self.served.say_capacity(pages - 1)

    def get_kv_size_bytes(self):
        return sum(pages.numel() for pages in self.coded.values())


def _refuser(name):
    def refuse(self, *args, **keywords):
        raise RuntimeError(f"crumb_kv: SGLang asks its KV pool for {name}, but a page of codes has no rows of K and V. Leave out the "
                           "option that wants this, or use another --attention-backend")
    return refuse


for _name in ("get_key_buffer", "get_value_buffer", "get_kv_buffer", "set_kv_buffer", "set_kv_buffer_prefix_valid", "move_kv_cache",
              "get_cpu_copy", "load_cpu_copy", "get_contiguous_buf_infos", "get_device_pool_infos"):
    setattr(CrumbPool, _name, _refuser(_name))


# Hooks: before configure(), and around the others.

def begin(configurator, **keywords):
    served_by(configurator)


def without_windows(original, configurator, pre_model_load_memory):
    available, served = original(configurator, pre_model_load_memory), served_by(configurator)
    if served is None:
        return available
    served.check_windows(available, "Type: --max-running-requests and a smaller number, or give the cache more memory with "
                                    "--mem-fraction-static")
    return available - served.windows_bytes


def pool_class(original, configurator, *, kind, default):
    served = served_by(configurator)
    if served is None or kind != "mha":
        return original(configurator, kind=kind, default=default)
    return type("CrumbPool", (CrumbPool,), {"served": served})


def bytes_of_a_token(original, sizes, configurator, num_layers):
    served = served_by(configurator)
    return original(sizes, configurator, num_layers) if served is None else -(-served.block_bytes // PAGE)

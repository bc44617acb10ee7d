"""The attention backend. K and V of a step come with the queries: a layer stores, encodes and attends at once."""

import numpy as np
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ..blocks import PAGE
from ..serving import Refused
from .pool import CrumbPool


class CrumbBackend(AttentionBackend):
    def __init__(self, runner):
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, CrumbPool):
            raise Refused("crumb_kv: SGLang has made its own KV pool, so the hooks of crumb were not applied. Look for 'Failed to apply "
                          "hooks' above, and see that SGLANG_PLUGINS, if it is set, names crumb_kv")
        self.served, self.coded = pool.served, pool.coded
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.work, self.left = [], set()  # of the step; layers that it has not seen yet

    def init_forward_metadata(self, forward_batch):
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if not (mode.is_decode() or mode.is_extend_or_draft_extend_or_mixed()):
            raise Refused(f"crumb_kv.sglang does not support steps of the kind {mode.name}")
        if self.left:
            raise RuntimeError(f"crumb_kv: SGLang prepares a step after one that {len(self.left)} layers have not seen")
        lengths = forward_batch.seq_lens_cpu.tolist()
        counts = [1] * len(lengths) if mode.is_decode() else list(forward_batch.extend_seq_lens_cpu)
        first_rows = self.req_to_token[forward_batch.req_pool_indices.long(), : max(lengths) : PAGE].numpy()
        self.work, self.left = self.served.work(np.asarray(first_rows) // PAGE, lengths, counts), set(self.coded)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **others):
        given = [name for name, value in others.items() if value is not None]
        if k is None or v is None or not save_kv_cache or given:
            raise Refused("crumb_kv.sglang cannot serve this model: its attention "
                          f"{'has ' + ', '.join(given) if given else 'reads the K and V of another layer'}")
        self.left.discard(layer.layer_id)
        heads = lambda x, n: x.view(len(x), n, -1)
        out = self.served.attend(layer.layer_id, self.work, heads(q, layer.tp_q_head_num), heads(k, layer.tp_k_head_num),
                                 heads(v, layer.tp_v_head_num), self.coded[layer.layer_id])
        return out.view(len(q), -1).to(q.dtype, copy=True)

    forward_decode = forward_extend

    def support_triton(self):
        return False

"""The model that a worker process serves: its layers, the slots of exact rows, and what a step does in each layer."""

import pathlib
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import safe_open
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from .. import models
from ..blocks import PAGE, Rules, tiles
from ..layer import Shape, make_layers
from .heads import heads_of_rank
from .options import Refused, options_of
from .windows import Windows, slots_for

logger = init_logger("vllm.crumb_kv")  # as a child of vLLM's, so that it is shown
MIB = 1 << 20

_served = None  # of the engine of this process


def served_by(vllm_config):
    global _served
    if _served is None or _served.vllm_config() is not vllm_config:
        _served = None  # its memory goes before that of the next is taken
        _served = Served(vllm_config)
    return _served


def _refuse_what_is_not_supported(config):
    parallel = config.parallel_config
    for what, there, remedy in (
        (f"the device {config.device_config.device_type}: it has run on CPUs only", config.device_config.device_type != "cpu",
         "Leave the crumb options out"),
        ("speculative decoding", config.speculative_config is not None, "Leave --speculative-config out"),
        ("KV connectors, which know nothing of its exact rows", config.kv_transfer_config is not None,
         "Leave --kv-transfer-config out"),
        ("context parallelism", getattr(parallel, "decode_context_parallel_size", 1) > 1
         or getattr(parallel, "prefill_context_parallel_size", 1) > 1, "Use --tensor-parallel-size"),
        ("dual batch overlap", getattr(parallel, "enable_dbo", False), "Leave --enable-dbo out"),
        (f"blocks of {config.cache_config.block_size} tokens", config.cache_config.block_size % PAGE, f"Type: --block-size {PAGE}"),
    ):
        if there:
            raise Refused(f"crumb_kv.vllm does not support {what}. {remedy}")


@dataclass(frozen=True)
class _Work:
    """A Piece as tensors."""

    tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    saved: torch.Tensor
    jobs: torch.Tensor
    rows: torch.Tensor
    coded: torch.Tensor
    exact: torch.Tensor
    sink: int


def _work_of(piece):
    tensor = lambda array: torch.from_numpy(np.ascontiguousarray(array, np.int32))
    return _Work(torch.from_numpy(piece.tokens.astype(np.int64)), tensor(piece.slots), tensor(piece.positions), tensor(piece.saved),
                 tensor(piece.jobs), tensor(tiles(piece.rows, piece.tokens)), tensor(piece.coded), tensor(piece.exact), piece.sink)


class Served:
    def __init__(self, vllm_config):
        self.vllm_config = weakref.ref(vllm_config)
        self.options = options_of(vllm_config)
        _refuse_what_is_not_supported(vllm_config)
        self.rules = Rules(self.options.sink, self.options.recent)
        self.attentions = {extract_layer_index(name): layer
                           for name, layer in vllm_config.compilation_config.static_forward_context.items()
                           if hasattr(layer, "get_kv_cache_spec")}
        shapes = self._shapes(vllm_config)
        whole = make_layers(self.options.recipe, shapes, self.options.artefact)
        self._check_artefact(vllm_config, shapes)
        self.order = models.channel_order(self._config(vllm_config), shapes[0].dim_k)
        rank, size = get_tensor_model_parallel_rank(), vllm_config.parallel_config.tensor_parallel_size
        first, n = heads_of_rank(shapes[0].n_head_kv, rank, size)
        self.coders = {number: whole[number].slice(first, n, shapes[0].n_head // size // n) for number in self.attentions}
        self._take_windows(vllm_config)
        self.counts = torch.zeros(2, dtype=torch.int32)
        self.no_workspace = torch.zeros(0, dtype=torch.uint8)
        self._step, self._work, self._said = 0, [], set()
        self._say_recipe(size, rank)

    @staticmethod
    def _config(vllm_config):
        return vllm_config.model_config.hf_text_config

    def _refuse(self, why, remedy="Leave the crumb options out"):
        raise Refused(f"crumb_kv.vllm cannot serve this model: {why}. {remedy}")

    def find(self, impl):
        """Number and vLLM's layer of an implementation."""
        return next((number, layer) for number, layer in self.attentions.items() if getattr(layer, "impl", None) is impl)

    def _shapes(self, vllm_config):
        """Of all layers of the model, on whatever machine they are: `planes` spends its budget over all of them."""
        model, config = vllm_config.model_config, self._config(vllm_config)
        kinds = {(type(layer.impl).__name__, layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v, layer.impl.scale,
                  layer.impl.softcap) if hasattr(getattr(layer, "impl", None), "softcap") else type(layer).__name__
                 for layer in self.attentions.values()}
        if len(kinds) != 1 or not isinstance(kind := kinds.pop(), tuple):
            self._refuse("its layers are not all of one kind of attention")
        _, _, _, dim_k, dim_v, scale, softcap = kind
        n_head, n_head_kv = config.num_attention_heads, model.get_total_num_kv_heads()
        return [Shape(i, n_head, n_head_kv, dim_k, dim_v, scale, softcap) for i in range(config.num_hidden_layers)]

    def _check_artefact(self, vllm_config, shapes):
        config = self._config(vllm_config)
        if self.options.artefact is None:
            if config.model_type.startswith("qwen2") or getattr(config, "attention_bias", False):
                logger.warning("crumb: the keys of this model have a bias, which '%s' spends its codes on: expect nonsense. Take a recipe "
                               "with an artefact, which knows their mean", self.options.recipe)
            return
        folder = pathlib.Path(vllm_config.model_config.model)
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        weights = (lambda: _weights(files, getattr(config, "tie_word_embeddings", False))) if files else None
        if why := models.why_not_this_artefact(self.options.artefact, config, shapes, weights):
            self._refuse(*why)

    def _take_windows(self, vllm_config):
        """The memory of the exact rows, out of that which the user gave to the cache."""
        sequences = vllm_config.scheduler_config.max_num_seqs
        slots = slots_for(self.rules, sequences + self.options.spare_windows, vllm_config.model_config.max_model_len)
        self.windows_bytes = slots * sum(coder.exact_block_bytes for coder in self.coders.values())
        cache = vllm_config.cache_config
        if cache.kv_cache_memory_bytes is not None:
            self._check_windows(sequences, cache.kv_cache_memory_bytes)
            cache.kv_cache_memory_bytes -= self.windows_bytes
        self.windows = Windows(self.rules, slots)
        self.exact = {number: torch.zeros(slots, coder.exact_block_bytes, dtype=torch.uint8)
                      for number, coder in self.coders.items()}

    def _check_windows(self, sequences, memory):
        if 2 * self.windows_bytes > memory:
            raise Refused(f"crumb_kv: the BF16 windows of {sequences} sequences and {self.options.spare_windows} spare ones take "
                          f"{self.windows_bytes // MIB} MiB of {memory // MIB} MiB of cache, more than half. Type: --max-num-seqs and a "
                          "smaller number, or give the cache more memory with --kv-cache-memory-bytes")

    @property
    def _bytes(self):
        """Of a block in all layers, coded and in BF16."""
        return [sum(getattr(coder, name) for coder in self.coders.values()) for name in ("block_bytes", "exact_block_bytes")]

    def _say_recipe(self, size, rank):
        coded, exact = self._bytes
        options, pages = self.options, sorted({coder.block_bytes for coder in self.coders.values()})
        source = "" if options.artefact is None else f", artefact {options.artefact} of {models.artefact_made_for(options.artefact)['model.name']}"
        each = f"{pages[0]} bytes" if len(pages) == 1 else f"{pages[0]} to {pages[-1]} bytes, each layer its own and none padded"
        logger.info("crumb: KV cache in %s%s: %.4g bits an element in %d layers (a block of 64 tokens: %s), %.2f times smaller than BF16; "
                    "first %d and last %d tokens of a sequence BF16%s", options.recipe, source, 16 * coded / exact, len(self.coders), each,
                    exact / coded, options.sink, options.recent, f"; rank {rank} of {size}" if size > 1 else "")

    def say_capacity(self):
        """Once vLLM has divided its memory into blocks."""
        cache, (coded, exact) = self.vllm_config().cache_config, self._bytes
        if "capacity" in self._said or not cache.num_gpu_blocks:
            return
        self._said.add("capacity")
        n_pages = cache.num_gpu_blocks * cache.block_size // PAGE
        memory = n_pages * coded + self.windows_bytes
        self._check_windows(self.vllm_config().scheduler_config.max_num_seqs, memory)
        logger.info("crumb: %d tokens in %d blocks (%d MiB) and %d MiB of BF16 windows; BF16 has room for %d tokens in that memory, "
                    "%.2f times fewer", n_pages * PAGE, cache.num_gpu_blocks, n_pages * coded // MIB, self.windows_bytes // MIB,
                    memory // exact * PAGE, n_pages / (memory // exact))

    # A step.

    def step(self, number, common):
        """What a step does. Every builder asks once a step, with the number of steps that it has seen."""
        if number == self._step:
            return self._work
        if number != self._step + 1:
            raise RuntimeError(f"crumb_kv: vLLM prepares step {number} after step {self._step}")
        self._step = number
        starts, lengths = common.query_start_loc_cpu.numpy(), common.seq_lens.numpy()[: common.num_reqs]
        counts = np.diff(starts)[: len(lengths)]
        pieces = self.windows.step(common.block_table_tensor.numpy(), lengths.tolist(), counts.tolist())
        self._work = [_work_of(piece) for piece in pieces]
        if self.windows.aged_early_tokens and "aged" not in self._said:
            self._said.add("aged")
            logger.warning("crumb: a prefix was found whose window is gone: its newest tokens are read through their codes. Raise "
                           "spare_windows (it is %d) if answers must not depend on what is in the cache", self.options.spare_windows)
        return self._work

    def attend(self, number, work, query, key, value, kv_cache, output):
        coder, exact, ops = self.coders[number], self.exact[number], torch.ops.crumb
        handle = coder.handle
        coded = kv_cache.as_strided((len(kv_cache), coder.block_bytes), (kv_cache.stride(0), 1))
        if self.order is not None:
            query, key = query[..., self.order], key[..., self.order]
        q, k, v = query.float(), key.to(torch.bfloat16).contiguous(), value.to(torch.bfloat16).contiguous()
        out = torch.zeros(len(q), q.shape[1], v.shape[2])
        for piece in work:
            if len(piece.saved) > 0:
                ops.encode(handle, piece.saved, exact, coded, self.counts)
            ops.store(handle, k[piece.tokens], v[piece.tokens], piece.slots, piece.positions, exact)
            if len(piece.jobs) > 0:
                ops.encode(handle, piece.jobs, exact, coded, self.counts)
            step = (piece.rows, piece.coded, piece.exact, piece.sink, 1)
            ops.plan(handle, *step, self.no_workspace)
            ops.attend(handle, q, *step, coded, exact, None, None, self.no_workspace, out)
        return output.copy_(out.view_as(output))


def _weights(files, tied):
    """(name, tensor) as transformers names them."""
    for path in files:
        with safe_open(path, framework="pt") as f:
            for name in f.keys():
                yield name, f.get_tensor(name)
                if tied and name == "model.embed_tokens.weight":
                    yield "lm_head.weight", f.get_tensor(name)

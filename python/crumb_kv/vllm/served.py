"""The model that a vLLM worker serves."""

import pathlib
import weakref

import numpy as np
import torch
from vllm import envs
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from .. import library, models, serving
from ..blocks import PAGE
from ..layer import Shape
from ..serving import refuse_if_any, refuse_model
from .options import options_of

ENGINE = "vllm"
logger = init_logger("vllm.crumb_kv")  # as a child of vLLM's, so that it is shown

_served = None  # of the engine of this process


def served_by(vllm_config):
    global _served
    if _served is None or _served.vllm_config() is not vllm_config:
        _served = None  # its memory goes before that of the next is taken
        _served = Served(vllm_config)
    return _served


def _refuse_what_is_not_supported(config):
    parallel, device = config.parallel_config, config.device_config.device_type
    refuse_if_any(ENGINE, (
        (f"the device {device}: it runs on CPUs and on CUDA", device not in ("cpu", "cuda"), "Leave the crumb options out"),
        ("GPUs: this build is for CPUs alone", device == "cuda" and not library.has_cuda(), "Type: pip install --no-build-isolation "
         "--config-settings=cmake.define.CRUMB_CUDA=ON ./python"),
        (f"--attention-backend {config.attention_config.backend and config.attention_config.backend.name} beside a recipe",
         config.attention_config.backend not in (None, AttentionBackendEnum.CUSTOM), "Leave it out"),
        ("sleeping engines, which forget its tables", getattr(config.model_config, "enable_sleep_mode", False),
         "Leave --enable-sleep-mode out"),
        ("speculative decoding", config.speculative_config is not None, "Leave --speculative-config out"),
        ("KV connectors, which know nothing of its exact rows", config.kv_transfer_config is not None,
         "Leave --kv-transfer-config out"),
        ("context parallelism", getattr(parallel, "decode_context_parallel_size", 1) > 1
         or getattr(parallel, "prefill_context_parallel_size", 1) > 1, "Use --tensor-parallel-size"),
        ("attention that is not causal", getattr(config.attention_config, "use_non_causal", False), "Leave the crumb options out"),
        ("batch invariance (VLLM_BATCH_INVARIANT)", envs.VLLM_BATCH_INVARIANT, "Unset it"),
        ("dual batch overlap", getattr(parallel, "enable_dbo", False), "Leave --enable-dbo out"),
        (f"blocks of {config.cache_config.block_size} tokens", config.cache_config.block_size % PAGE, f"Type: --block-size {PAGE}"),
    ))


def _device_of(config):
    kind = config.device_config.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _lengths_of(common):
    """Tokens of each sequence, on the host. Without speculative decoding the upper bound is what they are."""
    lengths = common.seq_lens if common.seq_lens.device.type == "cpu" else common.seq_lens_cpu_upper_bound
    return lengths.numpy()[: common.num_reqs]


class Served(serving.Served):
    def __init__(self, vllm_config):
        self.vllm_config = weakref.ref(vllm_config)
        options = options_of(vllm_config)
        _refuse_what_is_not_supported(vllm_config)
        self.attentions = {extract_layer_index(name): layer
                           for name, layer in vllm_config.compilation_config.static_forward_context.items()
                           if hasattr(layer, "get_kv_cache_spec")}
        model, config = vllm_config.model_config, vllm_config.model_config.hf_text_config
        folder = pathlib.Path(model.model)
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        weights = (lambda: models.weights_of(files, getattr(config, "tie_word_embeddings", False))) if files else None
        super().__init__(ENGINE, logger, options, self._shapes(model, config), self.attentions, config, weights,
                         get_tensor_model_parallel_rank(), vllm_config.parallel_config.tensor_parallel_size,
                         vllm_config.scheduler_config.max_num_seqs, model.max_model_len, _device_of(vllm_config))
        cache = vllm_config.cache_config
        if cache.kv_cache_memory_bytes is not None:  # windows are taken out of what the user gave to the cache
            self._check_windows(cache.kv_cache_memory_bytes)
            cache.kv_cache_memory_bytes -= self.windows_bytes
        self.take_windows()
        self.steps, self._work, self._capacity_said = 0, [], False

    def find(self, impl):
        """Number and vLLM's layer of an implementation."""
        return next((number, layer) for number, layer in self.attentions.items() if getattr(layer, "impl", None) is impl)

    def _shapes(self, model, config):
        if others := sorted({type(layer).__name__ for layer in self.attentions.values() if type(layer) is not Attention}):
            refuse_model(ENGINE, f"it has layers of kind {', '.join(others)}, and only full attention is coded here")
        if getattr(model, "is_mm_prefix_lm", False):
            refuse_model(ENGINE, "its images are seen both ways, and attention here is causal")
        kinds = {(type(layer.impl).__name__, layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v, layer.impl.scale,
                  layer.impl.softcap) if hasattr(getattr(layer, "impl", None), "softcap") else type(layer).__name__
                 for layer in self.attentions.values()}
        if len(kinds) != 1 or not isinstance(kind := kinds.pop(), tuple):
            refuse_model(ENGINE, "its layers are not all of one kind of attention")
        _, _, _, dim_k, dim_v, scale, softcap = kind
        n_head, n_head_kv = config.num_attention_heads, model.get_total_num_kv_heads()
        return [Shape(i, n_head, n_head_kv, dim_k, dim_v, scale, softcap) for i in range(config.num_hidden_layers)]

    def _check_windows(self, memory):
        self.check_windows(memory, "Type: --max-num-seqs and a smaller number, or give the cache more memory with --kv-cache-memory-bytes")

    def say_capacity_once(self):
        """Once vLLM has divided its memory into blocks."""
        cache = self.vllm_config().cache_config
        if not self._capacity_said and cache.num_gpu_blocks:
            self._capacity_said = True
            self._check_windows(self.say_capacity(cache.num_gpu_blocks * cache.block_size // PAGE))

    def step(self, number, common):
        """What a step does. Every builder asks once a step, with the number of steps that it has seen."""
        if number == self.steps:
            return self._work
        if number != self.steps + 1:
            raise RuntimeError(f"crumb_kv: vLLM prepares step {number} after step {self.steps}")
        self.steps = number
        lengths = _lengths_of(common)
        counts = np.diff(common.query_start_loc_cpu.numpy())[: len(lengths)]
        width = -(-int(lengths.max(initial=1)) // PAGE)
        tables = common.block_table_tensor[: len(lengths), :width].cpu().numpy()  # on a GPU this waits for the step before
        counts = np.where(tables[:, :1].any(1), counts, 0)  # block 0 is nobody's: vLLM tries out what a step takes
        self._work = self.work(tables, lengths.tolist(), counts.tolist())
        return self._work

    def attend_to(self, number, work, query, key, value, kv_cache, output):
        return output.copy_(self.attend(number, work, query, key, value, self._pool(number, kv_cache)).view_as(output))

    def pool_of(self, number):
        return self._pool(number, self.attentions[number].kv_cache)

    def _pool(self, number, kv_cache):
        return kv_cache.as_strided((len(kv_cache), self.coders[number].block_bytes), (kv_cache.stride(0), 1))

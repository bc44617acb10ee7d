"""The model that an SGLang scheduler serves."""

import logging
import pathlib
import weakref

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
from sglang.srt.runtime_context import (attention_backends, get_disagg, get_exec, get_memory, get_model, get_parallel,
                                        get_schedule, get_spec)

from .. import models, serving
from ..blocks import PAGE
from ..layer import Shape
from ..serving import refuse_if_any, refuse_model
from .options import BACKEND, TYPED, options_of

ENGINE = "sglang"
logger = logging.getLogger(__name__)

_served = weakref.WeakKeyDictionary()  # by model


def served_by(configurator):
    """The Served of a KVCacheConfigurator, or None: crumb is not asked for."""
    options, backends = options_of(get_model().json_model_override_args), set(attention_backends())
    if options is None and BACKEND not in backends:
        return None
    if options is None or backends != {BACKEND}:
        raise serving.Refused(f"crumb_kv: the attention backends are {', '.join(sorted(backends))} and the options of crumb are "
                              f"{'not there' if options is None else 'there'}: it takes both. Type: {TYPED}")
    if configurator.model not in _served:
        _refuse_what_is_not_supported(configurator)
        _served[configurator.model] = Served(configurator, options)
    return _served[configurator.model]


def _refuse_what_is_not_supported(configurator):
    memory, parallel, schedule, leave = get_memory(), get_parallel(), get_schedule(), "Leave {} out"
    refuse_if_any(ENGINE, (
        (f"the device {configurator.device}: it has run on CPUs only", configurator.device != "cpu", "Use another --attention-backend"),
        (f"pages of {configurator.page_size} tokens", configurator.page_size != PAGE, f"Type: --page-size {PAGE}"),
        (f"a cache of {configurator.kv_cache_dtype_str}, for a recipe is its format",
         configurator.kv_cache_dtype_str not in ("auto", "bf16", "bfloat16"), leave.format("--kv-cache-dtype")),
        ("an open number of requests, for each takes a BF16 window", schedule.max_running_requests is None,
         "Type: --max-running-requests 16"),
        ("CUDA graphs", not cuda_graph_fully_disabled(), "Type: --disable-cuda-graph"),
        ("speculative decoding", get_spec().speculative_algorithm is not None, leave.format("--speculative-algorithm")),
        ("prefill and decode in different processes", get_disagg().disaggregation_mode != "null", leave.format("--disaggregation-mode")),
        ("caches in other memory, which know nothing of its exact rows", memory.enable_hierarchical_cache or memory.enable_lmcache
         or memory.enable_flexkv or memory.enable_unified_cache_external_linker or memory.enable_hisparse,
         leave.format("--enable-hierarchical-cache, --enable-lmcache, --enable-flexkv, --enable-hisparse")),
        ("other layouts of the pool", memory.enable_unified_memory or memory.enable_page_major_kv_layout
         or parallel.enable_kv_cache_sharding or schedule.prefill_only_disable_kv_cache,
         leave.format("--enable-unified-memory and its like")),
        ("attention that is divided by requests or context", parallel.enable_dp_attention or parallel.dcp_size > 1
         or parallel.attn_cp_size > 1, "Use --tensor-parallel-size"),
        ("two batches at once", get_exec().overlap.enable_two_batch_overlap or get_disagg().enable_pdmux,
         leave.format("--enable-two-batch-overlap")),
    ))


class Served(serving.Served):
    def __init__(self, configurator, options):
        model, parallel = configurator.model_config, get_parallel()
        config, folder = model.hf_text_config, pathlib.Path(get_model().model_path)
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        weights = (lambda: models.weights_of(files, getattr(config, "tie_word_embeddings", False))) if files else None
        layers = {m.layer_id: m for m in configurator.model.modules() if isinstance(m, RadixAttention)}
        super().__init__(ENGINE, logger, options, self._shapes(configurator, config, layers), sorted(layers), config, weights,
                         parallel.attn_tp_rank, parallel.attn_tp_size, get_schedule().max_running_requests, model.context_len)

    @staticmethod
    def _shapes(configurator, config, layers):
        if configurator.use_mla_backend or configurator.is_hybrid_swa or configurator.mambaish_config or not layers:
            refuse_model(ENGINE, "its cache is not plainly K and V of all tokens in every layer")
        for layer in layers.values():
            for what, there in (("a sliding window", layer.sliding_window_size > 0), ("another sequence", layer.is_cross_attention),
                                ("no causality", layer.attn_type != AttentionType.DECODER), ("chunks", layer.use_irope),
                                ("scales of its logits by position", layer.xai_temperature_len > 0),
                                (f"a cap '{layer.logit_capping_method}'", layer.logit_cap > 0 and layer.logit_capping_method != "tanh")):
                if there:
                    refuse_model(ENGINE, f"its attention has {what}")
        kinds = {(m.qk_head_dim, m.v_head_dim, float(m.scaling), float(m.logit_cap)) for m in layers.values()}
        if len(kinds) != 1:
            refuse_model(ENGINE, "its layers are not all of one kind of attention")
        dim_k, dim_v, scale, softcap = kinds.pop()
        n_head, n_head_kv = configurator.model_config.num_attention_heads, configurator.model_config.get_total_num_kv_heads()
        return [Shape(i, n_head, n_head_kv, dim_k, dim_v, scale, softcap) for i in range(config.num_hidden_layers)]

"""The classes that vLLM asks for: the backend (what is static), the builder of metadata (once a step), the implementation (in each
layer). vLLM takes attention as it is given here: K and V of a step come with the queries, so forward() stores, encodes and
attends, and vLLM's own update of the cache has nothing to do. The same classes serve CPUs and CUDA."""

import functools
from dataclasses import replace

import torch
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout

from ..blocks import PAGE
from ..serving import Refused
from .options import options_of
from .served import served_by


def _refuse_second(first, second):
    """vLLM remembers which backend it took for as long as the process lives."""
    raise Refused(f"crumb_kv: this process has run an engine {first} crumb and cannot run one {second}: start another process")


class CrumbBackend(AttentionBackend):
    """vLLM asks for the page size of a layer without saying which: each layer has a class of its own, with its number."""

    forward_includes_kv_cache_update = True
    accept_output_buffer = True
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "bfloat16"]
    coder = None  # the Layer of libcrumb

    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return CrumbImpl

    @staticmethod
    def get_builder_cls():
        return CrumbBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [PAGE]

    @classmethod
    def supported_kv_cache_layouts(cls):
        return (KVCacheLayout.LBHNC,)  # the block of a layer is contiguous, its heads are pages

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def validate_configuration(cls, *arguments, **keywords):
        """Nothing is against it here: what is not supported is refused with the remedy where it is found."""
        return []

    @classmethod
    def customize_spec(cls, spec):
        """Bytes of a (head, token), of which a page has 64; what does not divide is added to the block as a whole."""
        if cls.coder is None:
            raise RuntimeError("crumb_kv: vLLM asks for the page size of a layer that it has not loaded")
        each, rest = divmod(cls.coder.block_bytes, PAGE * spec.num_kv_heads)
        if rest and spec.block_size != PAGE:
            raise Refused(f"crumb_kv: pages of {cls.coder.block_bytes // spec.num_kv_heads} bytes cannot be parts of a block of "
                          f"{spec.block_size} tokens. Type: --block-size {PAGE}")
        return replace(spec, dtype=torch.uint8, state_content_bytes=each, page_size_padded=cls.coder.block_bytes if rest else None)


@functools.cache
def _vllms_backend(name):
    """vLLM's own, for an engine without crumb."""
    own = resolve_obj_by_qualname(AttentionBackendEnum[name].value)

    def get_impl_cls():
        if _asked_for():
            _refuse_second("without", "with")
        return own.get_impl_cls()

    return type(name, (own,), {"get_impl_cls": staticmethod(get_impl_cls), "__module__": __name__})


def _asked_for():
    config = get_current_vllm_config_or_none()
    return config is not None and options_of(config) is not None


def __getattr__(name):
    """Each name of a backend of vLLM's."""
    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return CrumbBackend if _asked_for() or name == "CUSTOM" else _vllms_backend(name)


class CrumbBuilder(AttentionMetadataBuilder):
    """There is a builder for each page size; all of a step return the same. A step has as many parts as its sequences ask for, and its
    tables are made on the host. So attention runs between CUDA graphs, but if every sequence has one token: then it can be in one."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        stands = served_by(vllm_config).can_stand
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if stands else AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.served = served_by(vllm_config)
        self.steps = self.served.steps
        self.served.say_capacity_once()

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        self.steps += 1
        return self.served.step(self.steps, common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        """No step: what it is captured with is not read."""
        return self.served.standing(common_attn_metadata.num_reqs)


class CrumbImpl(AttentionImpl):
    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
                 kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
                 kv_sharing_target_layer_name=None, **others):
        self.vllm_config = get_current_vllm_config()
        if not options_of(self.vllm_config):
            _refuse_second("with", "without")
        for what, value in dict(others, ALiBi=alibi_slopes, sliding_window=sliding_window,
                                shared_KV=kv_sharing_target_layer_name).items():
            if value is not None and value is not False:
                raise Refused(f"crumb_kv.vllm cannot serve this model: its attention has {what.replace('_', ' ')}. Leave the crumb "
                              "options out, or use the crumb program, which serves sliding windows")
        if attn_type != AttentionType.DECODER:
            raise Refused(f"crumb_kv.vllm cannot serve this model: its attention is of the kind '{attn_type}'. Leave the crumb options out")
        if kv_cache_dtype not in CrumbBackend.supported_kv_cache_dtypes:
            raise Refused(f"crumb_kv: --kv-cache-dtype {kv_cache_dtype} and a recipe are two formats for one cache. Leave one of them out")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale, self.softcap = head_size, float(scale), float(logits_soft_cap or 0.0)
        self.kv_cache_dtype = kv_cache_dtype

    def process_weights_after_loading(self, act_dtype):
        self.served = served_by(self.vllm_config)
        self.number, attention = self.served.find(self)
        attention.attn_backend = type("CrumbBackend", (CrumbBackend,), {"coder": self.served.coders[self.number]})

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        if output_scale is not None or output_block_scale is not None:
            raise Refused("crumb_kv: the output of attention cannot be quantised: leave that fusion out")
        if attn_metadata is None:  # vLLM only wants to know what a step takes
            self.served.take_room(len(query), self.num_heads, value.shape[-1])
            return output.zero_()
        return self.served.attend_to(self.number, attn_metadata, query, key, value, kv_cache, output)

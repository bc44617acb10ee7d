"""The cache for transformers: model.generate(..., past_key_values=CrumbCache(model, "had2")).

A forward pass hands K and V of a layer to the cache (update) and then asks for attention. What attention reads depends on
positions alone (docs/design/position-rule.md), so a pass is cut into pieces of 512 tokens, and only one piece at a time has
exact blocks beside the windows: nothing but codes grows with the context. Padding is never stored: a row of a batch has the
positions that it would have alone.
"""

import copy
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from . import models
from .blocks import Rules, Sequences, tiles
from .layer import CHUNK, make_layers, multiprocessors

# The cache and mask interfaces of transformers change between releases: these are the ones that the tests have run on.
OLDEST, NEWEST = (5, 19), (5, 24)

PIECE = 512  # tokens

if not OLDEST <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) <= NEWEST:
    raise ImportError(
        f"CrumbCache works with transformers {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, and this is "
        f"{transformers.__version__}. Type: pip install 'transformers>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    )


@dataclass(frozen=True)
class Bytes:
    """Of the blocks that sequences hold now, all layers together."""

    coded: int
    exact: int  # sinks and recent windows
    bf16: int  # what a 16-bit cache of the same tokens takes

    @property
    def total(self):
        return self.coded + self.exact


class CrumbCache(Cache):
    """A KV cache in the pages of a recipe. It switches the model to the attention "crumb", which reads these pages.

    model: a loaded transformers model. recipe: as --kv of the crumb program, "had2" or "planes:1.5"; recipes that no kernel
    reads in place are refused. artefact: file of a calibration, for recipes that need one. sink, recent: tokens at the start
    and at the end of a sequence that stay BF16. Raises ValueError that says what is not supported, why, and what to type.

    One cache serves one batch at a time; reset() makes it empty. `counts` are elements that were not finite and rows beyond
    the range of the side information, `aged_early_tokens` those that a crop left readable through their codes only.
    """

    def __init__(self, model, recipe, *, artefact=None, sink=64, recent=256):
        if not all(isinstance(n, int) and n >= 0 for n in (sink, recent)):
            raise ValueError(f"sink is {sink} and recent is {recent}: both are numbers of tokens")
        if not isinstance(recipe, str):
            raise ValueError(f"the recipe is {recipe!r}: give its name, like 'had2' or 'planes:1.5'")
        shapes = models.shapes_of(model)
        self.coders = make_layers(recipe, shapes, artefact)
        if artefact is not None:
            models.check_artefact(model, artefact, shapes)
        elif models.has_key_bias(model):
            warnings.warn(f"crumb_kv: the keys of {type(model).__name__} have a bias, which '{recipe}' spends its codes on: expect "
                          "nonsense. Take a recipe with an artefact, which knows their mean: crumb_kv.calibrate(model, tokenizer, texts, FILE)")
        self.recipe, self.artefact = recipe, artefact
        self.rules = Rules(sink, recent)
        self.config = model.config.get_text_config(decoder=True)
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) == 1:  # what its kernels lack is said now, and with several devices in the first pass
            for coder in self.coders:
                coder.tables(*devices)
        self._order = models.channel_order(self.config, shapes[0].dim_k)
        self._counts = {}
        super().__init__(layers=[_Layer(self, i) for i in range(len(shapes))])
        self.reset()
        model.set_attn_implementation("crumb")

    def __repr__(self):
        bits = sum(coder.block_bytes for coder in self.coders) * 16 / sum(coder.exact_block_bytes for coder in self.coders)
        source = f", artefact {self.artefact}" if self.artefact is not None else ""
        return (f"CrumbCache({self.recipe}: {bits:.4g} bits an element in {len(self.coders)} layers, first {self.rules.sink} and "
                f"last {self.rules.recent} tokens BF16{source}; {len(self.sequences)} x {self.columns} tokens)")

    def __deepcopy__(self, memo):  # a copy serves the same model
        memo[id(self.config)] = self.config
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    @property
    def aged_early_tokens(self):
        return self.sequences.aged_early_tokens

    @property
    def counts(self):
        totals = sum((counts.cpu() for counts in self._counts.values()), torch.zeros(2, dtype=torch.int32)).tolist()
        return {"nonfinite": totals[0], "saturated": totals[1]}

    def bytes(self):
        tokens = sum(extent.length for extent in self.sequences.extents)
        return Bytes(
            coded=self.sequences.coded_pool.in_use * sum(coder.block_bytes for coder in self.coders),
            exact=self.sequences.exact_pool.in_use * sum(coder.exact_block_bytes for coder in self.coders),
            bf16=tokens * sum(coder.exact_block_bytes for coder in self.coders) // 64,
        )

    # What transformers calls. A column is a place in the batch's input: a token in some sequences, padding in others.

    def reset(self):
        self.columns = 0
        self.sequences = Sequences(self.rules)
        self._real = None  # bool [sequences, columns]; None: there was no padding
        self._pass = None  # the forward pass that is under way
        self._handed = None  # what update() was given and attention has not taken yet
        self._workspaces = {}
        for layer in self.layers:
            layer.coded = layer.exact = None

    def crop(self, tokens_to_remove):
        """-n removes the last n columns; a positive number is the length that remains, as older callers say it."""
        self._require_whole()
        n = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.columns - tokens_to_remove)
        n = min(n, self.columns)
        for i, extent in enumerate(self.sequences.extents):
            removed = n if self._real is None else int(self._real[i, self.columns - n :].sum())
            self.sequences.crop(i, extent.length - removed)
        self.columns -= n
        self._real = None if self._real is None else self._real[:, : self.columns]

    def reorder_cache(self, beam_idx):
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats):
        self.batch_select_indices(torch.arange(len(self.sequences)).repeat_interleave(repeats))

    def batch_select_indices(self, indices):
        self._require_whole()
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        indices = indices.tolist()
        self.sequences.select(indices)
        self._real = None if self._real is None else self._real[indices]

    def _require_whole(self):
        if self._pass is not None or self._handed is not None:
            raise RuntimeError("crumb_kv: a forward pass stopped between two layers, so they hold different tokens. Call "
                               "cache.reset() and give the whole text again")

    # A forward pass.

    def _begin(self, batch, length, mask):
        if batch != len(self.sequences) and len(self.sequences) > 0:
            raise ValueError(f"crumb_kv: the cache holds {len(self.sequences)} sequences and the input has {batch}. "
                             "Call cache.reset() before another batch")
        real = np.ones((batch, length), bool)
        if mask is not None:
            real = self._check_mask(mask.cpu().numpy().astype(bool), batch, length)
        self.sequences.add(batch - len(self.sequences))
        if self._real is not None or not real.all():
            before = np.ones((batch, self.columns), bool) if self._real is None else self._real
            self._real = np.concatenate([before, real], 1)
        pieces = []
        for begin in range(0, length, PIECE):
            sequence, column = np.nonzero(real[:, begin : begin + PIECE])
            if len(sequence) > 0:
                work = self.sequences.begin(np.bincount(sequence, minlength=batch).tolist())
                pieces.append(_Piece(work, sequence * length + begin + column, batch * length))
        self.columns += length
        return _Pass(batch, length, pieces, set())

    def _check_mask(self, mask, batch, length):
        if mask.shape != (batch, self.columns + length):
            raise ValueError(f"crumb_kv: the attention mask is {list(mask.shape)}, and the cache and the input together are "
                             f"{[batch, self.columns + length]}: pass a mask of all tokens so far, or none")
        past = mask[:, : self.columns]
        if not (past.all() if self._real is None else np.array_equal(past, self._real)):
            raise ValueError("crumb_kv: the attention mask hides tokens that the cache has stored, or shows padding that it has "
                             "not. Call cache.reset() and give the whole text with its new mask")
        return mask[:, self.columns :]

    def attend(self, index, query, key, value, mask):
        """query [B, heads, T, D], key and value [B, KV heads, T, D] of new tokens; returns [B, T, heads, D_v]."""
        batch, n_head, length, _ = query.shape
        if self._pass is None:
            self._pass = self._begin(batch, length, mask)
        if index in self._pass.done or (batch, length) != (self._pass.batch, self._pass.length):
            self._handed = None
            self._require_whole()
        if self._order is not None:
            self._order = self._order.to(key.device)
            query, key = query[..., self._order], key[..., self._order]
        rows = lambda x, dtype: x.transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[3]).to(dtype).contiguous()
        q, k, v = rows(query, torch.float32), rows(key, torch.bfloat16), rows(value, torch.bfloat16)
        out = torch.zeros((batch * length, n_head, value.shape[3]), dtype=torch.float32, device=query.device)
        layer, coder = self.layers[index], self.coders[index]
        layer.make_room(self.sequences, coder, key.device)
        for piece in self._pass.pieces:
            self._run(piece, layer, coder, q, k, v, out)
        self._pass.done.add(index)
        if len(self._pass.done) == len(self.layers):
            self._pass = None
        return out.view(batch, length, n_head, -1).to(query.dtype)

    def _run(self, piece, layer, coder, q, k, v, out):
        device, handle, ops = q.device, coder.handle, torch.ops.crumb
        on, tables = piece.on(device, CHUNK if coder.takes_chunks(device) else None), coder.tables(device)
        if len(piece.copy_to) > 0:
            ops.copy_blocks(layer.exact, piece.copy_from, piece.copy_to)
        if on.tokens is not None:
            k, v = k[on.tokens], v[on.tokens]
        ops.store(handle, k, v, on.blocks, on.slots, layer.exact)
        if len(on.jobs) > 0:
            counts = self._counts.setdefault(device, torch.zeros(2, dtype=torch.int32, device=device))
            ops.encode(handle, on.jobs, layer.exact, layer.coded, counts, tables)
        step = (on.rows, on.coded_ids, on.exact_ids, self.rules.sink, multiprocessors(device))
        workspace = self._workspace(coder.workspace_bytes(device, *on.rows.shape[:2], on.coded_ids.shape[1]), device)
        ops.plan(handle, *step, workspace)
        ops.attend(handle, q, *step, layer.coded, layer.exact, tables, None, workspace, out)

    def _workspace(self, size, device):
        if device not in self._workspaces or len(self._workspaces[device]) < size:
            self._workspaces[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._workspaces[device]


class _Layer(CacheLayerMixin):
    """The blocks of one layer; `keys` and `values` stay None, for there is no dense copy."""

    is_sliding, is_croppable, is_compileable = False, True, False

    def __init__(self, cache, index):
        super().__init__()
        self.cache, self.index = cache, index
        self.coded = self.exact = None  # uint8 [blocks, bytes of a block]
        self.is_initialized = True

    def make_room(self, sequences, coder, device):
        """Slabs for all blocks of the pools, with what they hold."""
        self.coded = _grown(self.coded, sequences.coded_pool.capacity, coder.block_bytes, device)
        self.exact = _grown(self.exact, sequences.exact_pool.capacity, coder.exact_block_bytes, device)

    def update(self, key_states, value_states, *args, **kwargs):
        cache = self.cache
        if cache.config._attn_implementation != "crumb":
            raise ValueError(f"crumb_kv: the model's attention is '{cache.config._attn_implementation}', which cannot read a "
                             "CrumbCache. Type: model.set_attn_implementation('crumb')")
        if cache._handed is not None:
            cache._require_whole()
        cache._handed = self
        key_states.crumb_layer = self  # attention gets this very tensor, and not the cache
        return key_states, value_states

    def lazy_initialization(self, key_states, value_states):
        pass

    def get_seq_length(self):
        return self.cache.columns

    def get_max_length(self):
        return -1

    def get_mask_sizes(self, query_length):
        return self.cache.columns + query_length, 0


def _grown(slab, blocks, block_bytes, device):
    if slab is not None and len(slab) >= blocks:
        return slab
    larger = torch.empty((blocks, block_bytes), dtype=torch.uint8, device=device)
    if slab is not None:
        larger[: len(slab)] = slab
    return larger


@dataclass
class _Pass:
    batch: int
    length: int
    pieces: list
    done: set  # layers


@dataclass(frozen=True)
class _OnDevice:
    tokens: torch.Tensor | None  # rows of K and V; None: all of them
    blocks: torch.Tensor
    slots: torch.Tensor
    jobs: torch.Tensor
    rows: torch.Tensor
    coded_ids: torch.Tensor
    exact_ids: torch.Tensor


class _Piece:
    """Work of all layers, as tensors. `tokens`: which rows of the pass, by sequence, ascending."""

    def __init__(self, work, tokens, n_tokens):
        self.copy_from, self.copy_to = (torch.from_numpy(ids.copy()) for ids in work.copies.T)
        self._work, self._tokens, self._all = work, tokens, len(tokens) == n_tokens
        self._devices = {}

    def on(self, device, chunk):
        """chunk: as tiles() takes it."""
        if device not in self._devices:
            work = self._work
            tensor = lambda array: torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)
            self._devices[device] = _OnDevice(
                tokens=None if self._all else torch.from_numpy(self._tokens.astype(np.int64)).to(device),
                blocks=tensor(work.blocks),
                slots=tensor(work.rows[:, 1]),
                jobs=tensor(work.jobs),
                rows=tensor(tiles(work.rows, self._tokens, chunk)),
                coded_ids=tensor(work.coded),
                exact_ids=tensor(work.exact),
            )
        return self._devices[device]


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, **options):
    """The attention "crumb" of transformers."""
    layer = getattr(key, "crumb_layer", None)
    if layer is None:
        raise ValueError("crumb_kv: the attention 'crumb' reads a CrumbCache, and there is none. Pass "
                         "past_key_values=CrumbCache(model, ...), or type: model.set_attn_implementation('sdpa')")
    cache, shape = layer.cache, layer.cache.coders[layer.index].shape
    cache._handed = None
    if module.config is not cache.config:
        raise ValueError("crumb_kv: this CrumbCache was made for another model: make one for this model")
    if query.requires_grad and torch.is_grad_enabled():
        raise ValueError("crumb_kv: a coded cache has no gradient: call the model under torch.no_grad()")
    for name in ("position_bias", "s_aux", "sliding_window"):
        if options.get(name) is not None:
            models.refuse(module, f"its attention has {name}")
    if options.get("output_attentions"):
        raise ValueError("crumb_kv: attention weights are never there as a whole: leave output_attentions out")
    scaling = shape.dim_k**-0.5 if scaling is None else scaling
    if dropout or abs(scaling - shape.scale) > 1e-6 or abs((softcap or 0.0) - shape.softcap) > 1e-6:
        models.refuse(module, f"its attention has dropout {dropout}, scaling {scaling} and softcap {softcap}, where the cache was "
                              f"made for 0, {shape.scale} and {shape.softcap}")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError("crumb_kv: a mask of four dimensions cannot be read: pass attention_mask [batch, tokens], or none")
    return cache.attend(layer.index, query, key, value, attention_mask), None


def mask(batch_size, q_length, kv_length, mask_function=causal_mask_function, attention_mask=None, **options):
    """Padding is all that "crumb" wants to know; causality follows from positions."""
    if mask_function is not causal_mask_function:
        raise ValueError("crumb_kv: the model asks for a mask that is not plainly causal (images, packed texts, windows or blocks), "
                         "which 'crumb' cannot read. Type: model.set_attn_implementation('sdpa') and leave the CrumbCache out")
    return attention_mask


AttentionInterface.register("crumb", attention)
AttentionMaskInterface.register("crumb", mask)

"""calibrate(): what a model's attention sees while it reads texts becomes an artefact, as crumb calibrate makes one from a GGUF.

Sums, rotations and bases are the core's (docs/design/artefact.md). Here is what only the model's framework can do: hand over
Q, K, V and the output of attention, and the gradient metric, by autograd. Noise that is zero stands beside K and V where far
queries read them; what the loss's gradient says about it is what errors of the codes cost.
"""

import ctypes
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from . import library, models
from .blocks import Rules
from .cache import mask
from .layer import Shape
from .library import c

LEAST_TOKENS = 2000
SKIP = 64  # sinks: first tokens of a window, which stay exact in a cache
BLOCK = 1024  # queries whose logits are there together
CLIP = 3.0  # rows' gradients are cut to this many median lengths, and the sum scaled to the trace it had


def _mask(*sizes, mask_function=causal_mask_function, **options):
    """None for layers that are plainly causal; of a sliding window what transformers' "sdpa" would get."""
    make = mask if mask_function is causal_mask_function else AttentionMaskInterface()["sdpa"]
    return make(*sizes, mask_function=mask_function, **options)


@dataclass
class _Run:
    """One pass over the texts. Layers that have no shape stay as they are."""

    shapes: list
    order: torch.Tensor | None
    handle: ctypes.c_void_p = None  # what observes; None: the gradient is wanted
    rules: Rules = field(default_factory=Rules)
    noise: dict = field(default_factory=dict)  # layer: (of K, of V), [KV heads, T, D]

    def attention(self, module, query, key, value, attention_mask, scaling=None, softcap=None, **options):
        shape = coded_shape(self.shapes, module, attention_mask)
        q, k, v = query[0].float(), key[0].float(), value[0].float()
        if shape is None:
            out = _exact_attention(q, k, v, attention_mask, scaling, softcap)
        elif self.handle is None:
            noise = self.noise[shape.layer] = [torch.zeros_like(rows, requires_grad=True) for rows in (k, v)]
            out = _noisy_attention(q, k, v, *noise, _far(k.shape[1], self.rules), shape)
        else:
            out = _causal_attention(q, k, v, shape)
            order = slice(None) if self.order is None else self.order.to(q.device)
            rows = [x.transpose(0, 1).contiguous().cpu() for x in (q[..., order], k[..., order], v, out)]
            pointers = [ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float)) for x in rows]
            library.require(c.crumb_calibration_observe(self.handle, ctypes.byref(library._Shape(*vars(shape).values())),
                                                        len(rows[0]), *pointers))
        return out.transpose(0, 1)[None].to(query.dtype).contiguous(), None


def coded_shape(shapes, module, attention_mask):
    """The Shape of the layer, or None if it is not coded."""
    shape = next((shape for shape in shapes if shape.layer == module.layer_idx), None)
    if shape is not None and attention_mask is not None:
        raise ValueError("crumb_kv: the model masks more than what comes later: give it texts alone, without padding or images")
    return shape


@dataclass(frozen=True)
class Far:
    """What queries read through codes: query t the tokens sink .. end[t]. end: int array [n], does not fall."""

    sink: int
    end: np.ndarray


def _far(n, rules):
    """What may be read through codes, wherever pages end."""
    return Far(rules.sink, np.arange(n) - rules.recent + 1)


def _attend(q, k, v, shape, seen):
    """Attention of queries to the keys that they see, seen [queries, keys]. Products in TF32 and a matrix of logits are twice as fast as
    PyTorch's fused kernel with a mask in FP32, forth and back (H200: 2.7 and 5.5 ms for 1,024 queries of 12 heads and 6,144 keys)."""
    k, v = (x.repeat_interleave(shape.n_head // shape.n_head_kv, 0) for x in (k, v))
    logits = q * shape.scale @ k.transpose(1, 2)
    if shape.softcap:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def _in_blocks(n, attend):
    """attend(begin, end) of BLOCK queries at a time, none of which is kept for the way back but what it reads."""
    blocks = [(begin, min(begin + BLOCK, n)) for begin in range(0, n, BLOCK)]
    return torch.cat([checkpoint(attend, *block, use_reentrant=False, preserve_rng_state=False) for block in blocks], 1)


def _causal_attention(q, k, v, shape, seen=None):
    """seen: [n, n] or None, all that is past."""
    def attend(begin, end):
        past = torch.ones(end - begin, end, dtype=torch.bool, device=q.device).tril(begin) if seen is None else seen[begin:end, :end]
        return _attend(q[:, begin:end], k[:, :end], v[:, :end], shape, past)

    return _in_blocks(q.shape[1], attend)


def _exact_attention(q, k, v, attention_mask, scaling, softcap):
    """Of a layer that is not coded."""
    shape = Shape(-1, len(q), len(k), q.shape[2], v.shape[2], scaling, softcap or 0.0)
    return _causal_attention(q, k, v, shape, None if attention_mask is None else attention_mask[0, 0])


def _noisy_attention(q, k, v, noise_k, noise_v, far, shape):
    """Attention that reads what is far with its noise: a block of queries sees sinks, keys with noise that are far for some of them, and
    keys without that are near for some, each of them in one of the two ways."""
    noisy_k, noisy_v = k + noise_k, v + noise_v

    def attend(begin, end):
        first, last = (int(min(max(far.sink, far.end[t]), end)) for t in (begin, end - 1))
        sink = min(far.sink, end)
        keys, values = (torch.cat([x[:, :sink], with_noise[:, sink:last], x[:, first:end]], 1) for x, with_noise in ((k, noisy_k), (v, noisy_v)))
        t = torch.arange(begin, end, device=q.device)[:, None]
        edge = torch.from_numpy(far.end[begin:end]).to(q.device)[:, None]
        token = lambda begin, end: torch.arange(begin, end, device=q.device)
        near = token(first, end)
        seen = torch.cat([token(0, sink) <= t, token(sink, last) < edge, (near >= edge) & (near <= t)], 1)
        return _attend(q[:, begin:end], keys, values, shape, seen)

    return _in_blocks(q.shape[1], attend)


def _squares(gradients, clip):
    """Sum of g^T g over rows [heads, n, D], in double precision: long rows say how much a head matters, but not which way."""
    g = gradients.double()
    lengths = g.norm(dim=2, keepdim=True)
    longest = clip * lengths.median(dim=1, keepdim=True).values
    cut = g * (longest / lengths.clamp(min=1e-300)).clamp(max=1)
    factor = g.square().sum((1, 2)) / cut.square().sum((1, 2)).clamp(min=1e-300)
    return cut.transpose(1, 2) @ cut * factor.clamp(min=1)[:, None, None]


def _drawn(p, generator):
    """A label for each row of probabilities; the generator is the CPU's, so that labels do not depend on the device."""
    drawn = torch.rand(len(p), 1, generator=generator).to(p.device) * (1 - 2**-20)
    sums = p.cumsum(-1)
    return torch.searchsorted(sums, drawn * sums[:, -1:], right=True)[:, 0]


def _gradients(model, run, tokens, generator):
    """Of minus the log-probability of labels that the model itself draws, summed over the positions that have far tokens."""
    first = run.rules.sink + run.rules.recent
    with torch.enable_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0, first:].float()
        if logits.isnan().any():
            raise ValueError("crumb_kv: the model's logits are not numbers. Load it with dtype=torch.float32, and look at its weights")
        labels = _drawn(logits.detach().softmax(-1), generator)
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    rows = slice(run.rules.sink, tokens.shape[1] - run.rules.recent)
    for layer, (k, v) in run.noise.items():
        order = slice(None) if run.order is None else run.order.to(k.device)
        k, v = k.grad[:, rows][..., order], v.grad[:, rows]
        if not (k.isfinite().all() and v.isfinite().all()):
            raise ValueError(f"crumb_kv: the gradient of layer {layer} is not finite. Load the model with dtype=torch.float32, or "
                             "type metric='none'")
        yield layer, k, v


def require_output(file, kept=None):
    """Reading takes long: what would keep its artefact from being written is said before it begins. kept: a file to leave alone."""
    folder = Path(file).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise ValueError(f"'{file}' cannot be written: name a file in a folder that exists and may be written to")
    if kept is not None and Path(file).exists() and Path(file).samefile(kept):
        raise ValueError(f"'{file}' would be overwritten, and it is what is read: name another file")


def require_texts(tokenizer, texts, tokens, window):
    if not callable(tokenizer):
        raise ValueError(f"the tokenizer is {tokenizer!r}: give that of the model, AutoTokenizer.from_pretrained(...)")
    if isinstance(texts, (str, bytes)) or not all(isinstance(text, str) for text in texts):
        raise ValueError("texts is a list of strings: [Path('prose.txt').read_text(), ...]")
    for text in texts:
        if 0 < len(text) < 256 and "\n" not in text and Path(text).is_file():
            raise ValueError(f"texts are read as they are, and '{text}' is the name of a file: give Path('{text}').read_text()")
    if tokens < 1 or window < 2:
        raise ValueError(f"tokens is {tokens} and window is {window}: give positive numbers of tokens")


def _begins(tokenizer):
    """The token that is put before every text, if this tokenizer does so or says so: [token] or []."""
    if tokenizer.bos_token_id is None:
        return []
    puts = tokenizer("1", add_special_tokens=True)["input_ids"][:1] == [tokenizer.bos_token_id]
    return [tokenizer.bos_token_id] if puts or getattr(tokenizer, "add_bos_token", False) else []


def _windows(tokenizer, texts, n_tokens, window):
    """Window i of every text, then window i + 1 of every text; the parts that fits are tried on alternate."""
    begins = _begins(tokenizer)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    room, left, windows = min(window, max(256, n_tokens // len(texts))) - len(begins), n_tokens, []
    for at in range(0, max(map(len, ids)), room):
        for i, text in enumerate(ids):
            piece = (begins + text[at : at + room])[:left]
            if at < len(text) and len(piece) > SKIP:
                left -= len(piece)
                windows.append((torch.tensor([piece]), (at // room + i) % 2))
    return windows


def calibrate(model, tokenizer, texts, file, *, tokens=32768, window=1024, metric="gradient", seed=0, report=None):
    """Reads texts (strings) with the model and writes the artefact `file`, which CrumbCache(model, ..., artefact=file) takes.

    tokens: of all texts together, in windows of `window`, each a sequence of its own. metric: how `planes` weighs errors:
    "gradient", what they do to the model's predictions, one backward pass a window, or "none". report(window, windows) is called after
    each that has been read; with "gradient" all are read twice. An artefact made here knows its model by the hash of its weights
    in BF16. Raises ValueError that says what is wrong and what to do."""
    shapes = models.shapes_of(model, leave_windows=True)
    require_texts(tokenizer, texts, tokens, window)
    require_output(file)
    if metric not in ("gradient", "none"):
        raise ValueError(f"there is no metric '{metric}': type metric='gradient' or 'none'")
    windows = _windows(tokenizer, texts, tokens, window) if texts else []
    used = sum(ids.shape[1] - SKIP for ids, _ in windows)
    if used < LEAST_TOKENS:
        raise ValueError(f"calibration needs at least {LEAST_TOKENS} tokens and has {used} (the first {SKIP} of each window do not "
                         "count): give longer texts, or more of them")
    longest, rules = max(ids.shape[1] for ids, _ in windows), Rules()
    if metric == "gradient" and longest <= rules.sink + rules.recent:
        raise ValueError(f"the longest of {len(windows)} windows has {longest} tokens, and the first {rules.sink} and last {rules.recent} of each are "
                         f"never read through codes, so metric='gradient' has nothing to measure: {len(texts)} texts share tokens={tokens} in windows "
                         f"of window={window} at most. Give fewer or longer texts, more tokens or a larger window, or type metric='none'")

    handle = ctypes.c_void_p()
    library.require(c.crumb_calibration_create(SKIP, torch.get_num_threads(), ctypes.byref(handle)))
    implementation, required = model.config._attn_implementation, [p for p in model.parameters() if p.requires_grad]
    try:
        model.requires_grad_(False)
        run = _Run(shapes, models.channel_order(model.config.get_text_config(decoder=True), shapes[0].dim_k))
        AttentionInterface.register("crumb-calibrate", run.attention)
        AttentionMaskInterface.register("crumb-calibrate", _mask)
        model.set_attn_implementation("crumb-calibrate")
        device = model.get_input_embeddings().weight.device
        times = 2 if metric == "gradient" else 1
        tell = (lambda window: report(window, times * len(windows))) if report else lambda window: None
        if metric == "gradient":
            _add_metric(model, run, handle, windows, device, torch.Generator().manual_seed(seed), tell)
        run.handle = handle
        with torch.no_grad():
            for at, (ids, fold) in enumerate(windows, 1 + (times - 1) * len(windows)):
                of_c = (ctypes.c_int32 * ids.numel())(*ids[0].tolist())
                library.require(c.crumb_calibration_begin(handle, fold, of_c, len(of_c)))
                model(input_ids=ids.to(device), use_cache=False, logits_to_keep=1)
                tell(at)
        layers = (ctypes.c_int * len(shapes))(*(shape.layer for shape in shapes))
        said = f"gradient (seed {seed}, clip {CLIP:g})" if metric == "gradient" else metric
        identity = library._Identity(**{name: value.encode() if isinstance(value, str) else value
                                        for name, value in models.identity(model, shapes).items()})
        library.require(c.crumb_calibration_write(handle, ctypes.byref(identity), f"{len(texts)} texts".encode(), said.encode(),
                                                  layers, len(layers), str(file).encode()))
    finally:
        c.crumb_calibration_destroy(handle)
        model.set_attn_implementation(implementation)
        for parameter in required:
            parameter.requires_grad_(True)


def _add_metric(model, run, handle, windows, device, generator, tell):
    sums, rows = {}, {0: 0, 1: 0}
    for at, (ids, fold) in enumerate(windows, 1):
        n_rows = ids.shape[1] - run.rules.sink - run.rules.recent
        if n_rows > 0:
            rows[fold] += n_rows
            for layer, k, v in _gradients(model, run, ids.to(device), generator):
                before = sums.setdefault((fold, layer), [0, 0])
                sums[fold, layer] = [before[0] + _squares(k, CLIP), before[1] + _squares(v, CLIP)]
        tell(at)
    for (fold, layer), sides in sums.items():
        k, v = ((side / rows[fold]).cpu().contiguous() for side in sides)
        pointers = [ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_double)) for x in (k, v)]
        shape = library._Shape(*vars(next(shape for shape in run.shapes if shape.layer == layer)).values())
        library.require(c.crumb_calibration_metric(handle, ctypes.byref(shape), fold, rows[fold], *pointers))

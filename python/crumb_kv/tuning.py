"""tune(): the bases of `planes`, trained on what the model says while it reads codes.

calibrate() fits each basis on its own, to second moments. Here all of them learn together, by gradient, to lower the divergence
of the model with codes from the model without, which is what a cache is judged by. Codes are integers, so gradients pass them
straight through (Bengio et al., arXiv 1308.3432), and reach the steps as in LSQ (Esser et al., arXiv 1902.08153). What is stored
is a basis like any other: encode, its inverse, and steps.
"""

import ctypes
import math
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from . import calibration, library, models
from .blocks import PAGE, Rules
from .layer import make_layers
from .library import c

STARTS = (0.6, 0.75, 0.9, 1.05, 1.25, 1.5)  # of the search for a token's gain (src/recipe/lanes/gain.cpp)
TINY = 1e-20
LEAST_STEP = 2.0**-24  # that an artefact may have
ROWS = 512  # of logits that are there together
KEEP_EVERY = 25  # windows, between two artefacts that are kept of what is not finished


class Side:
    """K or V of a layer: encodes rows and decodes them again, [tokens, KV heads, D] to the same, as src/recipe/lanes/ do."""

    def __init__(self, read, digits, device):
        """read(part): a tensor of the artefact, or None. digits: [KV heads, D]."""
        tensor = lambda part: None if (x := read(part)) is None else x.to(device)
        self.encode, self.decode, self.steps = tensor("encode"), tensor("decode"), tensor("step")
        self.mean, self.page_step, self.digits = tensor("mean"), tensor("page_step"), digits.to(device, torch.int64)
        spectrum = tensor("spectrum")
        self.sigma = (spectrum / spectrum.mean(1, keepdim=True).clamp(min=TINY)).sqrt().clamp(min=2.0**-24)
        self.coded, self.levels = (self.digits > 0).float(), 4.0**self.digits
        self.starts = torch.tensor(STARTS, device=device).view(-1, 1, 1, 1)
        self.step = torch.where(self.digits > 0, self.steps.gather(1, self._digit())[:, 0], 1.0)
        # What one unit of a parameter does to a row is about one step, whatever the variance of the direction it comes from.
        step = (self.step * self.coded).sum(1, keepdim=True) / self.coded.sum(1, keepdim=True).clamp(min=1)
        self.unit = (step / torch.maximum(self.sigma, 0.3 * step))[:, :, None]
        self.turn = torch.zeros_like(self.encode, requires_grad=True)  # encode <- encode (1 + unit turn)
        self.stretch = torch.zeros_like(self.step, requires_grad=True)  # step <- step exp(stretch)

    def _digit(self):
        return (self.digits - 1).clamp(min=0)[:, None]

    def tables(self):
        turn = torch.eye(self.encode.shape[1], device=self.encode.device) + self.unit * self.turn
        return self.encode @ turn, torch.linalg.inv_ex(turn)[0] @ self.decode, self.step * self.stretch.exp()

    def __call__(self, x):
        encode, decode, step = self.tables()
        x = x if self.mean is None else x - self.mean
        page_mean = 0.0 if self.page_step is None else self._page_means(x)
        y = torch.einsum("thd,hde->the", x - page_mean, encode)
        with torch.no_grad():
            code, gain = self._quantise(y, step)
        at = y / (step * gain)
        at = at * ((at.detach() + self.levels / 2 >= 0) & (at.detach() + self.levels / 2 <= self.levels))  # beyond: no gradient
        y = step * gain * (at + (code - at).detach()) * self.coded
        x = torch.einsum("the,hed->thd", y, decode) + page_mean
        return x if self.mean is None else x + self.mean

    def _page_means(self, x):
        pages = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % PAGE)).unflatten(0, (-1, PAGE))
        mean = pages.mean(1)
        stored = (mean.detach() / self.page_step + 0.5).floor().clamp(-127, 127) * self.page_step
        return (mean + (stored - mean).detach()).repeat_interleave(PAGE, 0)[: len(x)]

    def _code(self, at):
        return torch.minimum((at + self.levels / 2).floor().clamp(min=0), self.levels - 1) - (self.levels - 1) / 2

    def _quantise(self, y, step):
        total = lambda a: a.sum(-1, keepdim=True)
        rms = (total((y / self.sigma * self.coded) ** 2) / total(self.coded)).sqrt().clamp(min=TINY)
        at, weight = y / step, step**2 * self.coded
        code = self._code(at / (self.starts * rms))
        gain = (total(weight * code * at) / total(weight * code**2).clamp(min=1e-30)).clamp(2.0**-8, 2.0 ** (127 / 16))
        gain = torch.exp2((torch.log2(gain) * 16).round() / 16)
        error = total(weight * (at - self._code(at / gain) * gain) ** 2)
        gain = gain.gather(0, error.argmin(0, keepdim=True))[0]
        return self._code(at / gain), gain

    @torch.no_grad()
    def trained(self):
        """encode, decode and steps as the artefact has them, the first two inverse to each other in double precision."""
        encode, _, step = self.tables()
        encode = encode.float().double()
        decode, step, steps = torch.linalg.inv(encode), step.clamp(min=LEAST_STEP), self.steps.clone()
        steps.scatter_(1, self._digit(), torch.where(self.digits > 0, step, steps.gather(1, self._digit())[:, 0])[:, None])
        return [x.float().cpu().contiguous() for x in (encode, decode, steps)]


class _Run:
    """Attention of the model: exact, or with far rows through codes in the layers that have a shape."""

    def __init__(self, sides, shapes, order, rules, n, device):
        self.sides, self.shapes, self.coded = sides, shapes, False
        self.order = None if order is None else order.to(device)
        self.back = None if order is None else torch.argsort(self.order)
        self.far = calibration.Far(rules.sink, rules.edge(np.arange(n)))  # docs/design/position-rule.md

    def attention(self, module, query, key, value, attention_mask, scaling=None, softcap=None, **options):
        stored = lambda x: x + (x.bfloat16() - x).detach()  # what the cache holds
        shape = calibration.coded_shape(self.shapes, module, attention_mask)
        q, k, v = query[0].float(), stored(key[0].float()), stored(value[0].float())
        if shape is None:
            out = calibration._exact_attention(q, k, v, attention_mask, scaling, softcap)
        elif self.coded:
            out = self._coded_attention(q, k, v, shape)
        else:
            out = calibration._causal_attention(q, k, v, shape)
        return out.transpose(0, 1)[None].to(query.dtype).contiguous(), None

    def _coded_attention(self, q, k, v, shape):
        k_side, v_side = self.sides[shape.layer]
        through = lambda side, x: side(x.transpose(0, 1)).transpose(0, 1)
        if self.order is None:
            coded_k = through(k_side, k)
        else:
            coded_k = through(k_side, k[..., self.order])[..., self.back]
        return calibration._noisy_attention(q, k, v, coded_k - k, through(v_side, v) - v, self.far, shape)


def _sides(artefact, recipe, shapes, device):
    layers, sides = make_layers(recipe, shapes, artefact), {}
    with safe_open(artefact, framework="pt") as file:
        names = set(file.keys())
        for layer, shape in zip(layers, shapes):
            of_layer = []
            for of_values, (letter, dim) in enumerate((("k", shape.dim_k), ("v", shape.dim_v))):
                digits = torch.zeros(shape.n_head_kv, dim, dtype=torch.uint8)
                library.require(c.crumb_layer_digits(layer.handle, of_values, digits.data_ptr()))
                name = f"layers.{shape.layer}.{letter}_planes."
                read = lambda part: file.get_tensor(name + part) if name + part in names else None
                of_layer.append(Side(read, digits, device))
            sides[shape.layer] = of_layer
    return sides


def divergence(exact, ours):
    """Mean over positions of KL(exact || ours), of logits."""
    exact, ours = exact.float().log_softmax(-1), ours.float().log_softmax(-1)
    return (exact.exp() * (exact - ours)).sum(-1).mean()


class _Head:
    """Logits of some of the last hidden states: those of a whole window and a large vocabulary are gigabytes."""

    def __init__(self, model, ids):
        config = model.config.get_text_config(decoder=True)
        self.output = model.get_output_embeddings()
        self.factor = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        with torch.no_grad():
            wanted = model(input_ids=ids, use_cache=False).logits[0, -1].float()
            found = self(model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1:])[0]
        if not wanted.isfinite().all():
            raise ValueError(f"crumb_kv: logit {int((~wanted.isfinite()).nonzero()[0])} of {type(model).__name__} is {wanted.min():g}, and "
                             "the divergence from a model that rules tokens out has no gradient. Take out what masks its logits, "
                             "and load it with dtype=torch.float32")
        if not torch.allclose(found, wanted, rtol=0.01, atol=0.01 * wanted.abs().max().item()):
            models.refuse(model, "its logits are not the product of its last hidden states and its output matrix",
                          "calibrate() serves it")

    def __call__(self, hidden):
        logits = self.output(hidden).float() * self.factor
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def _learn(head, exact, ours):
    """The divergence of hidden states [n, width]; its gradient goes back through `ours`, at last."""
    rows, cost = ours.detach().requires_grad_(), 0.0
    for some, others in zip(exact.split(ROWS), rows.split(ROWS)):
        part = divergence(head(some), head(others)) * (len(some) / len(exact))
        part.backward()
        cost += part.detach()
    ours.backward(rows.grad)
    return cost.item()


def tune(model, tokenizer, texts, artefact, file, *, recipe="planes", tokens=500_000, window=8192, rate=0.003, minutes=None, report=None):
    """Trains the bases of `artefact` on texts (strings), for `recipe`, and writes the artefact `file`, which the crumb program and
    CrumbCache take like the other. The artefact may be one of calibrate() or one of crumb calibrate for a GGUF of this model.
    Layers with a sliding window stay as they are.

    tokens: of all texts together, a window of `window` (at most what the model knows positions for) a step, read without codes, and with
    them, and gone back through. What lies deeper than a window is not trained for. minutes: at most, to the end of a step. rate: of
    learning; it falls to 0 at the end of either. report(step, steps, divergence) is called after each step, nats a token. Wants a GPU for
    models of any size. Every 25 steps the artefact so far goes to FILE.unfinished: if training is cut off, it may be used, or be the
    `artefact` of another call, which reads its texts from their beginning. Returns the divergences. Raises ValueError that says what is wrong and what to do."""
    shapes, rules = models.shapes_of(model, leave_windows=True), Rules()
    window = min(window, getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", window))
    models.check_artefact(model, artefact, shapes)
    calibration.require_texts(tokenizer, texts, tokens, window)
    calibration.require_output(file, artefact)
    if not recipe.startswith("planes"):
        raise ValueError(f"'{recipe}' has no bases that could be trained: type recipe='planes', or a rate like 'planes:1.5'")
    windows = [ids for ids, _ in calibration._windows(tokenizer, texts, tokens, window) if ids.shape[1] == window] if texts else []
    first = rules.sink + rules.recent
    if window < first + PAGE or not windows:
        raise ValueError(f"training reads whole windows of {window} tokens, of {first + PAGE} or more, and {tokens} tokens of these {len(texts)} texts "
                         f"have none: give longer texts, fewer of them, more tokens, or window={first + PAGE} and up")
    if minutes is not None and minutes <= 0:
        raise ValueError(f"minutes is {minutes}: give more than 0, or leave it out and read all of the texts")
    device = model.get_input_embeddings().weight.device
    sides = _sides(str(artefact), recipe, shapes, device)
    order = models.channel_order(model.config.get_text_config(decoder=True), shapes[0].dim_k)
    run = _Run(sides, shapes, order, rules, window, device)
    parameters = [p for of_layer in sides.values() for side in of_layer for p in (side.turn, side.stretch)]
    optimiser = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.98))
    implementation, required = model.config._attn_implementation, [p for p in model.parameters() if p.requires_grad]
    costs, unfinished, begun = [], f"{file}.unfinished", time.monotonic()

    def write(to):
        how = f"bases trained for {recipe} on {len(costs)} windows of {window} tokens"
        _write(artefact, sides, how, torch.cat(windows[: len(costs)]), to)

    try:
        model.requires_grad_(False)
        AttentionInterface.register("crumb-tune", run.attention)
        AttentionMaskInterface.register("crumb-tune", calibration._mask)
        model.set_attn_implementation("crumb-tune")
        head = _Head(model, windows[0][:, :PAGE].to(device))
        for step, ids in enumerate(windows):
            done = max(step / len(windows), (time.monotonic() - begun) / (60 * minutes) if minutes else 0)
            if costs and done >= 1:
                break
            optimiser.param_groups[0]["lr"] = rate * min(1, (step + 1) / 10) * (0.51 + 0.49 * math.cos(math.pi * done))
            hidden = lambda: model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state[0, first:]
            with torch.no_grad():
                run.coded = False
                exact = hidden()
            with torch.enable_grad():
                run.coded = True
                cost = _learn(head, exact, hidden())
            if not all(p.grad.isfinite().all() for p in parameters):
                raise ValueError("crumb_kv: a gradient is not finite. Load the model with dtype=torch.float32")
            optimiser.step()
            optimiser.zero_grad()
            costs.append(cost)
            if report:
                report(step + 1, len(windows), cost)
            if len(costs) % KEEP_EVERY == 0:
                write(unfinished)
    finally:
        run.sides = {}  # transformers keeps `run`
        model.set_attn_implementation(implementation)
        for parameter in required:
            parameter.requires_grad_(True)
    write(file)
    Path(unfinished).unlink(missing_ok=True)
    end = sum(costs[-3:]) / len(costs[-3:])
    if end > 3 * costs[0]:  # windows differ, by less than that
        warnings.warn(f"crumb_kv: the divergence grew in training, from {costs[0]:.2g} to {end:.2g} nats a token: give a rate below {rate:g}")
    return costs


def _write(artefact, sides, how, tokens, file):
    bases, keep = [], []
    for layer, of_layer in sides.items():
        for of_values, side in enumerate(of_layer):
            keep.append(side.trained())
            pointers = [ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float)) for x in keep[-1]]
            bases.append(library._Basis(layer, of_values, *pointers))
    tokens = tokens.to(torch.int32).contiguous()
    library.require(c.crumb_artefact_with_bases(
        str(artefact).encode(), (library._Basis * len(bases))(*bases), len(bases), how.encode(),
        ctypes.cast(tokens.data_ptr(), ctypes.POINTER(ctypes.c_int32)), *tokens.shape, str(file).encode()))

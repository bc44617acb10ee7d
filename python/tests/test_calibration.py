"""calibrate() on a small random model: what the metric promises, and what the artefact is good for."""

import json

import pytest
import torch
from transformers import LlamaConfig

from crumb_kv import CrumbCache, calibrate, calibration, models
from crumb_kv.blocks import Rules
from test_cache import SIZES, make_model, text


class Words:
    """A tokenizer: a text is numbers."""

    bos_token_id = None

    def __call__(self, words, add_special_tokens):
        return {"input_ids": [int(word) for word in words.split()]}


def words(n, seed):
    return " ".join(map(str, text(n, seed=seed)[0].tolist()))


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def artefact(model, tmp_path_factory):
    file = tmp_path_factory.mktemp("artefact") / "small.safetensors"
    calibrate(model, Words(), [words(1500, 1), words(1500, 2)], file, tokens=2500, window=640)
    return file


def header(file):
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_the_artefact_is_complete(artefact):
    names = header(artefact)
    for layer in range(2):
        for part in ("k_mean", "k_rotation", "v_rotation", "k_planes.encode", "k_planes.spectrum", "v_planes.decode", "v_planes.step"):
            assert f"layers.{layer}.{part}" in names
    said = names["__metadata__"]
    assert said["model.architecture"] == "transformers/llama" and said["texts"] == "2 texts"
    assert "metric gradient (seed 0, clip 3)" in said["method"] and said["tokens"] == str(2500 - 64 * 4)


def test_recipes_run_on_it(model, artefact):
    ids = text(500)
    with torch.no_grad():
        exact = model(ids, past_key_values=CrumbCache(model, "had2", recent=512)).logits.log_softmax(-1)
        cost = {}
        for recipe in ("planes:2.25", "planes:4", "oscar", "q8"):
            ours = model(ids, past_key_values=CrumbCache(model, recipe, artefact=artefact, recent=64)).logits.log_softmax(-1)
            cost[recipe] = (exact.exp() * (exact - ours)).sum(-1).mean()
    assert cost["q8"] < cost["planes:4"] < cost["planes:2.25"] < 1


def test_another_model_is_refused(artefact):
    other = make_model(LlamaConfig(**{**SIZES, "rms_norm_eps": 1e-5}))
    other.lm_head.weight.data[0] += 1
    with pytest.raises(ValueError, match="was made for LlamaForCausalLM .hash .*crumb_kv.calibrate"):
        CrumbCache(other, "planes:2.25", artefact=artefact)
    CrumbCache(make_model(dtype=torch.float32).to(torch.bfloat16), "planes:2.25", artefact=artefact)


def test_calibration_leaves_the_model_as_it_was(model, artefact):
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert model.config._attn_implementation != "crumb-calibrate"


def test_the_metric_predicts_what_noise_costs(model, monkeypatch):
    """Errors e on far rows of one side of one layer cost half of E[e M e^T] a row, in nats a position."""
    rules, ids, amount = Rules(16, 32), text(300, seed=3), 0.02
    generator = torch.Generator().manual_seed(1)
    run = calibration._Run(models.shapes_of(model), None, rules=rules)
    calibration.AttentionInterface.register("crumb-calibrate", run.attention)
    calibration.AttentionMaskInterface.register("crumb-calibrate", calibration.mask)
    model.set_attn_implementation("crumb-calibrate")
    model.requires_grad_(False)
    squares = {(layer, side): 0 for layer in (0, 1) for side in (0, 1)}
    for _ in range(20):  # labels are drawn, so one backward pass is a sample
        for layer, *gradients in calibration._gradients(model, run, ids, generator):
            for side, g in enumerate(gradients):
                squares[layer, side] += g.square().sum().item() / 20

    def log_p():
        return model(ids, use_cache=False).logits[0, 48:].double().log_softmax(-1)

    with torch.no_grad():
        exact, whole = log_p(), calibration._noisy_attention
        for (layer, side), square in squares.items():
            def noisy(q, k, v, noise_k, noise_v, far, shape):
                noise = [noise_k, noise_v]
                if shape.layer == layer:
                    noise[side] = torch.randn(v.shape, generator=generator) * amount
                return whole(q, k, v, *noise, far, shape)

            monkeypatch.setattr(calibration, "_noisy_attention", noisy)
            costs = [(exact.exp() * (exact - log_p())).sum(-1).mean().item() for _ in range(20)]
            assert sum(costs) / 20 == pytest.approx(amount**2 * square / 2 / (300 - 48), rel=0.25)
    model.requires_grad_(True)


@pytest.mark.parametrize("puts, says", [(False, False), (True, False), (False, True), (True, True)])
def test_texts_begin_as_the_tokenizer_has_it(puts, says):
    class Tokenizer(Words):
        bos_token_id, add_bos_token = 3, says

        def __call__(self, words, add_special_tokens):
            ids = super().__call__(words, add_special_tokens)["input_ids"]
            return {"input_ids": [3] * (puts and add_special_tokens) + ids}

    (first, _), (second, _) = calibration._windows(Tokenizer(), [" ".join(["5"] * 600)], 600, 300)
    assert (first[0, :2].tolist() == second[0, :2].tolist() == ([3, 5] if puts or says else [5, 5])) and first.shape == (1, 300)


def test_labels_are_drawn_as_often_as_they_are_likely():
    p = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0]).repeat(20000, 1)
    counts = torch.bincount(calibration._drawn(p, torch.Generator().manual_seed(0)), minlength=6)
    assert len(counts) == 6 and torch.allclose(counts / 20000, p[0], atol=0.02) and not counts[p[0] == 0].any()


def test_long_gradients_say_how_much_and_not_which_way():
    g = torch.randn(2, 50, 8)
    g[0, 7] *= 100
    whole, cut = calibration._squares(g, 1e9), calibration._squares(g, 3)
    assert torch.allclose(whole.double(), g.double().transpose(1, 2) @ g.double())
    assert torch.allclose(*(m.diagonal(dim1=1, dim2=2).sum(1) for m in (whole, cut)))
    assert torch.linalg.eigvalsh(cut[0]).max() < torch.linalg.eigvalsh(whole[0]).max() / 2


@pytest.mark.parametrize("options, message", [
    (dict(texts=[]), "at least 2000 tokens and has 0"),
    (dict(texts=["1 2 3"]), "at least 2000 tokens and has 0"),
    (dict(window=300), "has 300 tokens.*window=300.*metric='none'"),
    (dict(texts=[words(300, seed) for seed in range(20)]), "has 256 tokens.*20 texts share tokens=5000"),
    (dict(metric="local"), "metric='gradient' or 'none'"),
    (dict(window=0), "window is 0"),
    (dict(tokens=-1), "tokens is -1"),
    (dict(texts="1 2 3"), "texts is a list of strings"),
    (dict(texts=[b"1 2 3"]), "texts is a list of strings"),
    (dict(texts=[__file__]), "is the name of a file: give Path"),
    (dict(tokenizer=None), "the tokenizer is None: give that of the model"),
    (dict(file="nowhere/a"), "'nowhere/a' cannot be written"),
    (dict(file="/"), "'/' cannot be written"),
])
def test_wrong_calls_say_what_is_wrong(model, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        calibrate(model, **{**dict(tokenizer=Words(), texts=[words(6000, 1)], file=tmp_path / "a", tokens=5000), **options})


def test_logits_that_are_not_numbers_are_said(tmp_path):
    broken = make_model()
    with torch.no_grad():
        next(broken.parameters())[:] = float("nan")
    with pytest.raises(ValueError, match="logits are not numbers"):
        calibrate(broken, Words(), [words(6000, 1)], tmp_path / "a", tokens=5000)


@pytest.mark.parametrize("metric, times", [("gradient", 2), ("none", 1)])
def test_progress_is_reported(model, tmp_path, metric, times):
    said = []
    calibrate(model, Words(), [words(6000, 1)], tmp_path / "a", tokens=5000, metric=metric, report=lambda *what: said.append(what))
    assert len(said) > 4 and said == [(i, len(said)) for i in range(1, len(said) + 1)] and len(said) % times == 0

"""tune() on a small random model: its codes are the cache's, it learns, and what it writes is an artefact like any other."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3TextConfig

from crumb_kv import CrumbCache, calibrate, calibration, models, tune, tuning
from crumb_kv.blocks import Rules
from test_cache import SIZES, make_model, text
from test_calibration import Words, artefact, header, model, words  # noqa: F401 (fixtures)

RECIPE = "planes:2.25"


@pytest.fixture(scope="module")
def trained(model, artefact):
    file = artefact.with_name("trained.safetensors")
    costs = tune(model, Words(), [words(9000, 3), words(9000, 4)], artefact, file, recipe=RECIPE, tokens=18000, window=480, rate=0.01)
    return file, costs


def cost(model, artefact, seed=9, n=640):
    """Nats a token, of text that nothing has seen. Leaves the model with the attention of the cache."""
    ids = text(n, seed=seed)
    with torch.no_grad():
        exact = model(ids, past_key_values=CrumbCache(model, "had2", recent=n)).logits[0, 320:]
        return tuning.divergence(exact, model(ids, past_key_values=CrumbCache(model, RECIPE, artefact=artefact)).logits[0, 320:]).item()


def test_it_learns(model, artefact, trained):
    file, costs = trained
    before, after = ([cost(model, of, seed) for seed in range(9, 13)] for of in (artefact, file))
    assert sum(after) < 0.95 * sum(before), (before, after)
    assert len(costs) == 36 and min(costs) > 0


def test_training_sees_what_the_cache_costs(model, artefact):
    """The Python codes against the core's: K, V, page means, gains and steps, through both layers of the model."""
    shapes, ids = models.shapes_of(model), text(640, seed=9)
    run = tuning._Run(tuning._sides(str(artefact), RECIPE, shapes, "cpu"), shapes,
                      models.channel_order(model.config, shapes[0].dim_k), Rules(), 640, "cpu")
    tuning.AttentionInterface.register("crumb-tune", run.attention)
    tuning.AttentionMaskInterface.register("crumb-tune", calibration._mask)
    logits = {}
    with torch.no_grad():
        cached = model(ids, past_key_values=CrumbCache(model, RECIPE, artefact=artefact)).logits[0, 320:]
        model.set_attn_implementation("crumb-tune")
        for run.coded in (False, True):
            logits[run.coded] = model(ids, use_cache=False).logits[0, 320:]
    model.set_attn_implementation("sdpa")
    apart, all_of_it = tuning.divergence(cached, logits[True]).item(), tuning.divergence(logits[False], cached).item()
    assert apart < 0.1 * all_of_it  # what is left: sums in another order move some codes


def test_codes_pass_gradients_through(model, artefact):
    shapes = models.shapes_of(model)
    side = tuning._sides(str(artefact), RECIPE, shapes, "cpu")[0][1]
    x = torch.randn(128, shapes[0].n_head_kv, shapes[0].dim_v, requires_grad=True)
    with torch.enable_grad():
        error = (side(x) - x.detach()).square().sum()
        error.backward()
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in (x.grad, side.turn.grad, side.stretch.grad))
    with torch.no_grad():
        for p in (side.turn, side.stretch):
            p -= 1e-4 * p.grad / p.grad.norm()
        assert (side(x) - x).square().sum() < error


def test_the_artefact_says_so(artefact, trained):
    said, before = (header(file)["__metadata__"] for file in (trained[0], artefact))
    assert said["method"] == before["method"] + "; bases trained for planes:2.25 on 36 windows of 480 tokens"
    assert said["model.hash"] == before["model.hash"] and len(said["text_sketch"]) > len(before["text_sketch"])
    assert header(trained[0]).keys() == header(artefact).keys()


def test_the_model_is_as_it_was(model, trained):
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert model.config._attn_implementation != "crumb-tune"


@pytest.fixture(scope="module")
def gemma():
    """Windows of 100 tokens in layers 0, 2 and 3, the others global and of other RoPE; heads of 48 channels, Q and K normed."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    model = make_model(Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 5, "head_dim": 48}, layer_types=kinds, sliding_window=100,
                                        query_pre_attn_scalar=4, final_logit_softcapping=20.0, tie_word_embeddings=False))
    model.model.embed_tokens.weight.data /= 5  # what is said depends on what attention reads
    model.lm_head.weight.data *= 4
    return model


def test_layers_with_windows_stay_as_they_are(gemma, tmp_path):
    base, file, again = tmp_path / "base", tmp_path / "trained", " ".join(20 * [words(480, 1)])
    calibrate(gemma, Words(), [words(1500, 1), words(1500, 2)], base, tokens=2500, window=640)
    assert {name.split(".")[1] for name in header(base) if name.startswith("layers.")} == {"1", "4"}
    costs = tune(gemma, Words(), [again], base, file, tokens=12000, window=480, rate=0.01)
    assert header(file).keys() == header(base).keys() and header(file)["__metadata__"]["model.n_layer"] == "5"
    assert len(costs) == 20 and max(costs[-5:]) < 0.9 * min(costs[:5]), costs


def test_what_is_not_coded_is_what_the_model_computes(gemma, monkeypatch):
    """Windows, norms, scales and caps are the model's own."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)  # K and V are not rounded
    ids, shapes = text(640, seed=9), models.shapes_of(gemma, leave_windows=True)
    assert [shape.layer for shape in shapes] == [1, 4]
    run = tuning._Run({}, shapes, None, Rules(), 640, "cpu")
    head = tuning._Head(gemma, ids[:, :64])
    tuning.AttentionInterface.register("crumb-tune", run.attention)
    tuning.AttentionMaskInterface.register("crumb-tune", calibration._mask)
    with torch.no_grad():
        wanted = gemma(ids, use_cache=False).logits[0]
        gemma.set_attn_implementation("crumb-tune")
        found = head(gemma.base_model(ids, use_cache=False).last_hidden_state[0])
    gemma.set_attn_implementation("sdpa")
    assert torch.allclose(wanted, found, atol=1e-3)


def test_learning_in_pieces_is_learning():
    head, exact = torch.nn.Linear(16, 40), torch.randn(1100, 16)
    found, wanted = (torch.randn(1100, 16, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    with torch.enable_grad():
        cost = tuning.divergence(head(exact), head(wanted))
        cost.backward()
        assert tuning._learn(head, exact, 1 * found) == pytest.approx(cost.item())
    assert torch.allclose(found.grad, wanted.grad, atol=1e-7)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_attention_reads_what_is_far_with_its_noise(model, monkeypatch, softcap):
    """Against all logits at once, and whatever the blocks are."""
    n, rules = 300, Rules(16, 32)
    shape, (q, k, v) = replace(models.shapes_of(model)[0], softcap=softcap), (torch.randn(heads, n, 32) for heads in (4, 2, 2))
    noise = [torch.randn(2, n, 32, requires_grad=True) for _ in range(2)]
    past, t, j = torch.ones(n, n, dtype=torch.bool).tril(), torch.arange(n)[:, None], torch.arange(n)

    def logits(keys):
        x = q @ keys.repeat_interleave(2, 0).transpose(1, 2) * shape.scale
        return softcap * (x / softcap).tanh() if softcap else x

    for far in (calibration._far(n, rules), calibration.Far(rules.sink, rules.edge(np.arange(n))), calibration.Far(16, np.full(n, 5))):
        read = (j >= far.sink) & (j < torch.from_numpy(far.end)[:, None])
        with torch.enable_grad():
            weights = torch.where(read, logits(k + noise[0]), logits(k)).masked_fill(~past, -torch.inf).softmax(-1)
            wanted = weights @ v.repeat_interleave(2, 0) + weights * read @ noise[1].repeat_interleave(2, 0)
            way_back = torch.autograd.grad(wanted.square().sum(), noise)
            for block in (1024, 64, 50):
                monkeypatch.setattr(calibration, "BLOCK", block)
                found = calibration._noisy_attention(q, k, v, *noise, far, shape)
                assert torch.allclose(found, wanted, atol=1e-5)
                assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(torch.autograd.grad(found.square().sum(), noise), way_back))
        assert torch.allclose(calibration._causal_attention(q, k, v, shape),
                              logits(k).masked_fill(~past, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 0), atol=1e-5)


def test_what_was_trained_stays_when_it_is_cut_off(model, artefact, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "KEEP_EVERY", 2)
    file = tmp_path / "trained"
    CrumbCache(model, "had2")  # the model's attention may be that of a cache

    def cut(step, steps, cost):
        if step == 5:
            raise KeyboardInterrupt

    call = lambda base, **options: tune(model, Words(), [words(6000, 3)], base, file, recipe=RECIPE, tokens=6000, window=480, **options)
    with pytest.raises(KeyboardInterrupt):
        call(artefact, report=cut)
    unfinished = file.with_name("trained.unfinished")
    assert not file.exists() and "on 4 windows" in header(unfinished)["__metadata__"]["method"]
    assert model.config._attn_implementation != "crumb-tune" and all(p.requires_grad for p in model.parameters())
    assert len(call(unfinished, minutes=1e-9)) == 1  # at least one
    assert file.exists() and not unfinished.exists()


def test_a_model_that_rules_tokens_out_is_refused(model, artefact, tmp_path):
    head = model.get_output_embeddings()
    ruled_out = head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, torch.tensor([7]), -torch.inf))
    try:
        with pytest.raises(ValueError, match="logit 7 of LlamaForCausalLM is -inf"):
            tune(model, Words(), [words(2000, 1)], artefact, tmp_path / "a", tokens=2000, window=480, recipe=RECIPE)
    finally:
        ruled_out.remove()


@pytest.mark.parametrize("options, message", [
    (dict(texts=[]), "whole windows of 480 tokens, .* of these 0 texts have none"),
    (dict(texts=["1 2 3"]), "whole windows of 480 tokens, .* of these 1 texts have none"),
    (dict(texts=words(2000, 1)), "texts is a list of strings"),
    (dict(texts=[__file__]), "is the name of a file: give Path"),
    (dict(tokenizer=None), "the tokenizer is None: give that of the model"),
    (dict(tokens=-1), "tokens is -1"),
    (dict(texts=7 * [words(2000, 1)]), "give longer texts, fewer of them, more tokens"),
    (dict(window=383), "of 384 or more"),
    (dict(minutes=0), "minutes is 0: give more"),
    (dict(file="nowhere/a"), "'nowhere/a' cannot be written"),
    (dict(recipe="oscar"), "'oscar' has no bases .*recipe='planes'"),
    (dict(artefact="nowhere.safetensors"), "there is no artefact nowhere.safetensors: make one with crumb_kv.calibrate"),
    (dict(artefact=None), "there is no artefact None"),
])
def test_wrong_calls_say_what_is_wrong(model, artefact, tmp_path, options, message):
    options = dict(dict(texts=[words(2000, 1)], artefact=artefact, file=tmp_path / "a", tokens=2000, window=480, recipe=RECIPE, tokenizer=Words()), **options)
    with pytest.raises(ValueError, match=message):
        tune(model, **options)


def test_files_that_are_no_artefacts_are_said_and_kept(model, artefact, tmp_path):
    weights, before = tmp_path / "model.safetensors", artefact.read_bytes()
    save_file({"x": torch.zeros(2)}, weights)
    with pytest.raises(ValueError, match="is not an artefact: make one"):
        tune(model, Words(), [words(2000, 1)], weights, tmp_path / "a", tokens=2000, window=480, recipe=RECIPE)
    with pytest.raises(ValueError, match="would be overwritten, and it is what is read"):
        tune(model, Words(), [words(2000, 1)], artefact, artefact, tokens=2000, window=480, recipe=RECIPE)
    assert artefact.read_bytes() == before


def test_learning_that_makes_it_worse_is_said(model, artefact, tmp_path):
    with pytest.warns(UserWarning, match="the divergence grew in training, .* rate below 1"):
        tune(model, Words(), [words(6000, 1)], artefact, tmp_path / "a", tokens=6000, window=480, recipe=RECIPE, rate=1.0)

"""tune() on a small random model: its codes are the cache's, it learns, and what it writes is an artefact like any other."""

import pytest
import torch
from transformers import Gemma3TextConfig

from crumb_kv import CrumbCache, calibrate, calibration, models, tune, tuning
from crumb_kv.blocks import Rules
from test_cache import SIZES, make_model, text
from test_calibration import Words, artefact, header, model, words  # noqa: F401 (fixtures)

RECIPE = "planes:2.25"


@pytest.fixture(scope="module")
def trained(model, artefact):
    file = artefact.with_name("trained.safetensors")
    costs = tune(model, Words(), [words(6000, 3), words(6000, 4)], artefact, file, recipe=RECIPE, tokens=12000, window=480, rate=0.01)
    return file, costs


def cost(model, artefact, seed=9, n=640):
    """Nats a token, of text that nothing has seen."""
    ids = text(n, seed=seed)
    with torch.no_grad():
        exact = model(ids, past_key_values=CrumbCache(model, "had2", recent=n)).logits[0, 320:]
        return tuning.divergence(exact, model(ids, past_key_values=CrumbCache(model, RECIPE, artefact=artefact)).logits[0, 320:]).item()


def test_it_learns(model, artefact, trained):
    file, costs = trained
    before = [cost(model, artefact, seed) for seed in (9, 10)]
    after = [cost(model, file, seed) for seed in (9, 10)]
    assert sum(after) < 0.93 * sum(before), (before, after)
    assert sum(costs[-5:]) < sum(costs[:5])


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
    assert said["method"] == before["method"] + "; bases trained for planes:2.25 on 24 windows of 480 tokens"
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
    base, file, texts = tmp_path / "base", tmp_path / "trained", [words(6000, 1), words(6000, 2)]
    calibrate(gemma, Words(), texts, base, tokens=2500, window=640)
    assert {name.split(".")[1] for name in header(base) if name.startswith("layers.")} == {"1", "4"}
    costs = tune(gemma, Words(), texts, base, file, tokens=12000, window=480, rate=0.01)
    assert header(file).keys() == header(base).keys() and header(file)["__metadata__"]["model.n_layer"] == "5"
    assert sum(costs[-5:]) < 0.97 * sum(costs[:5])


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


def test_blocks_of_queries_change_nothing(model, monkeypatch):
    shape, (q, k, v) = models.shapes_of(model)[0], (torch.randn(heads, 300, 32) for heads in (4, 2, 2))
    noise, far = torch.randn(2, 2, 300, 32), calibration._far(300, Rules(16, 32), "cpu")
    whole = calibration._causal_attention(q, k, v, shape), calibration._noisy_attention(q, k, v, *noise, far, shape)
    monkeypatch.setattr(calibration, "BLOCK", 64)
    parts = calibration._causal_attention(q, k, v, shape), calibration._noisy_attention(q, k, v, *noise, far, shape)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, parts))
    assert not torch.allclose(*whole, atol=0.1)


def test_what_was_trained_stays_when_it_is_cut_off(model, artefact, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "KEEP_EVERY", 2)
    file = tmp_path / "trained"

    def cut(step, steps, cost):
        if step == 5:
            raise KeyboardInterrupt

    call = lambda base, **options: tune(model, Words(), [words(6000, 3)], base, file, recipe=RECIPE, tokens=6000, window=480, **options)
    with pytest.raises(KeyboardInterrupt):
        call(artefact, report=cut)
    unfinished = file.with_name("trained.unfinished")
    assert not file.exists() and "on 4 windows" in header(unfinished)["__metadata__"]["method"]
    assert model.config._attn_implementation != "crumb-tune" and all(p.requires_grad for p in model.parameters())
    assert 1 <= len(call(unfinished, minutes=0.02)) < 12
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
    (dict(texts=[]), "windows of 480 of these texts have none"),
    (dict(texts=["1 2 3"]), "windows of 480 of these texts have none"),
    (dict(window=383), "384 tokens or more"),
    (dict(file="nowhere/a"), "'nowhere/a' cannot be written"),
    (dict(recipe="oscar"), "'oscar' has no bases .*recipe='planes'"),
    (dict(artefact="nowhere.safetensors"), "nowhere.safetensors"),
])
def test_wrong_calls_say_what_is_wrong(model, artefact, tmp_path, options, message):
    options = dict(dict(texts=[words(2000, 1)], artefact=artefact, file=tmp_path / "a", tokens=2000, window=480, recipe=RECIPE), **options)
    with pytest.raises((ValueError, OSError), match=message):
        tune(model, Words(), **options)

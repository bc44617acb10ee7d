"""tune() on a small random model: its codes are the cache's, it learns, and what it writes is an artefact like any other."""

import pytest
import torch

from crumb_kv import CrumbCache, models, tune, tuning
from crumb_kv.blocks import Rules
from test_cache import text
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
                      models.channel_order(model.config, shapes[0].dim_k), Rules())
    tuning.AttentionInterface.register("crumb-tune", run.attention)
    tuning.AttentionMaskInterface.register("crumb-tune", tuning.mask)
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

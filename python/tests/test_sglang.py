"""SmolLM2 in a real SGLang on the CPU, with crumb: `make test-sglang`."""

import inspect
import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import served
from conftest import scores

pytest.importorskip("sglang", reason="needs SGLang: type make test-sglang")

RECIPE = "planes:2"  # gives the layers pages of three sizes
CHUNK = 256
SHORT = {"sink": 64, "recent": 64}  # windows short enough that codes are read


@pytest.fixture(scope="module")
def planes(folder, tmp_path_factory, served_artefact, text, chat):
    """One engine for all tests."""
    prompts, at = served.prompts(text, chat), tmp_path_factory.mktemp("sglang")
    tasks = served.tasks(text, prompts)
    job = {"model": str(folder), "crumb": {"recipe": RECIPE, "artefact": str(served_artefact), **SHORT}, "arguments": {},
           "tasks": served.flat(tasks)}
    (at / "job.json").write_text(json.dumps(job))
    done = subprocess.run([sys.executable, pathlib.Path(__file__).with_name("sglang_engine.py"), at / "job.json", at / "result.json"],
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-4000:]
    got = served.by_name(tasks, json.loads((at / "result.json").read_text()))
    assert got["forget"] and got["forget again"] and got["forget the text"]
    return {"prompts": prompts, "log": done.stdout, **got}


@pytest.fixture(scope="module")
def ours(folder, served_artefact):
    from crumb_kv import CrumbCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, lambda **more: CrumbCache(model, RECIPE, artefact=served_artefact, **{**SHORT, **more})


def test_the_start_says_what_it_costs(planes, ours):
    pages = [coder.block_bytes for coder in ours[1]().coders]
    assert len(set(pages)) == 3
    assert f"(a block of 64 tokens: {min(pages)} to {max(pages)} bytes, each layer its own and none padded)" in planes["log"]
    assert f"crumb: 16384 tokens in 256 pages ({256 * sum(pages) >> 20} MiB)" in planes["log"]


def test_log_probabilities_are_those_of_transformers(planes, ours, text):
    model, cache = ours
    expected = scores(model, cache(), text[:1000], CHUNK)
    exact = scores(model, cache(recent=4096), text[:1000], CHUNK)
    got = torch.tensor(planes["score"])
    noise, cost = (got - expected).abs(), (exact - expected).abs()
    print(f"\nmean log-probability {got.mean():.4f}, in transformers {expected.mean():.4f}, BF16 {exact.mean():.4f}; a token differs by "
          f"{noise.median():.5f} (median), {noise.max():.5f} (most), of the codes {cost.median():.5f}")
    assert noise.max() < 5e-4  # both compute with PyTorch's operators


def test_answers_are_those_of_transformers(planes, ours):
    model, cache = ours
    for prompt, got in zip(planes["prompts"][:3], planes["solo"]):
        out = model.generate(torch.tensor([prompt]), past_key_values=cache(), max_new_tokens=16, do_sample=False)
        assert out[0, len(prompt) :].tolist() == got["tokens"][0]


def test_a_prefix_that_is_found_changes_nothing(planes):
    assert planes["solo"][0]["cached"] == [0] and planes["solo"][1]["cached"][0] >= 640 and planes["hit"]["cached"][0] >= 640
    assert planes["hit"]["tokens"] == planes["again"]["tokens"] == planes["solo"][0]["tokens"]
    assert "whose window is gone" not in planes["log"]


def test_sixteen_at_once_answer_as_each_alone(planes):
    assert planes["together"]["tokens"] == 4 * [solo["tokens"][0] for solo in planes["solo"]]


# What the hooks take hold of, in the classes of the package that is installed.

SIGNATURES = [
    ("sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator.configure", ["self", "pre_model_load_memory"]),
    ("sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator._profile_available_bytes", ["self", "pre_model_load_memory"]),
    ("sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator._resolve_kv_pool_class", ["self", "kind", "default"]),
    ("sglang.srt.model_executor.pool_configurator", "DefaultPoolConfigurator._compute_cell_size", ["self", "kvc", "num_layers"]),
    ("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.init_forward_metadata", ["self", "forward_batch"]),
    ("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.forward_extend",
     ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"]),
]


@pytest.mark.parametrize("module, name, parameters", SIGNATURES)
def test_hooks_fit(module, name, parameters):
    import importlib

    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert list(inspect.signature(found).parameters) == parameters


@pytest.fixture(scope="module")
def refusals(folder, tmp_path_factory):
    """What the configurator of a loaded model says to each case."""
    cases, script = tmp_path_factory.mktemp("refused") / "cases.json", pathlib.Path(__file__).with_name("sglang_refusals.py")
    cases.write_text(json.dumps([case for case, _ in REFUSED]))
    done = subprocess.run([sys.executable, script, folder, cases], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = [line[8:] for line in done.stdout.splitlines() if line.startswith("REFUSED ")]
    assert len(said) == len(REFUSED), done.stdout[-4000:]
    return said


REFUSED = [
    (dict(crumb={"recipe": "planes"}), "crumb calibrate"),
    (dict(crumb={"recipe": "kivi32"}), "no kernel reads such pages in place. Take one of: .*had2"),
    (dict(crumb={"recipe": "had2", "windows": 3}), "there is no option 'windows'. Take one of: recipe, artefact, sink"),
    (dict(crumb={"artefact": "x"}), "Type: --attention-backend crumb --json-model-override-args"),
    (dict(crumb=None), "options of crumb are not there"),
    (dict(crumb={"recipe": "had2"}, configurator={"page_size": 32}), "pages of 32 tokens. Type: --page-size 64"),
    (dict(crumb={"recipe": "had2"}, configurator={"device": "cuda"}), "the device cuda"),
    (dict(crumb={"recipe": "had2"}, configurator={"kv_cache_dtype_str": "fp8_e4m3"}), "a cache of fp8_e4m3.* Leave --kv-cache-dtype out"),
    (dict(crumb={"recipe": "had2"}, resolved={"max_running_requests": None}), "Type: --max-running-requests 16"),
    (dict(crumb={"recipe": "had2"}, resolved={"enable_hierarchical_cache": True}), "Leave --enable-hierarchical-cache"),
    (dict(crumb={"recipe": "had2"}, resolved={"speculative_algorithm": "EAGLE"}), "speculative decoding"),
    (dict(crumb={"recipe": "had2"}, layer={"sliding_window_size": 512}), "its attention has a sliding window"),
    (dict(crumb={"recipe": "had2"}, layer={"qk_head_dim": 40, "v_head_dim": 40}, layers=30), "40"),
    (dict(crumb={"recipe": "had2"}, memory=1 << 20), "more than half. Type: --max-running-requests"),
]


@pytest.mark.parametrize("i", range(len(REFUSED)))
def test_refused_with_the_remedy(refusals, i):
    assert re.search(REFUSED[i][1], refusals[i]), refusals[i]


def test_versions():
    from crumb_kv.serving import Refused
    from crumb_kv.sglang.options import check_version

    for version in ("0.5.23", "0.5.23.post1"):
        check_version(version)
    for version in ("0.5.22", "0.5.24", "0.6.0"):
        with pytest.raises(Refused, match=f"this is {version}. Type: pip install"):
            check_version(version)

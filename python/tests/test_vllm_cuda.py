"""SmolLM2 in a real vLLM on a GPU. Needs vLLM for CUDA and a crumb_kv built with CRUMB_CUDA=ON:
`pytest python/tests/test_vllm_cuda.py` with the options that `make test-vllm` passes to test_vllm.py."""

import re

import pytest
import torch

import served
from conftest import scores

pytest.importorskip("vllm", reason="needs vLLM for CUDA")

from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from crumb_kv import CrumbCache, has_cuda  # noqa: E402
from test_vllm import CHUNK, MEMORY, RECIPE, SHORT, job, run  # noqa: E402

pytestmark = pytest.mark.skipif(not (has_cuda() and torch.cuda.is_available()), reason="needs a GPU and a crumb_kv built with CRUMB_CUDA=ON")

GRAPHS = {"mode": 0, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}  # 0: not compiled
KINDS = ["fp32", "bf16", "between", "whole"]  # CUDA graphs of what is between attention, and of whole steps


@pytest.fixture(scope="module")
def engines(folder, tmp_path_factory, served_artefact, text, chat):
    """With crumb in one process, without in another."""
    prompts, crumb = served.prompts(text, chat), {"recipe": RECIPE, "artefact": str(served_artefact), **SHORT}
    tasks = served.tasks(text, prompts)
    refused = [job(folder, crumb={"recipe": "q8", "artefact": str(served_artefact)}), job(folder, crumb=crumb, attention_backend="FLASH_ATTN")]
    bf16 = lambda **more: job(folder, served.flat(tasks), crumb, dtype="bfloat16", **more)
    graphs = lambda mode: {**bf16(compilation_config={**GRAPHS, "cudagraph_mode": mode}), "eager": False}
    (fp32, eager, whole, *refused), log = run(tmp_path_factory.mktemp("crumb"), [
        job(folder, served.flat(tasks), crumb, operators="torch", ir_op_priority={"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}),
        bf16(), graphs("FULL_DECODE_ONLY"), *refused])
    (between,), _ = run(tmp_path_factory.mktemp("graphs"), [graphs("PIECEWISE")], VLLM_USE_BREAKABLE_CUDAGRAPH="1")
    (without,), _ = run(tmp_path_factory.mktemp("without"), [job(folder, served.flat(tasks), dtype="bfloat16")])
    assert "refused" not in {**fp32, **eager, **between, **whole, **without}, log[-4000:]
    kinds = {"fp32": fp32, "bf16": eager, "between": between, "whole": whole, "without": without}
    return {"prompts": prompts, "log": log, "refused": [got.get("refused", "no") for got in refused],
            **{kind: {**served.by_name(tasks, got["results"]), **got["facts"]} for kind, got in kinds.items()}}


@pytest.fixture(scope="module")
def ours(folder, served_artefact):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    return model, lambda: CrumbCache(model, RECIPE, artefact=served_artefact, **SHORT)


def test_every_layer_is_crumbs_and_has_its_own_page_size(engines, ours):
    for kind in KINDS:
        assert engines[kind]["implementations"] == ["CrumbImpl"] and engines[kind]["counts"] == [0, 0]
        assert engines[kind]["page_bytes"] == [coder.block_bytes for coder in ours[1]().coders]
    assert f"crumb: KV cache in {RECIPE}, artefact " in engines["log"]
    assert "CrumbImpl" not in engines["without"]["implementations"]


def test_log_probabilities_are_those_of_transformers(engines, ours, folder, text):
    expected = scores(ours[0], ours[1](), text[:1000], CHUNK).cpu()
    exact = scores(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda(), DynamicCache(), text[:1000], CHUNK).cpu()
    got = torch.tensor(engines["fp32"]["score"])
    noise, cost = (got - expected).abs(), (exact - expected).abs()
    print(f"\nmean {got.mean():.5f}, in transformers {expected.mean():.5f}; a token differs by {noise.median():.5f} (median), of the codes "
          f"{cost.median():.5f}")
    assert noise[:127].median() < 5e-3  # no codes are read yet; 0.0032 as measured
    assert abs(got.mean() - expected.mean()) < 5e-3 and noise.median() < cost.median() / 3


def test_answers_are_those_of_transformers(engines, ours):
    for prompt, got in zip(engines["prompts"], engines["fp32"]["solo"]):
        out = ours[0].generate(torch.tensor([prompt]).cuda(), past_key_values=ours[1](), max_new_tokens=16, do_sample=False)
        assert out[0, len(prompt) :].tolist() == got["tokens"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_that_is_found_changes_nothing(engines, kind):
    got = engines[kind]
    assert got["solo"][0]["cached"] == [0] and got["hit"]["cached"][0] >= 640 and got["aged_early_tokens"] == 0
    assert got["hit"]["tokens"] == got["again"]["tokens"] == got["solo"][0]["tokens"]


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_at_once_answer_as_each_alone(engines, kind):
    assert engines[kind]["together"]["tokens"] == 4 * [solo["tokens"][0] for solo in engines[kind]["solo"]]


@pytest.mark.parametrize("kind", ["between", "whole"])
def test_graphs_change_nothing(engines, kind):
    assert engines[kind]["score"] == engines["bf16"]["score"]
    assert engines[kind]["together"]["tokens"] == engines["bf16"]["together"]["tokens"]


def test_blocks_in_equal_memory(engines):
    ours, without = engines["bf16"], engines["without"]
    assert without["page_bytes"] == 30 * [3 * 64 * 2 * 64 * 2]
    print(f"\n{ours['blocks']} blocks, BF16 {without['blocks']}: {ours['blocks'] / without['blocks']:.2f} times")
    assert ours["blocks"] >= 5 * without["blocks"]
    assert 0.98 * MEMORY < ours["blocks"] * sum(ours["page_bytes"]) + ours["windows_bytes"] <= MEMORY


@pytest.mark.parametrize("i, remedy", [(0, "has no CUDA kernel.* Take had2, oscar or planes"), (1, "--attention-backend FLASH_ATTN beside a recipe. Leave it out")])
def test_refused_with_the_remedy(engines, i, remedy):
    assert re.search(remedy, engines["refused"][i]), engines["refused"][i]

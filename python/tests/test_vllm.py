"""SmolLM2 in a real vLLM on the CPU, with and without crumb: `make test-vllm`.

Float sums in another order round some K and V to the next BF16 number and some codes to their neighbours, in vLLM as in
test_model.py; what is equal to the bit there is said to be so."""

import json
import math
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import served
from conftest import scores

pytest.importorskip("vllm", reason="needs vLLM: type make test-vllm")

RECIPE = "planes:2"  # gives the layers pages of three sizes
SHORT = {"sink": 64, "recent": 64}  # windows short enough that codes are read
MEMORY = 1 << 30
CHUNK, WINDOW = 256, 1024  # tokens
REFUSED = [
    (dict(crumb={"recipe": "planes"}), "crumb calibrate"),
    (dict(crumb={"recipe": "kivi32"}), "no kernel reads such pages in place. Take one of: .*had2"),
    (dict(crumb={"recipe": "had2", "windows": 3}), "there is no option 'windows'. Take one of: recipe, artefact, sink"),
    (dict(crumb={"recipe": "had2", "recent": -1}), "option recent is -1"),
    (dict(crumb={"artefact": "x"}), "Type: --additional-config"),
    (dict(crumb={"recipe": "had2"}, block_size=32), "blocks of 32 tokens. Type: --block-size 64"),
    (dict(crumb={"recipe": "had2"}, kv_cache_dtype="fp8"), "--kv-cache-dtype fp8"),
    (dict(crumb={"recipe": "had2"}, max_num_seqs=256, kv_cache_memory_bytes=1 << 28), "more than half. Type: --max-num-seqs"),
    (dict(crumb={"recipe": "had2"}, hf_overrides={"head_dim": 40}), "heads of 40 channels have no page format"),
]


def job(model, tasks=(), crumb=None, operators="vllm", **more):
    arguments = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": CHUNK, "block_size": 64,
                 "kv_cache_memory_bytes": MEMORY, **more}
    return {"model": str(model), "crumb": crumb, "operators": operators, "arguments": arguments, "tasks": list(tasks)}


def run(at, jobs):
    """In a process of their own: starting vLLM takes longer than most jobs do."""
    (at / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, pathlib.Path(__file__).with_name("vllm_engine.py"), at / "jobs.json", at / "results.json"],
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads((at / "results.json").read_text()), done.stdout


@dataclass(frozen=True)
class Without:
    """vLLM as it is."""

    facts: dict
    score: list
    logits: pathlib.Path
    blocks: int  # of BF16; the others are FP32, as the model is
    page_bytes: list
    log: str


@pytest.fixture(scope="module")
def without(folder, tmp_path_factory, text):
    at = tmp_path_factory.mktemp("without")
    tasks = [{"score": text[:1000]}, {"divergence": text[:WINDOW], "file": str(at / "logits")}]
    (scored, bf16), log = run(at, [job(folder, tasks), job(folder, dtype="bfloat16")])
    return Without(scored["facts"], scored["results"][0], at / "logits", bf16["facts"]["blocks"], bf16["facts"]["page_bytes"], log)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random model, for SmolLM2's three KV heads cannot be halved; and a job for it."""
    torch.manual_seed(5)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
                 vocab_size=1000, max_position_embeddings=4096, initializer_range=0.1, eos_token_id=None, pad_token_id=0)
    model, tasks = tmp_path_factory.mktemp("small"), [{"score": torch.randint(2, 999, (500,)).tolist()}]
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(model)
    return lambda **more: job(model, tasks, **{"crumb": {"recipe": "had2", **SHORT}, "skip_tokenizer_init": True, **more})


@pytest.fixture(scope="module")
def engines(folder, tmp_path_factory, without, small, served_artefact, text, chat):
    """What engines with crumb did in one process."""
    prompts, crumb = served.prompts(text, chat), {"recipe": RECIPE, "artefact": str(served_artefact), **SHORT}
    tasks = {"divergence": {"divergence": text[:WINDOW], "file": str(without.logits)}, **served.tasks(text, prompts)}
    jobs = [job(folder, served.flat(tasks), crumb), job(folder, [tasks["score"]], crumb, operators="torch"), small()]
    jobs += [small(load_format="dummy", **case) for case, _ in REFUSED]
    (planes, torchs, alone, *refused), log = run(tmp_path_factory.mktemp("crumb"), jobs)
    assert "refused" not in {**planes, **torchs, **alone}, log[-4000:]
    return {"planes": {"prompts": prompts, "log": log, **served.by_name(tasks, planes["results"]), **planes["facts"]},
            "torch": torchs, "alone": alone, "refused": [got.get("refused", "no") for got in refused]}


@pytest.fixture(scope="module")
def planes(engines):
    return engines["planes"]


@pytest.fixture(scope="module")
def ours(folder, served_artefact):
    from crumb_kv import CrumbCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, lambda: CrumbCache(model, RECIPE, artefact=served_artefact, **SHORT)


def test_every_layer_is_crumbs_and_has_its_own_page_size(planes, ours):
    assert planes["implementations"] == ["CrumbImpl"]
    assert planes["page_bytes"] == [coder.block_bytes for coder in ours[1]().coders]  # nothing is padded
    assert len(set(planes["page_bytes"])) == 3
    assert planes["counts"] == [0, 0]


def test_the_start_says_what_it_costs(planes):
    assert f"crumb: KV cache in {RECIPE}, artefact " in planes["log"] and "bits an element in 30 layers" in planes["log"]
    assert f"tokens in {planes['blocks']} pages" in planes["log"]


def test_log_probabilities_are_those_of_transformers(planes, without, ours, text):
    model, cache = ours
    expected = scores(model, cache(), text[:1000], CHUNK)
    got, exact = torch.tensor(planes["score"]), torch.tensor(without.score)
    noise, cost = (got - expected).abs(), (exact - expected).abs()
    print(f"\nmean log-probability {got.mean():.4f}, in transformers {expected.mean():.4f}, without {exact.mean():.4f}; a token differs by "
          f"{noise.median():.5f} (median), {noise.max():.5f} (most), of the codes {cost.median():.5f}")
    assert noise[:127].median() < 3e-3  # no codes are read yet
    assert abs(got.mean() - expected.mean()) < 5e-3 and noise.median() < cost.median() / 3


def test_log_probabilities_are_equal_where_sums_are(engines, ours, text):
    """With PyTorch's operators in place of vLLM's, K and V are the same numbers, and so are codes and answers."""
    differs = (torch.tensor(engines["torch"]["results"][0]) - scores(ours[0], ours[1](), text[:1000], CHUNK)).abs()
    print(f"\na token differs by {differs.median():.6f} (median), {differs.max():.6f} (most)")
    assert differs.max() < 5e-4


def test_divergence_is_that_of_eval(option, planes, folder, served_artefact, tmp_path):
    """The same window, weights, recipe and artefact in the crumb program, beside its own 16 bits."""
    subprocess.run([option("--crumb"), "eval", "-m", folder.with_name("smollm2-f32.gguf"), "--kv", RECIPE, "--kv-artifact", served_artefact,
                    "-f", option("--text"), "-c", str(WINDOW), "--first", str(WINDOW // 2), "--kv-sink", str(SHORT["sink"]),
                    "--kv-recent", str(SHORT["recent"]), "--ubatch-size", str(CHUNK), "-t", "1", "--results", tmp_path / "results",
                    "--json", tmp_path / "eval.json"], check=True, capture_output=True)
    rows = map(json.loads, (tmp_path / "eval.json").read_text().splitlines())
    theirs, = (row for row in rows if row["kind"] == "quality" and row["recipe"] == RECIPE)
    ours = planes["divergence"]
    print(f"\n{RECIPE}, {WINDOW} tokens, second half, sink 64, recent 64 | Mean KLD | 99.9% KLD | Same top p | NLL\n"
          f"crumb eval | {theirs['mean_kld']:.4f} | {theirs['kld_99.9']:.3f} | {theirs['same_top_p']:.3f} | {math.log(theirs['ppl']):.4f}\n"
          f"vLLM | {ours['kld']:.4f} | {ours['kld_99.9%']:.3f} | {ours['same_top']:.3f} | {ours['nll']:.4f}")
    assert theirs["positions"] == WINDOW - WINDOW // 2 - 1
    assert abs(ours["kld"] - theirs["mean_kld"]) < 0.15 * theirs["mean_kld"]
    assert abs(ours["nll"] - math.log(theirs["ppl"])) < 0.01


def test_answers_are_those_of_transformers(planes, ours):
    model, cache = ours
    for prompt, got in zip(planes["prompts"][:3], planes["solo"]):
        out = model.generate(torch.tensor([prompt]), past_key_values=cache(), max_new_tokens=16, do_sample=False)
        assert out[0, len(prompt) :].tolist() == got["tokens"][0]


def test_a_prefix_that_is_found_changes_nothing(planes):
    assert planes["solo"][0]["cached"] == [0] and planes["hit"]["cached"][0] >= 640
    assert planes["hit"]["tokens"] == planes["again"]["tokens"] == planes["solo"][0]["tokens"]
    assert planes["aged_early_tokens"] == 0


def test_sixteen_at_once_answer_as_each_alone(planes):
    assert planes["together"]["tokens"] == 4 * [solo["tokens"][0] for solo in planes["solo"]]


def test_blocks_in_equal_memory(planes, without):
    """Windows of 16 sequences, and of as many that have ended, included."""
    assert without.page_bytes == 30 * [3 * 64 * 2 * 64 * 2]
    print(f"\n{planes['blocks']} blocks, BF16 {without.blocks}: {planes['blocks'] / without.blocks:.2f} times")
    assert planes["blocks"] >= 5 * without.blocks
    used = planes["blocks"] * sum(planes["page_bytes"]) + planes["windows_bytes"]
    assert 0.98 * MEMORY < used <= MEMORY


def test_vllm_without_the_options_is_as_it_was(without):
    assert without.facts["implementations"] == ["CPUAttentionBackendImpl"] and "crumb:" not in without.log


def test_two_processes_are_one(tmp_path, small, engines):
    """Their sums over heads are split, so they end in other bits."""
    alone, ((two,), log) = engines["alone"], run(tmp_path, [small(tensor_parallel_size=2)])
    assert "rank 0 of 2" in log and "rank 1 of 2" in log
    assert two["facts"]["blocks"] > 1.95 * alone["facts"]["blocks"]
    differs = (torch.tensor(alone["results"][0]) - torch.tensor(two["results"][0])).abs()
    assert differs.median() < 1e-3 and differs.max() < 0.05  # 1e-5 and 1e-3 as measured


@pytest.mark.parametrize("i", range(len(REFUSED)))
def test_refused_with_the_remedy(engines, i):
    assert re.search(REFUSED[i][1], engines["refused"][i]), engines["refused"][i]


def test_versions():
    from crumb_kv.serving import Refused
    from crumb_kv.vllm.options import check_version

    for version in ("0.29.0", "0.32.0+cpu", "0.33.1"):
        check_version(version)
    for version in ("0.28.0", "0.34.0", "1.0.0"):
        with pytest.raises(Refused, match=f"this is {version}. Type: pip install"):
            check_version(version)

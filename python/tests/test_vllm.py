"""SmolLM2 in a real vLLM on the CPU, with and without crumb: `make test-vllm`.

Float sums in another order round some K and V to the next BF16 number and some codes to their neighbours, in vLLM as in
test_model.py; what is equal to the bit there is said to be so."""

import json
import math
import pathlib
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from conftest import scores

pytest.importorskip("vllm", reason="needs vLLM: type make test-vllm")

RECIPE = "planes:2"  # gives the layers pages of three sizes
SHORT = {"sink": 64, "recent": 64}  # windows short enough that codes are read
MEMORY = 1 << 30
CHUNK, WINDOW = 256, 1024  # tokens
QUESTIONS = ["What is the capital of France?", "List the days of the week.", "What is 2 plus 2?", "Write one sentence about rain.",
             "What colour is the sky?", "Name three fruits.", "What is a lighthouse?", "Who writes books?"]


def arguments(**more):
    return {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": CHUNK, "block_size": 64,
            "kv_cache_memory_bytes": MEMORY, **more}


def run(folder, tmp_path, tasks, crumb=None, expect=0, operators="vllm", **more):
    job, result = tmp_path / "job.json", tmp_path / "result.json"
    job.write_text(json.dumps({"model": str(folder), "crumb": crumb, "operators": operators, "arguments": arguments(**more), "tasks": tasks}))
    done = subprocess.run([sys.executable, pathlib.Path(__file__).with_name("vllm_engine.py"), job, result], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == expect, done.stdout[-4000:]
    return json.loads(result.read_text()), done.stdout


@pytest.fixture(scope="module")
def bf16(folder, tmp_path_factory, text):
    at = tmp_path_factory.mktemp("bf16")
    got, log = run(folder, at, [{"score": text[:1000]}, {"divergence": text[:WINDOW], "file": str(at / "logits")}])
    return got, log, at / "logits"


@pytest.fixture(scope="module")
def planes(folder, tmp_path_factory, bf16, served_artefact, text, chat):
    """One engine for most tests: prompts that are cut into chunks of 256, beside others that decode."""
    long = [text[:700] + chat(question) for question in QUESTIONS]
    tasks = {
        "score": {"score": text[:1000]},
        "divergence": {"divergence": text[:WINDOW], "file": str(bf16[2])},
        "forget the text": "forget",
        "solo": [{"generate": [prompt], "tokens": 16} for prompt in long],
        "hit": {"generate": [long[0]], "tokens": 16},
        "forget": "forget",
        "again": {"generate": [long[0]], "tokens": 16},
        "forget again": "forget",
        "together": {"generate": 2 * long, "tokens": 16},
    }
    flat = [task for tasks_of in tasks.values() for task in (tasks_of if isinstance(tasks_of, list) else [tasks_of])]
    got, log = run(folder, tmp_path_factory.mktemp("planes"), flat, {"recipe": RECIPE, "artefact": str(served_artefact), **SHORT})
    results = iter(got["results"])
    by_name = {name: [next(results) for _ in task] if isinstance(task, list) else next(results) for name, task in tasks.items()}
    return {"long": long, "log": log, **by_name, **got["facts"]}


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


def test_log_probabilities_are_those_of_transformers(planes, bf16, ours, text):
    model, cache = ours
    expected = scores(model, cache(), text[:1000], CHUNK)
    got, exact = torch.tensor(planes["score"]), torch.tensor(bf16[0]["results"][0])
    noise, cost = (got - expected).abs(), (exact - expected).abs()
    print(f"\nmean log-probability {got.mean():.4f}, in transformers {expected.mean():.4f}, BF16 {exact.mean():.4f}; a token differs by "
          f"{noise.median():.5f} (median), {noise.max():.5f} (most), of the codes {cost.median():.5f}")
    assert noise[:127].median() < 3e-3  # no codes are read yet
    assert abs(got.mean() - expected.mean()) < 5e-3 and noise.median() < cost.median() / 3


def test_log_probabilities_are_equal_where_sums_are(folder, tmp_path, ours, served_artefact, text):
    """With PyTorch's operators in place of vLLM's, K and V are the same numbers, and so are codes and answers."""
    crumb = {"recipe": RECIPE, "artefact": str(served_artefact), **SHORT}
    got, _ = run(folder, tmp_path, [{"score": text[:1000]}], crumb, operators="torch")
    differs = (torch.tensor(got["results"][0]) - scores(ours[0], ours[1](), text[:1000], CHUNK)).abs()
    print(f"\na token differs by {differs.median():.6f} (median), {differs.max():.6f} (most)")
    assert differs.max() < 5e-4


def test_divergence_is_that_of_eval(option, planes, bf16, folder, served_artefact, tmp_path):
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
    for prompt, got in zip(planes["long"][:3], planes["solo"]):
        out = model.generate(torch.tensor([prompt]), past_key_values=cache(), max_new_tokens=16, do_sample=False)
        assert out[0, len(prompt) :].tolist() == got["tokens"][0]


def test_a_prefix_that_is_found_changes_nothing(planes):
    assert planes["solo"][0]["cached"] == [0] and planes["hit"]["cached"][0] >= 640
    assert planes["hit"]["tokens"] == planes["again"]["tokens"] == planes["solo"][0]["tokens"]
    assert planes["aged_early_tokens"] == 0


def test_sixteen_at_once_answer_as_each_alone(planes):
    assert planes["together"]["tokens"] == 2 * [solo["tokens"][0] for solo in planes["solo"]]


def test_blocks_in_equal_memory(folder, tmp_path, served_artefact):
    """As users run it: weights and vLLM's own cache in BF16."""
    options = {"dtype": "bfloat16", "max_num_seqs": 4}
    exact, _ = run(folder, tmp_path, [], **options)
    got, _ = run(folder, tmp_path, [], {"recipe": RECIPE, "artefact": str(served_artefact), "spare_windows": 2}, **options)
    assert exact["facts"]["page_bytes"] == 30 * [3 * 64 * 2 * 64 * 2]
    assert got["facts"]["blocks"] >= 5 * exact["facts"]["blocks"]
    used = got["facts"]["blocks"] * sum(got["facts"]["page_bytes"]) + got["facts"]["windows_bytes"]
    assert 0.98 * MEMORY < used <= MEMORY


def test_vllm_without_the_options_is_as_it_was(bf16):
    assert bf16[0]["facts"]["implementations"] == ["CPUAttentionBackendImpl"] and "crumb:" not in bf16[1]


def test_two_processes_are_one(folder, tmp_path):
    """A random model, for SmolLM2's three KV heads cannot be halved. Its sums over heads are split, so they end in other bits."""
    torch.manual_seed(5)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
                 vocab_size=1000, max_position_embeddings=4096, initializer_range=0.1, eos_token_id=None, pad_token_id=0)
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(tmp_path / "small")
    tasks = [{"score": torch.randint(2, 999, (500,)).tolist()}]
    alone, two = (run(tmp_path / "small", tmp_path, tasks, {"recipe": "had2", **SHORT}, tensor_parallel_size=size,
                      skip_tokenizer_init=True) for size in (1, 2))
    assert "rank 0 of 2" in two[1] and "rank 1 of 2" in two[1]
    assert two[0]["facts"]["blocks"] > 1.95 * alone[0]["facts"]["blocks"]
    differs = (torch.tensor(alone[0]["results"][0]) - torch.tensor(two[0]["results"][0])).abs()
    assert differs.median() < 1e-3 and differs.max() < 0.05  # 1e-5 and 1e-3 as measured


REFUSED = [
    (dict(crumb={"recipe": "planes"}), "crumb calibrate"),
    (dict(crumb={"recipe": "kivi32"}), "no kernel reads such pages in place. Take one of: .*had2"),
    (dict(crumb={"recipe": "had2", "windows": 3}), "there is no option 'windows'. Take one of: recipe, artefact, sink"),
    (dict(crumb={"recipe": "had2", "recent": -1}), "option recent is -1"),
    (dict(crumb={"artefact": "x"}), 'Type: --additional-config'),
    (dict(crumb={"recipe": "had2"}, block_size=32), "blocks of 32 tokens. Type: --block-size 64"),
    (dict(crumb={"recipe": "had2"}, kv_cache_dtype="fp8"), "--kv-cache-dtype fp8"),
    (dict(crumb={"recipe": "had2"}, max_num_seqs=256), "more than half. Type: --max-num-seqs"),
    (dict(crumb={"recipe": "had2"}, hf_overrides={"head_dim": 40}), "40"),
]


@pytest.fixture(scope="module")
def refusals(folder, tmp_path_factory):
    """All in one process: an engine that is refused leaves nothing behind."""
    file = tmp_path_factory.mktemp("refused") / "cases.json"
    cases = [{"crumb": case["crumb"], "arguments": arguments(**{k: v for k, v in case.items() if k != "crumb"})} for case, _ in REFUSED]
    file.write_text(json.dumps([{"model": str(folder), **case} for case in cases]))
    code = ("import json, sys; sys.path.insert(0, sys.argv[2])\nfrom vllm_engine import Engine\n"
            "for job in json.load(open(sys.argv[1])):\n"
            "    try:\n        Engine(job)\n        print('REFUSED no')\n"
            "    except Exception as e:\n        print('REFUSED', ' '.join(f'{e} {e.__cause__}'.split()))\n")
    done = subprocess.run([sys.executable, "-c", code, file, pathlib.Path(__file__).parent], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    said = [line[8:] for line in done.stdout.splitlines() if line.startswith("REFUSED ")]
    assert len(said) == len(REFUSED), done.stdout[-4000:]
    return said


@pytest.mark.parametrize("i", range(len(REFUSED)))
def test_refused_with_the_remedy(refusals, i):
    import re

    assert re.search(REFUSED[i][1], refusals[i]), refusals[i]


def test_versions():
    from crumb_kv.serving import Refused
    from crumb_kv.vllm.options import check_version

    for version in ("0.29.0", "0.32.0+cpu", "0.33.1"):
        check_version(version)
    for version in ("0.28.0", "0.34.0", "1.0.0"):
        with pytest.raises(Refused, match=f"this is {version}. Type: pip install"):
            check_version(version)

"""SmolLM2 in a real vLLM on the CPU, with and without crumb: `make test-vllm`.

Float sums in another order round some K and V to the next BF16 number and some codes to their neighbours, in vLLM as in
test_model.py; what is equal to the bit there is said to be so."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

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


def run(at, jobs, **environment):
    """In a process of their own: starting vLLM takes longer than most jobs do."""
    (at / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, pathlib.Path(__file__).with_name("vllm_engine.py"), at / "jobs.json", at / "results.json"],
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **environment})
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


# The classes without an engine: what CUDA asks of them beyond what the CPU does.


def config(device="cuda", backend=None, **model):
    """What the refusals look at."""
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device), attention_config=SimpleNamespace(backend=backend), speculative_config=None,
        parallel_config=SimpleNamespace(), kv_transfer_config=None, cache_config=SimpleNamespace(block_size=64),
        model_config=SimpleNamespace(**model))


@pytest.mark.parametrize("given, remedy", [
    (config(), "this build is for CPUs alone. Type: pip install .*CRUMB_CUDA=ON"),
    (config("xpu"), "the device xpu: it runs on CPUs and on CUDA"),
    (config("cpu", SimpleNamespace(name="FLASHINFER")), "--attention-backend FLASHINFER beside a recipe. Leave it out"),
    (config("cpu", enable_sleep_mode=True), "Leave --enable-sleep-mode out"),
])
def test_refused_on_a_device(monkeypatch, given, remedy):
    from crumb_kv import library
    from crumb_kv.serving import Refused
    from crumb_kv.vllm.served import _refuse_what_is_not_supported

    monkeypatch.setattr(library, "has_cuda", lambda: False)
    with pytest.raises(Refused, match=remedy):
        _refuse_what_is_not_supported(given)
    _refuse_what_is_not_supported(config("cpu"))
    monkeypatch.setattr(library, "has_cuda", lambda: True)
    _refuse_what_is_not_supported(config())


def test_what_vllm_promises_and_crumb_cannot_is_refused(monkeypatch):
    from crumb_kv.serving import Refused
    from crumb_kv.vllm.served import _refuse_what_is_not_supported

    given = config("cpu")
    given.attention_config.use_non_causal = True
    with pytest.raises(Refused, match="attention that is not causal"):
        _refuse_what_is_not_supported(given)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(Refused, match="batch invariance .VLLM_BATCH_INVARIANT.. Unset it"):
        _refuse_what_is_not_supported(config("cpu"))


def test_layers_with_rules_of_their_own_are_refused():
    """Llama 4's local layers, attention sinks of vLLM's own and the like take a backend as theirs and change what a token sees."""
    from crumb_kv.serving import Refused
    from crumb_kv.vllm.served import Served
    from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention

    layer = lambda kind: object.__new__(kind)
    shapes = lambda kinds, **model: Served._shapes(SimpleNamespace(attentions=dict(enumerate(map(layer, kinds)))), SimpleNamespace(**model), None)
    with pytest.raises(Refused, match="layers of kind ChunkedLocalAttention, and only full attention is coded"):
        shapes([Attention, ChunkedLocalAttention])
    with pytest.raises(Refused, match="its images are seen both ways"):
        shapes([Attention], is_mm_prefix_lm=True)


def test_every_backend_is_crumbs_with_the_options_and_vllms_without(monkeypatch):
    from crumb_kv.serving import Refused
    from crumb_kv.vllm import backend, register
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    monkeypatch.setattr(backend, "_asked_for", lambda: False)
    for name, module in (("TRITON_ATTN", "triton_attn"), ("CPU_ATTN", "cpu_attn")):
        own = AttentionBackendEnum[name].get_class()
        assert own.__mro__[1].__module__ == "vllm.v1.attention.backends." + module and own.get_name() == name
        assert own is AttentionBackendEnum[name].get_class() and ".".join(own.full_cls_name()) == AttentionBackendEnum[name].get_path()
        own.get_impl_cls()
    monkeypatch.setattr(backend, "_asked_for", lambda: True)
    with pytest.raises(Refused, match="has run an engine without crumb"):
        own.get_impl_cls()
    named = [each for each in AttentionBackendEnum if each.value != ""]
    assert {each.get_class() for each in named} == {backend.CrumbBackend}  # on CUDA vLLM asks several, by device and by model
    assert backend.CrumbBackend.validate_configuration(head_size=80, dtype=None) == []


class Steps:
    """The part of Served that is asked once a step."""

    def __init__(self):
        from crumb_kv.vllm.served import Served

        self.steps, self._work, self.given = 0, [], []
        self.step = lambda *arguments: Served.step(self, *arguments)

    def say_capacity_once(self):
        pass

    def work(self, tables, lengths, counts):
        self.given.append((tables.tolist(), lengths, counts))
        return object()


def common(tables, lengths, counts, on_device=False):
    """As vLLM's runners hand it over. On a GPU only the upper bound of the lengths lies on the host, and the batch may be padded."""
    lengths = torch.tensor(lengths)
    return SimpleNamespace(block_table_tensor=torch.tensor(tables), num_reqs=len(lengths), seq_lens_cpu_upper_bound=lengths,
                           seq_lens=lengths.to("meta") if on_device else lengths,
                           query_start_loc_cpu=torch.tensor([0, *counts]).cumsum(0))


@pytest.fixture
def builders(monkeypatch):
    from crumb_kv.vllm import backend

    steps = Steps()
    monkeypatch.setattr(backend, "served_by", lambda config: steps)
    return steps, lambda: backend.CrumbBuilder(None, [], None, torch.device("cpu"))


def test_builders_of_a_step_return_the_same(builders):
    steps, make = builders
    first, second = make(), make()
    for number in (1, 2):
        work = first.build(0, common([[5, 6, 0]], [70], [3]))
        assert second.build(common_prefix_len=0, common_attn_metadata=None) is work and len(steps.given) == number
    later = make()  # vLLM makes them again once it knows how much memory there is
    assert later.build(0, common([[5, 6, 0]], [73], [3])) is not work
    with pytest.raises(RuntimeError, match="prepares step 5 after step 3"):
        first.steps = 4
        first.build(0, common([[5, 6, 0]], [70], [3]))


def test_a_step_on_a_gpu_is_read_on_the_host_and_dummies_are_nobodys(builders):
    """Rows that pad a batch have no tokens; in a trial run of vLLM's every block is 0."""
    steps, make = builders
    builder = make()
    builder.build(0, common([[5, 6, 9], [7, 9, 9], [0, 9, 9]], [70, 64, 0], [3, 1, 0], on_device=True))
    builder.build(0, common([[0, 0], [0, 0]], [1, 1], [1, 1], on_device=True))
    assert steps.given == [([[5, 6], [7, 9], [0, 9]], [70, 64, 0], [3, 1, 0]), ([[0], [0]], [1, 1], [0, 0])]


@pytest.mark.parametrize("can_stand, support", [(False, "NEVER"), (True, "UNIFORM_SINGLE_TOKEN_DECODE")])
def test_attention_is_in_a_cuda_graph_where_its_tables_stand(monkeypatch, can_stand, support):
    from crumb_kv.vllm import backend

    served = SimpleNamespace(can_stand=can_stand, steps=0, say_capacity_once=lambda: None, standing=lambda n: [n])
    monkeypatch.setattr(backend, "served_by", lambda config: served)
    assert backend.CrumbBuilder.get_cudagraph_support(None, None).name == support
    builder = backend.CrumbBuilder(None, [], None, torch.device("cpu"))
    assert builder.build_for_cudagraph_capture(SimpleNamespace(num_reqs=3)) == [3] and builder.steps == 0  # it is no step

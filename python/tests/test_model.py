"""SmolLM2 in both programs, on the same weights: what crumb perplexity computes with --kv is what CrumbCache computes.

llama-perplexity's file of logits holds the tokens and, for each token that counts, the log-probabilities of the vocabulary in
16 bits, none less than 16 nats below the largest. Two programs that sum in another order round some K and V to the next BF16 number and some codes to their
neighbours; so they agree up to that noise, which is far below what the codes themselves cost."""

import json
import pathlib
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from crumb_kv import CrumbCache, calibrate
from dequantised import dequantise

TOKENS = 2304  # of calibration
CONTEXT, RECENT = 512, 64  # a window short enough that codes are read


@pytest.fixture(scope="module")
def gguf(option):
    work = pathlib.Path(option("--work"))
    work.mkdir(parents=True, exist_ok=True)
    file = work / "smollm2-f32.gguf"
    if not file.exists():
        dequantise(option("--model"), file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
    return file


@pytest.fixture(scope="module")
def model(gguf):
    return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def artefact(option, gguf):
    """Of few tokens: good enough to be the same in both programs."""
    file = gguf.with_suffix(".no-chat.safetensors")  # what it holds is in its name: it is kept for later runs
    if not file.exists():
        subprocess.run([option("--crumb"), "calibrate", "-m", gguf, "-o", file, "-f", option("--text"), "--no-chat", "--tokens", str(TOKENS), "--metric", "none"],
                       check=True)
    return file


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def crumb_logits(option, gguf, file, *flags):
    """Tokens [CONTEXT] and log-probabilities of the second half of them, as the program sees them."""
    subprocess.run([option("--crumb"), "perplexity", "-m", gguf, "-f", option("--text"), "-c", str(CONTEXT), "-b", str(CONTEXT),
                    "--chunks", "1", "--no-warmup", "--kl-divergence-base", file, "--kv-recent", str(RECENT), *flags],
                   check=True, capture_output=True)
    data = file.read_bytes()
    assert data[:8] == b"_logits_"
    context, vocabulary, chunks = np.frombuffer(data, np.int32, 3, 8)
    tokens = np.frombuffer(data, np.int32, context * chunks, 20)
    row = 2 * ((vocabulary + 1) // 2) + 4  # two floats, scale and least, then 16 bits a word
    rows = np.frombuffer(data, np.uint16, offset=20 + 4 * len(tokens)).reshape(-1, row)
    scale, least = rows[:, :4].copy().view(np.float32).T
    log_p = least[:, None] + scale[:, None] * rows[:, 4 : 4 + vocabulary].astype(np.float32)
    return torch.from_numpy(tokens.astype(np.int64))[None], torch.from_numpy(log_p)


def our_logits(cache, model, tokens, rows):
    log_p = model(tokens, past_key_values=cache).logits[0, CONTEXT - 1 - rows : -1].log_softmax(1)
    return log_p.maximum(log_p.max(1, keepdim=True).values - 16)


def divergence(p, q):
    return (p.exp() * (p - q)).sum(1).mean().item()


def test_windows_alone_are_16_bit_in_both(option, gguf, model, tmp_path):
    tokens, theirs = crumb_logits(option, gguf, tmp_path / "logits", "--kv", "bf16")
    ours = our_logits(CrumbCache(model, "had2", recent=CONTEXT), model, tokens, len(theirs))
    assert divergence(theirs, ours) < 1e-4  # 3e-6 as measured


@pytest.mark.parametrize("recipe", ["had2", "oscar", "planes"])
def test_logits_are_those_of_the_program(option, gguf, model, artefact, tmp_path, recipe):
    file = None if recipe == "had2" else artefact
    flags = ["--kv", recipe] + (["--kv-artifact", file] if file else [])
    tokens, theirs = crumb_logits(option, gguf, tmp_path / "logits", *flags)
    cache = CrumbCache(model, recipe, artefact=file, recent=RECENT)
    ours = our_logits(cache, model, tokens, len(theirs))
    exact = our_logits(CrumbCache(model, "had2", recent=CONTEXT), model, tokens, len(theirs))
    noise, cost = divergence(theirs, ours), divergence(exact, ours)
    nll = [-p.gather(1, tokens[0, -len(p) :, None]).mean().item() for p in (theirs, ours)]
    print(f"\n{cache}\n{recipe}: perplexity {np.exp(nll[0]):.4f} and ours {np.exp(nll[1]):.4f}, KLD between them {noise:.5f}, "
          f"of the codes {cost:.5f}")
    assert noise < cost / 8 and abs(nll[0] - nll[1]) < 0.01


def test_calibration_is_that_of_the_program(option, gguf, model, artefact, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    text = pathlib.Path(option("--text")).read_text()[: 8 * TOKENS]
    calibrate(model, tokenizer, [text], tmp_path / "ours", tokens=TOKENS, window=4096, metric="none")
    files = (artefact, tmp_path / "ours")
    assert len({header(file)["text_hash"] for file in files}) == 1  # the very same tokens
    theirs, ours = map(load_file, files)
    same = 0
    for layer in range(30):
        near(ours, theirs, f"layers.{layer}.k_mean")
        for side in ("k", "v"):
            parts = [{n for n in of if n.startswith(f"layers.{layer}.{side}_planes")} for of in (theirs, ours)]
            if parts[0] == parts[1]:  # centred, page means: tried on a few pages, so that a near tie may end either way
                near(ours, theirs, f"layers.{layer}.{side}_planes.spectrum")
                same += 1
    assert same > 45
    subprocess.run([option("--crumb"), "rotations", "adopt", "-m", gguf, "--artifact", files[1], "-o", tmp_path / "adopted"], check=True)
    assert header(tmp_path / "adopted")["model.hash"] == header(artefact)["model.hash"]


def header(file):
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def near(ours, theirs, name):
    assert (ours[name] - theirs[name]).norm() < 0.01 * theirs[name].norm(), name


def test_answers(model, gguf):
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, past_key_values=CrumbCache(model, "had2"), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])

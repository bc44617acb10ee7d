"""Options for the tests that need a model: what `make test-python` passes. And what the tests of the serving engines share."""

import os
import pathlib
import subprocess

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small keep no second thread busy: it waits, at the cost of four

import pytest

TOKENS = 2304  # of calibration


def pytest_addoption(parser):
    parser.addoption("--crumb", help="the crumb program")
    parser.addoption("--model", help="SmolLM2 as GGUF")
    parser.addoption("--text", help="a text file")
    parser.addoption("--work", help="folder for what the tests derive from the model, kept for the next run")


@pytest.fixture(scope="session")
def option(request):
    def get(name):
        value = request.config.getoption(name)
        if value is None:
            pytest.fail(f"needs {name}: type make test-python, test-vllm or test-sglang, which pass it", pytrace=False)
        return value

    return get


@pytest.fixture(scope="session")
def folder(option):
    """The weights of the GGUF as serving engines and transformers read them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dequantised import dequantise

    work = pathlib.Path(option("--work"))
    work.mkdir(parents=True, exist_ok=True)
    gguf, made = work / "smollm2-f32.gguf", work / "smollm2"
    if not gguf.exists():
        dequantise(option("--model"), gguf.with_suffix(".part"))
        gguf.with_suffix(".part").rename(gguf)
    if not (made / "complete").exists():
        model = AutoModelForCausalLM.from_pretrained(work, gguf_file=gguf.name, dtype=torch.bfloat16)
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(work, gguf_file=gguf.name).save_pretrained(made)
        (made / "complete").touch()
    return made


@pytest.fixture(scope="session")
def served_artefact(option, folder):
    file, gguf = folder.with_name("smollm2-f32.no-chat.safetensors"), folder.with_name("smollm2-f32.gguf")
    if not file.exists():
        subprocess.run([option("--crumb"), "calibrate", "-m", gguf, "-o", file, "-f", option("--text"), "--no-chat", "--tokens", str(TOKENS), "--metric", "none"],
                       check=True)
    return file


@pytest.fixture(scope="session")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def chat(tokenizer):
    return lambda text: tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]


@pytest.fixture(scope="session")
def text(option, tokenizer):
    return tokenizer(pathlib.Path(option("--text")).read_text()[:40000])["input_ids"]


def scores(model, cache, ids, chunk):
    """Log-probability of each token but the first, where `chunk` tokens at a time pass through the model."""
    import torch

    ids = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        logits = torch.cat([model(part, past_key_values=cache).logits[0] for part in ids.split(chunk, 1)])
    return logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

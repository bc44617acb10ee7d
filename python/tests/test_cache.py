"""CrumbCache under small random models: what it must equal, whatever the batch, the chunks, the beams and the crops."""

import copy

import pytest
import torch
from transformers import (AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, GptOssConfig, GraniteConfig, LlamaConfig,
                          MistralConfig, Qwen2Config, Qwen3Config, T5Config)

from crumb_kv import CrumbCache, models

SIZES = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=32, vocab_size=99, max_position_embeddings=4096, pad_token_id=0, eos_token_id=None, bos_token_id=1)
SHORT = dict(sink=64, recent=64)
# Sums of floats in another order.
NOISE = 2e-5
# A sum that differs in its last bit can round to the next BF16 number, which is 2^-8 away.
ROUNDING = 1e-3


class RoundedCache(DynamicCache):
    """transformers' own cache with K and V rounded to BF16, as ours has them."""

    def update(self, key, value, layer, *args, **kwargs):
        return super().update(key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype), layer, *args, **kwargs)


def make_model(config=None, dtype=torch.float32):
    torch.manual_seed(5)
    config = config or LlamaConfig(**SIZES)
    config.initializer_range = 0.1  # so that attention is not the same everywhere
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def text(n, batch=1, seed=0):
    return torch.randint(1, 99, (batch, n), generator=torch.Generator().manual_seed(seed))


def logits(model, ids, cache, **options):
    return model(ids, past_key_values=cache, **options).logits


def close(a, b, noise=NOISE):
    return (a - b).abs().max() <= noise * b.abs().max()


@pytest.mark.filterwarnings("ignore:crumb_kv. the keys of Qwen2")
@pytest.mark.parametrize("config, dtype, noise", [
    (LlamaConfig(**SIZES), torch.float32, ROUNDING),
    (LlamaConfig(**{**SIZES, "num_key_value_heads": 4}), torch.float32, ROUNDING),
    (LlamaConfig(**SIZES), torch.bfloat16, 0.02),  # transformers computes attention in BF16, we in FP32
    (MistralConfig(**SIZES, sliding_window=None), torch.float32, ROUNDING),
    (Qwen2Config(**SIZES), torch.float32, ROUNDING),
    (Qwen3Config(**SIZES), torch.float32, ROUNDING),
    (GraniteConfig(**SIZES, attention_multiplier=0.3), torch.float32, ROUNDING),
])
def test_exact_windows_equal_transformers_own_cache(config, dtype, noise):
    model, ids = make_model(config, dtype), text(200, 2)
    model.set_attn_implementation("sdpa")
    want = logits(model, ids, RoundedCache())
    cache = CrumbCache(model, "had2", recent=256)
    got = torch.cat([logits(model, part, cache) for part in ids.split([150, 1, 49], 1)], 1)
    assert close(got, want, noise)
    assert cache.bytes().coded == 0 and cache.get_seq_length() == 200


def test_codes_are_read(model):
    ids = text(400)
    exact, coded = (logits(model, ids, CrumbCache(model, "had2", sink=64, recent=recent)) for recent in (1000, 64))
    assert close(coded[:, :127], exact[:, :127])
    assert not close(coded[:, 200:], exact[:, 200:], 0.01)


def test_chunks_change_nothing(model):
    ids = text(1200)
    want = logits(model, ids, CrumbCache(model, "had2", **SHORT))
    cache = CrumbCache(model, "had2", **SHORT)
    got = torch.cat([logits(model, part, cache) for part in ids.split([1, 130, 63, 1, 1, 700, 304], 1)], 1)
    assert close(got, want)
    assert cache.bytes().total < cache.bytes().bf16 / 2


def test_a_padded_batch_equals_each_text_alone(model):
    lengths, width = (350, 200, 3), 350
    texts = [text(n, seed=n) for n in lengths]
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for i, t in enumerate(texts):
        ids[i, width - t.shape[1] :], mask[i, width - t.shape[1] :] = t, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = CrumbCache(model, "had2", **SHORT)
    got = torch.cat([logits(model, ids[:, a:b], cache, attention_mask=mask[:, :b], position_ids=positions[:, a:b])
                     for a, b in ((0, 100), (100, 349), (349, 350))], 1)
    for i, t in enumerate(texts):
        assert close(got[i, width - t.shape[1] :], logits(model, t, CrumbCache(model, "had2", **SHORT))[0])
    assert cache.bytes().bf16 == sum(lengths) * 2 * 2 * 2 * 32 * 2  # padding is not stored


def test_generate_in_a_padded_batch_equals_each_prompt_alone(model):
    prompts = [text(n, seed=n) for n in (140, 90)]
    ids, mask = torch.zeros(2, 140, dtype=torch.long), torch.zeros(2, 140, dtype=torch.long)
    for i, p in enumerate(prompts):
        ids[i, 140 - p.shape[1] :], mask[i, 140 - p.shape[1] :] = p, 1
    options = dict(max_new_tokens=20, do_sample=False)
    together = model.generate(ids, attention_mask=mask, past_key_values=CrumbCache(model, "had2", **SHORT), **options)
    for i, p in enumerate(prompts):
        alone = model.generate(p, past_key_values=CrumbCache(model, "had2", **SHORT), **options)
        assert torch.equal(together[i, 140:], alone[0, p.shape[1] :])


def test_beams_equal_transformers_own_cache(model):
    prompt, options = text(70), dict(num_beams=4, max_new_tokens=30, do_sample=False, num_return_sequences=2)
    got = model.generate(prompt, past_key_values=CrumbCache(model, "had2", recent=1000), **options)
    model.set_attn_implementation("sdpa")
    want = model.generate(prompt, past_key_values=RoundedCache(), **options)
    assert torch.equal(got, want)


def test_reordered_sequences_are_those_they_came_from(model):
    torch.manual_seed(2)
    ids, cache = text(180, 3), CrumbCache(model, "had2", **SHORT)
    logits(model, ids, cache)
    for _ in range(12):
        beams = torch.randint(0, 3, (3,))
        cache.reorder_cache(beams)
        more = torch.randint(1, 99, (3, int(torch.randint(1, 40, ()))))
        got, ids = logits(model, more, cache), torch.cat([ids[beams], more], 1)
    want = logits(model, ids, CrumbCache(model, "had2", **SHORT))
    assert close(got, want[:, -got.shape[1] :])


def test_batches_grow_and_shrink(model):
    ids, cache = text(200), CrumbCache(model, "had2", **SHORT)
    logits(model, ids, cache)
    cache.batch_repeat_interleave(3)
    assert cache.bytes().total < 0.5 * cache.bytes().bf16  # blocks are shared
    more = text(70, 3, seed=9)
    got = logits(model, more, cache)
    assert close(got, logits(model, torch.cat([ids.expand(3, -1), more], 1), CrumbCache(model, "had2", **SHORT))[:, 200:])
    cache.batch_select_indices(torch.tensor([False, True, False]))
    got = logits(model, ids[:, :5], cache)
    want = logits(model, torch.cat([ids, more[1:2], ids[:, :5]], 1), CrumbCache(model, "had2", **SHORT))
    assert close(got, want[:, -5:])


def test_a_crop_loses_nothing_that_the_window_has(model):
    ids, cache = text(300), CrumbCache(model, "had2", **SHORT)
    logits(model, ids, cache)
    logits(model, text(7, seed=3), cache)
    cache.crop(-7)
    more = text(120, seed=4)
    want = logits(model, torch.cat([ids, more], 1), CrumbCache(model, "had2", **SHORT))[:, 300:]
    assert close(logits(model, more, cache), want)
    assert cache.aged_early_tokens == 0


def test_a_deep_crop_reads_codes_and_says_so(model):
    ids, cache = text(600), CrumbCache(model, "had2", sink=64, recent=200)
    logits(model, ids, cache)
    logits(model, text(1), cache)
    cache.crop(300)
    assert cache.get_seq_length() == 300 and cache.aged_early_tokens == 300 - 64
    assert torch.isfinite(logits(model, text(260), cache)).all()
    cache.crop(-cache.get_seq_length())
    assert close(logits(model, ids, cache), logits(model, ids, CrumbCache(model, "had2", sink=64, recent=200)))


def test_assisted_generation_equals_plain(model):
    prompt = text(20).repeat(1, 8)
    options = dict(max_new_tokens=40, do_sample=False)
    plain = model.generate(prompt, past_key_values=CrumbCache(model, "had2", **SHORT), **options)
    assisted = model.generate(prompt, past_key_values=CrumbCache(model, "had2", **SHORT), prompt_lookup_num_tokens=5, **options)
    assert torch.equal(plain, assisted)


def test_a_smaller_model_assists(model):
    """Its own cache is transformers'; ours is cropped by what it got wrong."""
    prompt, options = text(300), dict(max_new_tokens=40, do_sample=False)
    cache, assisted = (CrumbCache(model, "had2", **SHORT) for _ in range(2))
    plain = model.generate(prompt, past_key_values=cache, **options)
    assistant = make_model(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}))
    assert torch.equal(plain, model.generate(prompt, past_key_values=assisted, assistant_model=assistant, **options))
    assert assisted.aged_early_tokens == 0


def test_generate_goes_on_from_a_filled_cache(model):
    options, cache = dict(max_new_tokens=15, do_sample=False), CrumbCache(model, "had2", **SHORT)
    first = model.generate(text(150), past_key_values=cache, **options)
    more = torch.cat([first, text(40, seed=6)], 1)
    assert torch.equal(model.generate(more, past_key_values=cache, **options),
                       model.generate(more, past_key_values=CrumbCache(model, "had2", **SHORT), **options))


def test_a_conversation_goes_on_in_a_copy(model):
    ids, cache = text(250), CrumbCache(model, "had2", **SHORT)
    logits(model, ids, cache)
    twin, more = copy.deepcopy(cache), text(80, seed=8)
    want = logits(model, more, cache)
    assert torch.equal(logits(model, more, twin), want)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.bytes().total == 0
    assert close(logits(model, torch.cat([ids, more], 1), cache)[:, 250:], want)


def test_it_says_what_it_is(model):
    cache = CrumbCache(model, "had2")
    logits(model, text(10, 2), cache)
    assert str(cache) == ("CrumbCache(had2: 2.25 bits an element in 2 layers, first 64 and last 256 tokens BF16; 2 x 10 tokens)")
    assert cache.counts == {"nonfinite": 0, "saturated": 0}


@pytest.mark.parametrize("config, message", [
    (Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 6}), "sliding_attention.*crumb chat"),
    (GptOssConfig(**SIZES, num_local_experts=2), "sliding_attention.*crumb chat"),
    (GptOssConfig(**SIZES, num_local_experts=2, layer_types=2 * ["full_attention"]), "its attention has sinks"),
    (MistralConfig(**SIZES, sliding_window=128), "window of 128 tokens.*sliding_window = None"),
    (LlamaConfig(**{**SIZES, "head_dim": 24}), "24"),
])
def test_models_that_cannot_be_served(config, message):
    with pytest.raises(ValueError, match=message):
        CrumbCache(make_model(config), "had2")


def test_a_key_bias_is_warned_of():
    with pytest.warns(UserWarning, match="keys of Qwen2ForCausalLM have a bias.*crumb_kv.calibrate"):
        CrumbCache(make_model(Qwen2Config(**SIZES)), "had2")


@pytest.mark.parametrize("name", models.KEY_PROJECTIONS)
def test_a_key_bias_is_found_in_fused_projections(name):
    for bias in (True, False):
        attention = torch.nn.Module()
        setattr(attention, name, torch.nn.Linear(8, 24, bias=bias))
        assert models.has_key_bias(torch.nn.Sequential(attention)) == bias


def test_encoder_decoders_are_refused():
    from transformers import T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, vocab_size=9))
    with pytest.raises(ValueError, match="encoder-decoder"):
        CrumbCache(model, "had2")


def test_wrong_use_says_what_to_do(model):
    ids, cache = text(20), CrumbCache(model, "had2")
    with pytest.raises(ValueError, match="there is none.*set_attn_implementation"):
        model(ids)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="'sdpa', which cannot read"):
        logits(model, ids, cache)
    model.set_attn_implementation("crumb")
    with pytest.raises(ValueError, match="another model"):
        other = make_model()
        other.set_attn_implementation("crumb")
        logits(other, ids, cache)
    cache.reset()
    with torch.enable_grad(), pytest.raises(ValueError, match="no_grad"):
        logits(model, ids, cache)
    with pytest.raises(ValueError, match="four dimensions"):
        logits(model, ids, cache, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool))
    logits(model, ids, cache)
    with pytest.raises(ValueError, match="holds 1 sequences and the input has 2"):
        logits(model, text(5, 2), cache)
    with pytest.raises(ValueError, match="hides tokens"):
        logits(model, ids, cache, attention_mask=torch.cat([torch.zeros(1, 20), torch.ones(1, 20)], 1))
    assert close(logits(model, ids, cache), logits(model, ids.repeat(1, 2), CrumbCache(model, "had2"))[:, 20:])


def test_a_pass_that_stopped_is_not_built_on(model):
    ids, cache = text(20), CrumbCache(model, "had2")
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids, cache)
    hook.remove()
    with pytest.raises(RuntimeError, match="stopped between two layers.*cache.reset"):
        logits(model, ids, cache)
    cache.reset()
    assert torch.isfinite(logits(model, ids, cache)).all()


@pytest.mark.parametrize("arguments, options, message", [
    ((None,), {}, "the recipe is None: give its name"),
    (("had2",), {"sink": 1.5}, "sink is 1.5 and recent is 256"),
    (("had2",), {"recent": -1}, "recent is -1"),
])
def test_wrong_calls_say_what_is_wrong(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        CrumbCache(make_model(), *arguments, **options)


def test_a_model_is_a_loaded_one():
    with pytest.raises(ValueError, match="the model is 'smollm2': give a loaded one"):
        CrumbCache("smollm2", "had2")

"""The head partition: what a rank computes with its slice of the artefact are the rows that the whole layer computes for its heads."""

import pytest
import torch
from transformers import LlamaConfig

from crumb_kv import calibrate, make_layers, models
from crumb_kv.heads import heads_of_rank
from test_calibration import Words, words
from test_cache import SIZES, make_model

OPS = torch.ops.crumb
HEADS, HEADS_KV, DIM, TOKENS = 16, 8, 32, 128


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """The second layer of a model with 8 KV heads, each with tables of its own."""
    model = make_model(LlamaConfig(**{**SIZES, "num_attention_heads": HEADS, "num_key_value_heads": HEADS_KV}))
    file = tmp_path_factory.mktemp("heads") / "small.safetensors"
    calibrate(model, Words(), [words(1300, 1), words(1300, 2)], file, tokens=2500, window=640, metric="none")
    return make_layers("planes:2.25", models.shapes_of(model), file)[1]


def computed(layer, q, k, v):
    """Blocks of codes, and attention over them, of which the last 32 tokens are exact."""
    ids, positions = torch.arange(2, dtype=torch.int32), torch.arange(TOKENS, dtype=torch.int32)
    exact = torch.zeros(2, layer.exact_block_bytes, dtype=torch.uint8)
    coded = torch.zeros(2, layer.block_bytes, dtype=torch.uint8)
    jobs, counts = torch.stack([ids, ids, 0 * ids, 0 * ids], 1), torch.zeros(2, dtype=torch.int32)
    OPS.store(layer.handle, k.contiguous(), v.contiguous(), positions // 64, positions, exact)
    OPS.encode(layer.handle, jobs, exact, coded, counts)
    rows = torch.tensor([[[0, 0, TOKENS - 1, 0, TOKENS - 32, TOKENS]]], dtype=torch.int32)
    out, workspace = torch.zeros(1, layer.shape.n_head, DIM), torch.zeros(0, dtype=torch.uint8)
    OPS.attend(layer.handle, q, rows, ids[None], ids[None], 0, 1, coded, exact, None, None, workspace, out)
    return coded, out


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_a_rank_computes_what_the_whole_layer_does_for_its_heads(layer, size):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, heads, DIM, generator=generator) for n, heads in ((1, HEADS), (TOKENS, HEADS_KV), (TOKENS, HEADS_KV)))
    k, v = k.bfloat16(), v.bfloat16()
    coded, out = computed(layer, q, k, v)
    pages, per_rank = coded.view(2, HEADS_KV, -1), HEADS // size
    assert not torch.equal(pages[:, 0], pages[:, 1])
    for rank in range(size):
        first, n = heads_of_rank(HEADS_KV, rank, size)
        part = layer.slice(first, n, per_rank // n)
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        codes, rows = computed(part, q[:, mine], k[:, first : first + n], v[:, first : first + n])
        assert torch.equal(codes.view(2, n, -1), pages[:, first : first + n])
        assert torch.equal(rows, out[:, mine])


# vLLM itself refuses the others.
DIVISIBLE = [(n, size) for n in range(1, 9) for size in range(1, 9) if max(n, size) % min(n, size) == 0]


@pytest.mark.parametrize("n_head_kv, size", DIVISIBLE)
def test_every_head_is_somewhere(n_head_kv, size):
    heads = [head for rank in range(size) for first, n in [heads_of_rank(n_head_kv, rank, size)] for head in range(first, first + n)]
    assert heads == sorted(heads) and set(heads) == set(range(n_head_kv))
    assert len({heads.count(head) for head in range(n_head_kv)}) == 1


@pytest.mark.parametrize("first, n, n_group, message", [(7, 2, 1, "KV heads 7 to 9 of a layer of 8"), (-1, 1, 1, "KV heads -1"), (0, 1, 0, "0 query heads")])
def test_slices_that_are_none(layer, first, n, n_group, message):
    with pytest.raises(ValueError, match=message):
        layer.slice(first, n, n_group)

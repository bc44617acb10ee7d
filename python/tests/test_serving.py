"""What a step of a serving engine hands to a device, beside the Pieces that it is made of."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from crumb_kv import models
from crumb_kv.blocks import NONE, PAGE, TILE, Rules, tile_groups, tiles
from crumb_kv.serving import Served, _on_device, _work_of
from crumb_kv.windows import Windows, slots_for

CPU, CHUNK, RULES = torch.device("cpu"), 128, Rules(sink=64, recent=64)


def rows(counts, length=1000):
    """The last counts[i] tokens of sequence i, and where they stand in the batch."""
    positions = [np.arange(length - n, length) for n in counts]
    return (np.concatenate([np.stack([np.full_like(p, i), p, RULES.edge(p)], 1) for i, p in enumerate(positions)]).astype(np.int32),
            np.arange(sum(counts), dtype=np.int32))


def real(made):
    """Rows of tiles that are no padding, in the order of their tokens."""
    made = made.reshape(-1, 6)
    made = made[made[:, 1] != NONE]
    return made[np.argsort(made[:, 1])]


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [300], [1, 40, 300, 1, 128, 127]])
def test_groups_have_the_same_rows_as_one(counts):
    whole, groups = tiles(*rows(counts)), tile_groups(*rows(counts), CHUNK)
    assert np.array_equal(real(np.concatenate([group.reshape(-1, 6) for group in groups])), real(whole))
    assert [np.array_equal(a, b) for a, b in zip(tile_groups(*rows(counts)), [whole], strict=True)] == [True]


def test_a_long_chunk_pads_nobody_else():
    groups = tile_groups(*rows([1, 300, 1, 128, 5]), CHUNK)
    assert [group.shape[1] for group in groups] == [TILE, 300, 128]
    assert [sorted(set(group[..., 0].flat)) for group in groups] == [[0, 2, 4], [1], [3]]
    assert all(group.shape[0] == 1 for group in groups[1:])


@pytest.mark.parametrize("counts", [[1, 1], [600, 1, 130], [1, 90]])
def test_tensors_are_what_the_pieces_say(counts):
    lengths, blocks = [n + 128 for n in counts], iter(range(1, 100))
    tables = np.zeros((len(counts), 12), np.int32)
    for table, length in zip(tables, lengths):
        table[: -(-length // PAGE)] = [next(blocks) for _ in range(-(-length // PAGE))]
    twins = [Windows(RULES, slots_for(RULES, 4, 1000)) for _ in range(2)]
    for windows in twins:
        windows.step(tables, [128] * len(counts), [128] * len(counts))
    pieces, work = twins[0].step(tables, lengths, counts), _work_of(twins[1].step(tables, lengths, counts), CPU, CHUNK)
    for piece, got in zip(pieces, work, strict=True):
        indices = torch.arange(sum(counts))[got.tokens]
        assert indices.tolist() == piece.tokens.tolist() and got.sink == piece.sink
        for name in ("slots", "positions", "saved", "jobs", "coded", "exact"):
            assert np.array_equal(getattr(got, name).numpy(), getattr(piece, name)), name
        for made, wanted in zip(got.rows, tile_groups(piece.rows, piece.tokens, CHUNK), strict=True):
            assert np.array_equal(made.numpy(), wanted)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_copied_in_the_order_of_gguf(model_type, dtype):
    order = models.channel_order(SimpleNamespace(model_type=model_type), 64)
    heads = torch.randn(5, 9 * 64).bfloat16()[:, 64:-64].view(5, 7, 64)  # as a part of Q, K and V together
    got = Served._in_order(SimpleNamespace(interleaved=order is not None), heads, dtype)
    assert got.dtype == dtype and torch.equal(got, (heads if order is None else heads[..., order]).to(dtype))
    assert order is None or got.is_contiguous()


def test_arrays_are_aligned_for_a_device():
    arrays = [np.arange(n, dtype=np.int64).reshape(-1, 1) for n in (3, 0, 16, 17, 1)]
    tensors = _on_device(arrays, CPU)
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in arrays]
    assert all((tensor.data_ptr() - tensors[0].data_ptr()) % 64 == 0 for tensor in tensors if tensor.numel())
    assert {tensor.dtype for tensor in tensors} == {torch.int32}

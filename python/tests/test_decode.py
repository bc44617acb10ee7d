"""Steps whose tables stand in one place give what other steps give."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from crumb_kv import serving
from crumb_kv.blocks import PAGE, Rules
from crumb_kv.decode import Standing, can_stand
from crumb_kv.layer import Shape

N_HEAD, N_KV, DIM, LAYERS, SEQUENCES, LONGEST = 4, 2, 64, 2, 4, 1024


class Engine(serving.Served):
    """Two layers, and pages of its own."""

    def __init__(self, pages=224, **options):
        shapes = [Shape(i, N_HEAD, N_KV, DIM, DIM, 0.125) for i in range(LAYERS)]
        super().__init__("test", logging.getLogger("test"), serving.Options("had2", spare_windows=8, **options), shapes, range(LAYERS),
                         SimpleNamespace(model_type="qwen3"), None, 0, 1, SEQUENCES, LONGEST)
        self.take_windows()
        self.pools = [torch.zeros(pages, self.coders[i].block_bytes, dtype=torch.uint8) for i in range(LAYERS)]

    def pool_of(self, number):
        return self.pools[number]

    def run(self, tables, lengths, counts, padding=0):
        """Attention of a step, of K, V and queries that sequence and position alone decide."""
        work, out = self.work(tables, lengths, counts), []
        seeds = [(i, p) for i, (length, n) in enumerate(zip(lengths, counts)) for p in range(length - n, length)]
        for number in range(LAYERS):
            heads = torch.stack([torch.randn(N_HEAD + 2 * N_KV, DIM, generator=torch.Generator().manual_seed(1000 * p + 10 * int(tables[i, 0]) + number))
                                 for i, p in seeds] + [torch.full((N_HEAD + 2 * N_KV, DIM), torch.nan)] * padding)
            q, k, v = heads.split([N_HEAD, N_KV, N_KV], 1)
            out.append(self.attend(number, work, q, k, v, self.pools[number])[: len(seeds)].clone())
        return torch.stack(out)


class Capturing(Engine):
    CAPTURING = ("cpu",)


def conversation(engine, padding=0, others=0):
    """Three prompts, 150 tokens of each, two of which go on; others; then a prompt that finds the blocks of the first one, which has
    ended."""
    tables = np.zeros((SEQUENCES, LONGEST // PAGE), np.int32)
    for i in range(3):
        tables[i] = np.arange(1 + 16 * i, 17 + 16 * i)
    lengths, results = [300, 100, 191, 0], []
    for i in range(3):
        results.append(engine.run(tables, lengths[: i + 1], [0] * i + [lengths[i]]))
    for _ in range(150):
        lengths = [length + (i < 3) for i, length in enumerate(lengths)]
        results.append(engine.run(tables, [*lengths[:3], 0], [1, 1, 1, 0], padding))
    for i in range(others):
        tables[3] = 65 + 5 * i + np.arange(16)
        results.append(engine.run(tables, [*lengths[:3], 300], [0, 0, 0, 300]))
    tables[3, :4], tables[3, 4:] = tables[0, :4], np.arange(49, 61)
    results.append(engine.run(tables, [*lengths[:3], 300], [0, 0, 0, 44]))
    for n in range(80):
        results.append(engine.run(tables, [lengths[0], lengths[1] + 1 + n, lengths[2], 301 + n], [0, 1, 0, 1], padding))
    return results


@pytest.mark.parametrize("rules", [dict(sink=64, recent=64), dict(sink=0, recent=128), dict(sink=70, recent=256), dict(sink=64, recent=1)])
@pytest.mark.parametrize("others", [0, 25])
def test_standing_steps_equal_others(rules, others):
    """After 25 others the prefix has its codes only, its sinks too."""
    plain, capturing = Engine(**rules), Capturing(**rules)
    assert capturing.can_stand and not plain.can_stand
    wanted, got = conversation(plain, others=others), conversation(capturing, 2, others)
    assert (plain.windows.aged_early_tokens > 0) == (others > 0)
    assert capturing.windows.aged_early_tokens == plain.windows.aged_early_tokens
    for a, b in zip(wanted, got, strict=True):
        assert torch.equal(a, b)
    capturing.work(np.zeros((1, 1), np.int32), [0], [0])  # what was full last is encoded by the next step
    for a, b in zip(plain.pools, capturing.pools):
        assert torch.equal(a, b)
    assert plain.counts.tolist() == capturing.counts.tolist()


def test_its_memory_stays_where_it_is():
    engine = Capturing(sink=64, recent=64)
    captured, = engine.standing(SEQUENCES)
    where = [t.data_ptr() for t in (captured.slots, captured.positions, *captured.rows, captured.coded, captured.exact)]
    assert captured.rows[0][:, 0, 1].tolist() == [-1] * SEQUENCES  # of nobody yet
    assert captured.slots.tolist() == [engine.n_slots - 1] * SEQUENCES  # which no block ever gets
    conversation(engine)
    again, = engine.standing(SEQUENCES)
    assert [t.data_ptr() for t in (again.slots, again.positions, *again.rows, again.coded, again.exact)] == where
    assert sorted(captured.rows[0][:, 0, 1].tolist()) == [-1, -1, 0, 1]


def test_who_cannot_stand():
    assert can_stand(Rules(0, 1), 512) and not can_stand(Rules(64, 0), 1) and not can_stand(Rules(64, 256), 513)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        Engine().standing(1)

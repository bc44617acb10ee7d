"""Windows beside an obvious vLLM: blocks are taken, shared by content, and taken again, and no one says when a sequence has ended.
After each step every token that a query sees must be found where the tables and the query's rows say."""

import random

import numpy as np
import pytest

from crumb_kv.blocks import PAGE, Rules, tiles
from crumb_kv.windows import NONE, Windows, slots_for


class Vllm:
    """Sequences of tokens; prefixes of full blocks are found in what earlier ones left, even while it is computed."""

    def __init__(self, rules, blocks, slots):
        self.rules, self.windows = rules, Windows(rules, slots)
        self.free, self.named, self.names = list(range(1, blocks)), {}, {}
        self.held = {}  # block -> how many sequences
        self.texts, self.tables, self.computed = {}, {}, {}
        self.exact, self.coded = {}, {}  # slot, block -> 64 tokens

    def start(self, name, text, share=True):
        self.texts[name], self.tables[name], self.computed[name] = list(text), [], 0
        while share and self.computed[name] + PAGE < len(text):
            block = self.named.get(tuple(text[: self.computed[name] + PAGE]))
            if block is None:
                break
            self._hold(block)
            self.tables[name].append(block)
            self.computed[name] += PAGE

    def _hold(self, block):
        if block in self.free:
            self.free.remove(block)
        self.held[block] = self.held.get(block, 0) + 1

    def end(self, name):
        for block in reversed(self.tables[name]):
            self.held[block] -= 1
            if not self.held[block]:
                self.free.append(block)
        del self.texts[name], self.tables[name], self.computed[name]

    def prepare(self, name, count):
        """What the scheduler does: blocks, and their names at once."""
        end = self.computed[name] + count
        while len(self.tables[name]) * PAGE < end:
            block = self.free[0]
            self.named.pop(self.names.pop(block, None), None)
            self._hold(block)
            self.tables[name].append(block)
        for b in range(self.computed[name] // PAGE, end // PAGE):
            key = tuple(self.texts[name][: (b + 1) * PAGE])
            if key not in self.named:
                self.named[key], self.names[self.tables[name][b]] = self.tables[name][b], key

    def step(self, order, counts):
        width = max(len(self.tables[name]) for name in order)
        tables = np.array([self.tables[name] + [0] * (width - len(self.tables[name])) for name in order])
        lengths = [self.computed[name] + counts[name] for name in order]
        batch = [(name, p) for name in order for p in range(self.computed[name], self.computed[name] + counts[name])]
        seen = []
        for piece in self.windows.step(tables, lengths, [counts[name] for name in order]):
            self.encode(piece.saved)
            for token, slot, position in zip(piece.tokens, piece.slots, piece.positions):
                name, p = batch[token]
                assert position == p
                self.exact.setdefault(int(slot), [None] * PAGE)[p % PAGE] = self.texts[name][p]
            self.encode(piece.jobs)
            assert len(tiles(piece.rows, piece.tokens)) > 0
            for token, (row, position, coded_end) in zip(piece.tokens, piece.rows.tolist()):
                seen.append(int(token))
                self.check(piece, row, position, coded_end, self.texts[batch[token][0]])
        assert sorted(seen) == list(range(len(batch)))
        for name in order:
            self.computed[name] += counts[name]

    def encode(self, jobs):
        for slot, block, keep, kept in jobs.tolist():
            self.coded[block] = (self.coded[kept][:keep] if keep else []) + self.exact[slot][keep:]

    def check(self, piece, row, position, coded_end, text):
        edge = int(self.rules.edge(position))
        assert coded_end >= edge and piece.sink in (0, self.rules.sink)
        if not self.windows.aged_early_tokens:
            assert coded_end == edge and piece.sink == self.rules.sink
        for begin, end, memory, table in ((0, min(piece.sink, position + 1), self.exact, piece.exact),
                                          (piece.sink, min(coded_end, position + 1), self.coded, piece.coded),
                                          (max(piece.sink, coded_end), position + 1, self.exact, piece.exact)):
            for b in range(begin // PAGE, -(-end // PAGE)):
                block, first, last = int(table[row, b]), max(begin, PAGE * b), min(end, PAGE * (b + 1))
                if first < last:
                    assert block != NONE and memory[block][first - PAGE * b : last - PAGE * b] == text[first:last], (position, b, coded_end)


def tokens(n, seed=0):
    choice = random.Random(seed)
    return [choice.random() for _ in range(n)]


@pytest.mark.parametrize("rules", [Rules(), Rules(16, 32), Rules(0, 0), Rules(100, 200)], ids=str)
def test_one_sequence(rules):
    vllm = Vllm(rules, 40, slots_for(rules, 1, 4096))
    text = tokens(1700)
    vllm.start("a", text)
    for count in (3, 61, 700, 1, 1, 64, 200) + 70 * (1,):
        vllm.prepare("a", count)
        vllm.step(["a"], {"a": count})
    assert vllm.windows.aged_early_tokens == 0


def test_a_prompt_that_begins_with_what_another_computes_in_the_same_step():
    vllm = Vllm(Rules(16, 32), 60, slots_for(Rules(16, 32), 4, 4096))
    text = tokens(600)
    for name, order in (("ab", "ba"), ("cd", "dc")):
        for one in name:
            vllm.start(one, text[: 500 + 40 * "abcd".index(one)])
            vllm.prepare(one, len(vllm.texts[one]) - vllm.computed[one])
        vllm.step(list(order), {one: len(vllm.texts[one]) - vllm.computed[one] for one in name})
    assert vllm.windows.aged_early_tokens == 0


def test_a_lost_window_is_read_through_codes_and_counted():
    rules = Rules(64, 128)
    vllm = Vllm(rules, 200, slots_for(rules, 1, 4096))
    system, other = tokens(640), tokens(3000, seed=1)
    for name, text in (("a", system + [1]), ("b", other), ("c", system + [2]), ("d", system + [3, 4])):
        vllm.start(name, text)
        count = len(text) - vllm.computed[name]
        vllm.prepare(name, count)
        vllm.step([name], {name: count})
        lost = vllm.windows.aged_early_tokens
        assert lost == {"a": 0, "b": 0, "c": 128, "d": 128}[name]  # the sink, and the block from edge(640) = 512 on
        vllm.end(name)


@pytest.mark.parametrize("seed", range(30))
def test_random_traces(seed):
    random.seed(seed)
    rules = random.choice([Rules(), Rules(16, 32), Rules(64, 64), Rules(0, 0), Rules(100, 200), Rules(64, 1)])
    few = seed % 3 == 0  # slots: windows get lost
    vllm = Vllm(rules, 150, slots_for(rules, 3 if few else 30, 4096))
    prefixes = [tokens(300, seed), tokens(500, seed + 1)]
    for step in range(60):
        while len(vllm.texts) < 3 and random.random() < 0.7:
            text = random.choice(prefixes)[: random.randrange(1, 500)] + tokens(random.randrange(1, 400), 1000 * seed + step)
            vllm.start(random.random(), text + tokens(300, step), share=random.random() < 0.9)
        order, counts = [], {}
        for name in list(vllm.texts):
            left = len(vllm.texts[name]) - vllm.computed[name]
            if left == 0 or random.random() < 0.05:
                vllm.end(name)
            elif random.random() < 0.8:
                counts[name] = min(left, random.choice([1, 1, 1, 7, 64, 100, 700]))
                vllm.prepare(name, counts[name])
                order.append(name)
        random.shuffle(order)
        if order:
            vllm.step(order, counts)
    if not few:
        assert vllm.windows.aged_early_tokens == 0 or vllm.windows.capacity < 100

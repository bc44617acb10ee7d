"""The block manager beside an obvious model: every sequence is a list of tokens, blocks are lists of what was written to them,
and after each step every token that a query sees must be found where the tables and the query's rows say."""

import random

import pytest

from crumb_kv.blocks import NONE, PAGE, Rules, Sequences


class World:
    def __init__(self, rules):
        self.rules, self.sequences = rules, Sequences(rules)
        self.texts, self.aged = [], []  # tokens of each sequence; from where on a sequence has its BF16 rows
        self.exact, self.coded = {}, {}  # block -> 64 tokens
        self.next_token = 0

    def add(self, n):
        self.sequences.add(n)
        self.texts += [[] for _ in range(n)]
        self.aged += [0] * n

    def step(self, counts):
        for i, text in enumerate(self.texts):  # what no query can want any more goes when a step begins
            edge = max(0, len(text) + 1 - self.rules.recent) // PAGE * PAGE
            if edge > -(-self.rules.sink // PAGE) * PAGE:
                self.aged[i] = max(self.aged[i], edge)
        starts = [len(text) for text in self.texts]
        work = self.sequences.begin(counts)
        for text, count in zip(self.texts, counts):
            text += range(self.next_token, self.next_token + count)
            self.next_token += count
        for source, target in work.copies.tolist():
            self.exact[target] = list(self.exact[source])
        for block, (sequence, position, _) in zip(work.blocks.tolist(), work.rows.tolist()):
            self.exact.setdefault(block, [None] * PAGE)[position % PAGE] = self.texts[sequence][position]
        for source, target, keep, kept in work.jobs.tolist():
            old = self.coded[kept][:keep] if keep else []
            self.coded[target] = old + self.exact[source][keep:]
        self.check_rows(work, starts, counts)
        self.check_pools(counts)

    def check_rows(self, work, starts, counts):
        assert [tuple(row[:2]) for row in work.rows.tolist()] == [
            (i, p) for i, (start, count) in enumerate(zip(starts, counts)) for p in range(start, start + count)]
        for sequence, position, coded_end in work.rows.tolist():
            edge = max(0, position + 1 - self.rules.recent) // PAGE * PAGE
            assert coded_end == max(edge, self.aged[sequence])
            for j in range(position + 1):
                coded = self.rules.sink <= j < coded_end
                memory, table = (self.coded, work.coded) if coded else (self.exact, work.exact)
                block = int(table[sequence, j // PAGE])
                assert block != NONE and memory[block][j % PAGE] == self.texts[sequence][j], (sequence, position, j, coded_end)

    def check_pools(self, counts):
        for pool, table in ((self.sequences.coded_pool, self.sequences.coded), (self.sequences.exact_pool, self.sequences.exact)):
            held = [block for block in table.flatten().tolist() if block != NONE]
            extra = self.sequences._sources if pool is self.sequences.coded_pool else []
            for block in range(pool.capacity):
                assert pool.counts[block] == held.count(block) + extra.count(block)
        window = -(-self.rules.sink // PAGE) + -(-(self.rules.recent + 63) // PAGE) + 2
        for i, count in enumerate(counts):
            assert (self.sequences.exact[i] != NONE).sum() <= window + count // PAGE

    def crop(self, i, length):
        self.sequences.crop(i, length)
        if length < len(self.texts[i]):
            del self.texts[i][length:]
            below_sinks = length <= -(-self.rules.sink // PAGE) * PAGE
            self.aged[i] = 0 if below_sinks else min(self.aged[i], length)

    def select(self, indices):
        self.sequences.select(indices)
        self.texts = [list(self.texts[i]) for i in indices]
        self.aged = [self.aged[i] for i in indices]


@pytest.mark.parametrize("sink, recent", [(64, 256), (0, 0), (0, 64), (64, 1), (100, 130)])
@pytest.mark.parametrize("seed", range(3))
def test_random_traces(sink, recent, seed):
    random.seed(f"{sink} {recent} {seed}")
    world = World(Rules(sink, recent))
    world.add(random.randint(1, 3))
    for _ in range(40):
        action = random.random()
        n = len(world.texts)
        if action < 0.7:
            longest = random.choice([1, 1, 5, 64, 200])
            world.step([random.randint(0, longest) for _ in range(n)])
        elif action < 0.85:
            i = random.randrange(n)
            world.crop(i, max(0, len(world.texts[i]) - random.choice([1, 7, 64, 150, 1000])))
        else:
            world.select([random.randrange(n) for _ in range(random.randint(1, 3))])


def test_a_long_sequence_holds_a_window_and_codes():
    sequences = Sequences(Rules(64, 256))
    sequences.add(1)
    for _ in range(40):
        sequences.begin([128])
    assert sequences.coded_pool.in_use == (40 * 128 - 256) // PAGE - 1
    assert sequences.exact_pool.in_use <= 1 + 5 + 3
    sequences.crop(0, 0)
    assert sequences.coded_pool.in_use == sequences.exact_pool.in_use == 0


def test_a_deep_crop_is_counted():
    sequences = Sequences(Rules(64, 256))
    sequences.add(1)
    sequences.begin([1000])
    sequences.begin([1])
    sequences.crop(0, 600)  # the window of token 600 begins at 320, rows are there from 704 on
    assert sequences.aged_early_tokens == 600 - 320

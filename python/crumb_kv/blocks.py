"""Which blocks a sequence holds, as positions say (docs/design/position-rule.md, docs/design/cache.md).

    0        sink              exact_begin        coded_end          length
    | exact   | codes           | codes and exact  | exact            |

The same rules as src/cache/extent.h, for pages of 64 tokens and no sliding windows. Numbers alone: what lies in the blocks,
and where, is the cache's. Block ids are the same in all layers, so there is one table a sequence and not one a layer.
"""

from dataclasses import dataclass, replace

import numpy as np

PAGE = 64
TILE = 8  # rows of attention that read the same blocks together
NONE = -1


@dataclass(frozen=True)
class Extent:
    length: int = 0
    coded_end: int = 0  # tokens below are encoded; a multiple of 64
    exact_begin: int = 0  # tokens from here on have their BF16 rows, as sinks have


def _blocks_for(tokens):
    return -(-tokens // PAGE)


def _range(begin, end):
    return range(begin, max(begin, end))


@dataclass(frozen=True)
class Rules:
    sink: int = 64
    recent: int = 256

    def edge(self, position):
        """Of a position, or of an array of them."""
        since = position + 1 - self.recent
        return (max(0, since) if isinstance(since, int) else np.maximum(0, since)) // PAGE * PAGE

    # The blocks of an extent. Pages wholly below the sinks are never read through codes.
    def coded(self, e):
        return _range(self.sink // PAGE, max(e.coded_end // PAGE, _blocks_for(e.exact_begin)))

    def sinks(self, e):
        return _range(0, min(_blocks_for(self.sink), _blocks_for(e.length)))

    def exact(self, e):
        return _range(max(_blocks_for(self.sink), e.exact_begin // PAGE), _blocks_for(e.length))

    def demoted(self, before, after):
        """Blocks that become due for encoding between two extents."""
        return _range(max(self.sink, before.coded_end) // PAGE, after.coded_end // PAGE)

    def appended(self, e, tokens):
        length = e.length + tokens
        return replace(e, length=length, coded_end=max(e.coded_end, int(self.edge(length - 1))))

    def cropped(self, e, length):
        if length == 0:
            return Extent()
        below_sinks = length <= _blocks_for(self.sink) * PAGE
        return Extent(length, min(e.coded_end, length // PAGE * PAGE), 0 if below_sinks else min(e.exact_begin, length))

    def trimmed(self, e):
        """Without what no query can want any more."""
        unwanted = min(int(self.edge(e.length)), e.coded_end)
        if unwanted <= _blocks_for(self.sink) * PAGE:
            return e
        return replace(e, exact_begin=max(e.exact_begin, unwanted))


class Pool:
    """Reference counts of blocks. It grows when it is empty; the lowest free block is taken first, so it stays dense."""

    def __init__(self):
        self.counts = np.zeros(0, np.int32)
        self._free = []

    @property
    def capacity(self):
        return len(self.counts)

    @property
    def in_use(self):
        return self.capacity - len(self._free)

    def take(self):
        if not self._free:
            old, new = self.capacity, self.capacity + max(8, self.capacity // 4)
            self.counts = np.concatenate([self.counts, np.zeros(new - old, np.int32)])
            self._free = list(range(new - 1, old - 1, -1))
        block = self._free.pop()
        self.counts[block] = 1
        return block

    def hold(self, block):
        self.counts[block] += 1

    def release(self, block):
        self.counts[block] -= 1
        if self.counts[block] == 0:
            self._free.append(block)

    def shared(self, block):
        return self.counts[block] > 1


@dataclass
class Work:
    """What a step does, the same in every layer, in this order: copies, stores, encodings, attention. int32 arrays."""

    copies: np.ndarray  # [n, 2] from, to: exact blocks
    blocks: np.ndarray  # [tokens] exact block of each new token, sequence by sequence
    jobs: np.ndarray  # [n, 4] exact source, coded target, keep, kept
    rows: np.ndarray  # [tokens, 3] sequence, position, coded_end
    coded: np.ndarray  # [sequences, blocks] the tables as attention of this step sees them
    exact: np.ndarray


def tiles(rows, tokens, chunk=None):
    """crumb_row [tiles, rows of a tile, 6]: the rows of a sequence together, the last tile of each padded. rows [n, 3]: sequence,
    position, coded_end; tokens [n]: where each stands in the batch. chunk: a sequence is one tile if one has so many rows."""
    sequence, position, coded_end = rows.T
    most = int(np.bincount(sequence).max(initial=1))
    per_tile = most if most == 1 or (chunk and most >= chunk) else TILE
    full = np.stack([sequence, tokens, position, np.zeros_like(position), coded_end, position + 1], 1).astype(np.int32)
    if per_tile == 1:
        return full[:, None]
    made = []
    for s in np.unique(sequence):
        of_sequence = full[sequence == s]
        padding = np.zeros((-len(of_sequence) % per_tile, 6), np.int32)
        padding[:, 0], padding[:, 1] = s, NONE
        made.append(np.concatenate([of_sequence, padding]).reshape(-1, per_tile, 6))
    return np.concatenate(made)


def tile_groups(rows, tokens, chunk=None):
    """The same as tiles() for attention that is done one after the other: sequences with `chunk` rows and more, each alone, and all
    others, which such a tile would pad to its size."""
    counts = np.bincount(rows[:, 0])
    large = [] if chunk is None else np.nonzero(counts >= chunk)[0]
    small = ~np.isin(rows[:, 0], large)
    groups = [small] * bool(small.any()) + [rows[:, 0] == sequence for sequence in large]
    return [tiles(rows[group], tokens[group], chunk) for group in groups]


def _int32(rows, width):
    return np.asarray(rows, np.int32).reshape(-1, width)


class Sequences:
    """The block tables of a batch."""

    def __init__(self, rules):
        self.rules = rules
        self.coded_pool, self.exact_pool = Pool(), Pool()
        self.aged_early_tokens = 0  # that a crop left readable through their codes only
        self.extents = []
        self.coded = np.full((0, 0), NONE, np.int32)
        self.exact = np.full((0, 0), NONE, np.int32)
        self._sources = []  # coded blocks that the last step encoded again

    def __len__(self):
        return len(self.extents)

    def add(self, n):
        """n empty sequences more."""
        self.extents += [Extent()] * n
        more = np.full((n, self.coded.shape[1]), NONE, np.int32)
        self.coded, self.exact = np.concatenate([self.coded, more]), np.concatenate([self.exact, more])

    def begin(self, counts):
        """Appends counts[i] tokens to sequence i; returns the Work."""
        while self._sources:
            self.coded_pool.release(self._sources.pop())
        for i, extent in enumerate(self.extents):
            self._reshape(i, self.rules.trimmed(extent))
        self._widen(max(extent.length + count for extent, count in zip(self.extents, counts)))
        copies, jobs, blocks, rows = [], [], [np.zeros(0, np.int32)], [np.zeros((0, 3), np.int32)]
        for i, count in enumerate(counts):
            if count > 0:
                copies += self._make_private(i)
                jobs += self._append(i, count)
                positions = np.arange(self.extents[i].length - count, self.extents[i].length, dtype=np.int32)
                blocks.append(self.exact[i, positions // PAGE])
                coded_end = np.maximum(self.rules.edge(positions), self.extents[i].exact_begin)
                rows.append(np.stack([np.full_like(positions, i), positions, coded_end], 1))
        return Work(_int32(copies, 2), np.concatenate(blocks), _int32(jobs, 4), np.concatenate(rows).astype(np.int32),
                    self.coded.copy(), self.exact.copy())

    def crop(self, i, length):
        """Takes tokens back, if there are any from `length` on. Where the BF16 rows of tokens that come back into the window
        are gone, they stay readable through their codes."""
        now, rules = self.extents[i], self.rules
        if length >= now.length:
            return
        to = rules.cropped(now, length)
        aged_begin, aged_end = max(rules.edge(length), rules.sink), min(to.exact_begin, rules.edge(now.length))
        self.aged_early_tokens += int(max(0, aged_end - aged_begin))
        self._reshape(i, to)

    def select(self, indices):
        """Sequence i becomes what sequence indices[i] was. Blocks are shared; who writes to a shared one gets a copy."""
        extents = [self.extents[i] for i in indices]
        coded, exact = self.coded[indices], self.exact[indices]
        for pool, old, new in ((self.coded_pool, self.coded, coded), (self.exact_pool, self.exact, exact)):
            for block in new[new != NONE].tolist():
                pool.hold(block)
            for block in old[old != NONE].tolist():
                pool.release(block)
        self.extents, self.coded, self.exact = extents, coded, exact

    def _make_private(self, i):
        """The block that the next token goes to, if it has rows already."""
        b, used = divmod(self.extents[i].length, PAGE)
        if used == 0 or not self.exact_pool.shared(self.exact[i, b]):
            return []
        block = int(self.exact[i, b])
        self.exact_pool.release(block)
        self.exact[i, b] = self.exact_pool.take()
        return [(block, int(self.exact[i, b]))]

    def _append(self, i, count):
        before = self.extents[i]
        self._reshape(i, self.rules.appended(before, count))
        aged, keep = divmod(before.exact_begin, PAGE)
        jobs = []
        for b in self.rules.demoted(before, self.extents[i]):
            if keep and b == aged:  # rows below `keep` are taken over from the page that has them
                kept = int(self.coded[i, b])
                self._sources.append(kept)
                self.coded[i, b] = self.coded_pool.take()
                jobs.append((self.exact[i, b], self.coded[i, b], keep, kept))
            else:
                jobs.append((self.exact[i, b], self.coded[i, b], 0, NONE))
        return jobs

    def _reshape(self, i, to):
        before, self.extents[i] = self.extents[i], to
        for pool, table, kind in (
            (self.coded_pool, self.coded, self.rules.coded),
            (self.exact_pool, self.exact, self.rules.sinks),
            (self.exact_pool, self.exact, self.rules.exact),
        ):
            old, new = kind(before), kind(to)
            for b in old:
                if b not in new:
                    pool.release(int(table[i, b]))
                    table[i, b] = NONE
            for b in new:
                if b not in old:
                    table[i, b] = pool.take()

    def _widen(self, tokens):
        more = _blocks_for(tokens) - self.coded.shape[1]
        if more > 0:
            more = np.full((len(self), more + self.coded.shape[1] // 4), NONE, np.int32)
            self.coded, self.exact = np.concatenate([self.coded, more], 1), np.concatenate([self.exact, more], 1)

"""Which tokens of a serving engine's sequences have their BF16 rows, and where.

vLLM and SGLang know blocks of 64 tokens by number, and tell a backend neither whose they are nor when they are free. So exact rows lie
in slots of their own, keyed by the number of the block, and every block is encoded as soon as it is full: rows whose slot was taken
for something else stay readable through their codes. That is what the position rule (docs/design/position-rule.md) wants for all
but the newest tokens; where it happens to these, after a prefix that was found without its window, it is counted.

A slot is taken from blocks that have left the window of their sequence, longest ago first, and then from those of windows and
sinks, longest unused first: mostly those of sequences that have ended. Numbers alone: nothing here knows an engine or torch.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from .blocks import NONE, PAGE

PIECE = 512  # tokens that are stored, encoded and attended to together


def _blocks_for(tokens):
    return -(-tokens // PAGE)


def slots_for(rules, sequences, longest):
    """Slots that so many sequences of `longest` tokens at most hold between two steps, and what a piece takes beside them."""
    of_a_sequence = _blocks_for(rules.sink) + _blocks_for(rules.recent + PAGE - 1)
    return sequences * min(of_a_sequence, _blocks_for(longest)) + _blocks_for(PIECE) + 1


@dataclass
class _Held:
    """Rows begin .. filled of a block are in a slot; those below `begin` have their codes only."""

    slot: int
    begin: int = 0
    filled: int = 0


@dataclass(frozen=True)
class Piece:
    """What is done together, the same in every layer, in this order. int32 arrays."""

    saved: np.ndarray  # [n, 4] crumb_encode_job: blocks that are not full and lose their slot
    tokens: np.ndarray  # [tokens] of the step
    slots: np.ndarray  # [tokens] exact block of each
    positions: np.ndarray  # [tokens]
    jobs: np.ndarray  # [n, 4] crumb_encode_job: blocks that have become full
    rows: np.ndarray  # [tokens, 3] sequence (row of the tables), position, coded_end
    coded: np.ndarray  # [sequences, blocks]
    exact: np.ndarray  # the same, NONE where there is no slot
    sink: int  # 0: the sinks of these sequences have their codes only


class Windows:
    def __init__(self, rules, capacity):
        self.rules, self.capacity = rules, capacity
        self.aged_early_tokens = 0  # that the rule wants exact, and have their codes only
        self._recent = OrderedDict()  # block -> _Held: windows and sinks
        self._past = OrderedDict()  # block -> _Held: has left its window
        self._lost = set()  # blocks that are counted already
        self._free = list(range(capacity - 1, -1, -1))

    def step(self, tables, lengths, counts):
        """tables [sequences, blocks]: numbers of the engine's blocks. lengths: tokens of each sequence after the step, of which the
        last counts[i] are new and lie in the batch one sequence after the other. Returns Pieces."""
        starts, parts = np.cumsum([0, *counts]), []
        for i in self._writers_first(tables, lengths, counts):
            first = lengths[i] - counts[i]
            parts += [(i, begin, min(begin + PIECE, lengths[i]), int(starts[i]) + begin - first) for begin in range(first, lengths[i], PIECE)]
        pieces, waiting, n_tokens, blocks = [], [], 0, set()
        for i, begin, end, at in parts:
            wanted = self._wanted_blocks(tables, i, begin, end)
            if waiting and (n_tokens + end - begin > PIECE or len(blocks) + len(wanted - blocks) > self.capacity):
                pieces += self._pieces(tables, waiting)
                waiting, n_tokens, blocks = [], 0, set()
            waiting.append((i, begin, end, at))
            n_tokens += end - begin
            blocks |= wanted
        return pieces + self._pieces(tables, waiting) if waiting else pieces

    @staticmethod
    def _writers_first(tables, lengths, counts):
        """The sequences in an order in which none comes before what it reads: an engine may let a prompt begin with blocks that another
        one computes in the same step."""
        order = [i for i, count in enumerate(counts) if count > 0]
        writers = {int(tables[i, b]): i for i in order for b in range((lengths[i] - counts[i]) // PAGE, lengths[i] // PAGE)}
        if not writers or len(order) == 1:
            return order
        written, done = np.fromiter(writers, np.int64), {}

        def visit(i):
            if i not in done:
                done[i] = None
                before = tables[i, : (lengths[i] - counts[i]) // PAGE]
                for block in before[np.isin(before, written)].tolist():
                    visit(writers[block])
                done[i] = done.pop(i)  # behind those that it reads

        for i in order:
            visit(i)
        return list(done)

    def _wanted(self, begin, end):
        """Blocks of a sequence whose exact rows tokens begin .. end read or are."""
        sinks = range(min(_blocks_for(self.rules.sink), _blocks_for(end)))
        return [*sinks, *range(max(len(sinks), self._window(begin)), _blocks_for(end))]

    def _wanted_blocks(self, tables, i, begin, end):
        return set(tables[i, self._wanted(begin, end)].tolist())

    def _window(self, position):
        """First block of the window of a token, which is in it whatever `recent` is."""
        return min(int(self.rules.edge(position)), position) // PAGE

    def _pieces(self, tables, parts):
        """One Piece, or two: the sequences whose sinks are lost are read by another rule."""
        saved = self._take(tables, parts)
        groups = {}
        for part in parts:
            sinks = range(min(_blocks_for(self.rules.sink), _blocks_for(part[1])))
            whole = all(self._has(tables[part[0], b], part[1] - PAGE * b) for b in sinks)
            groups.setdefault(self.rules.sink if whole else 0, []).append(part)
        pieces = []
        for sink, group in groups.items():
            pieces.append(self._piece(tables, group, sink, saved))
            saved = []
        for i, begin, end, _ in parts:
            self._leave(tables[i], begin, end)
        return pieces

    def _find(self, block):
        return self._recent.get(block) or self._past.get(block)

    def _has(self, block, rows):
        """Whether the first `rows` rows (64 at most) of a block are exact."""
        held = self._find(int(block))
        return held is not None and held.begin == 0 and held.filled >= min(rows, PAGE)

    def _take(self, tables, parts):
        """Slots for all blocks that the parts want and that can have one. Returns encode jobs for what had to go."""
        pinned = set().union(*(self._wanted_blocks(tables, i, begin, end) for i, begin, end, _ in parts))
        saved = []
        for i, begin, end, _ in parts:
            for b in self._wanted(begin, end):
                block, before = int(tables[i, b]), min(PAGE, max(0, begin - PAGE * b))
                held = self._find(block)
                if before == 0:  # whatever was there, the block has a new owner
                    self._lost.discard(block)
                elif (held is None or held.begin > 0) and block not in self._lost:
                    self._lost.add(block)
                    self.aged_early_tokens += before if held is None else held.begin
                if held is None:
                    if before == PAGE:
                        continue
                    held = _Held(self._slot(pinned, saved), before)
                elif held.filled < before:
                    raise RuntimeError(f"crumb_kv: block {block} has {held.filled} rows of the {before} that the engine computed")
                held.filled = max(before, min(PAGE, end - PAGE * b))
                held.begin = min(held.begin, before)
                self._past.pop(block, None)
                self._recent[block] = held
                self._recent.move_to_end(block)
        return saved

    def _slot(self, pinned, saved):
        if self._free:
            return self._free.pop()
        for blocks in (self._past, self._recent):
            block = next((block for block in blocks if block not in pinned), None)
            if block is not None:
                held = blocks.pop(block)
                if held.filled < PAGE:
                    saved.append((held.slot, block, held.begin, block if held.begin else NONE))
                return held.slot
        raise RuntimeError(f"crumb_kv: {self.capacity} exact blocks are too few for a step")

    def _piece(self, tables, parts, sink, saved):
        width = max(_blocks_for(end) for _, _, end, _ in parts)
        coded = np.stack([tables[i, :width] for i, *_ in parts]).astype(np.int32)
        exact = np.full_like(coded, NONE)
        tokens, slots, positions, rows, jobs = [], [], [], [], []
        for row, (i, begin, end, at) in enumerate(parts):
            coded[row, _blocks_for(end) :] = NONE  # what the engine has set aside is not written yet
            aged = 0
            for b in self._wanted(begin, end):
                block = int(tables[i, b])
                held = self._find(block)
                exact[row, b] = NONE if held is None else held.slot
                if PAGE * b >= self.rules.sink or sink == 0:
                    aged = max(aged, min(PAGE * (b + 1), begin) if held is None else PAGE * b + held.begin if held.begin else 0)
                if begin < PAGE * (b + 1) <= end:
                    jobs.append((held.slot, block, held.begin, block if held.begin else NONE))
            at_position = np.arange(begin, end, dtype=np.int32)
            tokens.append(np.arange(at, at + end - begin, dtype=np.int32))
            positions.append(at_position)
            slots.append(exact[row, at_position // PAGE])
            coded_end = np.maximum(self.rules.edge(at_position), aged)
            rows.append(np.stack([np.full_like(at_position, row), at_position, coded_end], 1))
        int32 = lambda jobs: np.asarray(jobs, np.int32).reshape(-1, 4)
        return Piece(int32(saved), np.concatenate(tokens), np.concatenate(slots), np.concatenate(positions), int32(jobs),
                     np.concatenate(rows).astype(np.int32), coded, exact, sink)

    def _leave(self, table, begin, end):
        sinks = _blocks_for(self.rules.sink)
        for b in range(max(sinks, self._window(begin)), max(sinks, self._window(end))):
            held = self._recent.pop(int(table[b]), None)
            if held is not None:
                self._past[int(table[b])] = held

"""Steps of one token a sequence at most, whose tables lie where those of the step before did: so they can be in a CUDA graph, which is
captured once and replayed with whatever its memory says.

A graph does the same in every step, so three things are done otherwise than in other steps. Blocks that lose their slot are encoded
before it. Blocks that have become full are encoded before the next step, which is the first to read their codes, unless `recent` is 0.
And sequences whose sinks have their codes only, elsewhere a Piece of their own, stand among the others as if they began later: behind
as many blocks of nobody as the sinks take, which their rows do not see."""

import numpy as np
import torch

from .blocks import NONE, PAGE
from .windows import PIECE

ALIGNMENT = 16  # numbers of 4 bytes


def can_stand(rules, sequences):
    return rules.recent > 0 and sequences <= PIECE


class Standing:
    """Tables of `sequences` sequences of `blocks` blocks on a device. spare: the exact block that takes the rows of nobody."""

    def __init__(self, rules, sequences, blocks, spare, device):
        self._shift = -(-rules.sink // PAGE)
        self._sink, self._spare, self._width = rules.sink, spare, -(-sequences // ALIGNMENT) * ALIGNMENT
        self._flat = torch.zeros(8 * self._width, dtype=torch.int32, device=device)  # slots, positions, crumb_row
        self._ids = torch.full((2, sequences, blocks + self._shift), NONE, dtype=torch.int32, device=device)
        self.write([])

    def first(self, n):
        """Of n tokens: slots, positions [n], rows [n, 1, 6], coded, exact [n, blocks]."""
        w = self._width
        return self._flat[:n], self._flat[w : w + n], self._flat[2 * w : 2 * w + 6 * n].view(n, 1, 6), self._ids[0, :n], self._ids[1, :n]

    def write(self, pieces):
        """The Pieces of a step, of one token a sequence. What no token is of is nobody's."""
        pin, w = self._flat.is_cuda, self._width
        flat = torch.zeros(8 * w, dtype=torch.int32, pin_memory=pin)
        slots, positions, rows = flat.numpy()[:w], flat.numpy()[w : 2 * w], flat.numpy()[2 * w :].reshape(w, 6)
        slots[:], rows[:, 1] = self._spare, NONE
        n, width = sum(len(piece.tokens) for piece in pieces), max((piece.coded.shape[1] for piece in pieces), default=0) + self._shift
        ids, first = torch.full((2, n, width), NONE, dtype=torch.int32, pin_memory=pin), 0
        for piece in pieces:
            shift = 0 if piece.sink == self._sink else self._shift
            sequence, position, coded_end = piece.rows.T
            slots[piece.tokens], positions[piece.tokens] = piece.slots, piece.positions
            before = np.full_like(position, PAGE * shift)
            rows[piece.tokens] = np.stack([first + sequence, piece.tokens, before + position, before, before + coded_end, before + position + 1], 1)
            for table, of in zip(ids.numpy(), (piece.coded, piece.exact)):
                table[first : first + len(of), shift : shift + of.shape[1]] = of
            first += len(piece.coded)
        self._flat.copy_(flat, non_blocking=True)
        if n:
            self._ids[:, :n, :width].copy_(ids, non_blocking=True)

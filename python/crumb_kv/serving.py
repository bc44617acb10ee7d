"""What a serving engine needs of crumb, whichever it is: options, the layers of this rank, room for exact rows, and what a step
does in each layer. What is an engine's own is in vllm/ and sglang/."""

from dataclasses import dataclass, fields

import numpy as np
import torch

from . import models
from .blocks import PAGE, Rules, tile_groups
from .decode import ALIGNMENT, Standing, can_stand
from .heads import heads_of_rank
from .layer import CHUNK, make_layers, multiprocessors
from .windows import PIECE, Windows, slots_for

MIB = 1 << 20


class Refused(ValueError):
    """What cannot be served: what, why, and what to type."""


@dataclass(frozen=True)
class Options:
    recipe: str  # as --kv of the crumb program
    artefact: str | None = None  # file of a calibration
    sink: int = 64  # tokens at the start of a sequence that stay BF16
    recent: int = 256  # and at its end
    spare_windows: int = 16  # of sequences that have ended, for prefixes that are asked for again


def read_options(given, typed):
    """Options from what the user gave. typed: how one gives them."""
    known = {field.name: field for field in fields(Options)}
    if not isinstance(given, dict) or "recipe" not in given:
        raise Refused(f"crumb_kv: the options are no object with a recipe. Type: {typed}")
    for name, value in given.items():
        if name not in known:
            raise Refused(f"crumb_kv: there is no option '{name}'. Take one of: {', '.join(known)}")
        wanted = known[name].type
        if not isinstance(value, wanted) or isinstance(value, bool) or (wanted is int and value < 0):
            raise Refused(f"crumb_kv: option {name} is {value!r}: it must be {'a number of at least 0' if wanted is int else 'a text'}")
    return Options(**given)


def refuse_if_any(engine, cases):
    """cases: (what, whether it is there, what to do instead)."""
    for what, there, remedy in cases:
        if there:
            raise Refused(f"crumb_kv.{engine} does not support {what}. {remedy}")


def refuse_model(engine, why, remedy="Leave the crumb options out"):
    raise Refused(f"crumb_kv.{engine} cannot serve this model: {why}. {remedy}")


@dataclass(frozen=True)
class Work:
    """A Piece of Windows as tensors of the device."""

    tokens: torch.Tensor | slice  # rows of the step
    slots: torch.Tensor
    positions: torch.Tensor
    saved: torch.Tensor
    jobs: torch.Tensor
    rows: list[torch.Tensor]  # what attention takes one after the other
    coded: torch.Tensor
    exact: torch.Tensor
    sink: int
    stands: bool = False  # may be captured: what it needs beside has no other owner


def _on_device(arrays, device):
    """Arrays as int32 tensors. They go to a GPU in one copy, which nothing waits for."""
    arrays = [np.ascontiguousarray(array, np.int32) for array in arrays]
    ends = np.cumsum([0, *(-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays)])
    host = torch.empty(int(ends[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    for array, begin in zip(arrays, ends):
        host.numpy()[begin : begin + array.size] = array.reshape(-1)
    there = host.to(device, non_blocking=True)
    return [there[begin : begin + array.size].view(array.shape) for array, begin in zip(arrays, ends)]


def _work_of(pieces, device, chunk):
    """The Work of Pieces. chunk: as tile_groups() takes it."""
    if not pieces:
        return []
    arrays, counts = [], []
    for piece in pieces:
        groups = tile_groups(piece.rows, piece.tokens, chunk)
        arrays += [piece.tokens, piece.slots, piece.positions, piece.saved, piece.jobs, piece.coded, piece.exact, *groups]
        counts.append(len(groups))
    tensors = iter(_on_device(arrays, device))
    work = []
    for piece, n_groups in zip(pieces, counts):
        tokens, slots, positions, saved, jobs, coded, exact = (next(tensors) for _ in range(7))
        first, n = int(piece.tokens[0]), len(piece.tokens)
        if np.array_equal(piece.tokens, np.arange(first, first + n)):
            tokens = slice(first, first + n)  # neighbours are not copied
        work.append(Work(tokens, slots, positions, saved, jobs, [next(tensors) for _ in range(n_groups)], coded, exact, piece.sink))
    return work


class Served:
    """A model on one rank. shapes: of all layers of the model, on whatever rank they are, for `planes` spends its budget over
    all of them; numbers: of the layers that are here; config: the text model's; weights: as why_not_this_artefact() takes them;
    sequences, longest: how many run at once, and the tokens of the longest; device: where K, V and queries lie."""

    CAPTURING = ("cuda",)  # devices with graphs

    def __init__(self, engine, logger, options, shapes, numbers, config, weights, rank, size, sequences, longest,
                 device=torch.device("cpu")):
        self.engine, self.logger, self.options, self.device = engine, logger, options, device
        self.rules = Rules(options.sink, options.recent)
        whole = make_layers(options.recipe, shapes, options.artefact)
        self._check_artefact(config, shapes, weights)
        self.interleaved = models.channel_order(config, shapes[0].dim_k) is not None
        first, n = heads_of_rank(shapes[0].n_head_kv, rank, size)
        self.coders = {number: whole[number].slice(first, n, shapes[0].n_head // size // n) for number in numbers}
        self.block_bytes = sum(coder.block_bytes for coder in self.coders.values())
        self.exact_block_bytes = sum(coder.exact_block_bytes for coder in self.coders.values())
        self._tables = self._make_tables()
        self._multiprocessors = multiprocessors(device)
        self._chunk = CHUNK if all(coder.takes_chunks(device) for coder in self.coders.values()) else None
        self.sequences, self._longest = sequences, longest
        self.can_stand = device.type in self.CAPTURING and can_stand(self.rules, sequences)
        self.n_slots = slots_for(self.rules, sequences + options.spare_windows, longest) + self.can_stand
        self.windows_bytes = self.n_slots * self.exact_block_bytes
        self.windows, self._standing, self._full = None, None, None
        self.counts = torch.zeros(2, dtype=torch.int32, device=device)
        self._workspace, self._workspace_sizes = torch.zeros(0, dtype=torch.uint8, device=device), {}
        self._out = torch.zeros(0, dtype=torch.float32, device=device)  # an engine may have another default
        self._warned = False
        self._say_recipe(rank, size)

    def _check_artefact(self, config, shapes, weights):
        if self.options.artefact is None:
            if config.model_type.startswith("qwen2") or getattr(config, "attention_bias", False):
                self.logger.warning("crumb: the keys of this model have a bias, which '%s' spends its codes on: expect nonsense. Take a "
                                    "recipe with an artefact, which knows their mean", self.options.recipe)
        elif why := models.why_not_this_artefact(self.options.artefact, config, shapes, weights):
            refuse_model(self.engine, *why)

    def _make_tables(self):
        try:
            return {number: coder.tables(self.device) for number, coder in self.coders.items()}
        except ValueError as e:
            refuse_model(self.engine, str(e), "Take had2, oscar or planes and a model with heads of 64, 128 or 256 channels, or leave "
                         "the crumb options out")

    def take_windows(self):
        """The memory of the exact rows."""
        self.windows = Windows(self.rules, self.n_slots - self.can_stand)
        if self.can_stand:
            self._standing = Standing(self.rules, self.sequences, -(-self._longest // PAGE), self.n_slots - 1, self.device)
        self.exact = {number: torch.zeros(self.n_slots, coder.exact_block_bytes, dtype=torch.uint8, device=self.device)
                      for number, coder in self.coders.items()}

    def take_room(self, tokens, heads, dim):
        """The memory of the largest step, so that what is left can be told before there is one."""
        self._room(tokens, heads, dim)
        few, blocks = min(self.sequences, PIECE), -(-self._longest // PAGE)
        for n_tiles, rows_per_tile in ((few, 1), (few + PIECE // 8, 8), (1, PIECE if self._chunk else 8)):
            self._work_room(n_tiles, rows_per_tile, blocks)

    def check_windows(self, memory, remedy):
        if 2 * self.windows_bytes > memory:
            raise Refused(f"crumb_kv: the BF16 windows of {self.sequences} sequences and {self.options.spare_windows} spare ones take "
                          f"{self.windows_bytes // MIB} MiB of {memory // MIB} MiB of cache, more than half. {remedy}")

    def _say_recipe(self, rank, size):
        options, pages = self.options, sorted({coder.block_bytes for coder in self.coders.values()})
        source = "" if options.artefact is None else f", artefact {options.artefact} of {models.artefact_made_for(options.artefact)['model.name']}"
        each = f"{pages[0]} bytes" if len(pages) == 1 else f"{pages[0]} to {pages[-1]} bytes, each layer its own and none padded"
        self.logger.info("crumb: KV cache in %s%s: %.4g bits an element in %d layers (a block of 64 tokens: %s), %.2f times smaller than "
                         "BF16; first %d and last %d tokens of a sequence BF16%s", options.recipe, source,
                         16 * self.block_bytes / self.exact_block_bytes, len(self.coders), each,
                         self.exact_block_bytes / self.block_bytes, options.sink, options.recent,
                         f"; rank {rank} of {size}" if size > 1 else "")

    def say_capacity(self, n_pages):
        memory = n_pages * self.block_bytes + self.windows_bytes
        room = memory // self.exact_block_bytes
        self.logger.info("crumb: %d tokens in %d pages (%d MiB) and %d MiB of BF16 windows; BF16 has room for %d tokens in that memory, "
                         "%.2f times fewer", n_pages * PAGE, n_pages, n_pages * self.block_bytes // MIB, self.windows_bytes // MIB,
                         room * PAGE, n_pages / room)
        return memory

    def pool_of(self, number):
        """uint8 [pages, block_bytes]: where the engine keeps the pages of a layer. Asked for if can_stand."""
        raise NotImplementedError

    # A step.

    def work(self, tables, lengths, counts):
        """What a step does in every layer, as Windows.step() says."""
        self._encode_full()
        pieces = self._pieces(tables, lengths, counts)
        if self._standing is None or max(counts, default=0) > 1:
            return _work_of(pieces, self.device, self._chunk)
        saved, jobs = (np.concatenate([getattr(piece, name) for piece in pieces] or [np.zeros((0, 4), np.int32)]) for name in ("saved", "jobs"))
        saved, self._full = _on_device([saved, jobs], self.device)
        self._encode(saved)
        self._standing.write(pieces)
        return self.standing(sum(counts)) if pieces else []

    def standing(self, n):
        """The work of a step of n tokens, each of another sequence, as it was written last."""
        if self._standing is None:
            raise RuntimeError("crumb_kv: a step of this engine cannot be captured")
        slots, positions, rows, coded, exact = self._standing.first(n)
        none = torch.zeros(0, 4, dtype=torch.int32, device=self.device)
        return [Work(slice(0, n), slots, positions, none, none, [rows], coded, exact, self.rules.sink, stands=True)]

    def _pieces(self, tables, lengths, counts):
        pieces = self.windows.step(tables, lengths, counts)
        if self.windows.aged_early_tokens and not self._warned:
            self._warned = True
            self.logger.warning("crumb: a prefix was found whose window is gone: its newest tokens are read through their codes. Raise "
                                "spare_windows (it is %d) if answers must not depend on what is in the cache", self.options.spare_windows)
        return pieces

    def _encode_full(self):
        """Blocks that the step before has filled."""
        if self._full is not None:
            self._encode(self._full)
            self._full = None

    def _encode(self, jobs):
        """In all layers."""
        for number, coder in self.coders.items() if len(jobs) else ():
            torch.ops.crumb.encode(coder.handle, jobs, self.exact[number], self.pool_of(number), self.counts, self._tables[number])

    def attend(self, number, work, query, key, value, coded):
        """query [tokens, heads, D], key, value [tokens, KV heads, D] of this rank; coded: uint8 [pages, block_bytes]. Returns
        float32 [tokens, heads, D_v], which is good until the next call; rows that only pad the step have any value."""
        coder, exact, tables, ops = self.coders[number], self.exact[number], self._tables[number], torch.ops.crumb
        stands = any(piece.stands for piece in work)
        handle = coder.handle
        q, k, v = self._in_order(query, torch.float32), self._in_order(key, torch.bfloat16).contiguous(), value.to(torch.bfloat16).contiguous()
        out = q.new_empty(*q.shape[:2], v.shape[2]) if stands else self._room(len(q), q.shape[1], v.shape[2])
        for piece in work:
            if len(piece.saved) > 0:
                ops.encode(handle, piece.saved, exact, coded, self.counts, tables)
            ops.store(handle, k[piece.tokens], v[piece.tokens], piece.slots, piece.positions, exact)
            if len(piece.jobs) > 0:
                ops.encode(handle, piece.jobs, exact, coded, self.counts, tables)
            for rows in piece.rows:
                step = (rows, piece.coded, piece.exact, piece.sink, self._multiprocessors)
                workspace = self._work_room(*rows.shape[:2], piece.coded.shape[1], stands)
                ops.plan(handle, *step, workspace)
                ops.attend(handle, q, *step, coded, exact, tables, None, workspace, out)
        return out

    def _in_order(self, heads, dtype):
        """As models.channel_order() says, in one copy."""
        if not self.interleaved:
            return heads.to(dtype)
        return heads.unflatten(-1, (2, -1)).transpose(-1, -2).to(dtype, memory_format=torch.contiguous_format).flatten(-2)

    def _room(self, tokens, heads, dim):
        if self._out.numel() < tokens * heads * dim:
            self._out = torch.zeros(tokens * heads * dim, dtype=torch.float32, device=self.device)
        return self._out[: tokens * heads * dim].view(tokens, heads, dim)

    def _work_room(self, n_tiles, rows_per_tile, blocks, new=False):
        """What plan() and attend() of any layer write in between."""
        shape = (n_tiles, rows_per_tile, -(-blocks // PAGE) * PAGE)  # it changes seldom, and is asked for in every layer
        if shape not in self._workspace_sizes:
            self._workspace_sizes[shape] = max(coder.workspace_bytes(self.device, *shape) for coder in self.coders.values())
        if new:
            return torch.empty(self._workspace_sizes[shape], dtype=torch.uint8, device=self.device)
        if len(self._workspace) < self._workspace_sizes[shape]:
            self._workspace = torch.empty(self._workspace_sizes[shape], dtype=torch.uint8, device=self.device)
        return self._workspace

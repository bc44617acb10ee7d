"""torch.ops.crumb on a CUDA device beside the CPU's, and CrumbCache on both. Needs a GPU and a crumb_kv built for CUDA:
`pytest python/tests/test_cuda.py`."""

import numpy as np
import pytest
import torch

from crumb_kv import Shape, has_cuda, make_layers
from crumb_kv.blocks import Rules, tiles
from crumb_kv.layer import CHUNK, multiprocessors
from test_ops import read_had2

pytestmark = pytest.mark.skipif(not (has_cuda() and torch.cuda.is_available()), reason="needs a GPU and a crumb_kv built with CRUMB_CUDA=ON")

OPS = torch.ops.crumb
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
RULES = Rules(sink=64, recent=128)
# How far an output may lie from what it should be, as a part of its length: sums of floats in another order; codes that meet integers
# of 8 bits (the CPU's weights), or BF16 (chunks on CUDA), as in test_ops.py. Two devices may differ by twice that.
FLOATS, CODES = 2e-5, 0.02
MODELS = [("had2", 4, 2, 64), ("had2", 16, 1, 64), ("had2", 6, 2, 128), ("int2:paper", 8, 2, 128), ("quarot:paper", 4, 4, 64)]


def numbers(kind, *shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(kind) + shape[-1]))
    if kind == "outliers":
        x[..., ::17] *= 30
        x[::50] *= 100
    if kind == "extreme":
        x[::3], x[1::7], x[2::11] = 0, x[1::7] * 1e30, x[2::11] * 1e-30
    if kind == "broken":
        x[::5, :, 3], x[3::70] = torch.nan, torch.inf
    return x.bfloat16()


class World:
    """Two sequences whose blocks lie in another order, stored and encoded on both devices."""

    def __init__(self, recipe, heads, heads_kv, dim, kind="normal", lengths=(700, 330)):
        self.layer, = make_layers(recipe, [Shape(0, heads, heads_kv, dim, dim, dim**-0.5)])
        self.lengths, width = lengths, -(-max(lengths) // 64)
        self.ids = torch.randperm(2 * width, generator=torch.Generator().manual_seed(3)).int().view(2, width)
        positions = [torch.arange(n) for n in lengths]
        blocks = torch.cat([ids[p // 64] for ids, p in zip(self.ids, positions)])
        k, v = numbers(kind, len(blocks), heads_kv, dim), numbers(kind, len(blocks), heads_kv, dim).flip(0).contiguous()
        self.q = 2 * torch.randn(len(blocks), heads, dim, generator=torch.Generator().manual_seed(4))
        full = torch.cat([ids[: n // 64] for ids, n in zip(self.ids, lengths)])
        jobs = torch.stack([full, full, 0 * full, 0 * full], 1)
        self.exact, self.coded, self.counts = {}, {}, {}
        for device in (CPU, CUDA):
            pool = lambda block_bytes: torch.zeros(2 * width, block_bytes, dtype=torch.uint8, device=device)
            self.exact[device], self.coded[device] = pool(self.layer.exact_block_bytes), pool(self.layer.block_bytes)
            self.counts[device] = torch.zeros(2, dtype=torch.int32, device=device)
            self.stored = (k, v, blocks, torch.cat(positions).int())
            OPS.store(self.layer.handle, *(x.to(device) for x in self.stored), self.exact[device])
            OPS.encode(self.layer.handle, jobs.to(device), self.exact[device], self.coded[device], self.counts[device],
                       self.layer.tables(device))
        self.jobs = jobs

    def rows(self, last, chunk=None):
        """Tiles of the last tokens of each sequence."""
        starts = np.cumsum([0, *self.lengths])
        parts = [(i, np.arange(n - min(last, n), n)) for i, n in enumerate(self.lengths)]
        rows = np.concatenate([np.stack([np.full_like(p, i), p, RULES.edge(p)], 1) for i, p in parts])
        return torch.from_numpy(tiles(rows, np.concatenate([starts[i] + p for i, p in parts]), chunk))

    def arguments(self, device, rows):
        """Of plan() and attend()."""
        rows, ids = rows.to(device), self.ids.to(device)
        workspace = torch.empty(self.layer.workspace_bytes(device, *rows.shape[:2], ids.shape[1]), dtype=torch.uint8, device=device)
        return (rows, ids, ids, RULES.sink, multiprocessors(device)), workspace, torch.zeros(self.q.shape, device=device)

    def attend(self, device, rows, sinks=None):
        step, workspace, out = self.arguments(device, rows)
        OPS.plan(self.layer.handle, *step, workspace)
        OPS.attend(self.layer.handle, self.q.to(device), *step, self.coded[device], self.exact[device], self.layer.tables(device),
                   None if sinks is None else sinks.to(device), workspace, out)
        return out.cpu()


    def expected(self, rows):
        """Attention in double precision over had2's codes as the page format says, and BF16 rows."""
        layer, out, (k, v, *_) = self.layer, torch.zeros(self.q.shape, dtype=torch.double), self.stored
        starts, group = np.cumsum([0, *self.lengths]), layer.shape.n_head // layer.shape.n_head_kv
        codes = []
        for ids in self.ids:
            pages = self.coded[CPU][ids.long()].view(len(ids), layer.shape.n_head_kv, -1)
            codes.append([torch.cat([torch.stack([read_had2(page)[side] for page in block], 1) for block in pages]) for side in (0, 1)])
        for sequence, token, position, _, coded_end, end in rows.flatten(0, 1).tolist():
            if token < 0:
                continue
            seen = slice(int(starts[sequence]), int(starts[sequence]) + end)
            coded = torch.zeros(end, dtype=torch.bool)
            coded[RULES.sink : coded_end] = True
            keys, values = (torch.where(coded[:, None, None], y[:end], x[seen].float()).double().repeat_interleave(group, 1)
                            for x, y in zip((k, v), codes[sequence]))
            weights = torch.einsum("hd,thd->ht", self.q[token].double() * layer.shape.scale, keys).softmax(1)
            out[token] = torch.einsum("ht,thd->hd", weights, values)
        return out


def distance(got, want):
    """As a part of the length of what is wanted; rows that are in no tile are zero in both."""
    assert torch.isfinite(got).all() and torch.equal(got.any(-1), want.any(-1))
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("kind", ["normal", "outliers", "extreme", "broken"])
@pytest.mark.parametrize("model", MODELS)
def test_blocks_are_the_cpus(model, kind):
    world = World(*model, kind)
    for pools in (world.exact, world.coded, world.counts):
        assert torch.equal(pools[CUDA].cpu(), pools[CPU])
    assert (world.counts[CPU][0] > 0) == (kind == "broken")


def test_rows_of_a_kept_page_are_taken_over():
    world = World(*MODELS[0])
    job = torch.stack([world.ids[0, 2], world.ids[1, 1], torch.tensor(20, dtype=torch.int32), world.ids[0, 1]])[None]
    for device in (CPU, CUDA):
        OPS.encode(world.layer.handle, job.to(device), world.exact[device], world.coded[device], world.counts[device], world.layer.tables(device))
    assert torch.equal(world.coded[CUDA].cpu(), world.coded[CPU])


LAST = pytest.mark.parametrize("last, chunk", [(1, None), (37, None), (CHUNK, CHUNK), (300, CHUNK)])


@LAST
@pytest.mark.parametrize("model", MODELS)
def test_attention_is_the_cpus(model, last, chunk):
    world = World(*model)
    far = distance(world.attend(CUDA, world.rows(last, chunk)), world.attend(CPU, world.rows(last)))
    print(f"\n{model}, last {last}, chunk {chunk}: {far:.2g}")
    assert far < 2 * CODES


@LAST
@pytest.mark.parametrize("model", MODELS[:2])
def test_codes_are_read_as_the_page_format_says(model, last, chunk):
    world = World(*model, lengths=(500, 330))
    rows = world.rows(last, chunk)
    want = world.expected(rows)
    far = [distance(world.attend(device, rows), want) for device in (CUDA, CPU)]
    print(f"\n{model}, last {last}, chunk {chunk}: {far[0]:.2g}, CPU {far[1]:.2g}")
    assert max(far) < CODES


@pytest.mark.parametrize("model", MODELS)
def test_exact_rows_are_read_in_floats(model):
    world = World(*model, lengths=(100, 64))
    far = distance(world.attend(CUDA, world.rows(20)), world.attend(CPU, world.rows(20)))
    print(f"\n{model}: {far:.2g}")
    assert far < FLOATS


def test_sinks_of_heads():
    world, sinks = World(*MODELS[0]), torch.linspace(6, 10, 4)
    got, want = (world.attend(device, world.rows(5), sinks) for device in (CUDA, CPU))
    assert distance(got, want) < 2 * CODES and distance(got, world.attend(CPU, world.rows(5))) > 0.1


def test_a_step_in_a_graph_is_replayed_with_other_numbers():
    """Captured once; then K, V, queries, rows and tables change, and the shapes do not."""
    world = World(*MODELS[0])
    other = World(*MODELS[0], kind="outliers")
    handle, tables = world.layer.handle, world.layer.tables(CUDA)
    step, workspace, out = world.arguments(CUDA, world.rows(1))
    stored, jobs = [x.to(CUDA) for x in world.stored], world.jobs.to(CUDA)
    q, exact, coded, counts = world.q.to(CUDA), world.exact[CUDA], world.coded[CUDA], world.counts[CUDA]

    def work():
        OPS.store(handle, *stored, exact)
        OPS.encode(handle, jobs, exact, coded, counts, tables)
        OPS.plan(handle, *step, workspace)
        OPS.attend(handle, q, *step, coded, exact, tables, None, workspace, out)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    want = world.attend(CUDA, world.rows(1))
    graph.replay()
    assert torch.equal(out.cpu(), want)
    rows = world.rows(2)[:, :1]  # each a token earlier
    for mine, theirs in zip([*stored, q, step[0]], [*other.stored, other.q, rows]):
        mine.copy_(theirs)
    out.zero_()
    graph.replay()
    assert torch.equal(coded.cpu(), other.coded[CPU])
    assert torch.equal(out.cpu(), other.attend(CUDA, rows))


def test_on_a_stream_of_the_user():
    world, stream = World(*MODELS[0]), torch.cuda.Stream()
    want = world.attend(CUDA, world.rows(1))
    with torch.cuda.stream(stream):
        assert torch.equal(world.attend(CUDA, world.rows(1)), want)


def test_copied_blocks_are_the_same():
    world = World(*MODELS[0])
    pool, before = world.coded[CUDA], world.coded[CUDA].cpu()
    OPS.copy_blocks(pool, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32))
    before[5], before[3] = before[0].clone(), before[2].clone()
    assert torch.equal(pool.cpu(), before)


def test_opcheck():
    world = World(*MODELS[0], lengths=(70, 64))
    handle, tables, exact, coded = world.layer.handle, world.layer.tables(CUDA), world.exact[CUDA], world.coded[CUDA]
    step, workspace, out = world.arguments(CUDA, world.rows(1))
    calls = {
        OPS.store: (handle, *(x.to(CUDA) for x in world.stored), exact),
        OPS.encode: (handle, world.jobs.to(CUDA), exact, coded, world.counts[CUDA], tables),
        OPS.plan: (handle, *step, workspace),
        OPS.attend: (handle, world.q.to(CUDA), *step, coded, exact, tables, None, workspace, out),
        OPS.copy_blocks: (exact, torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)),
    }
    for op, arguments in calls.items():
        torch.library.opcheck(op.default, arguments)


def test_wrong_calls_say_what_is_wrong():
    world = World(*MODELS[0])
    step, workspace, out = world.arguments(CUDA, world.rows(1))
    rest = (world.coded[CUDA], world.exact[CUDA])
    with pytest.raises(RuntimeError, match="does not lie where the first tensor does"):
        OPS.store(world.layer.handle, world.stored[0].to(CUDA), *world.stored[1:], world.exact[CUDA])
    with pytest.raises(RuntimeError, match=r"pass Layer.tables\(device\)"):
        OPS.attend(world.layer.handle, world.q.to(CUDA), *step, *rest, None, None, workspace, out)
    with pytest.raises(RuntimeError, match="workspace has 1 bytes, the step needs"):
        OPS.plan(world.layer.handle, *step, workspace[:1])
    layer, = make_layers("had2", [Shape(0, 2, 1, 96, 96, 0.1)])
    with pytest.raises(ValueError, match="no CUDA kernel"):
        layer.tables(CUDA)


# CrumbCache under a small random model.


@pytest.fixture(scope="module")
def models():
    from transformers import LlamaConfig
    from test_cache import SIZES, make_model

    config = LlamaConfig(**{**SIZES, "head_dim": 64})
    return make_model(config), make_model(config).to(CUDA)


@pytest.fixture(scope="module")
def artefact(models, tmp_path_factory):
    from crumb_kv import calibrate
    from test_calibration import Words, words

    file = tmp_path_factory.mktemp("artefact") / "small.safetensors"
    calibrate(models[0], Words(), [words(1500, 1), words(1500, 2)], file, tokens=2500, window=640)
    return file


@pytest.mark.parametrize("recipe", ["had2", "planes", "planes:1.5", "planes:3", "oscar"])
@torch.no_grad()
def test_a_model_on_cuda_answers_as_on_the_cpu(models, artefact, recipe):
    """Matrix products of another order round some K and V, and then some codes, the other way: these stay far below what codes cost."""
    from crumb_kv import CrumbCache
    from test_cache import text

    ids = text(1000, 2)
    make = lambda model, **more: CrumbCache(model, recipe, artefact=None if recipe == "had2" else artefact, **{"sink": 64, "recent": 64, **more})

    def log_p(model, splits, **more):
        cache = make(model, **more)
        return torch.cat([model(part.to(model.device), past_key_values=cache).logits.cpu() for part in ids.split(splits, 1)], 1).log_softmax(-1)

    kld = lambda p, q: (p.exp() * (p - q)).sum(-1).mean().item()
    exact, want, got = log_p(models[0], 1000, recent=2000), log_p(models[0], 1000), log_p(models[1], 1000)
    pieces = log_p(models[1], [1, 300, 7, 1, 691])
    print(f"\n{recipe}: the codes cost {kld(exact, want):.5f}, CUDA differs by {kld(want, got):.6f}, and cut into pieces by {kld(got, pieces):.6f}")
    assert max(kld(want, got), kld(got, pieces)) < 0.1 * kld(exact, want) + 1e-4


@torch.no_grad()
def test_a_padded_batch_equals_each_prompt_alone_on_cuda(models):
    from crumb_kv import CrumbCache
    from test_cache import text

    model, prompts = models[1], [text(n, seed=n).to(CUDA) for n in (300, 90)]
    ids, mask = torch.zeros(2, 300, dtype=torch.long, device=CUDA), torch.zeros(2, 300, dtype=torch.long, device=CUDA)
    for i, p in enumerate(prompts):
        ids[i, 300 - p.shape[1] :], mask[i, 300 - p.shape[1] :] = p, 1
    options = dict(max_new_tokens=12, do_sample=False)
    together = model.generate(ids, attention_mask=mask, past_key_values=CrumbCache(model, "had2", sink=64, recent=64), **options)
    for i, p in enumerate(prompts):
        alone = model.generate(p, past_key_values=CrumbCache(model, "had2", sink=64, recent=64), **options)
        assert torch.equal(together[i, 300:], alone[0, p.shape[1] :])


@torch.no_grad()
def test_recipes_without_kernels_are_refused_at_load(models):
    from crumb_kv import CrumbCache

    with pytest.raises(ValueError, match="'q8:paper' with heads of 64 and 64 channels .* has no CUDA kernel"):
        CrumbCache(models[1], "q8:paper")

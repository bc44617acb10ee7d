"""torch.ops.crumb beside arithmetic of its own: pages of had2 are read here as docs/design/page-format.md says."""

import pytest
import torch

from crumb_kv import Shape, has_cuda, make_layers

OPS = torch.ops.crumb
HEADS, HEADS_KV, DIM = 4, 2, 64


def key_code(planes, token, plane):
    """Byte and shift of a code of K; full groups alone, as heads of 64 have."""
    h, s, c, e = token // 32, token // 16 % 2, token // 4 % 4, token % 4
    group, f, q, b = plane // 64, plane // 16 % 4, plane // 4 % 4, plane % 4
    block = ((h * (planes // 64) + group) * 2 + s) * 4 + q
    return 64 * block + 16 * (c ^ (q & 2)) + 4 * e + b, 2 * f


def value_code(planes, token, plane):
    u, b = token // 4, token % 4
    group, f, c, e = plane // 64, plane // 16 % 4, plane // 4 % 4, plane % 4
    block = (u // 4 * (planes // 64) + group) * 4 + u % 4
    return 64 * block + 16 * (c ^ (u & 2)) + 4 * e + b, 2 * f


def hadamard(n):
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / n**0.5


def read_had2(page):
    """K and V [64, DIM] of a page of one head."""
    codes, gains = 16 * DIM, page[32 * DIM :].float()
    rows = []
    for side, where in enumerate((key_code, value_code)):
        at = torch.tensor([[where(DIM, t, p) for p in range(DIM)] for t in range(64)])
        code = page[side * codes :][at[..., 0]].int() >> at[..., 1] & 3
        gain = torch.exp2((gains[64 * side : 64 * side + 64] - 128) / 16)
        rows.append((code - 1.5) * 0.9957 * gain[:, None] @ hadamard(DIM))
    return rows


class Setting:
    """192 tokens of one sequence in exact and coded blocks, in another order."""

    def __init__(self, n_blocks=3):
        torch.manual_seed(1)
        self.layer, = make_layers("had2", [Shape(0, HEADS, HEADS_KV, DIM, DIM, DIM**-0.5)])
        self.n = 64 * n_blocks
        self.k, self.v = (torch.randn(self.n, HEADS_KV, DIM).bfloat16() for _ in range(2))
        self.q = torch.randn(1, HEADS, DIM)
        self.ids = torch.arange(n_blocks - 1, -1, -1, dtype=torch.int32)
        self.positions = torch.arange(self.n, dtype=torch.int32)
        self.exact = torch.zeros(n_blocks, self.layer.exact_block_bytes, dtype=torch.uint8)
        self.coded = torch.zeros(n_blocks, self.layer.block_bytes, dtype=torch.uint8)
        self.counts = torch.zeros(2, dtype=torch.int32)
        self.workspace = torch.zeros(0, dtype=torch.uint8)
        self.jobs = torch.stack([self.ids, self.ids, 0 * self.ids, 0 * self.ids], 1)
        OPS.store(self.layer.handle, self.k, self.v, self.ids[self.positions.long() // 64], self.positions, self.exact)
        OPS.encode(self.layer.handle, self.jobs, self.exact, self.coded, self.counts)

    def step(self, coded_end, sink=0):
        row = torch.tensor([[[0, 0, self.n - 1, 0, coded_end, self.n]]], dtype=torch.int32)
        return (row, self.ids[None], self.ids[None], sink, 1)

    def attend(self, coded_end, sink=0):
        out = torch.empty(1, HEADS, DIM)
        OPS.plan(self.layer.handle, *self.step(coded_end, sink), self.workspace)
        OPS.attend(self.layer.handle, self.q, *self.step(coded_end, sink), self.coded, self.exact, None, None, self.workspace, out)
        return out

    def expected(self, k, v):
        k, v = (x.float().repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
        weights = torch.einsum("hd,thd->ht", self.q[0] * DIM**-0.5, k).softmax(1)
        return torch.einsum("ht,thd->hd", weights, v)[None]

    def read(self):
        """All tokens through their codes."""
        pages = self.coded.view(len(self.ids), HEADS_KV, -1)[self.ids.long()]
        sides = [[read_had2(page) for page in block] for block in pages]
        return [torch.cat([torch.stack([head[side] for head in block], 1) for block in sides]) for side in (0, 1)]


@pytest.fixture(scope="module")
def setting():
    return Setting()


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_sizes(setting):
    assert setting.layer.block_bytes == HEADS_KV * (2 * 16 * DIM + 2 * 64)
    assert setting.layer.exact_block_bytes == HEADS_KV * 64 * 2 * DIM * 2
    assert setting.layer.bits_per_element == 2.125


def test_exact_rows_are_bf16(setting):
    assert relative(setting.attend(coded_end=0), setting.expected(setting.k, setting.v)) < 1e-5


def test_codes_are_read_as_the_page_format_says(setting):
    k, v = setting.read()
    assert 0.2 < relative(k, setting.k.float()) < 0.4  # 2 bits of a normal variable: 0.34
    # queries meet codes in 8 bits
    assert relative(setting.attend(coded_end=setting.n), setting.expected(k, v)) < 0.02


def test_a_query_reads_both(setting):
    k, v = setting.read()
    for sink, coded_end in ((64, 128), (10, 100)):
        mixed = [torch.cat([x[:sink].float(), y[sink:coded_end], x[coded_end:].float()]) for x, y in ((setting.k, k), (setting.v, v))]
        assert relative(setting.attend(coded_end, sink), setting.expected(*mixed)) < 0.02


def test_threads_change_nothing(setting):
    before, threads = setting.attend(128), torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert torch.equal(setting.attend(128), before)
            coded = torch.zeros_like(setting.coded)
            OPS.encode(setting.layer.handle, setting.jobs, setting.exact, coded, setting.counts)
            assert torch.equal(coded, setting.coded)
    finally:
        torch.set_num_threads(threads)


def test_copied_blocks_are_the_same(setting):
    pool = torch.cat([setting.exact, torch.zeros_like(setting.exact)])
    OPS.copy_blocks(pool, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32))
    assert torch.equal(pool[5], setting.exact[0]) and torch.equal(pool[3], setting.exact[2]) and not pool[4].any()


def test_opcheck():
    s = Setting(1)
    step, out = s.step(64), torch.zeros(1, HEADS, DIM)
    calls = {
        OPS.store: (s.layer.handle, s.k, s.v, s.ids[s.positions.long() // 64], s.positions, s.exact),
        OPS.encode: (s.layer.handle, s.jobs, s.exact, s.coded, s.counts, None),
        OPS.plan: (s.layer.handle, *step, s.workspace),
        OPS.attend: (s.layer.handle, s.q, *step, s.coded, s.exact, None, None, s.workspace, out),
        OPS.copy_blocks: (s.exact, s.ids, s.ids),
    }
    for op, arguments in calls.items():
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("changes, message", [
    (dict(k=lambda x: x.float()), r"k is float32: it must be bfloat16 \(\.to\(torch\.bfloat16\)\)"),
    (dict(v=lambda x: x[:, :1]), r"v has shape \[192, 1, 64\]: it must be \[192, 2, 64\]"),
    (dict(k=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)), "k is not contiguous: pass it .contiguous()"),
    (dict(blocks=lambda x: x + 1), "blocks name block 3 of a pool of 3"),
    (dict(blocks=lambda x: x.long()), "blocks is int64: it must be int32"),
    (dict(exact=lambda x: x[:, 16:]), "exact has shape"),
    (dict(layer=lambda x: 0), "layer 0 is none"),
])
def test_wrong_calls_say_what_is_wrong(setting, changes, message):
    s = setting
    arguments = dict(layer=s.layer.handle, k=s.k, v=s.v, blocks=s.ids[s.positions.long() // 64], slots=s.positions, exact=s.exact)
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        OPS.store(**arguments)


def test_rows_beyond_the_tables_are_refused(setting):
    row, *step = setting.step(64)
    for place, value in ((1, 1), (5, 193)):
        wrong = row.clone()
        wrong[0, 0, place] = value
        with pytest.raises(RuntimeError, match="crumb: row 0"):
            OPS.attend(setting.layer.handle, setting.q, wrong, *step, setting.coded, setting.exact, None, None, setting.workspace,
                       torch.zeros(1, HEADS, DIM))


@pytest.mark.parametrize("block, missing, message", [
    (0, "coded", None), (0, "exact", "exact block 0"), (1, "coded", "coded block 1"), (1, "exact", None), (2, "coded", None), (2, "exact", "exact block 2"),
])
def test_a_row_that_reads_a_block_that_is_none_is_refused(setting, block, missing, message):
    row, coded_ids, exact_ids, *step = setting.step(128, sink=64)
    ids = dict(coded=coded_ids, exact=exact_ids)
    ids[missing] = ids[missing].clone()
    ids[missing][0, block] = -1
    attend = lambda: OPS.attend(setting.layer.handle, setting.q, row, ids["coded"], ids["exact"], *step, setting.coded, setting.exact, None, None,
                                setting.workspace, torch.zeros(1, HEADS, DIM))
    if message is None:
        attend()
    else:
        with pytest.raises(RuntimeError, match=f"crumb: row 0 reads .*{message}"):
            attend()


@pytest.mark.parametrize("recipe, shape, message", [
    ("int3", {}, "had2"),
    ("oscar", {}, r"crumb calibrate.*artefact=FILE.*: (?!.*kivi).*had2"),
    ("planes", {}, "crumb calibrate"),
    ("kivi32", {}, "Take one of: .*had2"),
    ("bf16", {}, "no codes"),
    ("had2", dict(dim_k=40), "40"),
    ("had2", dict(n_head=3), "3 query heads over 2 KV heads"),
])
def test_layers_that_cannot_be(recipe, shape, message):
    with pytest.raises(ValueError, match=message):
        make_layers(recipe, [Shape(**{**dict(layer=0, n_head=4, n_head_kv=2, dim_k=64, dim_v=64, scale=0.125), **shape})])


@pytest.mark.skipif(has_cuda(), reason="built for CUDA")
def test_a_build_for_cpus_says_what_cuda_wants(setting):
    with pytest.raises(ValueError, match="built for CPUs alone, and the model is on cuda:0. Type: pip install .*CRUMB_CUDA=ON"):
        setting.layer.tables(torch.device("cuda", 0))


def test_torch_of_another_version_is_refused():
    from crumb_kv.library import _check_torch

    for version in ("2.10.0", "2.13.1+cu130", "2.15.0a0"):
        _check_torch(version)
    for version in ("2.9.1", "2.16.0", "3.0"):
        with pytest.raises(ImportError, match=f"this is torch {version}. Type: pip install"):
            _check_torch(version)

"""Makes planes_study.json: codes, gains and values of `planes` by the PyTorch code of the study that the recipe comes from.

    python3 planes_study.py FOLDER_WITH_CODERS_PY > planes_study.json

It is an independent implementation: its own transform, allocation, steps, gain search and page means. One page of 64
tokens of one head of 32 channels a side, in five kinds of rows: random, offset, constant, zero, outliers. K is centred
with an 8-bit gain, V has a page mean and a 16-bit gain. Floats are hexadecimal FP32, rows BF16."""
import json, struct, sys
import torch

sys.path.insert(0, sys.argv[1])
from coders import Klt, Paged, page_mean

D, PAGES = 32, 96


def hexes(x):
    return ''.join(f'{struct.unpack("<I", struct.pack("<f", float(v)))[0]:08x}' for v in x.flatten())


def bf16_hexes(x):
    return ''.join(f'{int(v) & 0xffff:04x}' for v in x.bfloat16().view(torch.int16).flatten())


def rows(x, generator):
    page = x[:64].clone()
    page[32:40] += 3 * torch.randn(1, 1, D, generator=generator)
    page[40:48] = torch.randn(8, 1, 1, generator=generator)
    page[48:56] = 0
    page[56:64] *= torch.where(torch.rand(8, 1, D, generator=generator) < 0.1, 20.0, 1.0)
    return page.bfloat16().float()


def side(seed, centred, paged, gain):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(D, D, generator=g) * torch.exp(-torch.arange(D) / 6)[None]
    x = (torch.randn(64 * PAGES, 1, D, generator=g) @ mix.T) + torch.randn(D, generator=g)
    x += torch.randn(PAGES, 1, D, generator=g).repeat_interleave(64, 0) * 0.5
    x = x.bfloat16().float()
    a = torch.randn(200, D, generator=g, dtype=torch.float64) * torch.exp(torch.randn(D, generator=g))
    metric = (a.T @ a / 200)[None]
    step = (1.5 * page_mean(x, 64).abs().amax(0) / 127).clamp_min(1e-12)
    r = x - page_mean(x, 64, step) if paged else x
    mu = r.double().mean(0) if centred else torch.zeros(1, D, dtype=torch.float64)
    c = (r.double() - mu)[:, 0]
    k = Klt(metric, (c.T @ c / len(c))[None], mu, r[::4], bits=2.0, widths=(0, 2, 4, 6), mix=0, gain='search', sb=gain, opt=1)
    page = rows(x, g)
    m = page_mean(page, 64, step) if paged else torch.zeros_like(page)
    code, s = k.codes(page - m)
    values = Paged(k, 64, step, 1, D)(page) if paged else k(page)
    return {'rows': bf16_hexes(page), 'encode': hexes(k.T), 'decode': hexes(k.Ti), 'spectrum': hexes(k.lam),
            'sigma': hexes(k.sig), 'step': hexes(k.step), 'reference': hexes(k.ref), 'mean': hexes(k.mu) if centred else '',
            'page_step': hexes(step) if paged else '', 'page_mean': [int(v) for v in torch.round(m[0, 0] / step[0])] if paged else [],
            'digits': ''.join(str(int(b) // 2) for b in k.b[0]),
            'codes': ''.join(f'{int(v):02x}' for v in (code + (k.n - 1) / 2).flatten()), 'gain': hexes(s), 'values': hexes(values)}


torch.set_num_threads(1)
print(json.dumps({'k': side(1, True, False, 'l8'), 'v': side(2, False, True, 'f16')}, indent=1))

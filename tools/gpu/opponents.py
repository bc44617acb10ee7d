#!/usr/bin/env python3
"""Decode attention, and chunks of prompts, by other people's kernels, on the shapes of cuda_bench and timed in the same way: PyTorch's over a 16-bit
cache, and OSCAR's own Triton kernel over 2-bit codes where its source is at hand.

One query token a request, random data; a CUDA graph runs over disjoint copies of at least 300 MB, so that the L2 cache is
cold; median of 15 replays. Every output is held against FP32. Prints one JSON line a kernel and shape; a kernel that PyTorch
refuses for a shape says so.

Usage: opponents.py [--quick | --prefill] [--oscar FILE]
FILE: sglang-research/python/sglang/srt/layers/attention/triton_ops/decode_attention.py of github.com/FutureMLS-Lab/OSCAR;
it is run with the number of splits that is fastest here, its server's default among them.
"""
import argparse
import importlib.util
import json
import math
import statistics
import sys
import types

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ModuleNotFoundError:
    torch = None  # --help does without

DIM = 128
KERNELS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}  # of SDPBackend
SHAPES = [(1, 8192), (1, 32768), (1, 131072), (16, 32768), (32, 32768), (32, 131072)]
CHUNKS = [(8192, 0), (2048, 32768), (512, 32768), (64, 32768), (512, 0)]  # rows, tokens before them
SPLITS = [8, 16, 32, 128]


def median_us(launch, launches):
    """Microseconds of one of `launches` launches, replayed as a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(launches, 3)):
            launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return statistics.median(times[5:])


def copies_of(size):
    copies = max(2, min(64, math.ceil(3e8 / size)))
    return copies if copies * size < 0.8 * torch.cuda.mem_get_info()[0] else 1


def attention(q, k, v):
    """FP32 attention of one request: q [heads, DIM], k and v [KV heads, context, DIM]."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q[None, :, None].float(), k[None].float(), v[None].float(), enable_gqa=True)[0, :, 0]


def error(got, want):
    return float((got.float() - want).norm() / want.norm())


def measure(name, heads, heads_kv, batch, context):
    size = 2 * batch * heads_kv * context * DIM * 2
    copies = copies_of(size)
    make = lambda h, n: torch.randn(batch, h, n, DIM, device="cuda", dtype=torch.bfloat16)
    q = make(heads, 1)
    kv = [(make(heads_kv, context), make(heads_kv, context)) for _ in range(copies)]

    def launch(i):
        k, v = kv[i % copies]
        with sdpa_kernel(getattr(SDPBackend, KERNELS[name])):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=heads != heads_kv)

    wrong = error(launch(0)[0, :, 0], attention(q[0, :, 0], kv[0][0][0], kv[0][1][0]))
    us = median_us(launch, max(copies, 8))
    return {"us": round(us, 2), "tbs": round(size / us / 1e6, 3), "error": wrong}


def measure_prefill(name, heads, heads_kv, rows, depth):
    """A chunk of a prompt: `rows` queries that see `depth` tokens before them and their own up to themselves. With depth > 0 a
    kernel may also look at all tokens, which is up to rows / 2 more a row ("mask": "none"); the faster way counts."""
    from torch.nn.attention.bias import causal_lower_right

    tokens = depth + rows
    make = lambda h, n: torch.randn(1, h, n, DIM, device="cuda", dtype=torch.bfloat16)
    q, k, v = make(heads, rows), make(heads_kv, tokens), make(heads_kv, tokens)
    masks = {"causal": {"is_causal": True}} if depth == 0 else {"causal": {"attn_mask": causal_lower_right(rows, tokens)}, "none": {}}
    best = {}
    for mask, options in masks.items():
        def launch(_):
            with sdpa_kernel(getattr(SDPBackend, KERNELS[name])):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=heads != heads_kv, **options)

        try:
            out = launch(0)
        except RuntimeError as why:
            best = best or {"refused": str(why).splitlines()[0]}
            continue
        wrong = error(out[0, :, -1], attention(q[0, :, -1], k[0], v[0]))
        us = median_us(launch, 4)
        if "us" not in best or us < best["us"]:
            pairs = rows * depth + rows * (rows + 1) / 2
            best = {"us": round(us, 2), "tflops": round(4 * pairs * heads * DIM / us / 1e6, 1), "mask": mask, "error": wrong}
    return best


def load_oscar(path):
    """The kernel's module; what it imports from its server is two flags."""
    for name, content in {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.utils": {"is_hip": lambda: False},
        "sglang.srt.environ": {"envs": types.SimpleNamespace()},
    }.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    spec = importlib.util.spec_from_file_location("oscar_decode", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_oscar(oscar, heads, heads_kv, batch, context):
    slots = batch * context
    size = 2 * slots * heads_kv * (DIM // 4 + 8)
    copies = copies_of(size)
    codes = [[torch.randint(0, 256, (slots, heads_kv, DIM // 4), device="cuda", dtype=torch.uint8) for _ in "kv"]
             for _ in range(copies)]
    pairs = [[torch.rand(slots, heads_kv, 2, device="cuda") * torch.tensor([1.0, 3.0], device="cuda") for _ in "kv"]
             for _ in range(copies)]
    q = torch.randn(batch, heads, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * context
    places = torch.randperm(slots, device="cuda").to(torch.int64)
    best = None
    for splits in SPLITS:
        sums = torch.empty(batch, heads, splits, DIM, device="cuda", dtype=torch.float32)
        logs = torch.empty(batch, heads, splits, device="cuda", dtype=torch.float32)
        counts = torch.full((batch,), splits, device="cuda", dtype=torch.int32)

        def launch(i):
            c, p = codes[i % copies], pairs[i % copies]
            oscar.decode_attention_fwd_grouped_quant_int2(
                q, c[0], c[1], p[0], p[1], out, starts, places, sums, logs, counts, splits, 1 / math.sqrt(DIM))

        launch(0)
        own = places[:context]

        def values(side):
            c = codes[0][side][own].to(torch.int32)
            digits = torch.cat([c >> (2 * i) & 3 for i in range(4)], dim=-1).float()
            scale, zero = pairs[0][side][own].unbind(-1)
            return ((digits - zero[..., None]) * scale[..., None]).transpose(0, 1)

        wrong = error(out[0], attention(q[0], values(0), values(1)))
        us = median_us(launch, max(copies, 8))
        if best is None or us < best["us"]:
            best = {"us": round(us, 2), "tbs": round(size / us / 1e6, 3), "splits": splits, "error": wrong}
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes alone")
    parser.add_argument("--prefill", action="store_true", help="chunks of prompts only")
    parser.add_argument("--oscar", metavar="FILE", help="OSCAR's Triton kernel")
    args = parser.parse_args()
    if torch is None or not torch.cuda.is_available():
        parser.exit(1, "opponents.py: error: this needs PyTorch and a GPU that it can use\n")
    for rows, depth in CHUNKS:
        for name in KERNELS:
            row = {"bench": "opponent-prefill", "kernel": name, "heads": "32/8", "rows": rows, "depth": depth}
            try:
                row |= measure_prefill(name, 32, 8, rows, depth)
            except (RuntimeError, torch.OutOfMemoryError) as why:
                row |= {"refused": str(why).splitlines()[0]}
            print(json.dumps(row), flush=True)
    if args.prefill:
        return
    shapes = [SHAPES[2], SHAPES[5]] if args.quick else SHAPES
    runs = [(name, lambda *a, n=name: measure(n, *a)) for name in KERNELS]
    if args.oscar:
        oscar = load_oscar(args.oscar)
        runs.append(("oscar-int2", lambda *a: measure_oscar(oscar, *a)))
    for heads, heads_kv in [(32, 8)] if args.quick else [(32, 8), (64, 8), (96, 8)]:
        for batch, context in shapes:
            if heads != 32 and (batch, context) not in [(1, 32768), (32, 32768)]:
                continue
            for name, run in runs:
                row = {"bench": "opponent", "kernel": name, "heads": f"{heads}/{heads_kv}", "batch": batch, "context": context}
                try:
                    row |= run(heads, heads_kv, batch, context)
                except (RuntimeError, torch.OutOfMemoryError) as why:
                    row |= {"refused": str(why).splitlines()[0]}
                torch.cuda.empty_cache()
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

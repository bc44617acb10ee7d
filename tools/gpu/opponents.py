#!/usr/bin/env python3
"""Decode attention over a 16-bit cache by PyTorch's kernels, on the shapes of cuda_bench, timed in the same way.

One query token a request, K and V in BF16, [batch, KV heads, context, 128]; a CUDA graph runs over disjoint copies of at
least 300 MB, so that the L2 cache is cold; median of 15 replays. Prints one JSON line a kernel and shape; a kernel that
PyTorch refuses for a shape says so. Usage: opponents.py [--quick]
"""
import json
import math
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

DIM = 128
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
SHAPES = [(1, 8192), (1, 32768), (1, 131072), (16, 32768), (32, 32768), (32, 131072)]


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
    for i in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return statistics.median(times[5:])


def measure(name, backend, heads, heads_kv, batch, context):
    size = 2 * batch * heads_kv * context * DIM * 2
    copies = max(2, min(64, math.ceil(3e8 / size)))
    if copies * size > 0.8 * torch.cuda.mem_get_info()[0]:
        copies = 1
    make = lambda h, n: torch.randn(batch, h, n, DIM, device="cuda", dtype=torch.bfloat16)
    q = make(heads, 1)
    kv = [(make(heads_kv, context), make(heads_kv, context)) for _ in range(copies)]

    def launch(i):
        k, v = kv[i % copies]
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=heads != heads_kv)

    us = median_us(launch, max(copies, 8))
    return {"bench": "bf16", "kernel": name, "us": round(us, 2), "tbs": round(size / us / 1e6, 3)}


def main():
    shapes = [SHAPES[2], SHAPES[5]] if "--quick" in sys.argv else SHAPES
    for heads, heads_kv in [(32, 8)] if "--quick" in sys.argv else [(32, 8), (64, 8), (96, 8)]:
        for batch, context in shapes:
            for name, backend in KERNELS.items():
                row = {"heads": f"{heads}/{heads_kv}", "batch": batch, "context": context}
                try:
                    row |= measure(name, backend, heads, heads_kv, batch, context)
                except (RuntimeError, torch.OutOfMemoryError) as error:
                    row |= {"bench": "bf16", "kernel": name, "refused": str(error).splitlines()[0]}
                torch.cuda.empty_cache()
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Rotation files as PyTorch itself writes them, for tests/rotation_file_test.cpp: shared storages, strides, types, keys.

usage: rotation_files.py          writes rotations_v1.pt, rotations_shared.pt, rotations_v2.pt beside itself
       rotation_files.py FILE...  loads files with weights_only=True and prints what they hold

Written with PyTorch 1.13. Matrix n is the 4 x 4 Hadamard matrix with its rows moved down by n: orthogonal, not symmetric,
and exact in every type.
"""
import pathlib
import sys

import torch

HADAMARD = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2


def matrix(n):
    return torch.roll(HADAMARD, n, 0)


def write(folder):
    torch.save({
        "format_version": 1, "objective": "qqt_r_h_pbr", "source_grouping": "layer",
        "layers": {
            3: {"layer_id": 3, "rotation": matrix(1), "eigenvalues": torch.arange(4.0)},
            7: {"layer_id": 7, "rotation": matrix(2).T.contiguous().T, "eigenvalues": torch.arange(4.0)},
        }}, folder / "rotations_v1.pt")

    block = torch.stack([matrix(n) for n in range(3)])
    torch.save({"layers": {"3": {"rotation": block[2]}, "7": {"rotation": block[1]}}}, folder / "rotations_shared.pt")

    def heads(dtype, *numbers):
        return torch.stack([matrix(n) for n in numbers]).to(dtype)
    torch.save({
        "format_version": 2, "objective": "cov_eig_hadamard_perhead", "source_grouping": "per_kv_head",
        "layers": {
            3: {"rotation": heads(torch.float64, 1, 2), "k_mean": torch.arange(8.0).reshape(2, 4), "q_rotation": None},
            7: {"rotation": heads(torch.bfloat16, 3, 0), "k_mean": torch.arange(8.0).reshape(2, 4).half() / 2},
        }}, folder / "rotations_v2.pt")


def show(path):
    loaded = torch.load(path, weights_only=True)
    print(path, {k: v for k, v in loaded.items() if k != "layers"})
    for index, layer in loaded["layers"].items():
        for name, value in layer.items():
            if isinstance(value, torch.Tensor):
                r = value.double()
                note = f"{name} {tuple(value.shape)} {value.dtype}, first {r.flatten()[:3].tolist()}"
                if r.ndim > 1 and r.shape[-1] == r.shape[-2]:
                    note += f", R^T R - 1: {(r.mT @ r - torch.eye(r.shape[-1])).abs().max():.1e}"
                print(f"  {index} {note}")


if sys.argv[1:]:
    for path in sys.argv[1:]:
        show(path)
else:
    write(pathlib.Path(__file__).parent)

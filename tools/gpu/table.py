#!/usr/bin/env python3
"""The files of tools/gpu/bench.sh as one Markdown table: ours, the best 16-bit kernel, the ratio. Usage: table.py FOLDER"""
import json
import sys
from pathlib import Path

INFO = ["", "scale + zero", "16-bit gain", "8-bit gain"]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(folder):
    ours, opponents = rows(folder / "ours.jsonl"), rows(folder / "opponents.jsonl")
    best = {}
    for row in opponents:
        key = (row["heads"], row["batch"], row["context"])
        if "us" in row and (key not in best or row["us"] < best[key]["us"]):
            best[key] = row
    roof = next(row for row in ours if row["bench"] == "roof")
    print(f"{roof['device']}, read roof {roof['tbs']:.2f} TB/s. us: a layer with both maps; roof: share of the read roof while pages are read.\n")
    print("| format | heads | batch | context | us | pages us | roof | error | best 16-bit us | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in ours:
        if row["bench"] != "decode":
            continue
        name = f"d{row['dim']} {row['planes_k']}/{row['planes_v']} {INFO[row['info']]}{', means' if row['mean'] else ''}"
        other = best.get((row["heads"], row["batch"], row["context"])) if row["dim"] == 128 else None
        versus = f"{other['us']:.1f} ({other['kernel']}) | {other['us'] / row['us']:.2f}" if other else " | "
        print(f"| {name} | {row['heads']} | {row['batch']} | {row['context']} | {row['us']:.1f} | {row['pages_us']:.1f} | "
              f"{100 * row['roof']:.0f} % | {row['error']:.1e} | {versus} |")
    for row in ours:
        if row["bench"] == "encode":
            print(f"\nencode {row['tokens']} tokens, 8 heads of 128: {row['us']:.1f} us, {row['tbs']:.2f} TB/s read and written", end="")
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

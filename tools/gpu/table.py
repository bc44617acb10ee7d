#!/usr/bin/env python3
"""The files of tools/gpu/bench.sh as a Markdown table on standard output, one JSON file and two SVG plots beside them:
speed-up over the context, and share of the read roof. Usage: table.py FOLDER"""
import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from svg import COLOURS, Svg  # noqa: E402

INFO = ["", "scale + zero", "16-bit gain", "8-bit gain"]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key(row):
    return row["heads"], row["batch"], row["context"]


def is_main(row):
    return row["dim"] == 128 and row["info"] == 1 and row["planes_k"] == 128 and not row["name"]


def format_name(row):
    if row.get("group"):
        return f"d{row['dim']} groups of {row['group']} tokens{', gains' if row['gain'] else ''}"
    return f"d{row['dim']} {row['planes_k']}/{row['planes_v']} {INFO[row['info']]}{', means' if row['mean'] else ''}"


def tokens(n):
    return f"{n // 1024}k" if n >= 1024 else str(n)


def shape_name(row):
    return row["name"] or f"{row['batch']} x {tokens(row['context'])}"


def best_of(opponents, kernels):
    best = {}
    for row in opponents:
        if row["bench"] == "opponent" and "us" in row and row["kernel"] in kernels and row["us"] < best.get(key(row), row)["us"] + 1e-9:
            best[key(row)] = row
    return best


def table(ours, bf16, oscar):
    print("| format | heads | requests | us, with maps | pages us | maps us | of the roof | error | best BF16 us | ratio | OSCAR INT2 us | ratio |")
    print("| " + "--- | " * 12)
    for row in ours:
        if row["bench"] != "decode":
            continue
        cells = [format_name(row), row["heads"], shape_name(row), f"{row['us']:.1f}", f"{row['pages_us']:.1f}",
                 f"{row['query_us']:.1f} + {row['output_us']:.1f}", f"{100 * row['roof']:.0f} %", f"{row['error']:.1e}"]
        for other in (bf16, oscar):
            found = other.get(key(row)) if row["dim"] == 128 and not row["name"] else None
            cells += [f"{found['us']:.1f} ({found['kernel']})", f"{found['us'] / row['us']:.2f}"] if found else ["", ""]
        print("| " + " | ".join(cells) + " |")
    print()
    for row in ours:
        if row["bench"] not in ("encode", "store"):
            continue
        what = row["recipe"] if row["bench"] == "encode" else "a prompt" if row["chunk"] else "one a sequence"
        print(f"* {row['bench']}, {what}, {row['tokens']} tokens of 8 heads: {row['us']:.1f} us, {row['tbs']:.2f} TB/s read and written")


def chunk_table(ours, opponents):
    """Chunks of prompts; the best BF16 kernel may be one that looks at all tokens, see opponents.py."""
    chunks = [row for row in ours if row["bench"] == "prefill"]
    if not chunks:
        return
    print("\n| format | heads | rows | tokens before | us | of these, unpacking | Tflop/s | error | best BF16 us | ratio |")
    print("| " + "--- | " * 10)
    for row in chunks:
        same = [other for other in opponents if other["bench"] == "opponent-prefill" and "us" in other and row["dim"] == 128
                and all(other[k] == row[k] for k in ("heads", "rows", "depth"))]
        best = min(same, key=lambda other: other["us"], default=None)
        cells = [format_name(row), row["heads"], str(row["rows"]), tokens(row["depth"]), f"{row['us']:.1f}", f"{row['unpack_us']:.1f}",
                 f"{row['tflops']:.0f}", f"{row['error']:.1e}"]
        cells += [f"{best['us']:.1f} ({best['kernel']})", f"{best['us'] / row['us']:.2f}"] if best else ["", ""]
        print("| " + " | ".join(cells) + " |")


def plot_speedup(ours, bf16, oscar, path):
    svg, left, top, width, height = Svg(720, 380), 60, 40, 440, 290
    contexts = sorted({row["context"] for row in ours if key(row) in bf16})
    lines = {}
    for row in ours:
        for other, what in ((bf16, "best BF16"), (oscar, "OSCAR INT2")):
            if row["heads"] == "32/8" and key(row) in other:
                lines.setdefault((row["batch"], what), []).append((row["context"], other[key(row)]["us"] / row["us"]))
    most = max(ratio for line in lines.values() for _, ratio in line) * 1.1
    place = lambda context, ratio: (left + width * contexts.index(context) / max(1, len(contexts) - 1), top + height * (1 - ratio / most))
    svg.text(left, 22, "Times as fast, 32/8 heads of 128 channels, one layer with both maps")
    for ratio in range(int(most) + 1):
        svg.line([(left, place(contexts[0], ratio)[1]), (left + width, place(contexts[0], ratio)[1])])
        svg.text(left - 8, place(contexts[0], ratio)[1] + 4, ratio, "end")
    for context in contexts:
        svg.text(place(context, 0)[0], top + height + 18, tokens(context), "middle")
    svg.text(left + width / 2, top + height + 36, "tokens a request", "middle")
    for i, ((batch, what), line) in enumerate(sorted(lines.items())):
        colour, points = COLOURS[i % len(COLOURS)], [place(*point) for point in sorted(line)]
        svg.line(points, colour, 2)
        for x, y in points:
            svg.bar(x - 3, y - 3, 6, 6, colour)
        svg.bar(left + width + 30, top + 22 * i, 12, 12, colour)
        svg.text(left + width + 48, top + 22 * i + 11, f"{what}, {batch} request{'s' if batch > 1 else ''}")
    svg.save(path)


def plot_roof(ours, path):
    shown = [row for row in ours if row["bench"] == "decode"]
    svg, left, width = Svg(760, 60 + 20 * len(shown)), 350, 340
    svg.text(20, 22, "Share of the read roof while pages are read")
    for i, row in enumerate(shown):
        y = 40 + 20 * i
        svg.text(left - 8, y + 12, f"{format_name(row)}, {row['heads']} heads, {shape_name(row)}", "end")
        svg.bar(left, y, width * row["roof"], 15, COLOURS[0])
        svg.text(left + width * row["roof"] + 6, y + 12, f"{100 * row['roof']:.0f} %")
    svg.save(path)


def main(folder):
    everything = rows(folder / "ours.jsonl")
    opponents = rows(folder / "opponents.jsonl")
    bf16, oscar = best_of(opponents, ("cudnn", "flash")), best_of(opponents, ("oscar-int2",))
    roof = next((row for row in everything if row["bench"] == "roof"), None)
    if roof is None:
        sys.exit(f"table.py: error: {folder / 'ours.jsonl'} is not there or has no read roof: tools/gpu/bench.sh writes it")
    print(f"{roof['device']}, read roof {roof['tbs']:.2f} TB/s.\n")
    table(everything, bf16, oscar)
    chunk_table(everything, opponents)
    (folder / "bench.json").write_text(json.dumps(everything + opponents, indent=0) + "\n")
    main_rows = [row for row in everything if row["bench"] == "decode" and is_main(row)]
    if bf16:
        plot_speedup(main_rows, bf16, oscar, folder / "speedup.svg")
    plot_roof(everything, folder / "roof.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)

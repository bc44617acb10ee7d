#!/usr/bin/env python3
"""A whole model at depth: time of a generated token and of a prompt token behind 0 to N tokens, with crumb's cache and with
llama.cpp's own, in turns, so that what else the machine does meets all of them.

usage: depth.py CRUMB MODEL.gguf -o NAME [--depths 0,2048,8192] [--rounds 3] [--threads 1] [--prompt 512] [--generate 32]
                [--cache "had2=--kv had2" --cache "f16=" --cache "q8_0=-fa 1 -ctk q8_0 -ctv q8_0@4096" ...]

A cache is NAME=FLAGS of `crumb bench`, with @DEPTH where its largest depth is smaller than the others'. NAME.jsonl keeps every run
of `crumb bench`, and a depth that is in it is not measured again; NAME.svg is the plot; the table goes to standard output.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from svg import COLOURS, Svg

CACHES = ["had2=--kv had2", "f16=-fa 1"]


def parse_cache(text):
    name, _, rest = text.partition("=")
    flags, _, deepest = rest.partition("@")
    return name, flags.split(), int(deepest or 1 << 30)


def run(args, name, flags, depth, round_):
    command = [args.crumb, "bench", "-m", args.model, "-t", str(args.threads), "-ngl", "0", "-d", str(depth), "-p", str(args.prompt), "-n",
               str(args.generate), "-r", "1", "-o", "jsonl", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"depth: error: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    record = {"cache": name, "depth": depth, "round": round_, "load": os.getloadavg()[0]}
    for line in filter(None, done.stdout.splitlines()):
        row = json.loads(line)
        record["prompt" if row["n_prompt"] else "generate"] = row["avg_ts"]
        record["model"], record["cpu"], record["threads"] = row["model_type"], row["cpu_info"], row["n_threads"]
    return record


def medians(records):
    """(cache, depth): seconds of a thousand prompt tokens, and of a thousand generated ones."""
    found = {}
    for r in records:
        found.setdefault((r["cache"], r["depth"]), []).append(r)
    return {k: tuple(1000 / statistics.median(r[what] for r in runs) for what in ("prompt", "generate")) for k, runs in found.items()}


def slope(points):
    """Seconds more for a thousand tokens with every 1,024 tokens of depth: least squares through (depth, seconds)."""
    if len(points) < 2:
        return None
    x = [d / 1024 for d, _ in points]
    return statistics.linear_regression(x, [s for _, s in points]).slope


def table(records):
    measured, caches = medians(records), list(dict.fromkeys(r["cache"] for r in records))
    depths = sorted({r["depth"] for r in records})
    for i, what in enumerate(("prompt", "generated")):
        print(f"\n| {what} tokens a second at | " + " | ".join(f"{d:,}" for d in depths) + " | ms more a token and 1k of depth |")
        print("|---|" + "---|" * (len(depths) + 1))
        for cache in caches:
            here = [(d, measured[cache, d][i]) for d in depths if (cache, d) in measured]
            cells = [f"{1000 / measured[cache, d][i]:.1f}" if (cache, d) in measured else "" for d in depths]
            rise = slope(here)
            print(f"| {cache} | " + " | ".join(cells) + f" | {'' if rise is None else f'{rise:.3f}'} |")
    loads = [r["load"] for r in records]
    rounds = len({r["round"] for r in records})
    print(f"\n{records[0]['model']}, {records[0]['cpu']}, {records[0]['threads']} threads, medians of {rounds} rounds, "
          f"load averages {min(loads):.1f} to {max(loads):.1f}")


def plot(records, path):
    measured, caches = medians(records), list(dict.fromkeys(r["cache"] for r in records))
    depths = sorted({r["depth"] for r in records})
    svg, height, width = Svg(820, 360), 260, 300
    for i, what in enumerate(("a prompt token", "a generated token")):
        left, most = 60 + 370 * i, 1.1 * max(v[i] for v in measured.values())
        svg.text(left, 22, f"ms of {what}")
        for step in range(5):
            y = 40 + height * (1 - step / 4)
            svg.line([(left, y), (left + width, y)])
            svg.text(left - 6, y + 4, f"{most * step / 4:.0f}" if most > 20 else f"{most * step / 4:.1f}", "end")
        for d in (0, max(depths) // 2, max(depths)):
            svg.text(left + width * d / max(depths), 56 + height, f"{d:,}", "middle")
        for k, cache in enumerate(caches):
            points = [(left + width * d / max(depths), 40 + height * (1 - measured[cache, d][i] / most)) for d in depths if (cache, d) in measured]
            svg.line(points, COLOURS[k % len(COLOURS)], 2)
    for k, cache in enumerate(caches):
        svg.bar(60 + 110 * k, 335, 12, 12, COLOURS[k % len(COLOURS)])
        svg.text(78 + 110 * k, 346, cache)
    svg.text(740, 346, "tokens before", "middle")
    svg.save(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crumb")
    parser.add_argument("model")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--depths", default="0,2048,4096,8192", type=lambda s: [int(d) for d in s.split(",")])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--cache", action="append", type=parse_cache)
    args = parser.parse_args()
    kept = Path(args.output + ".jsonl")
    records = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(r["cache"], r["depth"], r["round"]) for r in records}
    with open(kept, "a") as out:
        for round_ in range(args.rounds):
            for depth in args.depths:
                for name, flags, deepest in args.cache or map(parse_cache, CACHES):
                    if depth <= deepest and (name, depth, round_) not in done:
                        records.append(run(args, name, flags, depth, round_))
                        out.write(json.dumps(records[-1]) + "\n")
                        out.flush()
                        print(f"\rround {round_ + 1}, depth {depth}, {name}", end="    ", file=sys.stderr)
    print(file=sys.stderr)
    table(records)
    plot(records, args.output + ".svg")


if __name__ == "__main__":
    main()

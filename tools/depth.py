#!/usr/bin/env python3
"""A whole model at depth: time of a generated token and of a prompt token behind 0 to N tokens, with crumb's cache and with
llama.cpp's own, in turns, so that what else the machine does meets all of them.

usage: depth.py CRUMB MODEL.gguf -o NAME [--depths 0,2048,8192] [--rounds 3] [--threads 1] [--prompt 512] [--generate 32]
                [--cache "had2=--kv had2" --cache "f16=" --cache "q8_0=-fa 1 -ctk q8_0 -ctv q8_0@4096" ...]

A cache is NAME=FLAGS of `crumb bench`, with @DEPTH where its largest depth is smaller than the others'. NAME.jsonl keeps every run
of `crumb bench`, and a depth that is in it is not measured again (runs of other settings are refused); NAME.svg is the plot; the table goes to standard output.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from svg import COLOURS, Svg

CACHES = ["had2=--kv had2", "f16=-fa 1"]


def cache(text):
    name, equals, rest = text.partition("=")
    flags, at, deepest = rest.partition("@")
    if not name or not equals or at and not deepest.isdigit():
        raise argparse.ArgumentTypeError(f"a cache is NAME=FLAGS or NAME=FLAGS@DEPTH, not '{text}'")
    return name, flags.split(), int(deepest) if at else 1 << 30


def depth_list(text):
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"depths are numbers of tokens with commas between, not '{text}'")
    return [int(d) for d in text.split(",")]


def count(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a number from 1 on is needed, not '{text}'")
    return int(text)


def settings(args):
    """What all runs of one table have in common."""
    return {"file": Path(args.model).name, "threads": args.threads, "prompt_tokens": args.prompt, "generated_tokens": args.generate}


def kept_runs(path, args, caches):
    """The runs of an earlier call. A last line that was not written to its end is cut off."""
    text = path.read_text() if path.exists() else ""
    whole = text[:text.rfind("\n") + 1]
    if whole != text:
        os.truncate(path, len(whole.encode()))
    records, flags = [], {name: flags for name, flags, _ in caches}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            r = json.loads(line)
            expected = settings(args) | {"flags": flags.get(r["cache"], r.get("flags"))}
            measured = all(r[what] > 0 for what in ("prompt", "generate")) and r["depth"] >= 0 and r["round"] >= 0
        except (ValueError, KeyError, TypeError, AttributeError):
            measured = False
        if not measured:
            sys.exit(f"depth: error: line {number} of {path} is no run of crumb bench: remove the line, or choose another -o")
        for what, value in expected.items():
            if r.get(what) != value:
                sys.exit(f"depth: error: line {number} of {path} was measured with {what} {r.get(what)}, not {value}: choose another -o, or remove the file")
        records.append(r)
    return records


def run(args, name, flags, depth, round_):
    command = [args.crumb, "bench", "-m", args.model, "-t", str(args.threads), "-ngl", "0", "-d", str(depth), "-p", str(args.prompt), "-n",
               str(args.generate), "-r", "1", "-o", "jsonl", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"depth: error: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    record = {"cache": name, "depth": depth, "round": round_, "load": os.getloadavg()[0], **settings(args), "flags": flags}
    for line in filter(None, done.stdout.splitlines()):
        row = json.loads(line)
        record["prompt" if row["n_prompt"] else "generate"] = row["avg_ts"]
        record["model"], record["cpu"] = row["model_type"], row["cpu_info"]
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
    deepest = max(*depths, 1)
    for i, what in enumerate(("a prompt token", "a generated token")):
        left, most = 60 + 370 * i, 1.1 * max(v[i] for v in measured.values())
        svg.text(left, 22, f"ms of {what}")
        for step in range(5):
            y = 40 + height * (1 - step / 4)
            svg.line([(left, y), (left + width, y)])
            svg.text(left - 6, y + 4, f"{most * step / 4:.0f}" if most > 20 else f"{most * step / 4:.1f}", "end")
        for d in (0, deepest // 2, deepest):
            svg.text(left + width * d / deepest, 56 + height, f"{d:,}", "middle")
        for k, cache in enumerate(caches):
            points = [(left + width * d / deepest, 40 + height * (1 - measured[cache, d][i] / most)) for d in depths if (cache, d) in measured]
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
    parser.add_argument("--depths", default="0,2048,4096,8192", type=depth_list)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--prompt", type=count, default=512)
    parser.add_argument("--generate", type=count, default=32)
    parser.add_argument("--cache", action="append", type=cache)
    args = parser.parse_args()
    kept = Path(args.output + ".jsonl")
    caches = args.cache or [cache(text) for text in CACHES]
    records = kept_runs(kept, args, caches)
    done = {(r["cache"], r["depth"], r["round"]) for r in records}
    with open(kept, "a") as out:
        for round_ in range(args.rounds):
            for depth in args.depths:
                for name, flags, deepest in caches:
                    if depth <= deepest and (name, depth, round_) not in done:
                        records.append(run(args, name, flags, depth, round_))
                        out.write(json.dumps(records[-1]) + "\n")
                        out.flush()
                        print(f"\rround {round_ + 1}, depth {depth}, {name}", end="    ", file=sys.stderr)
    print(file=sys.stderr)
    if not records:
        sys.exit("depth: error: every depth of --depths is beyond the @DEPTH of every cache")
    table(records)
    plot(records, args.output + ".svg")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"depth: error: {error}")

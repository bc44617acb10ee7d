#!/usr/bin/env python3
"""What depth.py measured, on this machine or another, as tables on standard output and as one SVG: milliseconds of a generated token and of
a prompt token over the depth, a line a cache. Points are medians of the rounds, bars from the fastest to the slowest; a line ends with the
cache's name and the time at its last point. One column, so that it can be read on a phone.

usage: depth_plot.py RUNS.jsonl [MORE.jsonl ...] [--svg FILE]      (RUNS.svg without --svg)

Several files are those of one model and of the same settings: caches that were measured apart.
"""
import argparse
import json
import math
import statistics
import sys
from pathlib import Path

from svg import COLOURS, Svg

SETTINGS = "file", "threads", "prompt_tokens", "generated_tokens"
KINDS = {"generate": "generated", "prompt": "prompt"}

WIDTH, HEIGHT = 400, 300        # of one plot
LEFT, TOP, BOTTOM = 40, 34, 44  # around its lines; to their right there are names
HEADER, LETTER = 26, 7


def is_run(r):
    try:
        known = all(what in r for what in ("cache", "flags", *SETTINGS))
        return known and all(r[what] > 0 for what in KINDS) and all(r[what] >= 0 for what in ("depth", "round", "load"))
    except (KeyError, TypeError):
        return False


def read_runs(path, text):
    runs = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            runs.append(json.loads(line))
        except ValueError:
            runs.append(None)
        if not is_run(runs[-1]):
            raise RuntimeError(f"line {number} of {path} is no measurement of depth.py: remove the line, or name another file")
    return runs


def require_one_table(runs):
    first, flags = runs[0], {}
    for r in runs:
        for what in SETTINGS:
            if r[what] != first[what]:
                raise RuntimeError(f"runs with {what} {first[what]} and {r[what]} do not belong into one plot")
        if r["flags"] != flags.setdefault(r["cache"], r["flags"]):
            raise RuntimeError(f"{r['cache']} was measured with {flags[r['cache']]} and with {r['flags']}")


def times(runs):
    """kind, cache, depth: milliseconds of a token, fastest round first."""
    found = {}
    for r in runs:
        for kind in KINDS:
            found.setdefault((kind, r["cache"], r["depth"]), []).append(1000 / r[kind])
    return {key: sorted(rounds) for key, rounds in found.items()}


def caches_of(runs):
    return list(dict.fromkeys(r["cache"] for r in runs))


def slope(points):
    """Milliseconds more for a token with every 1,024 tokens of depth: least squares through (depth, milliseconds)."""
    if len(points) < 2:
        return None
    return statistics.linear_regression([d / 1024 for d, _ in points], [t for _, t in points]).slope


def table(runs):
    measured, depths = times(runs), sorted({r["depth"] for r in runs})
    for kind, word in KINDS.items():
        print(f"\n| {word} tokens a second at | " + " | ".join(f"{d:,}" for d in depths) + " | ms more a token and 1k of depth |")
        print("|---|" + "---|" * (len(depths) + 1))
        for cache in caches_of(runs):
            here = {d: statistics.median(measured[kind, cache, d]) for d in depths if (kind, cache, d) in measured}
            rise = slope(list(here.items()))
            print(f"| {cache} | " + " | ".join(f"{1000 / here[d]:.1f}" if d in here else "" for d in depths) + f" | {'' if rise is None else f'{rise:.3f}'} |")
    loads = [r["load"] for r in runs]
    print(f"\n{setting(runs)}, load averages {min(loads):.1f} to {max(loads):.1f}")


def setting(runs):
    rounds, threads = len({r["round"] for r in runs}), runs[0]["threads"]
    return f"{Path(runs[0]['file']).stem}, {threads} thread{'s' * (threads > 1)}, {f'medians of {rounds} rounds' if rounds > 1 else 'one round'}"


def nice_step(most, parts=5):
    """1, 2 or 5 times a power of ten, of which at most `parts` are in `most`."""
    power = 10.0 ** math.floor(math.log10(most / parts))
    return next(step * power for step in (1, 2, 5, 10) if most / (step * power) <= parts)


def short(milliseconds):
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def tokens(n):
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n:,}"


def apart(ys, least, bottom):
    """The same order from top to bottom, at least so far from each other and not below the bottom."""
    placed = []
    for y in reversed(ys):
        placed.append(min(y, (placed[-1] if placed else bottom + least) - least))
    return placed[::-1]


def plot_kind(svg, runs, kind, top):
    measured, caches, depths = times(runs), caches_of(runs), sorted({r["depth"] for r in runs})
    width, height = WIDTH - LEFT - 14 - LETTER * (max(map(len, caches)) + len(" 12.3")), HEIGHT - TOP - BOTTOM
    deepest, slowest = max(depths[-1], 1), max(rounds[-1] for key, rounds in measured.items() if key[0] == kind)
    step = nice_step(slowest)
    most = step * math.ceil(slowest / step)

    def x(depth):
        return LEFT + width * depth / deepest

    def y(milliseconds):
        return top + TOP + height * (1 - milliseconds / most)

    svg.text(8, top + 20, f"ms a {KINDS[kind]} token", size=14)
    for i in range(round(most / step) + 1):
        svg.line([(LEFT, y(i * step)), (LEFT + width, y(i * step))])
        svg.text(LEFT - 6, y(i * step) + 4, f"{i * step:g}", "end")
    leftmost = math.inf
    for d in reversed(depths):  # as many as there is room for
        if leftmost - x(d) >= 34:
            leftmost = x(d)
            svg.line([(x(d), y(0)), (x(d), y(0) + 4)])
            svg.text(x(d), y(0) + 18, tokens(d), "middle")
    svg.text(LEFT + width / 2, y(0) + 34, "tokens before", "middle")

    ends = {}
    for colour, cache in zip(COLOURS, caches):
        points = [(d, measured[kind, cache, d]) for d in depths if (kind, cache, d) in measured]
        for d, rounds in points:
            svg.line([(x(d), y(rounds[0])), (x(d), y(rounds[-1]))], colour, 1)
            svg.bar(x(d) - 3, y(statistics.median(rounds)) - 3, 6, 6, colour)
        svg.line([(x(d), y(statistics.median(rounds))) for d, rounds in points], colour, 2)
        last = statistics.median(points[-1][1])
        ends.setdefault(points[-1][0], []).append((y(last), f"{cache} {short(last)}", colour))
    for d, labels in ends.items():
        labels.sort()
        for (_, text, colour), at in zip(labels, apart([label[0] for label in labels], 15, y(0))):
            svg.text(x(d) + 7, at + 4, text, colour=colour, halo=True)


def plot(runs, path):
    caches = caches_of(runs)
    if len(caches) > len(COLOURS):
        raise RuntimeError(f"there are {len(caches)} caches, and a plot has colours for {len(COLOURS)}")
    svg = Svg(WIDTH, HEADER + HEIGHT * len(KINDS))
    svg.text(8, 20, setting(runs), colour="#555")
    for i, kind in enumerate(KINDS):
        plot_kind(svg, runs, kind, HEADER + HEIGHT * i)
    svg.save(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    runs = [r for path in args.runs for r in read_runs(path, path.read_text())]
    if not runs:
        raise RuntimeError(f"nothing was measured in {args.runs[0]}")
    require_one_table(runs)
    table(runs)
    plot(runs, args.svg or args.runs[0].with_suffix(".svg"))


if __name__ == "__main__":
    try:
        main()
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        sys.exit(f"depth_plot: error: {error}")

#!/usr/bin/env python3
"""A whole model at depth: time of a generated token and of a prompt token behind 0 to N tokens, with crumb's cache and with
llama.cpp's own, in turns, so that what else the machine does meets all of them.

usage: depth.py CRUMB MODEL.gguf -o NAME --folder FOLDER [--depths 0,2048,8192] [--rounds 3] [--threads 1] [--prompt 512] [--generate 32]
                [--cache "had2=--kv had2" --cache "q8_0=-ctk q8_0 -ctv q8_0@4096" ...] [--svg FILE]

A cache is NAME=FLAGS of `crumb serve`, with @DEPTH where its largest depth is smaller than the others'. A server a cache, all of them up at
once. A measurement restores a slot file of so many tokens, asks for --prompt tokens more, restores it again and asks for --generate
tokens; times are the server's own. FOLDER keeps the slot files (slots.py says how they are made), so that a run of a build for GPUs can make
those of a run on CPUs. NAME.jsonl keeps every measurement, and one that is in it is not made again (those of other settings are
refused); NAME.svg (or --svg FILE) is the plot; the table goes to standard output. depth_plot.py makes both again from NAME.jsonl. Beyond
the context that a model was trained for, which a server keeps to, times are had with --override-kv ARCHITECTURE.context_length=int:65536
among the flags of each cache.
"""
import argparse
import json
import os
import re
import sys
import urllib.error
from pathlib import Path

from depth_plot import plot, read_runs, table
from loopback import message_of
from slots import F16, Slots, need_numpy, prompt_of

CACHES = ["had2=--kv had2", f"f16={F16}"]
ANSWER = {"temperature": 0, "ignore_eos": True, "cache_prompt": True, "id_slot": 0}


def cache(text):
    name, equals, rest = text.partition("=")
    flags, at, deepest = rest.partition("@")
    if not name or not equals or at and not deepest.isdigit():
        raise argparse.ArgumentTypeError(f"a cache is NAME=FLAGS or NAME=FLAGS@DEPTH, not '{text}'")
    return name, flags, int(deepest) if at else 1 << 30


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
    records, flags = read_runs(path, whole), {name: flags for name, flags, _ in caches}
    for number, r in enumerate(records, 1):
        for what, value in (settings(args) | {"flags": flags.get(r["cache"], r["flags"])}).items():
            if r[what] != value:
                sys.exit(f"depth: error: line {number} of {path} was measured with {what} {r[what]}, not {value}: choose another -o, or remove the file")
    return records


def measure(slots, server, flags, prompt, depth, begin, args):
    """Tokens a second behind `depth` tokens: of a prompt, and generated. begin: where the text of depth 0 begins, another one every time,
    for a server of crumb finds the pages of one that it knows."""
    begin = 0 if depth else begin

    def ask(tokens, answer):
        if depth:
            slots.restore(server, 0, flags, depth)
        else:
            server.call("/slots/0?action=erase", {})
        return server.call("/completion", {"prompt": prompt[begin:begin + depth + tokens], "n_predict": answer, **ANSWER})["timings"]
    asked, answered = ask(args.prompt, 1), ask(1, args.generate + 1)  # the first token is the prompt's
    if (asked["prompt_n"], answered["prompt_n"], answered["predicted_n"]) != (args.prompt, 1, args.generate + 1):
        raise RuntimeError(f"{flags}: behind {depth} tokens {asked['prompt_n']} of a prompt were computed and {answered['predicted_n']} generated, not "
                           f"{args.prompt} and {args.generate + 1}: the slot is not what was restored")
    return {"prompt": 1000 * args.prompt / asked["prompt_ms"], "generate": 1000 * args.generate / answered["predicted_ms"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crumb")
    parser.add_argument("model")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--folder", required=True, help="of slot files")
    parser.add_argument("--svg", help="the plot; NAME.svg without it")
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
    wanted = [(name, flags, round_, depth) for round_ in range(args.rounds) for depth in args.depths for name, flags, deepest in caches if depth <= deepest]
    done = {(r["cache"], r["round"], r["depth"]) for r in records}
    missing = [w for w in wanted if (w[0], *w[2:]) not in done]
    if not wanted:
        sys.exit("depth: error: every depth of --depths is beyond the @DEPTH of every cache")
    need_numpy(flags for _, flags, _, _ in missing)
    slots = Slots(args.crumb, args.model, args.folder, args.threads)
    deepest = max(args.depths) + max(args.prompt, args.generate + 2) + 1 + args.rounds
    servers = {}
    try:
        with open(kept, "a") as out:
            for name, flags, round_, depth in missing:
                if name not in servers:
                    servers[name] = slots.serve(flags, deepest)
                    prompt = prompt_of(servers[name], deepest)
                    slots.fill(flags, prompt, {d for n, _, _, d in missing if n == name and d})
                    measure(slots, servers[name], flags, prompt, 0, 0, args)  # what is first touched then is no cost of a depth
                record = {"cache": name, "depth": depth, "round": round_, "load": os.getloadavg()[0], **settings(args), "flags": flags,
                          **measure(slots, servers[name], flags, prompt, depth, 1 + round_, args)}
                records.append(record)
                out.write(json.dumps(record) + "\n")
                out.flush()
                print(f"\rround {round_ + 1}, depth {depth}, {name}", end="    ", file=sys.stderr)
    finally:
        for server in servers.values():
            server.stop()
    print(file=sys.stderr)
    table(records)
    plot(records, args.svg or args.output + ".svg")


if __name__ == "__main__":
    try:
        main()
    except urllib.error.HTTPError as error:
        sys.exit(f"depth: error: the server refused: {message_of(error)}")
    except (OSError, RuntimeError) as error:  # of files, of a connection, or a server that did not start
        sys.exit(f"depth: error: {error}")

#!/usr/bin/env python3
"""Total tokens a second of sessions that answer at once, all at one depth: crumb's cache beside llama.cpp's own.

usage: sessions.py CRUMB MODEL.gguf --folder FOLDER [--tokens 8096] [--loads 1,2,4,8] [--rounds 5] [--answer 24] [--threads 1]
                   [--computed 512] [--cache "--kv had2" --cache "-ctk f16 -ctv f16" ...] [--json FILE]

A server a cache, all of them up at once. A round asks each of them for each load; the next round begins with another cache, so
what else the machine does falls on all alike. Measured is the time in which all streams of a load run: from the first token of
the last to the last token of the first. A line of JSON a sample; at the end a table of medians over the rounds: tokens a second
of all streams, and CPU time of the server's process for each of them, which says more where others use the machine too.

All slots restore one file and answer from the same tokens. It is kept in FOLDER for later runs; slots.py says how it is made (llama.cpp's of
--computed tokens). crumb's server shares the pages of slots that hold the same text, and at the end it is said how many.
"""
import argparse
import concurrent.futures
import json
import os
import statistics
import sys
import threading
import time
import urllib.error

from loopback import message_of
from slots import F16, Slots, need_numpy, prompt_of

CACHES = [F16, "-ctk q8_0 -ctv q8_0", "-ctk q4_0 -ctv q4_0", "--kv had2"]


class Cache:
    """A server with one kind of cache, all slots at the same depth."""

    def __init__(self, slots, flags, tokens):
        self.slots, self.flags = slots, flags
        self.server = slots.serve(flags, tokens)

    def fill(self, prompt):
        self.prompt = prompt
        self.slots.fill(self.flags, prompt, [len(prompt)])
        for slot in range(self.slots.count):
            self.slots.restore(self.server, slot, self.flags, len(prompt))

    def ask(self, slot, answer, so_far=lambda n: None):
        """Tokens of the prompt that were computed. Not every token has an event of its own: text may end in half a character."""
        body = {"prompt": self.prompt, "n_predict": answer, "id_slot": slot, "temperature": 0, "ignore_eos": True, "cache_prompt": True,
                "timings_per_token": True}
        for event in self.server.events("/completion", body):
            if "timings" in event:
                so_far(event["timings"]["predicted_n"])
        return event["timings"]["prompt_n"]

    def measure(self, load, answer):
        lock, seen, marks = threading.Lock(), [0] * load, []  # (tokens, seconds, CPU seconds) when all have begun, and when the first has ended

        def mark():
            marks.append((sum(seen), time.monotonic(), self.server.cpu_seconds()))

        def session(slot):
            def so_far(n):
                with lock:
                    seen[slot] = n
                    if not marks and all(seen) or len(marks) == 1 and n == answer:
                        mark()
            return self.ask(slot, answer, so_far)

        with concurrent.futures.ThreadPoolExecutor(load) as pool:
            computed = list(pool.map(session, range(load)))
        if max(computed) > 1 or len(marks) < 2:
            raise RuntimeError(f"{self.flags}: {computed} tokens of the prompts were computed again, {len(marks)} marks: the slots are not what was restored")
        (n0, t0, c0), (n1, t1, c1) = marks
        return {"tokens_per_second": (n1 - n0) / (t1 - t0), "cpu_ms_per_token": 1000 * (c1 - c0) / (n1 - n0)}


def count(least):
    def parse(text):
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a number from {least} on is needed, not '{text}'")
        return int(text)
    return parse


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crumb")
    parser.add_argument("model")
    parser.add_argument("--folder", required=True, help="of slot files")
    parser.add_argument("--tokens", type=count(1), default=8096)
    parser.add_argument("--loads", type=lambda text: [count(1)(n) for n in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=count(1), default=5)
    parser.add_argument("--answer", type=count(2), default=24)
    parser.add_argument("--threads", type=count(1), default=1)
    parser.add_argument("--computed", type=count(1), default=512)
    parser.add_argument("--cache", action="append", help="flags of a cache; by default " + ", ".join(CACHES))
    parser.add_argument("--json", help="append the samples there")
    args = parser.parse_args()
    slots = Slots(args.crumb, args.model, args.folder, args.threads, max(args.loads), args.computed)
    if args.json:
        open(args.json, "a").close()  # before the work
    wanted = args.cache or CACHES
    need_numpy(wanted)
    caches = []
    try:
        for flags in wanted:
            caches.append(Cache(slots, flags, args.tokens + args.answer + 64))
        prompt = prompt_of(caches[0].server, args.tokens)
        for cache in caches:
            cache.fill(prompt)
        samples = []
        for round in range(args.rounds):
            for load in args.loads:
                for cache in caches[round % len(caches):] + caches[:round % len(caches)]:
                    sample = {"model": os.path.basename(args.model), "cache": cache.flags, "depth": len(prompt), "sessions": load, "round": round,
                              "load_average": os.getloadavg()[0], **cache.measure(load, args.answer)}
                    samples.append(sample)
                    print(json.dumps(sample), flush=True)
                    if args.json:
                        with open(args.json, "a") as f:
                            f.write(json.dumps(sample) + "\n")
        shared = {cache.flags: cache.server.metrics().get("crumb:kv_pages_shared", 0) for cache in caches}
    finally:
        for cache in caches:
            cache.server.stop()
    table(samples, args.loads)
    for flags, pages in shared.items():
        if pages:
            print(f"sessions: {flags}: {pages:.0f} pages were shared between slots", file=sys.stderr)
    return 0


def table(samples, loads):
    print("\n| cache | " + " | ".join(f"{n} session{'s' * (n > 1)}" for n in loads) + " | ms of CPU a token |")
    print("|---" * (len(loads) + 2) + "|")
    for cache in dict.fromkeys(sample["cache"] for sample in samples):
        cells, cpu = [], []
        for load in loads:
            here = [s for s in samples if s["cache"] == cache and s["sessions"] == load]
            rates = [s["tokens_per_second"] for s in here]
            cells.append(f"{statistics.median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f})")
            cpu.append(f"{statistics.median(s['cpu_ms_per_token'] for s in here):.0f}")
        print(f"| `{cache}` | " + " | ".join(cells) + " | " + ", ".join(cpu) + " |")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except urllib.error.HTTPError as error:
        sys.exit(f"sessions: error: the server refused: {message_of(error)}")
    except (OSError, RuntimeError) as error:  # of files, of a connection, or a server that did not start
        sys.exit(f"sessions: error: {error}")

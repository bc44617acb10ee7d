#!/usr/bin/env python3
"""Total tokens a second of sessions that answer at once, all at one depth: crumb's cache beside llama.cpp's own.

usage: sessions.py CRUMB MODEL.gguf --folder FOLDER [--tokens 8096] [--loads 1,2,4,8] [--rounds 5] [--answer 24] [--threads 1]
                   [--computed 512] [--cache "--kv had2" --cache "-ctk f16 -ctv f16" ...] [--json FILE]

A server a cache, all of them up at once. A round asks each of them for each load; the next round begins with another cache, so
what else the machine does falls on all alike. Measured is the time in which all streams of a load run: from the first token of
the last to the last token of the first. A line of JSON a sample; at the end a table of medians over the rounds: tokens a second
of all streams, and CPU time of the server's process for each of them, which says more where others use the machine too.

All slots restore one file and answer from the same tokens. It is kept in FOLDER for later runs. That of crumb is of a prompt that
was computed; its server shares the pages of slots that hold the same text, and at the end it is said how many. Those of llama.cpp's
f16, q8_0 and q4_0 are made of the first --computed tokens at f16, whose K and V are repeated to the depth and quantised here (numpy):
the same bytes to read, sooner than by prompts, which are five to ten times slower in its quantised caches. What they hold is no
text, and what is answered from it is none; time does not depend on it.
"""
import argparse
import concurrent.futures
import importlib.util
import json
import os
import re
import statistics
import struct
import sys
import threading
import time
import urllib.error

from loopback import Server, message_of

CACHES = ["-ctk f16 -ctv f16", "-ctk q8_0 -ctv q8_0", "-ctk q4_0 -ctv q4_0", "--kv had2"]
SENTENCE = "Rule {}: the cache of a transformer grows with the length of the text, so answer in few words. "
STEP = 512


def q8_0(x):
    import numpy as np
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    codes = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)).astype(np.int8)
    return np.hstack([scale.astype("<f2").view(np.uint8), codes.view(np.uint8)])


def q4_0(x):
    import numpy as np
    scale = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1) / -8
    codes = np.clip(np.divide(x, scale, out=np.zeros_like(x), where=scale != 0) + 8.5, 0, 15).astype(np.uint8)
    return np.hstack([scale.astype("<f2").view(np.uint8), codes[:, :16] | codes[:, 16:] << 4])


# Number of the type in ggml, and rows of 32 elements as bytes of it.
TYPES = {"f16": (1, lambda x: x.astype("<f2").view("u1")), "q8_0": (8, q8_0), "q4_0": (2, q4_0)}


def repeated(flags):
    """The type of a cache whose slot files are made here, or None."""
    kind = re.fullmatch(r"-ctk (\w+) -ctv \1", flags)
    return kind[1] if kind and kind[1] in TYPES else None


def stretch(source, file, kind, tokens):
    """A slot file of llama.cpp, of some first tokens and an F16 cache, as one of all `tokens` and a cache of another kind: K and
    V of the first ones are repeated."""
    import numpy as np
    number, encode = TYPES[kind]
    with open(source, "rb") as f, open(file + ".part", "wb") as out:

        def read(layout):
            data = f.read(struct.calcsize(layout))
            if len(data) != struct.calcsize(layout):
                raise SystemExit(f"sessions: error: {source} is cut off: remove it, and it is computed again")
            return struct.unpack(layout, data)

        magic, version, n_words = read("<III")
        f.seek(4 * n_words, os.SEEK_CUR)
        out.write(struct.pack(f"<III{len(tokens)}i", magic, version, len(tokens), *tokens))
        (n_streams,) = read("<I")
        out.write(struct.pack("<I", n_streams))
        for _ in range(n_streams):  # that of the slot has cells
            (cells,) = read("<I")
            out.write(struct.pack("<I", len(tokens) if cells else 0))
            if cells == 0:
                continue
            for _ in range(cells):
                _, n_sequences = read("<iI")
                sequences = f.read(4 * n_sequences)
            for position in range(len(tokens)):
                out.write(struct.pack("<iI", position, n_sequences) + sequences)
            transposed, n_layers = read("<II")
            if transposed:
                raise SystemExit("sessions: error: the values of this file lie transposed: save it with -fa on")
            out.write(struct.pack("<II", transposed, n_layers))
            for _ in range(2 * n_layers):
                kind_here, row = read("<iQ")
                if kind_here != TYPES["f16"][0]:
                    raise SystemExit(f"sessions: error: {source} is not of an F16 cache: remove it, and it is computed again")
                rows = encode(np.frombuffer(b"".join(read(f"{cells * row}s")), "<f2").astype(np.float32).reshape(-1, 32)).reshape(cells, -1)
                out.write(struct.pack("<iQ", number, rows.shape[1]))
                out.write(rows[np.arange(len(tokens)) % cells].tobytes())
        if f.read(1):
            raise SystemExit(f"sessions: error: {source} has more than one cache: of models with sliding windows there is no such file")
    os.replace(file + ".part", file)


class Cache:
    """A server with one kind of cache, all slots at the same depth."""

    def __init__(self, args, flags):
        self.flags, self.slots = flags, max(args.loads)
        context = (args.tokens + args.answer + 64) // 256 * 256 + 256
        self.server = Server([args.crumb, "serve", "-m", args.model, "-c", str(context * self.slots), "-np", str(self.slots), "-t", str(args.threads),
                              "-fa", "on", "-b", str(STEP), "-ub", str(STEP), "--metrics", "--slot-save-path", args.folder, *flags.split()])

    def say(self, what):
        print(f"sessions: {self.flags}: {what}", file=sys.stderr, flush=True)

    def fill(self, args, prompt):
        self.prompt = prompt
        kind = repeated(self.flags)
        model = os.path.splitext(os.path.basename(args.model))[0]

        def path(what):
            return os.path.join(args.folder, f"{model}.{what}.{self.slots}")

        file = path(f"{len(prompt)}.{kind or '.'.join(os.path.basename(word.strip('-')) for word in self.flags.split())}")
        if not os.path.exists(file):
            begun = path("begun") if kind else file
            if not os.path.exists(begun):
                if kind in (None, "f16"):
                    self.compute(prompt[:args.computed] if kind else prompt, begun)
                else:
                    with_f16 = Cache(args, CACHES[0])
                    try:
                        with_f16.compute(prompt[:args.computed], begun)
                    finally:
                        with_f16.server.stop()
            if kind:
                stretch(begun, file, kind, prompt)
        for slot in range(self.slots):
            try:
                self.server.call(f"/slots/{slot}?action=restore", {"filename": os.path.basename(file)})
            except urllib.error.HTTPError as error:
                raise SystemExit(f"sessions: error: {file} was not restored: {message_of(error)}; remove it, and it is computed again") from error

    def compute(self, prompt, file):
        self.say(f"computing {len(prompt)} tokens")
        began = time.monotonic()
        self.server.call("/completion", {"prompt": prompt, "n_predict": 1, "id_slot": 0})
        self.server.call("/slots/0?action=save", {"filename": os.path.basename(file) + ".part"})
        os.replace(file + ".part", file)
        self.say(f"computed in {time.monotonic() - began:.0f} s")

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
            raise SystemExit(f"sessions: error: {self.flags}: {computed} tokens of the prompts were computed again, {len(marks)} marks: the slots are not what was restored")
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
    os.makedirs(args.folder, exist_ok=True)
    args.folder = os.path.abspath(args.folder)
    if args.json:
        open(args.json, "a").close()  # before the work
    wanted = args.cache or CACHES
    if not importlib.util.find_spec("numpy") and any(map(repeated, wanted)):
        raise SystemExit("sessions: error: slot files of llama.cpp's caches are made with numpy, which this python3 has not: install it, or give --cache without them")
    caches = []
    try:
        for flags in wanted:
            caches.append(Cache(args, flags))
        text = "".join(SENTENCE.format(i) for i in range(args.tokens // 16 + 1))
        prompt = caches[0].server.call("/tokenize", {"content": text})["tokens"][:args.tokens]
        for cache in caches:
            cache.fill(args, prompt)
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
    except (OSError, RuntimeError) as error:  # of files, of a connection, or a server that did not start
        sys.exit(f"sessions: error: {error}")

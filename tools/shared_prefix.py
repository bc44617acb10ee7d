#!/usr/bin/env python3
"""Users who arrive together with one system prompt: what each of them waits for, how often the prompt is computed, what it
takes in memory. The same server and flags with crumb's cache and with llama.cpp's own.

usage: shared_prefix.py CRUMB MODEL.gguf [--users 8] [--tokens 6000] [--answer 16] [--threads 1] [--json FILE]
                        [--cache "--kv had2" --cache "-ctk f16 -ctv f16" ...]

A line a cache: time to the first token of the first, the middle and the last user, tokens of prompts that were computed
and how many times the shared ones are in them, bytes of the cache as the server prints them, and its largest resident memory.
"""
import argparse
import concurrent.futures
import json
import re
import sys
import time

from loopback import Server

CACHES = ["--kv had2", "-ctk f16 -ctv f16"]
SENTENCE = "Rule {}: the cache of a transformer grows with the length of the text, so answer in few words. "


def cache_mib(server):
    """Ours says it in one line; llama.cpp in one for each kind of layer."""
    ours = re.search(r"kv: .*?([\d.]+) MiB instead of", server.output())
    return float(ours[1]) if ours else sum(float(size) for size in re.findall(r"KV buffer size = +([\d.]+) MiB", server.output()))


def user(server, prompt, answer):
    """Seconds to the first token, and what the server says of the prompt."""
    began, first, timings = time.monotonic(), None, {}
    for event in server.events("/completion", {"prompt": prompt, "n_predict": answer, "temperature": 0, "ignore_eos": True}):
        first = first or time.monotonic() - began
        timings = event.get("timings", timings)
    return first, timings["prompt_n"]


def measure(args, cache):
    context = (args.tokens + args.answer + 511) // 256 * 256  # a slot
    command = [args.crumb, "serve", "-m", args.model, "-c", str(context * args.users), "-np", str(args.users), "-t", str(args.threads),
               "-fa", "on", "-lv", "4", *cache.split()]
    with Server(command) as server:
        prompt, n, shared = "", 0, 0
        while shared < args.tokens - 32:
            n += max(1, (args.tokens - shared) // 32)
            prompt = "".join(SENTENCE.format(i) for i in range(n))
            shared = len(server.call("/tokenize", {"content": prompt})["tokens"])
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(args.users) as pool:
            users = list(pool.map(lambda i: user(server, f"{prompt}Question {i}: what grows?", args.answer), range(args.users)))
        waits = sorted(first for first, _ in users)
        computed = sum(n for _, n in users)
        return {"cache": cache, "users": args.users, "shared_tokens": shared, "computed_tokens": computed,
                "times_computed": round(computed / shared, 2), "first_token_s": [round(w, 1) for w in (waits[0], waits[len(waits) // 2], waits[-1])],
                "all_done_s": round(time.monotonic() - began, 1), "cache_MiB": round(cache_mib(server), 1),
                "largest_memory_MiB": round(server.memory_mib("VmHWM"))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crumb")
    parser.add_argument("model")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", action="append", help="flags of a cache; by default " + " and ".join(CACHES))
    parser.add_argument("--json", help="write the figures there")
    args = parser.parse_args()
    rows = []
    for cache in args.cache or CACHES:
        rows.append(measure(args, cache))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
            f.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

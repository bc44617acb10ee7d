#!/usr/bin/env python3
"""Insert crumb's hooks into a llama.cpp source tree. Lines are only added, never changed or removed.

usage: hooks.py LLAMA_CPP_FOLDER [--cuda] [--check]
       hooks.py --list [--cuda]     (prints the hooks, what two versions of them are told apart by)

With the hooks, a library can register a factory (llama_memory_set_factory) that is asked wherever llama.cpp would
create a plain or sliding-window KV cache, and the memory it returns may store K and V and attend by itself. The server
asks such a memory (server_set_kv_memory) what it can start a prompt from and whether a request has room, and shows what
it says of itself in /props and /metrics. It also serves pages of another library (server_http_set_pages).
--cuda adds the hooks that let such a library run its nodes on llama.cpp's CUDA streams.

Each hook has a name, a file, an anchor (a regular expression) and the text that goes before or behind it; insertions/
has them by target. The tree must be exactly the release that the hooks were written for: an anchor that is missing or
found twice stops everything with the hook's name before any file is written. Applying twice does nothing. --check says
what would be done.
"""
import argparse
import os
import pathlib
import re
import sys

from insertions import cuda, http, memory, server, shift


class Refused(Exception):
    pass


HOOKS = memory.HOOKS + server.HOOKS + shift.HOOKS + http.HOOKS
CUDA_HOOKS = cuda.HOOKS


def refuse(hook, why):
    raise Refused(f"hook '{hook.name}' does not fit {hook.file}: {why}\n"
                  f"  this is not the llama.cpp that the hooks were written for; nothing was written")


def place(hook, text):
    """Where the hook's text goes, and whether it is there already."""
    start = 0
    if hook.after:
        found = list(re.finditer(hook.after, text, re.M))
        if len(found) != 1:
            refuse(hook, f"{len(found)} matches of {hook.after!r}")
        start = found[0].end()
    found = [match for match in re.finditer(hook.anchor, text[start:], re.M)]
    if not found or (len(found) > 1 and not hook.after):
        refuse(hook, f"{len(found)} matches of {hook.anchor!r}")
    at = start + (found[0].start() if hook.where == "before" else found[0].end())
    around = text[max(0, at - len(hook.text)):at] if hook.where == "before" else text[at:at + len(hook.text)]
    if hook.where == "behind" and hook.anchor == r"\Z":
        around = text[max(0, at - len(hook.text)):]
    return at, around == hook.text


def plan(root, hooks):
    """The new text of each file, as {file: (text, lines added)}. Reads, never writes."""
    texts, edits, present = {}, {}, {}
    for hook in hooks:
        if hook.file not in texts:
            try:
                texts[hook.file] = (root / hook.file).read_text(encoding="utf-8")
            except OSError as error:
                refuse(hook, error.strerror)
            edits[hook.file] = []
        at, there = place(hook, texts[hook.file])
        if not there:
            edits[hook.file].append((at, hook))
        # files are written whole: some of their hooks without the others are those of another version of this script
        if present.setdefault(hook.file, there) != there:
            refuse(hook, "other hooks are there, and it is not: start from an unchanged tree")
    out = {}
    for file, text in texts.items():
        for at, hook in sorted(edits[file], key=lambda edit: -edit[0]):
            text = text[:at] + hook.text + text[at:]
        for hook in hooks:
            if hook.file == file and not place(hook, text)[1]:
                refuse(hook, "two hooks meet at one place")
        out[file] = text, sum(hook.text.count("\n") for _, hook in edits[file])
    return out


def write(path, text):
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def main(argv):
    parser = argparse.ArgumentParser(prog="hooks.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, nargs="?")
    parser.add_argument("--cuda", action="store_true", help="the CUDA hooks as well")
    parser.add_argument("--check", action="store_true", help="say what would be done, write nothing")
    parser.add_argument("--list", action="store_true", help="print the hooks, touch nothing")
    args = parser.parse_args(argv)
    hooks = HOOKS + (CUDA_HOOKS if args.cuda else [])
    if args.list:
        print(*hooks, sep="\n")
        return 0
    if not args.folder:
        parser.error("the folder of llama.cpp is missing")
    try:
        planned = plan(args.folder, hooks)
    except Refused as refused:
        print(f"hooks: error: {refused}", file=sys.stderr)
        return 1
    for file, (text, lines) in planned.items():
        if lines and not args.check:
            write(args.folder / file, text)
        print(f"hooks: {file}: " + (f"{lines} lines" if lines else "already there"))
    total = sum(lines for _, lines in planned.values())
    print(f"hooks: {total} lines " + ("would be added" if args.check else "added"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

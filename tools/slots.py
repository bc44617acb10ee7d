"""Slot files of `crumb serve` with a given number of tokens, kept in a folder for later runs.

Those of crumb's caches are of a prompt that was computed. Those of llama.cpp's f16, q8_0 and q4_0 are made of some first tokens
computed at f16, whose K and V are repeated to the depth and quantised here (numpy): the same bytes to read, sooner than by prompts, which are
five to ten times slower in its quantised caches. What they hold is no text, and what is answered from it is none; time does not
depend on it.
"""
import importlib.util
import os
import re
import struct
import sys
import time
import urllib.error

from loopback import Server, message_of

F16 = "-ctk f16 -ctv f16"
STEP = 512
SENTENCE = "Rule {}: the cache of a transformer grows with the length of the text, so answer in few words. "


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
                raise RuntimeError(f"{source} is cut off: remove it, and it is computed again")
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
                raise RuntimeError("the values of this file lie transposed: save it with -fa on")
            out.write(struct.pack("<II", transposed, n_layers))
            for _ in range(2 * n_layers):
                kind_here, row = read("<iQ")
                if kind_here != TYPES["f16"][0]:
                    raise RuntimeError(f"{source} is not of an F16 cache: remove it, and it is computed again")
                rows = encode(np.frombuffer(b"".join(read(f"{cells * row}s")), "<f2").astype(np.float32).reshape(-1, 32)).reshape(cells, -1)
                out.write(struct.pack("<iQ", number, rows.shape[1]))
                out.write(rows[np.arange(len(tokens)) % cells].tobytes())
        if f.read(1):
            raise RuntimeError(f"{source} has more than one cache: of models with sliding windows there is no such file")
    os.replace(file + ".part", file)


class Slots:
    """A model's slot files in a folder, for servers of `count` slots. `computed`: tokens that are computed before they are repeated."""

    def __init__(self, crumb, model, folder, threads, count=1, computed=512):
        os.makedirs(folder, exist_ok=True)
        self.crumb, self.model, self.folder, self.threads = crumb, model, os.path.abspath(folder), threads
        self.count, self.computed = count, computed

    def serve(self, flags, tokens):
        """A server with slots of at least `tokens` tokens."""
        context = tokens // 256 * 256 + 256
        return Server([self.crumb, "serve", "-m", self.model, "-c", str(context * self.count), "-np", str(self.count), "-t", str(self.threads),
                       "-fa", "on", "-b", str(STEP), "-ub", str(STEP), "--metrics", "--slot-save-path", self.folder, *flags.split()])

    def path(self, what):
        name = os.path.splitext(os.path.basename(self.model))[0]
        return os.path.join(self.folder, re.sub("[^A-Za-z0-9._-]", "_", f"{name}.{what}.{self.count}"))  # a server takes no others

    def file(self, flags, tokens):
        words = [os.path.basename(word.strip("-")) for word in flags.split()]
        return self.path(f"{tokens}.{repeated(flags) or '.'.join(words)}")

    def fill(self, flags, prompt, depths):
        """The files of these first tokens of the prompt, where they are missing."""
        missing = [depth for depth in sorted(depths) if not os.path.exists(self.file(flags, depth))]
        kind = repeated(flags)
        if kind and missing:
            begun = self.path(f"begun.{self.computed}")
            if not os.path.exists(begun):
                self.compute(F16, prompt, {min(self.computed, len(prompt)): begun})
            for depth in missing:
                stretch(begun, self.file(flags, depth), kind, prompt[:depth])
        elif missing:
            self.compute(flags, prompt, {depth: self.file(flags, depth) for depth in missing})

    def compute(self, flags, prompt, files):
        with self.serve(flags, max(files)) as server:
            for tokens, file in files.items():
                print(f"{flags}: computing {tokens} tokens", file=sys.stderr, flush=True)
                began = time.monotonic()
                server.call("/completion", {"prompt": prompt[:tokens], "n_predict": 1, "id_slot": 0})
                server.call("/slots/0?action=save", {"filename": os.path.basename(file)})
                print(f"{flags}: computed in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    def restore(self, server, slot, flags, tokens):
        file = self.file(flags, tokens)
        try:
            server.call(f"/slots/{slot}?action=restore", {"filename": os.path.basename(file)})
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{file} was not restored: {message_of(error)}; remove it, and it is computed again") from error


def prompt_of(server, tokens):
    text = "".join(SENTENCE.format(i) for i in range(tokens // 16 + 1))
    return server.call("/tokenize", {"content": text})["tokens"][:tokens]


def need_numpy(caches):
    """Before the work."""
    if not importlib.util.find_spec("numpy") and any(map(repeated, caches)):
        raise RuntimeError("slot files of llama.cpp's caches are made with numpy, which this python3 has not: install it, or give --cache without them")

#!/usr/bin/env python3
"""Write a GGUF of the llama architecture with random Q4_0 weights: the shape of a large model without its download.

usage: random_gguf.py FILE SHAPE     SHAPE: 8b, 4b, 8b-quarter (of its layers and its vocabulary: a step of 8b is four of it),
                                     70b8 (a 70B's layers, 8 of them), tiny

For speed: the weights mean nothing, and tokens have no text. Reads no package.
"""
import os
import struct
import sys

# layers, width, feed-forward, heads, KV heads, head size, vocabulary
SHAPES = {
    "tiny": (2, 256, 512, 4, 2, 64, 512),
    "4b": (36, 2560, 9728, 32, 8, 128, 151936),
    "8b": (32, 4096, 14336, 32, 8, 128, 128256),
    "8b-quarter": (8, 4096, 14336, 32, 8, 128, 32064),
    "70b8": (8, 8192, 28672, 64, 8, 128, 128256),
}
F32, Q4_0 = 0, 2
UINT32, FLOAT32, STRING = 4, 6, 8
ALIGNMENT = 32


def text(s):
    return struct.pack("<Q", len(s)) + s.encode()


def metadata(shape):
    layers, width, inner, heads, kv_heads, size, vocabulary = shape
    for name, kind, value in (
        ("general.architecture", STRING, "llama"), ("llama.block_count", UINT32, layers), ("llama.context_length", UINT32, 1 << 20),
        ("llama.embedding_length", UINT32, width), ("llama.feed_forward_length", UINT32, inner), ("llama.attention.head_count", UINT32, heads),
        ("llama.attention.head_count_kv", UINT32, kv_heads), ("llama.attention.key_length", UINT32, size),
        ("llama.attention.value_length", UINT32, size), ("llama.rope.dimension_count", UINT32, size), ("llama.rope.freq_base", FLOAT32, 5e5),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5), ("llama.vocab_size", UINT32, vocabulary),
        ("tokenizer.ggml.model", STRING, "no_vocab"),
    ):
        yield text(name) + struct.pack("<I", kind) + (text(value) if kind == STRING else struct.pack("<I" if kind == UINT32 else "<f", value))


def tensors(shape):
    """(name, columns, rows, type); a row is contiguous."""
    layers, width, inner, heads, kv_heads, size, vocabulary = shape
    yield "token_embd.weight", width, vocabulary, Q4_0
    for i in range(layers):
        for name, columns, rows, kind in (
            ("attn_norm", width, 1, F32), ("attn_q", width, heads * size, Q4_0), ("attn_k", width, kv_heads * size, Q4_0),
            ("attn_v", width, kv_heads * size, Q4_0), ("attn_output", heads * size, width, Q4_0), ("ffn_norm", width, 1, F32),
            ("ffn_gate", width, inner, Q4_0), ("ffn_up", width, inner, Q4_0), ("ffn_down", inner, width, Q4_0),
        ):
            yield f"blk.{i}.{name}.weight", columns, rows, kind
    yield "output_norm.weight", width, 1, F32
    yield "output.weight", width, vocabulary, Q4_0


def n_bytes(columns, rows, kind):
    return 4 * columns * rows if kind == F32 else columns * rows // 32 * 18


def q4_0_blocks(n, columns):
    """n blocks of 32 weights with a standard deviation of about 1 / sqrt(columns)."""
    scale = struct.pack("<e", columns ** -0.5 / 4.6)  # nibbles are uniform in -8 .. 7
    noise = os.urandom(16 * n)
    return b"".join(scale + noise[16 * i : 16 * i + 16] for i in range(n))


def write(path, shape):
    listed = list(tensors(shape))
    pairs = list(metadata(shape))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(pairs)) + b"".join(pairs)
    offset = 0
    for name, columns, rows, kind in listed:
        dimensions = (columns,) if rows == 1 else (columns, rows)
        head += text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
        offset += -(-n_bytes(columns, rows, kind) // ALIGNMENT) * ALIGNMENT
    pieces = {}  # by columns: blocks that are repeated with an odd period, so that no two rows are the same
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for name, columns, rows, kind in listed:
            left = n_bytes(columns, rows, kind)
            if kind == F32:
                file.write(struct.pack("<f", 1.0) * (left // 4))
            else:
                piece = pieces.setdefault(columns, q4_0_blocks(131071, columns))
                while left > 0:
                    file.write(piece[:left])
                    left -= min(left, len(piece))
            file.write(bytes(-n_bytes(columns, rows, kind) % ALIGNMENT))


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit()
    if len(sys.argv) != 3 or sys.argv[2] not in SHAPES:
        sys.exit(__doc__)
    write(sys.argv[1], SHAPES[sys.argv[2]])

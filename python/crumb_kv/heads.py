"""Tensor parallelism: a rank has some of the KV heads of every layer, and the slice of the artefact that is theirs."""


def heads_of_rank(n_head_kv, rank, size):
    """First KV head and how many of a layer's are on a rank, as vLLM and SGLang lay them out: heads are divided, or else repeated."""
    if size >= n_head_kv:
        return rank // (size // n_head_kv), 1
    return rank * (n_head_kv // size), n_head_kv // size

"""What crumb needs to know of a transformers model, and which models it refuses."""

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open

from .layer import Shape

# By model_type: the architecture's name in GGUF, and whether GGUF interleaves the two halves of a rotary head. crumb codes
# the channels of a head in GGUF's order, so that artefacts and codes are those of the crumb program.
GGUF = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "mixtral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "gemma3_text": ("gemma3", False),
}

NO_CRUMB = "Leave past_key_values out to use transformers' own cache"


def refuse(model, why, remedy=NO_CRUMB):
    raise ValueError(f"crumb_kv cannot serve {type(model).__name__}: {why}. {remedy}.")


def shapes_of(model, leave_windows=False):
    """The Shape of every layer that is coded. leave_windows: layers with a sliding window are not, and stay as they are; else
    models that have some are refused. Raises ValueError for models whose cache crumb cannot be."""
    if not hasattr(model, "config"):
        raise ValueError(f"the model is {model!r}: give a loaded one, AutoModelForCausalLM.from_pretrained(...)")
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        refuse(model, "it is an encoder-decoder model")
    if not type(model)._can_set_attn_implementation():
        refuse(model, "its attention is not transformers' attention interface")
    if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        refuse(model, f"its weights are {model.dtype}", "Load it with dtype=torch.bfloat16")
    if getattr(config, "kv_lora_rank", None):
        refuse(model, "its KV is latent (MLA), which has no page format")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse(model, f"{config.num_kv_shared_layers} of its layers read the KV of others")
    kinds = getattr(config, "layer_types", None) or config.num_hidden_layers * ["full_attention"]
    coded = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    kinds = set(kinds) - {"full_attention"} - ({"sliding_attention"} if leave_windows and coded else set())
    if kinds:
        refuse(model, f"it has layers of kind {', '.join(sorted(kinds))}, and only full attention is coded here",
               "The crumb program serves it: crumb chat -m MODEL.gguf")
    if not hasattr(config, "layer_types") and getattr(config, "sliding_window", None):
        refuse(model, f"all of its layers see a window of {config.sliding_window} tokens",
               "Set model.config.sliding_window = None if your texts are shorter than that")
    attention = {m.layer_idx: m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")}
    if sorted(attention) != list(range(config.num_hidden_layers)):
        refuse(model, f"{len(attention)} of its {config.num_hidden_layers} layers have an attention that says its scaling")
    if any(hasattr(m, "sinks") for m in attention.values()):
        refuse(model, "its attention has sinks, a logit more a head")
    n_head = config.num_attention_heads
    n_head_kv = getattr(config, "num_key_value_heads", None) or n_head
    dim = getattr(config, "head_dim", None) or config.hidden_size // n_head
    softcap = float(getattr(config, "attn_logit_softcapping", None) or 0.0)
    return [Shape(i, n_head, n_head_kv, dim, dim, float(attention[i].scaling), softcap) for i in coded]


# What makes keys, alone or with queries and values.
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "c_attn", "W_pack", "Wqkv")


def has_key_bias(model):
    keys = (getattr(m, name, None) for m in model.modules() for name in KEY_PROJECTIONS)
    return any(getattr(k, "bias", None) is not None for k in keys)


def channel_order(config, dim):
    """Where each channel of a head comes from, in GGUF's order; None: they stay where they are. config: of the text model."""
    _, interleaved = GGUF.get(config.model_type, (None, False))
    return torch.arange(dim).view(2, dim // 2).t().reshape(-1) if interleaved else None


def _made_here(config):
    """What an artefact of calibrate() calls the architecture: as GGUF does, so that the crumb program can adopt it, where heads lie
    as they do there (channel_order())."""
    known = GGUF.get(config.model_type)
    return f"transformers/{known[0]}" if known else f"only in transformers/{config.model_type}"


def weights_hash(weights):
    """Of (name, tensor) pairs, in BF16, so that it does not depend on the type in which they are loaded."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights, key=lambda pair: pair[0]):
        digest.update(f"{name} {list(weight.shape)}".encode())
        digest.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy())
    return digest.hexdigest()[:32]


def weights_of(files, tied):
    """(name, tensor) pairs of safetensors files, as transformers names them."""
    for path in files:
        with safe_open(path, framework="pt") as f:
            for name in f.keys():
                yield name, f.get_tensor(name)
                if tied and name == "model.embed_tokens.weight":
                    yield "lm_head.weight", f.get_tensor(name)


def _sizes(config, shapes):
    s = shapes[0]
    return {"n_layer": config.num_hidden_layers, "n_head": s.n_head, "n_head_kv": s.n_head_kv, "dim_k": s.dim_k, "dim_v": s.dim_v}


def identity(model, shapes):
    """What an artefact of calibrate() says of its model."""
    config = model.config.get_text_config(decoder=True)
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    return {"name": name, "architecture": _made_here(config), "hash": weights_hash(model.state_dict().items()), **_sizes(config, shapes)}


def artefact_made_for(file):
    """What an artefact says of its model, and how it was made."""
    if file is None or not Path(file).is_file():
        raise ValueError(f"there is no artefact {file}: make one with crumb_kv.calibrate(model, tokenizer, texts, FILE)")
    with safe_open(file, framework="pt") as f:
        made = f.metadata() or {}
    if "model.architecture" not in made:
        raise ValueError(f"'{file}' is not an artefact: make one with crumb_kv.calibrate(model, tokenizer, texts, FILE)")
    return made


def why_not_this_artefact(file, config, shapes, weights):
    """Why the artefact is not for this model, as text and remedy, or None. It may have been made for this model, or for a GGUF
    of a model of its kind. config: of the text model. weights: what gives its (name, tensor) pairs, or None: not compared."""
    made_for, kind = artefact_made_for(file), config.model_type
    if made_for["model.architecture"] == _made_here(config):
        wanted = {"architecture": _made_here(config), **_sizes(config, shapes)}
        if weights is not None:
            wanted["hash"] = weights_hash(weights())
    elif kind in GGUF:
        wanted = {"architecture": GGUF[kind][0], **_sizes(config, shapes)}
    else:
        return (f"how GGUF lays out the heads of a '{kind}' model is not known here, so the artefact {file} cannot be used",
                "Make one with crumb_kv.calibrate(model, ...)")
    differs = [f"{name} {made_for['model.' + name]}, not {value}" for name, value in wanted.items()
               if made_for["model." + name] != str(value)]
    if differs:
        return (f"the artefact {file} was made for {made_for['model.name']} ({'; '.join(differs)})",
                "Make one for this model with crumb_kv.calibrate(model, ...)")
    return None


def check_artefact(model, file, shapes):
    """That the artefact was made for this model, or for a GGUF of a model of its kind."""
    config = model.config.get_text_config(decoder=True)
    if why := why_not_this_artefact(file, config, shapes, lambda: model.state_dict().items()):
        refuse(model, *why)

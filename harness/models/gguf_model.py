"""The model that a GGUF's metadata describe."""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from harness.base import bounds
from harness.models import gguf, not_a_model
from harness.models.gguf import GgufError, GgufHeader
from harness.theory.config_settings import shown
from harness.theory.decoder import Decoder, dense, in_runs
from harness.theory.layer_parts import Cache, Layer, Piece
from harness.theory.tensors import of_shape

# llama.cpp's dense architectures with a gated feed-forward and RMS norms alone (Mistral 7B is a llama there).
DENSE = ("llama", "qwen2", "qwen3")
_LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_LONGEST_CONTEXT = 1 << 31


class Contradiction(ValueError):
    """A header's keys contradict its tensors or each other; the message is a clause with both figures."""


def dense_of(header: GgufHeader) -> Decoder | None:
    """The dense model in a header; None: counts that differ by layer, or unusual tensors.

    Vocabulary, biases, q and k norms and a tied lm_head follow from the tensors, as in llama.cpp. Raises
    Contradiction.
    """
    embedding = dims_of(header, "token_embd.weight")
    if len(embedding) != 2:
        return None
    counts = ("block_count", "feed_forward_length", "attention.head_count", "embedding_length")
    if any(header.key(key) in header.arrays for key in (*counts, "attention.head_count_kv")):
        return None
    if any(f"blk.0.{name}.weight" not in header.tensors for name in _LINEAR):
        return None
    layers, ffn, heads, hidden = (_needed(header, key) for key in counts)
    stored_layers = sum(name.endswith(".attn_norm.weight") for name in header.tensors)
    if layers != stored_layers:
        raise Contradiction(f"has tensors of {stored_layers} layers, and its block_count is {layers}")
    kv_heads = _needed(header, "attention.head_count_kv", heads)
    if heads % kv_heads:
        raise Contradiction(
            f"has head_count {heads}, which is not a multiple of its head_count_kv {kv_heads}"
        )
    head_dim = _needed(header, "attention.key_length", hidden // heads)
    value_dim = _needed(header, "attention.value_length", head_dim)
    context = _needed(header, "context_length", 4096)
    if context > _LONGEST_CONTEXT:
        raise Contradiction(f"has context_length {context}, longer than any model's")
    window = window_of(header)
    decoder = dense(
        arch=header.architecture,
        vocab_size=embedding[0],
        hidden_size=hidden,
        layers=layers,
        intermediate_size=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_up.bias" in header.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
        rope_theta=_real(header, "rope.freq_base", 10_000.0),
        norm_eps=_real(header, "attention.layer_norm_rms_epsilon", 1e-5),
        context=context,
        window=window or None,
    )
    of_values = {
        "attn_v.weight": (kv_heads * value_dim, hidden),
        "attn_output.weight": (hidden, heads * value_dim),
    }
    for tensor in of_shape(decoder):
        expected = of_values.get(tensor.name.split(".", 2)[-1], tensor.dims)
        dims = dims_of(header, tensor.name) or expected
        if dims != expected and len(expected) == 2:
            raise Contradiction(
                f"has {tensor.name} of {dims_text(dims)}, and its keys say {dims_text(expected)}"
            )
    return None if window is None or value_dim != head_dim else decoder


def _needed(header: GgufHeader, key: str, default: int | None = None) -> int:
    """A positive whole number. Raises Contradiction."""
    if count := header.count(key, default):
        return count
    name = header.key(key)
    value = header.metadata.get(name)
    raise Contradiction(f"has no {name}" if value is None else f"has {name} {shown(value)}")


def dims_text(dims: Iterable[int]) -> str:
    return " x ".join(map(str, dims))


def is_mixture_gguf(header: GgufHeader) -> bool:
    """Whether it is a mixture of experts, of which a token reads only some."""
    named = bool(header.metadata.get(header.key("expert_count")))
    return named or any("_exps." in name for name in header.tensors)


def dims_of(header: GgufHeader, name: str) -> tuple[int, ...]:
    """Dimensions of a tensor, rows first; empty if it is missing."""
    tensor = header.tensors.get(name)
    return tensor.dims if tensor else ()


def window_of(header: GgufHeader) -> int | None:
    """Tokens attended to; 0: all; None: not a single number."""
    key = header.key("attention.sliding_window")
    value = header.integer(key) if key in header.metadata else 0
    return value if value is not None and 0 <= value <= _LONGEST_CONTEXT else None


def _real(header: GgufHeader, key: str, default: float) -> float:
    """A positive number, as before rounding to 32 bits. Raises Contradiction."""
    named = header.key(key)
    value = header.metadata.get(named, default)
    if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
        raise Contradiction(f"has {named} {shown(value)}")
    return float(f"{value:.7g}")


_IN_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")
_MATRICES = ["attn_k", "attn_v", "attn_qkv", "attn_output", "attn_kv_a_mqa", "ssm_conv1d", "shortconv.conv"]
# data/gguf_architectures.csv. decoder: its tensors are those of theory/architectures. One layer in
# `all_tokens_every` attends to all tokens, the others to a window (llama4: to a chunk); 0: all layers have
# one; empty: none has. `window`: where a file names none. Source: set_swa_pattern in src/models/*.cpp of
# llama.cpp.
_DECODERS = {name: row for name, row in not_a_model.ARCHITECTURES.items() if row["kind"] == "decoder"}


def check_is_model(path: Path, header: GgufHeader) -> None:
    """Raises GgufError for a file that is complete and no language model: a projector, a LoRA, an encoder."""
    if other := not_a_model.other_kind(header.metadata):
        raise GgufError(f"{path}: {other}")
    if "token_embd.weight" not in header.tensors:
        raise GgufError(f"{path}: has no input embedding, so it is not a complete language model")


def is_other_kind(path: Path) -> bool:
    """Whether a GGUF among others is no language model, by its name or its header."""
    try:
        return not_a_model.is_projector_name(path.name) or bool(
            not_a_model.other_kind(gguf.read(path).metadata)
        )
    except (GgufError, OSError):
        return False  # reported if it is the one that is read


def decoder_of(header: GgufHeader) -> Decoder | None:
    """The layers in a header; None: the architecture or a layer's cache is unknown. Raises Contradiction."""
    if header.architecture in DENSE and not is_mixture_gguf(header):
        return dense_of(header)
    embedding = dims_of(header, "token_embd.weight")
    layers = header.count("block_count")
    drafts = header.draft_layers
    if layers and drafts >= layers:
        raise Contradiction(f"has nextn_predict_layers {drafts}, and its block_count is {layers}")
    if (
        header.architecture not in _DECODERS
        or len(embedding) != 2
        or not layers
        or layers > bounds.MODEL_LAYERS
    ):
        return None
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for name, tensor in header.tensors.items():
        if match := _IN_LAYER.fullmatch(name):
            pieces[int(match[1])].append(Piece(match[2], tensor.dims))
    if set(pieces) != set(range(layers)):
        raise Contradiction(f"has tensors of {len(pieces)} layers, and its block_count is {layers}")
    layers -= drafts  # the last ones
    experts, used = _experts(header)
    caches = [_cache(header, number, pieces[number], layers) for number in range(layers)]
    if None in caches:
        return None
    others = [
        Piece(tensor.name, tensor.dims)
        for tensor in header.decoded()
        if not _IN_LAYER.fullmatch(tensor.name) and tensor.name not in ("token_embd.weight", "output.weight")
    ]
    return Decoder(
        arch=header.architecture,
        vocab_size=embedding[0],
        hidden_size=embedding[1],
        context=header.count("context_length", 4096) or 4096,
        tied="output.weight" not in header.tensors,
        runs=in_runs(
            _layer(pieces[number], cache) for number, cache in enumerate(caches) if cache is not None
        ),
        others=tuple(others),
        experts=experts,
        experts_used=used,
        heads=header.count("attention.head_count") or 0,
        ffn=max((p.dims[-1] for n in range(layers) for p in pieces[n] if "ffn_down" in p.name), default=0),
    )


def nearest(architecture: str) -> str | None:
    """The known architecture with the most similar name; None: none is similar, or it is one of them."""
    if architecture in _DECODERS:
        return None
    return next(iter(difflib.get_close_matches(architecture[:40], _DECODERS, 1, 0.6)), None)


def _layer(pieces: list[Piece], cache: Cache) -> Layer:
    """Files of Gemma 3n hold keys and values of all layers."""
    unused = [p for p in pieces if cache.borrowed and p.name.startswith(("attn_k", "attn_v"))]
    return Layer(tuple(p for p in pieces if p not in unused), cache, tuple(unused))


def _experts(header: GgufHeader) -> tuple[int, int]:
    """How many there are, and how many a token uses. Raises Contradiction."""
    stacked = {name: tensor.dims[0] for name, tensor in header.tensors.items() if "_exps.weight" in name}
    count = header.count("expert_count") or 0
    used = header.count("expert_used_count") or 0
    if not stacked and not count:
        return 0, 0
    for name, stored in stacked.items():
        if stored != count:
            raise Contradiction(f"has {stored} experts in {name[:60]}, and its expert_count is {count}")
    if not 0 < used <= count:
        raise Contradiction(f"uses {used} of {count} experts for a token")
    return count, used


def _cache(header: GgufHeader, number: int, pieces: list[Piece], layers: int) -> Cache | None:
    """The cache of a layer, from the widths of its matrices; None if unknown."""
    dims = {piece.name: piece.dims for piece in pieces}
    if any(len(dims.get(f"{name}.weight", (0, 0))) != 2 for name in _MATRICES):
        return None
    state = 0
    if convolution := dims.get("ssm_conv1d.weight") or dims.get("shortconv.conv.weight"):
        state = convolution[0] * (convolution[1] - 1)
    if "ssm_conv1d.weight" in dims:
        inner, of_head = (header.count(f"ssm.{key}") for key in ("inner_size", "state_size"))
        if not inner or not of_head:
            return None
        state += inner * of_head
    heads = header.count("attention.head_count") or 0
    latent = dims.get("attn_kv_a_mqa.weight")
    if latent:
        rank = header.count("attention.kv_lora_rank")
        if not rank or not heads:
            return None
        width = latent[0]
        key = header.count("attention.key_length_mla") or 0
        value = header.count("attention.value_length_mla") or 0
        return Cache(width, products=heads * (width + rank), expanded=heads * (key + value))
    if "attn_output.weight" not in dims:
        return Cache(state=state)
    queries = dims["attn_output.weight"][-1]
    if fused := dims.get("attn_qkv.weight"):
        if "ssm_conv1d.weight" in dims:
            return Cache(state=state)
        keys = values = max(0, fused[0] - queries) // 2
    elif "attn_k.weight" in dims:
        keys = dims["attn_k.weight"][0]
        values = dims["attn_v.weight"][0] if "attn_v.weight" in dims else keys
    else:
        return None
    window, chunked = _window(header, number)
    shared = header.count("attention.shared_kv_layers") or 0
    return Cache(keys, values, 2 * queries, window, chunked, borrowed=number >= layers - shared, state=state)


def _window(header: GgufHeader, number: int) -> tuple[int | None, bool]:
    """A layer's window, and whether the window is a chunk."""
    row = _DECODERS[header.architecture]
    period, window = row["all_tokens_every"], window_of(header) or int(row["window"] or 0)
    if not period or not window or (int(period) and (number + 1) % int(period) == 0):
        return None, False
    return window, header.architecture == "llama4"

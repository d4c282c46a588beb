"""The shape of a dense Llama-like model from a GGUF header, checked against its tensors."""

from __future__ import annotations

import math
import re

from harness.models.gguf_header import GgufHeader
from harness.theory.config_values import shown
from harness.theory.shapes import Shape

# llama.cpp's dense architectures with a gated feed-forward and RMS norms alone (Mistral 7B is a llama there).
DENSE = ("llama", "qwen2", "qwen3")
_LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_LONGEST_CONTEXT = 1 << 31
_MATRIX = re.compile(r"blk\.[0-9]+\.[a-z_]+\.weight")


class Contradiction(ValueError):
    """A header's keys contradict its tensors or each other; the message is a clause with both figures."""


def shape_of(header: GgufHeader) -> Shape | None:
    """Null: another architecture, counts that differ by layer, or tensors that llama.cpp's usual files lack.

    Vocabulary, biases, q and k norms and a tied lm_head follow from the tensors, as in llama.cpp. Raises
    Contradiction.
    """
    embedding = dims_of(header, "token_embd.weight")
    if header.architecture not in DENSE or len(embedding) != 2:
        return None
    counts = ("block_count", "feed_forward_length", "attention.head_count", "embedding_length")
    if any(f"{header.architecture}.{key}" in header.arrays for key in (*counts, "attention.head_count_kv")):
        return None
    if any(f"blk.0.{name}.weight" not in header.tensors for name in _LINEAR):
        return None
    layers, ffn, heads, width = (_needed(header, key) for key in counts)
    vocab, hidden = embedding
    if width != hidden:
        raise Contradiction(_other_size(header, "token_embd.weight", f"embedding_length {width}"))
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
    theta = _real(header, "rope.freq_base", 10_000.0)
    eps = _real(header, "attention.layer_norm_rms_epsilon", 1e-5)
    of_heads, of_values = f"head_count {heads} of {head_dim}", f"head_count {heads} of {value_dim}"
    kv_of_heads, kv_of_values = (
        f"head_count_kv {kv_heads} of {head_dim}",
        f"head_count_kv {kv_heads} of {value_dim}",
    )
    of_ffn = f"feed_forward_length {ffn}"
    in_layer = {
        "attn_q": ((heads * head_dim, hidden), of_heads),
        "attn_k": ((kv_heads * head_dim, hidden), kv_of_heads),
        "attn_v": ((kv_heads * value_dim, hidden), kv_of_values),
        "attn_output": ((hidden, heads * value_dim), of_values),
        "ffn_gate": ((ffn, hidden), of_ffn),
        "ffn_up": ((ffn, hidden), of_ffn),
        "ffn_down": ((hidden, ffn), of_ffn),
    }
    for name, tensor in header.tensors.items():
        piece = in_layer.get(name.split(".")[2]) if _MATRIX.fullmatch(name) else None
        if piece and tensor.shape[::-1] != piece[0]:
            raise Contradiction(_other_size(header, name, piece[1]))
    if "output.weight" in header.tensors and dims_of(header, "output.weight") != embedding:
        raise Contradiction(_other_size(header, "output.weight", f"token_embd.weight {_by(embedding)}"))
    stored_layers = sum(name.endswith(".attn_norm.weight") for name in header.tensors)
    if layers != stored_layers:
        raise Contradiction(f"has tensors of {stored_layers} layers, and its block_count is {layers}")
    if window is None or value_dim != head_dim:
        return None
    return Shape(
        arch=header.architecture,
        vocab_size=vocab,
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
        rope_theta=theta,
        norm_eps=eps,
        context=context,
        window=window or None,
    )


def _needed(header: GgufHeader, key: str, default: int | None = None) -> int:
    """A positive whole number. Raises Contradiction."""
    if found := count_of(header, key, default):
        return found
    named = f"{header.architecture}.{key}"
    given = header.metadata.get(named)
    raise Contradiction(f"has no {named}" if given is None else f"has {named} {shown(given)}")


def _other_size(header: GgufHeader, name: str, key: str) -> str:
    return f"has {name} of {_by(dims_of(header, name))}, which contradicts its {key}"


def _by(dims: tuple[int, ...]) -> str:
    return " x ".join(map(str, dims))


def is_mixture(header: GgufHeader) -> bool:
    """Whether it is a mixture of experts, of which a token reads only some."""
    named = bool(header.metadata.get(f"{header.architecture}.expert_count"))
    return named or any("_exps." in name for name in header.tensors)


def dims_of(header: GgufHeader, name: str) -> tuple[int, ...]:
    """Dimensions of a tensor, rows first; empty if it is missing."""
    tensor = header.tensors.get(name)
    return tensor.shape[::-1] if tensor else ()


def count_of(header: GgufHeader, key: str, default: int | None = None) -> int | None:
    """A positive whole number; null for anything else."""
    key = f"{header.architecture}.{key}"
    value = header.integer(key) if key in header.metadata else default
    return value if value and value > 0 else None


def window_of(header: GgufHeader) -> int | None:
    """Tokens attended to; 0: all; null: not a single number."""
    key = f"{header.architecture}.attention.sliding_window"
    value = header.integer(key) if key in header.metadata else 0
    return value if value is not None and 0 <= value <= _LONGEST_CONTEXT else None


def _real(header: GgufHeader, key: str, default: float) -> float:
    """A positive number, as before rounding to 32 bits. Raises Contradiction."""
    named = f"{header.architecture}.{key}"
    value = header.metadata.get(named, default)
    if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
        raise Contradiction(f"has {named} {shown(value)}")
    return float(f"{value:.7g}")

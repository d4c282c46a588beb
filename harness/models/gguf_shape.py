"""The shape of a dense Llama-like model from a GGUF header, checked against its tensors."""

from __future__ import annotations

import math

from harness.models.gguf_header import GgufHeader
from harness.theory.shapes import Shape

# llama.cpp's dense architectures with a gated feed-forward and RMS norms alone (Mistral 7B is a llama there).
DENSE = ("llama", "qwen2", "qwen3")
_LONGEST_CONTEXT = 1 << 31


def shape_of(header: GgufHeader) -> Shape | None:
    """Null: another architecture, counts that differ by layer, missing keys, or tensors of other sizes.

    Vocabulary, biases, q and k norms and a tied lm_head follow from the tensors, as in llama.cpp.
    """
    embedding = dims_of(header, "token_embd.weight")
    if header.architecture not in DENSE or len(embedding) != 2:
        return None
    vocab, hidden = embedding
    layers = count_of(header, "block_count")
    ffn = count_of(header, "feed_forward_length")
    heads = count_of(header, "attention.head_count")
    kv_heads = count_of(header, "attention.head_count_kv", heads)
    head_dim = count_of(header, "attention.key_length", hidden // heads if heads else None)
    value_dim = count_of(header, "attention.value_length", head_dim)
    context = count_of(header, "context_length", 4096)
    window = window_of(header)
    theta = _real(header, "rope.freq_base", 10_000.0)
    eps = _real(header, "attention.layer_norm_rms_epsilon", 1e-5)
    if not (layers and ffn and heads and kv_heads and head_dim and context and theta and eps):
        return None
    if window is None or context > _LONGEST_CONTEXT or value_dim != head_dim or heads % kv_heads:
        return None
    q, kv = heads * head_dim, kv_heads * head_dim
    first_layer = {
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    if any(dims_of(header, f"blk.0.{name}.weight") != dims for name, dims in first_layer.items()):
        return None
    stored_layers = sum(name.endswith(".attn_norm.weight") for name in header.tensors)
    if (count_of(header, "embedding_length"), layers) != (hidden, stored_layers):
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


def _real(header: GgufHeader, key: str, default: float) -> float | None:
    """A positive number, as before rounding to 32 bits."""
    value = header.metadata.get(f"{header.architecture}.{key}", default)
    if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
        return None
    return float(f"{value:.7g}")

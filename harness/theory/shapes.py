"""The shape of a dense Llama- or Qwen2-like model, with its parameters and KV cache. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A dense decoder with a gated feed-forward and RMS norms. `arch` is llama.cpp's name for it.

    Biases: `qkv_bias` on q, k and v (Qwen2), `o_bias` on the attention's output, `mlp_bias` on all three of
    the feed-forward. `qk_norm`: a norm of head_dim on q and on k (Qwen3). `window`: tokens attended to; null
    for all.
    """

    arch: str
    vocab_size: int
    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    context: int = 4096
    window: int | None = None

    @property
    def q_width(self) -> int:
        """Elements of a token's queries, and of the attention's output before its projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of one K (or V) row."""
        return self.kv_heads * self.head_dim


def attention(shape: Shape) -> dict[str, int]:
    """The dimensions of the KV cache: layers, kv_heads and head_dim."""
    return {"layers": shape.layers, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}


def layer_params(shape: Shape, norms: bool = True) -> int:
    """All but the embedding and lm_head; without `norms`: weights and biases of the linear layers only."""
    hidden, q, kv, ffn = shape.hidden_size, shape.q_width, shape.kv_width, shape.intermediate_size
    layer = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * ffn
    layer += (q + 2 * kv) * shape.qkv_bias + hidden * shape.o_bias + (2 * ffn + hidden) * shape.mlp_bias
    if not norms:
        return shape.layers * layer
    return shape.layers * (layer + 2 * hidden + 2 * shape.head_dim * shape.qk_norm) + hidden


def lm_head_params(shape: Shape) -> int:
    """Of the output matrix; the input embedding has as many, and is the same matrix if tied."""
    return shape.vocab_size * shape.hidden_size


def active_params(shape: Shape, norms: bool = True) -> int:
    """Parameters that a decode step computes with: all but the input embedding, of which it reads one row."""
    return layer_params(shape, norms) + lm_head_params(shape)


def parameters(shape: Shape, norms: bool = True) -> int:
    """All weights and biases; a tied embedding counts once."""
    return active_params(shape, norms) + (0 if shape.tied else lm_head_params(shape))


def kv_elements_per_token(shape: Shape) -> int:
    """Elements of KV cache a token adds: one K and one V row per layer."""
    return 2 * shape.layers * shape.kv_width


def kv_bytes_per_token(shape: Shape, k_element_bytes: float = 2, v_element_bytes: float = 2) -> float:
    """Bytes of KV cache a token adds, K and V as typed."""
    return shape.layers * shape.kv_width * (k_element_bytes + v_element_bytes)

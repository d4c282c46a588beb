"""Shapes of dense Llama- and Qwen2-like models, and what follows from a shape alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A dense decoder. `arch` is llama.cpp's name for it; `qkv_bias`: biases on q, k and v, as Qwen2 has."""

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
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    context: int = 4096

    @property
    def kv_width(self) -> int:
        """Elements of one K (or V) row."""
        return self.kv_heads * self.head_dim


def parameters(shape: Shape) -> int:
    """Weights and biases of all tensors; a tied embedding counts once."""
    h, q = shape.hidden_size, shape.heads * shape.head_dim
    attention = 2 * h * q + 2 * h * shape.kv_width + (q + 2 * shape.kv_width if shape.qkv_bias else 0)
    per_layer = attention + 3 * h * shape.intermediate_size + 2 * h
    embeddings = shape.vocab_size * h * (1 if shape.tied else 2)
    return shape.layers * per_layer + embeddings + h


def kv_bytes_per_token(shape: Shape, k_element_bytes: float = 2, v_element_bytes: float = 2) -> float:
    """Bytes of KV cache a token adds: one K and one V row per layer."""
    return shape.layers * shape.kv_width * (k_element_bytes + v_element_bytes)


def _qwen15(hidden: int, layers: int, ffn: int, heads: int, kv_heads: int = 0, vocab: int = 151_936) -> Shape:
    return Shape(
        arch="qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        intermediate_size=ffn,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        qkv_bias=True,
        rope_theta=1e6,
        norm_eps=1e-6,
        context=32_768,
    )


# Qwen1.5 from the config.json of each model; all untied, as in the published tables and the GGUF files
# (on the hub 0.5B ties its embeddings). The tiny ones are for tests and first tries: their speed says
# nothing.
SHAPES: dict[str, Shape] = {
    "qwen1.5-0.5b": _qwen15(1024, 24, 2816, 16),
    "qwen1.5-1.8b": _qwen15(2048, 24, 5504, 16),
    "qwen1.5-4b": _qwen15(2560, 40, 6912, 20),
    "qwen1.5-7b": _qwen15(4096, 32, 11_008, 32),
    "qwen1.5-14b": _qwen15(5120, 40, 13_696, 40, vocab=152_064),
    "qwen1.5-32b": _qwen15(5120, 64, 27_392, 40, kv_heads=8, vocab=152_064),
    "qwen1.5-72b": _qwen15(8192, 80, 24_576, 64, vocab=152_064),
    "qwen1.5-110b": _qwen15(8192, 80, 49_152, 64, kv_heads=8, vocab=152_064),
    "tiny-qwen2": Shape("qwen2", 512, 256, 2, 512, 4, 4, 64, qkv_bias=True, rope_theta=1e6, context=32_768),
    "tiny-llama": Shape("llama", 512, 256, 2, 512, 8, 2, 32, context=32_768),
}

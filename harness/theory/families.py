"""Shapes of common model families by name, from the config.json of each. Pure.

A name stands for the base model as the hub has it (Qwen3: the one without a suffix). `vocab_size` is the rows
stored, padding included; `context` is max_position_embeddings.
"""

from __future__ import annotations

from dataclasses import replace

from harness.theory.shapes import Shape


def _llama(
    hidden: int,
    layers: int,
    ffn: int,
    heads: int,
    kv_heads: int = 0,
    *,
    vocab: int = 32_000,
    context: int = 4096,
    theta: float = 1e4,
    eps: float = 1e-5,
    tied: bool = False,
) -> Shape:
    return Shape(
        arch="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        intermediate_size=ffn,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        tied=tied,
        rope_theta=theta,
        norm_eps=eps,
        context=context,
    )


def _llama3(
    hidden: int, layers: int, ffn: int, heads: int, context: int = 131_072, tied: bool = False
) -> Shape:
    return _llama(
        hidden, layers, ffn, heads, kv_heads=8, vocab=128_256, context=context, theta=5e5, tied=tied
    )


def _mistral(
    hidden: int = 4096,
    layers: int = 32,
    ffn: int = 14_336,
    vocab: int = 32_000,
    context: int = 32_768,
    theta: float = 1e6,
    window: int | None = None,
) -> Shape:
    """All of them have 32 heads of 128, whatever the hidden size."""
    shape = _llama(hidden, layers, ffn, 32, 8, vocab=vocab, context=context, theta=theta)
    return replace(shape, head_dim=128, window=window)


def _qwen2(
    hidden: int,
    layers: int,
    ffn: int,
    heads: int,
    kv_heads: int = 0,
    vocab: int = 151_936,
    context: int = 131_072,
    eps: float = 1e-6,
    tied: bool = False,
) -> Shape:
    """Its vocabulary is padded to 151,936 rows in small models and to 152,064 in large ones."""
    shape = _llama(
        hidden, layers, ffn, heads, kv_heads, vocab=vocab, context=context, theta=1e6, eps=eps, tied=tied
    )
    return replace(shape, arch="qwen2", qkv_bias=True)


def _qwen15(hidden: int, layers: int, ffn: int, heads: int, kv_heads: int = 0, vocab: int = 151_936) -> Shape:
    return _qwen2(hidden, layers, ffn, heads, kv_heads, vocab, context=32_768)


def _qwen3(hidden: int, layers: int, ffn: int, heads: int, tied: bool = False) -> Shape:
    shape = _qwen2(hidden, layers, ffn, heads, 8, context=40_960, tied=tied)
    return replace(shape, arch="qwen3", head_dim=128, qkv_bias=False, qk_norm=True)


# Qwen1.5: all untied, as in the published tables and the GGUF files (on the hub 0.5B ties its embeddings).
# -mha: without GQA, which the published study lists besides the real ones. The tiny ones are for tests and
# first tries: their speed is meaningless.
SHAPES: dict[str, Shape] = {
    "qwen1.5-0.5b": _qwen15(1024, 24, 2816, 16),
    "qwen1.5-1.8b": _qwen15(2048, 24, 5504, 16),
    "qwen1.5-4b": _qwen15(2560, 40, 6912, 20),
    "qwen1.5-7b": _qwen15(4096, 32, 11_008, 32),
    "qwen1.5-14b": _qwen15(5120, 40, 13_696, 40, vocab=152_064),
    "qwen1.5-32b": _qwen15(5120, 64, 27_392, 40, kv_heads=8, vocab=152_064),
    "qwen1.5-72b": _qwen15(8192, 80, 24_576, 64, vocab=152_064),
    "qwen1.5-110b": _qwen15(8192, 80, 49_152, 64, kv_heads=8, vocab=152_064),
    "qwen1.5-32b-mha": _qwen15(5120, 64, 27_392, 40, vocab=152_064),
    "qwen1.5-110b-mha": _qwen15(8192, 80, 49_152, 64, vocab=152_064),
    "llama-7b": _llama(4096, 32, 11_008, 32, context=2048, eps=1e-6),
    "llama-13b": _llama(5120, 40, 13_824, 40, context=2048, eps=1e-6),
    "llama-33b": _llama(6656, 60, 17_920, 52, context=2048, eps=1e-6),
    "llama-65b": _llama(8192, 80, 22_016, 64, context=2048),
    "llama-2-7b": _llama(4096, 32, 11_008, 32),
    "llama-2-13b": _llama(5120, 40, 13_824, 40),
    "llama-2-70b": _llama(8192, 80, 28_672, 64, kv_heads=8),
    "llama-3-8b": _llama3(4096, 32, 14_336, 32, context=8192),
    "llama-3-70b": _llama3(8192, 80, 28_672, 64, context=8192),
    "llama-3.1-8b": _llama3(4096, 32, 14_336, 32),
    "llama-3.1-70b": _llama3(8192, 80, 28_672, 64),
    "llama-3.1-405b": _llama3(16_384, 126, 53_248, 128),
    "llama-3.2-1b": _llama3(2048, 16, 8192, 32, tied=True),
    "llama-3.2-3b": _llama3(3072, 28, 8192, 24, tied=True),
    "qwen2-0.5b": _qwen2(896, 24, 4864, 14, kv_heads=2, tied=True),
    "qwen2-1.5b": _qwen2(1536, 28, 8960, 12, kv_heads=2, tied=True),
    "qwen2-7b": _qwen2(3584, 28, 18_944, 28, kv_heads=4, vocab=152_064),
    "qwen2-72b": _qwen2(8192, 80, 29_568, 64, kv_heads=8, vocab=152_064, eps=1e-5),
    "qwen2.5-0.5b": _qwen2(896, 24, 4864, 14, kv_heads=2, context=32_768, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 8960, 12, kv_heads=2, tied=True),
    "qwen2.5-3b": _qwen2(2048, 36, 11_008, 16, kv_heads=2, context=32_768, tied=True),
    "qwen2.5-7b": _qwen2(3584, 28, 18_944, 28, kv_heads=4, vocab=152_064),
    "qwen2.5-14b": _qwen2(5120, 48, 13_824, 40, kv_heads=8, vocab=152_064, eps=1e-5),
    "qwen2.5-32b": _qwen2(5120, 64, 27_648, 40, kv_heads=8, vocab=152_064, eps=1e-5),
    "qwen2.5-72b": _qwen2(8192, 80, 29_568, 64, kv_heads=8, vocab=152_064, eps=1e-5),
    "qwen3-0.6b": _qwen3(1024, 28, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 12_288, 32),
    "qwen3-14b": _qwen3(5120, 40, 17_408, 40),
    "qwen3-32b": _qwen3(5120, 64, 25_600, 64),
    "mistral-7b-v0.1": _mistral(theta=1e4, window=4096),
    "mistral-7b-v0.2": _mistral(),
    "mistral-7b-v0.3": _mistral(vocab=32_768),
    "mistral-nemo-12b": _mistral(5120, 40, vocab=131_072, context=128_000),
    "mistral-small-24b": _mistral(5120, 40, 32_768, vocab=131_072, theta=1e8),
    "tiny-qwen2": Shape("qwen2", 512, 256, 2, 512, 4, 4, 64, qkv_bias=True, rope_theta=1e6, context=32_768),
    "tiny-llama": Shape("llama", 512, 256, 2, 512, 8, 2, 32, context=32_768),
}

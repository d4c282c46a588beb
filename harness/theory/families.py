"""Shapes by name: the model families people run, from the config.json of each. Pure."""

from __future__ import annotations

from harness.theory.shapes import Shape


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

"""The ggml type that llama.cpp gives each tensor when it quantizes a model. Pure.

For dense models with separate q, k and v, without an importance matrix. Source: llama_tensor_get_type and
its callees in llama.cpp's src/llama-quant.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from harness.theory.shapes import Shape
from harness.theory.tensors import Tensor, of_shape, typed

# The type of every matrix without a rule below, by decreasing size of Qwen1.5-7B files (f16 and bf16 have the
# same size there, as have q5_k_s and q5_0). Other shapes may differ.
_BASE = {
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
    "q8_0": "q8_0",
    "q6_k": "q6_k",
    "q5_1": "q5_1",
    "q5_k_m": "q5_k",
    "q5_k_s": "q5_k",
    "q5_0": "q5_0",
    "q4_1": "q4_1",
    "q4_k_m": "q4_k",
    "q4_k_s": "q4_k",
    "q4_0": "q4_0",
    "q3_k_l": "q3_k",
    "q3_k_m": "q3_k",
    "q3_k_s": "q3_k",
    "q2_k": "q2_k",
}
QUANTS: tuple[str, ...] = tuple(_BASE)


def _all(layer: int, layers: int) -> bool:
    return True


def _more_bits(layer: int, layers: int) -> bool:
    """The first eighth, the last, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


# Tensors with more bits than the rest: file type, parts, their type, layers. The first match counts.
_RULES: list[tuple[str, tuple[str, ...], str, Callable[[int, int], bool]]] = [
    ("q5_k_m", ("attn_v", "ffn_down"), "q6_k", _more_bits),
    ("q4_k_m", ("attn_v", "ffn_down"), "q6_k", _more_bits),
    ("q4_k_s", ("attn_v",), "q5_k", lambda layer, layers: layer < 4),
    ("q4_k_s", ("ffn_down",), "q5_k", lambda layer, layers: layer < layers // 8),
    ("q3_k_l", ("attn_v", "attn_output", "ffn_down"), "q5_k", _all),
    ("q3_k_m", ("attn_v",), "q5_k", lambda layer, layers: layer < 2),
    ("q3_k_m", ("ffn_down",), "q5_k", lambda layer, layers: layer < layers // 16),
    ("q3_k_m", ("attn_v", "attn_output", "ffn_down"), "q4_k", _all),
    ("q2_k", ("attn_v", "attn_output", "ffn_down"), "q3_k", _all),
]

# Types in blocks of 256 -> the fallback of a matrix whose row length is not a multiple of 256.
_FALLBACK = {"q6_k": "q8_0", "q5_k": "q5_1", "q4_k": "q5_0", "q3_k": "q4_0", "q2_k": "q4_0"}
# Q3_K fell back to Q4_1 when the published files of Qwen1.5 were made (llama.cpp 1182cf4, January 2024): 1.8B
# and 14B have such rows in ffn_down. All else was as today for untied models, such as these.
_FALLBACK_AS_PUBLISHED = _FALLBACK | {"q3_k": "q4_1"}


def quantized(shape: Shape, quant: str, as_published: bool = False) -> list[Tensor]:
    """All tensors of a shape as llama.cpp stores them in a file of type `quant`, one of QUANTS.

    `as_published`: by the rules of the published Qwen1.5 files, not today's. Raises KeyError for an unknown
    quant.
    """
    n_gqa = shape.heads // shape.kv_heads
    return retyped(of_shape(shape), quant, shape.arch, shape.layers, n_gqa, as_published)


def model_bytes(shape: Shape, quant: str, as_published: bool = False) -> int:
    """Bytes of all tensors of such a file, as llama.cpp prints them. Raises KeyError as `quantized`."""
    return sum(tensor.bytes for tensor in quantized(shape, quant, as_published))


def retyped(
    tensors: Sequence[Tensor], quant: str, arch: str, layers: int, n_gqa: int, as_published: bool = False
) -> list[Tensor]:
    """All tensors of a file, by llama.cpp's names, as it would store them in a file of type `quant`.

    `arch`: llama, qwen2 or qwen3. `n_gqa`: query heads to a KV head. What is not a matrix keeps its type.
    Raises KeyError for an unknown quant.
    """
    base = _BASE[quant]
    fallback = _FALLBACK_AS_PUBLISHED if as_published else _FALLBACK
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    is_70b = layers == 80 and (arch == "qwen2" or (arch == "llama" and n_gqa > 1))  # to llama.cpp, any width

    def stored(tensor: Tensor) -> str:
        part, n_in = tensor.part, tensor.dims[-1]
        if tensor.elements == n_in:  # one row: norms and biases
            return tensor.type
        if base in ("f32", "f16", "bf16"):
            return base
        chosen = _by_rule(quant, part, _layer(tensor.name), layers) or base
        if part == "lm_head" or (tied and part == "embedding"):
            chosen = "q8_0" if base == "q8_0" else "q6_k"
        if part == "attn_v" and quant == "q2_k" and n_gqa >= 4:
            chosen = "q4_k"
        if part == "attn_v" and is_70b and chosen in ("q3_k", "q4_k"):
            chosen = "q5_k"
        if n_in % 256:
            chosen = fallback.get(chosen, chosen)
        return "f16" if n_in % 32 else chosen

    return [typed(tensor.name, stored(tensor), tensor.dims) for tensor in tensors]


def _by_rule(quant: str, part: str, layer: int, layers: int) -> str | None:
    for of_quant, parts, chosen, applies in _RULES:
        if quant == of_quant and part in parts and applies(layer, layers):
            return chosen
    return None


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else 0

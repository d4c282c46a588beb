"""A model's tensors: name, type, bytes, part, and the bytes that a decode step streams. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from typing_extensions import TypedDict

from harness.theory import ggml
from harness.theory.shapes import Shape

# The part of a tensor by its name in llama.cpp and Hugging Face checkpoints; the first match counts.
_PARTS = {
    "norm": r"norm",
    "embedding": r"token_embd|embed_tokens",
    "lm_head": r"^output\.|lm_head",
    "attn_q": r"attn_q\.|q_proj",
    "attn_k": r"attn_k\.|k_proj",
    "attn_v": r"attn_v\.|v_proj",
    "attn_output": r"attn_output|o_proj",
    "ffn_gate": r"ffn_gate|gate_proj",
    "ffn_up": r"ffn_up|up_proj",
    "ffn_down": r"ffn_down|down_proj",
}


@dataclass(frozen=True)
class Tensor:
    """`type`: as ggml or safetensors name it, in lower case. `dims`: a matrix is (n_out, n_in)."""

    name: str
    type: str
    dims: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def part(self) -> str:
        """embedding, lm_head, attn_q ... ffn_down, norm, or other."""
        return _part(self.name)


class Sizes(TypedDict):
    """What determines the bytes of a decode step; an untied model reads one row of the input embedding."""

    model_bytes: int
    parameters: int
    bytes_by_type: dict[str, int]
    input_embedding_bytes: int
    tied: bool


class Typed(Protocol):
    """Anything with a type's name and bytes."""

    @property
    def type(self) -> str: ...

    @property
    def bytes(self) -> int: ...


@cache
def _part(name: str) -> str:
    return next((part for part, names in _PARTS.items() if re.search(names, name)), "other")


def typed(name: str, type_name: str, dims: tuple[int, ...]) -> Tensor:
    """A tensor stored in a ggml type. Raises KeyError for a type ggml lacks."""
    elements = math.prod(dims)
    return Tensor(name, type_name, dims, round(elements * ggml.element_bytes(type_name)))


def streamed_bytes(tensor: Tensor, tied: bool) -> int:
    """Bytes of a tensor that one decode step reads.

    An untied input embedding does not count (one row is read); a tied one is the lm_head, read in full; a
    second stored copy is not loaded.
    """
    if tensor.part == ("lm_head" if tied else "embedding"):
        return 0
    return tensor.bytes


def bytes_by_part(tensors: Iterable[Tensor]) -> dict[str, dict[str, int]]:
    """{part: {type: bytes}}, parts in the order in which they first come."""
    found: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        of_part = found.setdefault(tensor.part, {})
        of_part[tensor.type] = of_part.get(tensor.type, 0) + tensor.bytes
    return found


def bytes_by_type(tensors: Iterable[Typed]) -> dict[str, int]:
    """{type: bytes}, types in the order in which they first come."""
    found: dict[str, int] = {}
    for tensor in tensors:
        found[tensor.type] = found.get(tensor.type, 0) + tensor.bytes
    return found


def of_shape(shape: Shape) -> list[Tensor]:
    """All tensors of a shape by llama.cpp's names, matrices in f16 and the rest in f32, in a file's order."""
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    q, kv = shape.q_width, shape.kv_width
    linear = {
        "attn_q": (q, hidden, shape.qkv_bias),
        "attn_k": (kv, hidden, shape.qkv_bias),
        "attn_v": (kv, hidden, shape.qkv_bias),
        "attn_output": (hidden, q, shape.o_bias),
        "ffn_gate": (ffn, hidden, shape.mlp_bias),
        "ffn_up": (ffn, hidden, shape.mlp_bias),
        "ffn_down": (hidden, ffn, shape.mlp_bias),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if shape.qk_norm:
        norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    found = [typed("token_embd.weight", "f16", (shape.vocab_size, hidden))]
    for layer in range(shape.layers):
        found += [typed(f"blk.{layer}.{name}.weight", "f32", (width,)) for name, width in norms.items()]
        for name, (n_out, n_in, bias) in linear.items():
            found.append(typed(f"blk.{layer}.{name}.weight", "f16", (n_out, n_in)))
            if bias:
                found.append(typed(f"blk.{layer}.{name}.bias", "f32", (n_out,)))
    found.append(typed("output_norm.weight", "f32", (hidden,)))
    if not shape.tied:
        found.append(typed("output.weight", "f16", (shape.vocab_size, hidden)))
    return found

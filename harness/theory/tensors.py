"""A model's tensors: name, type, bytes, part, and the bytes that a decode step streams. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from typing_extensions import NotRequired, TypedDict

from harness.theory import decoder, ggml
from harness.theory.decoder import Decoder
from harness.theory.shapes import Shape

# Of one expert or of all experts of a layer, but not of those that every token uses: llama.cpp's names, and
# those of Hugging Face checkpoints.
_EXPERTS = re.compile(r"_exps\.|(?<!shared_)experts\.|block_sparse_moe\.(in|out)put_linear")
# The part of a tensor by its name in llama.cpp and Hugging Face checkpoints; the first match counts.
_PARTS = {
    "norm": r"norm",
    "router": r"ffn_gate_inp|mlp\.gate\.|\.router\.",
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
        """embedding, lm_head, attn_q ... ffn_down, norm, router, or other."""
        return _part(self.name)


class Sizes(TypedDict):
    """What determines the bytes of a decode step; an untied model reads one row of the input embedding.
    `expert_bytes`: of all experts; `table_bytes`: of other tables with a row for each token; `draft_bytes`:
    of layers that only draft tokens. Each only where there are any."""

    model_bytes: int
    parameters: int
    bytes_by_type: dict[str, int]
    input_embedding_bytes: int
    tied: bool
    expert_bytes: NotRequired[int]
    table_bytes: NotRequired[int]
    draft_bytes: NotRequired[int]


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


@cache
def is_of_experts(name: str) -> bool:
    """Whether a tensor holds experts of which a token uses only some."""
    return bool(_EXPERTS.search(name))


def streamed_bytes(tensor: Tensor, tied: bool, expert_share: float = 1.0) -> int:
    """Bytes of a tensor that one decode step reads: of experts, `expert_share` of them.

    An untied input embedding does not count (one row is read), nor does another table with a row for each
    token; a tied one is the lm_head, read in full; a second stored copy is not loaded.
    """
    if tensor.part == ("lm_head" if tied else "embedding"):
        return 0
    if tensor.part != "embedding" and decoder.is_table(tensor.name):
        return 0
    return round(tensor.bytes * expert_share) if is_of_experts(tensor.name) else tensor.bytes


class Stored(Typed, Protocol):
    """A tensor with a name."""

    @property
    def name(self) -> str: ...


def read_in_part(tensors: Iterable[Stored]) -> dict[str, int]:
    """`expert_bytes` and `table_bytes` of a model's sizes."""
    found = {"expert_bytes": 0, "table_bytes": 0}
    for tensor in tensors:
        if is_of_experts(tensor.name):
            found["expert_bytes"] += tensor.bytes
        elif decoder.is_table(tensor.name) and _part(tensor.name) != "embedding":
            found["table_bytes"] += tensor.bytes
    return {key: size for key, size in found.items() if size}


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


def of_shape(model: Shape | Decoder) -> list[Tensor]:
    """All tensors by llama.cpp's names, matrices in f16 and the rest in f32, in a file's order."""
    made, width = decoder.made(model), model.hidden_size
    found = [typed("token_embd.weight", "f16", (model.vocab_size, width))]
    found += [typed(piece.name, "f16" if piece.is_matrix else "f32", piece.dims) for piece in made.pieces()]
    if not model.tied:
        found.append(typed("output.weight", "f16", (model.vocab_size, width)))
    return found

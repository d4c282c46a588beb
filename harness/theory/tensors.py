"""A model's tensors: name, type, bytes, part, and the bytes that a decode step streams. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count, islice
from typing import Protocol

from typing_extensions import NotRequired, TypedDict

from harness.theory import decoder, layer_parts
from harness.theory.decoder import Decoder
from harness.theory.ggml_types import TYPE_BY_NAME

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
        return part_of(self.name)


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


class Stored(Protocol):
    """Anything with a name, a type and bytes."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> str: ...

    @property
    def bytes(self) -> int: ...


@cache
def part_of(name: str) -> str:
    return next((part for part, names in _PARTS.items() if re.search(names, name)), "other")


def typed(name: str, type_name: str, dims: tuple[int, ...]) -> Tensor:
    """A tensor stored in a ggml type. Raises KeyError for a type ggml lacks."""
    return Tensor(name, type_name, dims, TYPE_BY_NAME[type_name].bytes_of(dims))


@cache
def is_of_experts(name: str) -> bool:
    """Whether a tensor holds experts of which a token uses only some."""
    return bool(_EXPERTS.search(name))


def streamed_bytes(tensor: Tensor, tied: bool, expert_share: float = 1.0) -> int:
    """Bytes of a tensor that one decode step reads: of experts, `expert_share` of them.

    An untied input embedding does not count (one row is read), nor does another table with a row for each
    token, nor the encoder of an encoder-decoder; a tied one is the lm_head, read in full; a second stored
    copy is not loaded.
    """
    if not _is_streamed(tensor.name, tied):
        return 0
    return round(tensor.bytes * expert_share) if is_of_experts(tensor.name) else tensor.bytes


# Of an encoder-decoder such as T5: the encoder, and K and V of cross-attention, which depend on its output
# alone. Both are read once for a prompt. Names of llama.cpp, T5 and BART.
_OF_ENCODER = re.compile(
    r"^enc\.|^(?:model\.)?encoder\.|cross_attn_[kv]\.|(?:encoder_attn|EncDecAttention)\.[kv](?:_proj)?\."
)


@cache
def is_of_encoder(name: str) -> bool:
    """Whether an encoder-decoder reads a tensor for the prompt alone, not in a decode step."""
    return bool(_OF_ENCODER.search(name))


@cache
def _is_streamed(name: str, tied: bool) -> bool:
    if is_of_encoder(name):
        return False
    part = part_of(name)
    if part == ("lm_head" if tied else "embedding"):
        return False
    return part == "embedding" or not decoder.is_table(name)


def read_in_part(tensors: Iterable[Stored]) -> dict[str, int]:
    """`expert_bytes` and `table_bytes` of a model's sizes."""
    sizes = {"expert_bytes": 0, "table_bytes": 0}
    for tensor in tensors:
        if is_of_experts(tensor.name):
            sizes["expert_bytes"] += tensor.bytes
        elif decoder.is_table(tensor.name) and part_of(tensor.name) != "embedding":
            sizes["table_bytes"] += tensor.bytes
    return {key: size for key, size in sizes.items() if size}


def bytes_by_part(tensors: Iterable[Tensor]) -> dict[str, dict[str, int]]:
    """{part: {type: bytes}}, parts in the order in which they first come."""
    by_part: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        of_part = by_part.setdefault(tensor.part, {})
        of_part[tensor.type] = of_part.get(tensor.type, 0) + tensor.bytes
    return by_part


def bytes_by_type(tensors: Iterable[Stored]) -> dict[str, int]:
    """{type: bytes}, types in the order in which they first come."""
    by_type: dict[str, int] = {}
    for tensor in tensors:
        by_type[tensor.type] = by_type.get(tensor.type, 0) + tensor.bytes
    return by_type


@lru_cache(maxsize=64)  # up to 0.2 MB each
def of_shape(model: Decoder) -> tuple[Tensor, ...]:
    """All tensors by llama.cpp's names, matrices in f16 and the rest in f32, in a file's order."""

    def whole(piece: layer_parts.Piece) -> Tensor:
        return typed(piece.name, "f16" if piece.is_matrix else "f32", piece.dims)

    vocabulary, layers = (model.vocab_size, model.hidden_size), count()
    tensors = [typed("token_embd.weight", "f16", vocabulary)]
    for layer, times in model.runs:
        alike = [whole(piece) for piece in (*layer.pieces, *layer.unused)]
        for number in islice(layers, times):
            tensors += [Tensor(f"blk.{number}.{t.name}", t.type, t.dims, t.bytes) for t in alike]
    tensors += map(whole, model.others)
    if not model.tied:
        tensors.append(typed("output.weight", "f16", vocabulary))
    return tuple(tensors)

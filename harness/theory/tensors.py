"""The tensors of a model, and their bytes in each quantization type. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import count, islice
from typing import Protocol

from typing_extensions import NotRequired, TypedDict

from harness.base import data
from harness.theory import decoder
from harness.theory.decoder import Decoder, is_quantized

# ggml's tensor types. Pure.
#
# harness/data/ggml_types.csv. Source: enum ggml_type in ggml.h, the type traits in ggml.c and the sizes of
# blocks in ggml-common.h, vendored by llama-cpp-python 0.3.36; those from 133 on are of ik_llama.cpp, as
# ggml_row_size of ik-llama-cpp-python 0.1.5 gives them. Missing numbers were removed from ggml.


@dataclass(frozen=True)
class Type:
    """`block`: elements that share their scales, in `block_bytes`; `row_bytes`: of each row besides."""

    name: str
    block: int
    block_bytes: int
    row_bytes: int = 0

    def bytes_of(self, dims: Sequence[int]) -> int:
        """Of a tensor whose rows, the last of `dims`, are whole blocks."""
        rows = math.prod(dims[:-1])
        return math.prod(dims) * self.block_bytes // self.block + rows * self.row_bytes


TYPES: dict[int, Type] = {
    int(row["number"]): Type(row["type"], *(int(row[k]) for k in ("block", "block_bytes", "row_bytes")))
    for row in data.rows("ggml_types.csv")
}
"""By ggml's type number, as in a GGUF file."""
IK_TYPES = frozenset(each.name for number, each in TYPES.items() if number >= 133)
"""Those that only ik_llama.cpp has."""
# general.file_type (llama.h, enum llama_ftype; from 135 on ik_llama.cpp's) -> the quantization's name here.
FILE_TYPES = {int(row["number"]): row["quant"] for row in data.rows("gguf_file_types.csv")}
_TYPE = {each.name: each for each in TYPES.values()}


def element_bytes(name: str) -> float:
    """Bytes of one element of a type, its block's scales included. Raises KeyError for a type ggml lacks."""
    return _TYPE[name].block_bytes / _TYPE[name].block


# A model's tensors: name, type, bytes, part, and the bytes that a decode step streams. Pure.


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


class Stored(Protocol):
    """Anything with a name, a type and bytes."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> str: ...

    @property
    def bytes(self) -> int: ...


@cache
def _part(name: str) -> str:
    return next((part for part, names in _PARTS.items() if re.search(names, name)), "other")


def typed(name: str, type_name: str, dims: tuple[int, ...]) -> Tensor:
    """A tensor stored in a ggml type. Raises KeyError for a type ggml lacks."""
    return Tensor(name, type_name, dims, _TYPE[type_name].bytes_of(dims))


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
    part = _part(name)
    if part == ("lm_head" if tied else "embedding"):
        return False
    return part == "embedding" or not decoder.is_table(name)


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


def bytes_by_type(tensors: Iterable[Stored]) -> dict[str, int]:
    """{type: bytes}, types in the order in which they first come."""
    found: dict[str, int] = {}
    for tensor in tensors:
        found[tensor.type] = found.get(tensor.type, 0) + tensor.bytes
    return found


@lru_cache(maxsize=64)  # up to 0.2 MB each
def of_shape(made: Decoder) -> tuple[Tensor, ...]:
    """All tensors by llama.cpp's names, matrices in f16 and the rest in f32, in a file's order."""

    def whole(piece: decoder.Piece) -> Tensor:
        return typed(piece.name, "f16" if piece.is_matrix else "f32", piece.dims)

    vocabulary, layers = (made.vocab_size, made.hidden_size), count()
    found = [typed("token_embd.weight", "f16", vocabulary)]
    for each, times in made.runs:
        alike = [whole(piece) for piece in (*each.pieces, *each.unused)]
        for number in islice(layers, times):
            found += [Tensor(f"blk.{number}.{t.name}", t.type, t.dims, t.bytes) for t in alike]
    found += map(whole, made.others)
    if not made.tied:
        found.append(typed("output.weight", "f16", vocabulary))
    return tuple(found)


# The ggml type that llama.cpp gives each tensor when it quantizes a model. Pure.
#
# Source: llama_tensor_get_type and its callees in llama.cpp's src/llama-quant.cpp, as of llama-cpp-python
# 0.3.36.


# ik_llama.cpp's own types of files, and the parts that take another type than the file's, in a model of one,
# of at least two and of at least four query heads to a KV head, in the first eighth of the layers, or with
# experts. Source: llama_tensor_get_type in its src/llama-quantize.cpp, as of ik-llama-cpp-python 0.1.5.
_OF_IK = {row["quant"]: row for row in data.rows("ik_quants.csv")}
# By decreasing size of Qwen1.5-7B files, where f16 and bf16 have the same size, as have q5_k_s and q5_0.
QUANTS: tuple[str, ...] = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_1", "q5_k_m", "q5_k_s", "q5_0", "q4_1", "q4_k_m", "q4_k_s"),
    *("q4_0", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k"),
)
"""Types of whole files that llama.cpp makes without an importance matrix, and that users know."""
IK_QUANTS: tuple[str, ...] = tuple(_OF_IK)
"""Types of whole files that only ik_llama.cpp makes and loads."""
_OTHERS = (
    *("iq4_nl", "iq4_xs", "iq3_m", "iq3_s", "iq3_xs", "iq3_xxs", "q2_k_s", "iq2_m", "iq2_s", "iq2_xs"),
    *("iq2_xxs", "iq1_m", "iq1_s", "tq2_0", "tq1_0", "mxfp4_moe"),
)
ALL_QUANTS: tuple[str, ...] = (*QUANTS, *_OTHERS, *IK_QUANTS)
# The type of every matrix without a rule below: the file's, whose name may have a mix behind (q4_k_m).
_BASE = {quant: re.sub(r"^(q\d_k)_[sml]$", r"\1", quant) for quant in ALL_QUANTS}
_BASE |= {"iq3_m": "iq3_s", "iq3_xs": "iq3_s", "iq2_m": "iq2_s", "iq2_s": "iq2_xs", "mxfp4_moe": "mxfp4"}

UNQUANTIZED = ("f32", "f16", "bf16")
_ONE_AND_TWO_BITS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq1_s", "iq1_m")
# With eight experts, as in Mixtral, the attention's output is small in comparison and gets more bits.
_EIGHT = (
    *("q2_k", "iq3_xs", "iq3_xxs", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m", "iq3_s", "iq3_m"),
    "iq4_xs",
)
# Types in blocks of 256 -> the fallback of a matrix whose row length is not a multiple of 256.
_FALLBACK = {
    "q6_k": "q8_0",
    "q5_k": "q5_1",
    "q4_k": "q5_0",
    **dict.fromkeys(("q3_k", "q2_k", "tq1_0", "tq2_0"), "q4_0"),
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    **dict.fromkeys(
        ("iq2_k", "iq2_kl", "iq3_k", "iq3_ks", "iq3_kt", "iq4_ks", "iq4_kss", "iq4_kt"), "iq4_nl"
    ),
    **dict.fromkeys(("iq4_k", "iq5_ks"), "q5_0"),
    "iq5_k": "q6_0",
    "iq6_k": "q8_0",
}
_FALLBACK_OF_IK = _FALLBACK | {"q5_k": "q6_0"}
# Q3_K fell back to Q4_1 when the published files of Qwen1.5 were made (llama.cpp 1182cf4, January 2024): 1.8B
# and 14B have such rows in ffn_down. All else was as today for untied models, such as these.
_FALLBACK_AS_PUBLISHED = _FALLBACK | {"q3_k": "q4_1"}


@dataclass(frozen=True)
class Mix:
    """The inputs of the rules besides a model's tensors. `arch`: llama.cpp's name. `n_gqa`: query heads to a
    KV head. `imatrix`: with an importance matrix, as most published files are. `as_published`: by the rules
    of the published Qwen1.5 files, not today's."""

    arch: str
    layers: int
    n_gqa: int
    experts: int = 0
    imatrix: bool = False
    as_published: bool = False

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp takes the model for a 70B, whatever its width."""
        return self.layers == 80 and (
            self.arch in ("qwen2", "olmo", "deci")
            or (self.arch == "llama" and self.n_gqa > 1 and self.experts != 8)
        )


@lru_cache(maxsize=64)
def quantized(
    made: Decoder, quant: str, as_published: bool = False, imatrix: bool = False
) -> tuple[Tensor, ...]:
    """All tensors of a model as llama.cpp stores them in a file of type `quant`, one of ALL_QUANTS.

    Raises KeyError for an unknown quant.
    """
    mix = Mix(made.arch, made.count, _n_gqa(made), made.experts, imatrix, as_published)
    return retyped(of_shape(made), quant, mix)


def _n_gqa(made: Decoder) -> int:
    """The first layer's value, as in llama.cpp: 0 if files give heads by layer and the first has none."""
    by_layer = made.arch in ("granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe")
    return 0 if by_layer and not made.runs[0][0].cache.k else decoder.queries_to_a_key(made)


def model_bytes(made: Decoder, quant: str, as_published: bool = False) -> int:
    """Bytes of all tensors of such a file, as llama.cpp prints them. Raises KeyError as `quantized`."""
    return sum(tensor.bytes for tensor in quantized(made, quant, as_published))


def retyped(tensors: Sequence[Tensor], quant: str, mix: Mix) -> tuple[Tensor, ...]:
    """All tensors of a file, by llama.cpp's names, as llama.cpp would store them in a file of type `quant`.
    Tensors that are not quantized keep their type. Raises KeyError for an unknown quant."""
    base = _BASE[quant]
    rules = _Rules(
        quant,
        base,
        mix,
        tied=all(tensor.name != "output.weight" for tensor in tensors),
        values=sum(_quantized_part(tensor.name) == "attn_v" for tensor in tensors),
    )

    def stored(tensor: Tensor) -> Tensor:
        return typed(tensor.name, base if base in UNQUANTIZED else rules.type_of(tensor), tensor.dims)

    # llama.cpp goes by layer, then by name, whatever the order in the file.
    changed = [tensor for tensor in tensors if is_quantized(tensor.name, tensor.dims)]
    changed.sort(key=lambda t: (layer_of(t.name), t.name))
    found = {tensor.name: stored(tensor) for tensor in changed}
    return tuple(found.get(tensor.name, tensor) for tensor in tensors)


def type_of_file(tensors: Sequence[Tensor], named: str | None) -> str | None:
    """The type of a whole file: `named`, one of ALL_QUANTS, if most of its layers' weights have the type that
    such a file has, else that of most weights. "f16-q8_0": 16 bits, but not all of it. None: there are
    no matrices."""
    matrices = [tensor for tensor in tensors if len(tensor.dims) > 1]
    elements: Counter[str] = Counter()
    for tensor in [t for t in matrices if layer_of(t.name) >= 0] or matrices:
        elements[tensor.type] += tensor.elements
    if not elements:
        return None
    most = max(elements, key=elements.__getitem__)
    if most in UNQUANTIZED:
        packed = sorted({tensor.type for tensor in matrices} - set(UNQUANTIZED))
        return "-".join([most, *packed[:1]])
    base = _BASE.get(named, named) if named else None
    has_it = most in (base, _FALLBACK.get(base or ""), _FALLBACK_AS_PUBLISHED.get(base or ""))
    return named if has_it or (named, most) == ("iq3_xs", "iq3_xxs") else most


_FUSED = re.compile(r"attn_(qkv|kv_b)\.")


def _quantized_part(name: str) -> str:
    """The part whose rule llama.cpp applies: q, k and v in one matrix count as v, and the embedding of a
    drafting layer as any matrix."""
    if not name.endswith(".weight"):  # a bias has no type of its own
        return "other"
    part = "attn_v" if _FUSED.search(name) else _part(name)
    return "other" if part == "embedding" and layer_of(name) >= 0 else part


def _more_bits(number: int, count: int) -> bool:
    """The first eighth, the last, and every third between."""
    eighth = count // 8
    return number < eighth or number >= 7 * count // 8 or (number - eighth) % 3 == 2


@dataclass
class _Rules:
    """The rules of one file, which count tensors as they come. `values`: tensors that count as attn_v."""

    quant: str
    base: str
    mix: Mix
    tied: bool
    values: int
    seen: Counter[str] = field(default_factory=Counter)

    def type_of(self, tensor: Tensor) -> str:
        part, n_in = _quantized_part(tensor.name), tensor.dims[-1]
        number = self.seen[part]
        if self.mix.experts > 1 and part.startswith("ffn") and self.quant not in _ONE_AND_TWO_BITS:
            number = layer_of(tensor.name)
        self.seen[part] += 1
        if self.quant in _OF_IK:
            chosen = self._of_ik(part, number, n_in)
        elif part == "lm_head" or (self.tied and part == "embedding"):
            chosen = self._lm_head(n_in)
        elif self.quant == "mxfp4_moe":
            chosen = "mxfp4" if len(tensor.dims) == 3 and tensor.dims[0] > 1 else "q8_0"
        elif part == "embedding":
            chosen = self._embedding()
        elif self.quant in _ONE_AND_TWO_BITS:
            chosen = self._one_or_two_bits(part, number)
        else:
            chosen = self._usual(part, number, tensor.name)
        if n_in % _TYPE[chosen].block:
            fallback = _FALLBACK_AS_PUBLISHED if self.mix.as_published else _FALLBACK
            fallback = _FALLBACK_OF_IK if self.quant in _OF_IK else fallback
            chosen = fallback.get(chosen, chosen)
            chosen = "f16" if n_in % _TYPE[chosen].block else chosen
        return chosen

    def _of_ik(self, part: str, number: int, n_in: int) -> str:
        """Not of a Llama 3 of 8B or 70B in iq5_k or iq5_ks, which has two tensors of a layer otherwise."""
        mix, several = self.mix, self.mix.experts >= 4
        column = part
        if part == "lm_head" or (self.tied and part == "embedding"):
            if n_in % _TYPE["q6_k"].block:
                return "q8_0"
            column = "tied_lm_head" if self.tied else "lm_head"
        elif several and part in ("attn_v", "attn_k"):
            return "q8_0"
        elif part == "attn_v" and mix.is_70b:
            return "iq5_k" if self.quant == "iq3_k" else self.base
        elif part == "attn_v":
            column = {0: "attn_v", 1: "attn_v_of_2"}.get(mix.n_gqa // 2, "attn_v_of_4")
        elif part == "attn_output" and (several or mix.n_gqa >= 4):
            column = "attn_output_of_experts" if several else "attn_output_of_4"
        elif part == "ffn_down" and number < mix.layers // 8 and _OF_IK[self.quant]["first_ffn_down"]:
            column = "first_ffn_down"
        return _OF_IK[self.quant].get(column) or self.base

    def _lm_head(self, n_in: int) -> str:
        if self.quant == "mxfp4_moe" or n_in % _TYPE[self.base].block:
            return "q8_0"
        if self.quant == "iq3_xxs" or (self.quant in _ONE_AND_TWO_BITS):
            return "q5_k"
        return "q8_0" if self.base == "q8_0" else "q6_k"

    def _embedding(self) -> str:
        if self.quant in ("iq2_xxs", "iq2_xs", "iq1_s", "iq1_m"):
            return "q2_k"
        if self.quant in ("iq2_s", "iq2_m", "iq3_xxs"):
            return "iq3_s"
        return "q4_k" if self.quant in ("tq1_0", "tq2_0") else self.base

    def _one_or_two_bits(self, part: str, number: int) -> str:
        mix, wider = self.mix, self.quant in ("iq2_s", "iq2_m")
        if part == "attn_v":
            return "q4_k" if mix.n_gqa >= 4 or mix.experts >= 4 else "iq3_s" if wider else "q2_k"
        if part == "attn_k" and mix.experts == 8:
            return "q4_k"
        if part == "ffn_down" and number < mix.layers // 8:
            return "iq3_s" if wider else "q2_k"
        if part == "attn_output":
            if mix.experts == 8:
                return "q5_k"
            return "iq3_s" if wider else "iq2_xxs" if self.quant in ("iq1_s", "iq1_m") else self.base
        return self.base

    def _usual(self, part: str, number: int, name: str) -> str:
        if part == "attn_v":
            return self._value(number)
        if part in ("attn_k", "attn_q"):
            if part == "attn_k" and self.mix.experts == 8:
                return "q8_0"
            return {"iq3_xs": "iq3_xxs", "iq3_xxs": "iq2_s"}.get(self.quant, self.base)
        if part == "ffn_down":
            return self._down(number)
        if part == "attn_output":
            if self.mix.experts == 8:
                return "q5_k" if self.quant in _EIGHT else self.base
            more = {"q2_k": "q3_k", "iq3_xxs": "iq3_s", "q3_k_m": "q4_k", "q3_k_l": "q5_k", "iq3_m": "q4_k"}
            return more.get(self.quant, self.base)
        between = self.mix.layers // 8 <= number < 7 * self.mix.layers // 8
        if part in ("ffn_gate", "ffn_up") and self.quant == "iq3_xs" and between:
            return "iq3_xxs"
        return self.base

    def _value(self, number: int) -> str:
        """Also of q, k and v in one matrix."""
        mix, chosen = self.mix, self.base
        many = mix.n_gqa >= 4
        if self.quant == "q2_k":
            chosen = "q4_k" if many else "q3_k"
        elif self.quant == "iq3_xxs":
            chosen = "q4_k" if many else "iq3_xxs" if mix.imatrix else "iq3_s"
        elif (self.quant in ("q2_k_s", "iq3_xs", "iq3_s") and many) or self.quant == "iq3_m":
            chosen = "q4_k"
        elif self.quant == "q3_k_m":
            chosen = "q5_k" if number < 2 else "q4_k"
        elif self.quant == "q3_k_l" or (self.quant in ("iq4_nl", "iq4_xs") and many):
            chosen = "q5_k"
        elif self.quant in ("q4_k_m", "q5_k_m") and _more_bits(number, self.values):
            chosen = "q6_k"
        elif self.quant == "q4_k_s" and number < 4:
            chosen = "q5_k"
        if mix.is_70b and chosen in ("q3_k", "q4_k"):
            chosen = "q5_k"
        return "q8_0" if mix.experts == 8 else chosen

    def _down(self, number: int) -> str:
        layers, first = self.mix.layers, number < self.mix.layers // 8
        more = _more_bits(number, layers)
        imatrix, quant = self.mix.imatrix, self.quant
        if quant == "q2_k":
            return "q3_k"
        if quant == "iq3_xxs" and not imatrix:
            return "q4_k" if first else "q3_k"
        if quant == "q3_k_m":
            return "q5_k" if number < layers // 16 else "q4_k"
        if quant == "q3_k_l":
            return "q5_k"
        if quant in ("q4_k_m", "q5_k_m") and more:
            return "q6_k"
        if quant == "iq3_m" and (first or (self.mix.experts == 8 and more)):
            return "q4_k"
        of_first = {"q2_k_s": "q4_k", "q4_k_s": "q5_k"}
        of_first |= {"q4_0": "q4_1", "q5_0": "q5_1"} if imatrix else {"iq4_nl": "q5_k", "iq4_xs": "q5_k"}
        return of_first.get(quant, self.base) if first else self.base


@cache
def layer_of(name: str) -> int:
    """The number of a tensor's layer, by its name in llama.cpp; -1: it is of none."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


# Bytes of a checkpoint's weights once torch has loaded them, as typed or as bitsandbytes packs them. Pure.
#
# Source: bitsandbytes 0.50's Linear8bitLt and Linear4bit, as transformers substitutes them for every linear
# layer but lm_head; embeddings, norms and biases keep the requested dtype.


ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_LOADED_BLOCK = 64  # weights that share a scale (absmax) in nf4 and fp4
_NESTED_BLOCK = 256  # scales that share one of their own, with double_quant
_SCALE_BYTES = 4
LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def loaded_bytes(
    tensors: Iterable[Tensor], dtype: str, quant: str | None = None, double_quant: bool = False
) -> int:
    """Bytes of all tensors, scales included. Tables of nf4 and fp4 (64 bytes a layer) are left out.

    `dtype`: bf16, fp16 or fp32. `quant`: int8, nf4 or fp4; None for none. Raises KeyError for another dtype.
    """
    element_bytes = ELEMENT_BYTES[dtype]

    def bytes_of(dims: tuple[int, ...], is_linear: bool) -> int:
        if quant and is_linear:
            return _packed_bytes(dims, quant, double_quant)
        return math.prod(dims) * element_bytes

    return sum(times * bytes_of(*alike) for alike, times in _alike(tensors).items())


def _alike(tensors: Iterable[Tensor]) -> Counter[tuple[tuple[int, ...], bool]]:
    """The number of tensors by their dims, and whether they are matrices of a linear layer."""
    return Counter((t.dims, t.part in LINEAR and len(t.dims) == 2) for t in tensors)


def _packed_bytes(dims: tuple[int, ...], quant: str, double_quant: bool) -> int:
    elements = math.prod(dims)
    if quant == "int8":  # a scale a row
        return elements + dims[0] * _SCALE_BYTES
    scales = math.ceil(elements / _LOADED_BLOCK)
    packed = math.ceil(elements / 2)
    if not double_quant:
        return packed + scales * _SCALE_BYTES
    return packed + scales + math.ceil(scales / _NESTED_BLOCK) * _SCALE_BYTES


# GPTQ and AWQ checkpoints: their settings, and the bytes of each kind of tensor. Pure.
#
# Layout: auto-gptq 0.7.1 (qlinear_cuda_old.py) and autoawq 0.2.9 (gemm.py); both pack 32 bits into an int32.


FORMATS = ("gptq", "awq")
USUAL_GROUP = 128
KINDS = ("qweight", "qzeros", "scales", "g_idx")  # by the ends of their names
_FLOAT16_BYTES, _INT32_BYTES = 2, 4


@dataclass(frozen=True)
class Packing:
    """How the linear layers of a checkpoint are quantized. `method`: gptq or awq. `group_size`: input rows
    that share a scale; -1: all of a column. `act_order`: rows are grouped by importance (desc_act).
    `layout`: gptq, gptq_v2 or marlin; gemm, gemv, gemv_fast or marlin."""

    method: str
    bits: int = 4
    group_size: int = USUAL_GROUP
    symmetric: bool = True
    act_order: bool = False
    layout: str = ""

    @property
    def words(self) -> str:
        """The name in tables, such as gptq-int4."""
        return f"{self.method}-int{self.bits}"


def linears(made: Decoder) -> Iterator[Tensor]:
    """The matrices that are packed, (n_out, n_in) each: all but embedding and lm_head."""
    return (t for t in of_shape(made) if t.part in LINEAR and len(t.dims) == 2)


def packed_bytes(tensors: Iterable[Tensor], packing: Packing) -> dict[str, int]:
    """Bytes by kind, `f16` those of all that is not packed. `tensors`: of a 16- or 32-bit model."""
    found: Counter[str] = Counter()
    for (dims, is_linear), times in _alike(tensors).items():
        elements = math.prod(dims)
        if not is_linear:
            found["f16"] += times * elements * _FLOAT16_BYTES
            continue
        n_out, n_in = dims
        groups = 1 if packing.group_size == -1 else -(-n_in // packing.group_size)
        found["qweight"] += times * (elements * packing.bits // 8)
        found["qzeros"] += times * (groups * n_out * packing.bits // 8)
        found["scales"] += times * groups * n_out * _FLOAT16_BYTES
        if packing.method == "gptq":
            found["g_idx"] += times * n_in * _INT32_BYTES
    return {kind: found[kind] for kind in (*KINDS, "f16") if found[kind]}


MXFP4 = "mxfp4"
_NEVER_FP8 = ("embedding", "lm_head", "router", "norm")


def as_released(model: Decoder, method: str, packing: Packing | None) -> list[Tensor]:
    """The tensors of a checkpoint as its config.json says that they are quantized, without FP8's scales.
    `method`: quant_method. Empty for other methods than mxfp4 and fp8, and gptq and awq of a dense model."""
    matrices = [each for each in of_shape(model) if each.type == "f16" and each.part not in _NEVER_FP8]
    if packing and all(len(matrix.dims) == 2 for matrix in matrices):
        linear = [matrix for matrix in matrices if matrix.part in LINEAR]
        made = {t.name: replace(t, type=packing.words, bytes=_packed([t], packing)) for t in linear}
    elif method == MXFP4:
        made = {t.name: typed(t.name, MXFP4, t.dims) for t in matrices if is_of_experts(t.name)}
    elif method == "fp8":
        made = {t.name: replace(t, type="fp8", bytes=t.elements) for t in matrices}
    else:
        return []
    return [made.get(each.name, typed(each.name, "bf16", each.dims)) for each in of_shape(model)]


def _packed(tensors: Iterable[Tensor], packing: Packing) -> int:
    return sum(packed_bytes(tensors, packing).values())

"""The ggml type that llama.cpp gives each tensor when it quantizes a model. Pure.

Source: llama_tensor_get_type and its callees in llama.cpp's src/llama-quant.cpp, as of llama-cpp-python
0.3.36.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

from harness.base import data
from harness.theory import decoder
from harness.theory.decoder import Decoder
from harness.theory.ggml_types import TYPE_BY_NAME
from harness.theory.layer_parts import is_quantized
from harness.theory.tensors import Tensor, of_shape, part_of, typed

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
    model: Decoder, quant: str, as_published: bool = False, imatrix: bool = False
) -> tuple[Tensor, ...]:
    """All tensors of a model as llama.cpp stores them in a file of type `quant`, one of ALL_QUANTS.

    Raises KeyError for an unknown quant.
    """
    mix = Mix(model.arch, model.count, _n_gqa(model), model.experts, imatrix, as_published)
    return retyped(of_shape(model), quant, mix)


def _n_gqa(model: Decoder) -> int:
    """The first layer's value, as in llama.cpp: 0 if files give heads by layer and the first has none."""
    by_layer = model.arch in ("granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe")
    return 0 if by_layer and not model.runs[0][0].cache.k else decoder.queries_to_a_key(model)


def model_bytes(model: Decoder, quant: str, as_published: bool = False) -> int:
    """Bytes of all tensors of such a file, as llama.cpp prints them. Raises KeyError as `quantized`."""
    return sum(tensor.bytes for tensor in quantized(model, quant, as_published))


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
    retyped_by_name = {tensor.name: stored(tensor) for tensor in changed}
    return tuple(retyped_by_name.get(tensor.name, tensor) for tensor in tensors)


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
    part = "attn_v" if _FUSED.search(name) else part_of(name)
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
        if n_in % TYPE_BY_NAME[chosen].block:
            fallback = _FALLBACK_AS_PUBLISHED if self.mix.as_published else _FALLBACK
            fallback = _FALLBACK_OF_IK if self.quant in _OF_IK else fallback
            chosen = fallback.get(chosen, chosen)
            chosen = "f16" if n_in % TYPE_BY_NAME[chosen].block else chosen
        return chosen

    def _of_ik(self, part: str, number: int, n_in: int) -> str:
        """Not of a Llama 3 of 8B or 70B in iq5_k or iq5_ks, which has two tensors of a layer otherwise."""
        mix, several = self.mix, self.mix.experts >= 4
        column = part
        if part == "lm_head" or (self.tied and part == "embedding"):
            if n_in % TYPE_BY_NAME["q6_k"].block:
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
        if self.quant == "mxfp4_moe" or n_in % TYPE_BY_NAME[self.base].block:
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
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1

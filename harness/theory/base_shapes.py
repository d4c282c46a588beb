"""The known shape of a finetune or another variant, by its name: which one, and why. Pure.

A finetune has its base's shape. A name is taken for a known shape if it has the words of its family in one
piece, and every size that it states is the shape's: anything else is refused with the nearest known names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.base import data
from harness.theory import decoder, names
from harness.theory.decoder import Decoder
from harness.theory.ggml_quants import ALL_QUANTS
from harness.theory.names import Named, NotUnderstood

LONGEST = 160  # characters of a hub's owner, repository and tag
SIZE_TOLERANCE = 0.12  # of a stated size, where a shape's own name states none: 24b is 23.6e9 parameters
_NEAREST = 3

_RULES = data.table("aliases.toml")["variants"]
_SITE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co|ollama\.com(?:/library)?)/", re.IGNORECASE
)
_FORMAT = re.compile(
    r"i?q\d\w*|tq\d\w*|bf16|fp?(?:32|16|8)|mxfp4|nvfp4|int[48]|w\d+a\d+|[2-8](?:\.\d+)?(?:bit|bpw)"
    r"|awq|gptq|gguf|ggml|exl[23]|mlx|bnb|qat|imat|imatrix|ud|i1|dynamic"
)
# A type as files and tags have it: Q4_K_M, UD-Q4_K_XL, i1-IQ2_M, f16, fp16, MXFP4.
GGUF_TYPE = r"(?:ud-|i1-)?(i?q[1-9](?:_[0-9a-z]+)*|tq[12]_0|bf16|fp?16|fp?32|mxfp4(?:_moe)?|nvfp4)"
_SIZE = re.compile(r"(?:\d+x|[ae])?\d+(?:\.\d+)?[bt]|a?\d{2,3}m")
_PLAIN_SIZE = re.compile(r"(\d+(?:\.\d+)?)([mbt])")
_UNIT = {"m": 1e6, "b": 1e9, "t": 1e12}
_VERSION = re.compile(r"v?\d{1,2}(?:\.\d+)*")


class _Typed(NamedTuple):
    """A typed name in words, and the words that say how its weights are stored."""

    words: list[str]
    formats: list[str]

    @property
    def sizes(self) -> set[str]:
        return {word for word in self.words if _SIZE.fullmatch(word)}


class _Known(NamedTuple):
    """A known name: the words before its sizes, the sizes, and the words after them."""

    name: str
    stem: list[str]
    sizes: set[str]
    after: set[str]


def understood(text: str, shapes: Mapping[str, Decoder], otherwise: str = "") -> Named:
    """The model with a name, or with the shape of that name's base; then its `note` says so.

    `otherwise`: what to do for an unknown shape. Raises NotUnderstood.
    """
    spelled = _spelled(text) if len(text) <= LONGEST else ""
    if not _is_latest(text.strip().lower()):
        try:
            return names.named(text, shapes, otherwise)
        except NotUnderstood:
            if not spelled:
                raise
    typed = _typed(spelled)
    if encodes := next((word for word in typed.words if word in _RULES["encoders"]), None):
        raise NotUnderstood(f'by its name ("{encodes}") it is no decoder: it generates no tokens')
    best = _best(typed, shapes)
    if len(best) > 1:
        raise NotUnderstood(names.did_you_mean([base.name for base in best]), ambiguous=True)
    if best:
        shape = best[0]
        named = names.with_context(shape.name, shapes[shape.name], set(typed.words), tuned=":" in text)
    else:
        try:
            named = names.named("-".join(typed.words), shapes, otherwise)
        except NotUnderstood as why:
            raise NotUnderstood(_nearest(typed, shapes, otherwise) or why.hint, why.ambiguous) from why
        shape = _split(named.name)
    return named._replace(note=_note(text, named, typed, shape))


def formats(text: str) -> list[str]:
    """The words of a name that say how its weights are stored: gguf, gptq, q4_k_m; empty for 16 bits."""
    return _typed(_spelled(text)).formats


def without_site(text: str) -> str:
    """A name without the address of the hub before it."""
    return _SITE.sub("", text.strip())


def is_path(text: str) -> bool:
    """Whether a text is a path, and no name with its owner."""
    name = without_site(text)
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _spelled(text: str) -> str:
    """The name without site and owner, and with the spellings of known names; empty for a path."""
    if is_path(text):
        return ""
    name = re.sub(r"\s+", "-", text.strip().lower().rpartition("/")[2])
    owner, copied, rest = name.partition("_")  # as bartowski copies: microsoft_Phi-4-GGUF
    name = rest if copied and owner in names.OWNERS else name
    if _is_latest(name):
        family = name.removesuffix(":latest")
        name = f"{family}:{_RULES['latest'][family]}"
    for pattern, plain in _RULES["spellings"]:
        name = re.sub(pattern, plain, name)
    return name


def _is_latest(name: str) -> bool:
    """Whether it is Ollama's name for one size of several."""
    family, _, tag = name.rpartition(":")
    return tag == "latest" and family in _RULES["latest"]


def _typed(name: str) -> _Typed:
    parts = [part for part in re.split(r"[-:]+", name) if part]
    formats = [part for part in parts if _FORMAT.fullmatch(part)]
    plain = "-".join(part for part in parts if part not in formats)
    return _Typed(names.word_list(plain), formats)


def _split(name: str) -> _Known:
    words = names.word_list(name)
    first = next((index for index, word in enumerate(words) if _SIZE.fullmatch(word)), len(words))
    sizes = {word for word in words if _SIZE.fullmatch(word)}
    return _Known(name, words[:first], sizes, set(words[first:]) - sizes)


def _best(typed: _Typed, shapes: Mapping[str, Decoder]) -> list[_Known]:
    """Those that fit with the most words."""
    ranks = {
        shape.name: (len(shape.stem), len(shape.after & set(typed.words)), len(shape.sizes))
        for shape in map(_split, shapes)
        if _fits(shape, typed, shapes)
    }
    return [_split(name) for name, rank in ranks.items() if rank == max(ranks.values())]


def _fits(shape: _Known, typed: _Typed, shapes: Mapping[str, Decoder]) -> bool:
    end = _after(shape.stem, typed.words)
    if end is None or not (shape.after <= set(typed.words) or shape.name in _RULES["defaults"]):
        return False
    if _is_next(end, typed) and typed.words[end] not in shape.after:
        return False
    if shape.sizes:
        return _largest(typed.sizes) in (_largest(shape.sizes), None) and bool(
            typed.sizes and typed.sizes <= shape.sizes
        )
    if typed.sizes:
        stated = _largest(typed.sizes)
        return stated is not None and abs(stated / _parameters(shape, shapes) - 1) < SIZE_TOLERANCE
    return _others(typed, shape) <= set(_RULES["tunings"])


def _is_next(end: int, typed: _Typed) -> bool:
    """Whether a version follows, as of the next of the family: mistral-small-4."""
    return bool(_VERSION.fullmatch("".join(typed.words[end : end + 1])))


def _after(stem: Sequence[str], words: Sequence[str]) -> int | None:
    """Where in `words` the stem ends; None if it is not there in one piece."""
    starts = range(len(words) - len(stem) + 1) if stem else ()
    return next((start + len(stem) for start in starts if words[start : start + len(stem)] == stem), None)


def _largest(sizes: set[str]) -> float | None:
    """The largest of the sizes in parameters; None where all are of active ones, or of one expert."""
    plain = [float(match[1]) * _UNIT[match[2]] for size in sizes if (match := _PLAIN_SIZE.fullmatch(size))]
    return max(plain, default=None)


def _parameters(shape: _Known, shapes: Mapping[str, Decoder]) -> int:
    return decoder.parameters(shapes[shape.name])


def _others(typed: _Typed, shape: _Known) -> set[str]:
    """Words of the typed name that the known one lacks, but for those that every name may have."""
    return set(typed.words) - {*shape.stem, *shape.sizes, *shape.after} - names.IGNORED


def _nearest(typed: _Typed, shapes: Mapping[str, Decoder], otherwise: str) -> str | None:
    """The nearest sizes of the family, for sizes that are not known; None for another family."""
    stated = _largest(typed.sizes)
    ends = {shape.name: _after(shape.stem, typed.words) for shape in map(_split, shapes)}
    stems = [len(_split(name).stem) for name, end in ends.items() if end and not _is_next(end, typed)]
    least = max(stems, default=1)
    family = [
        shape
        for shape in map(_split, shapes)
        if len(shape.stem) >= least and _after(shape.stem[:least], typed.words) is not None
    ]
    if stated is None or not family:
        return None
    family.sort(key=lambda shape: abs(math.log(_parameters(shape, shapes) / stated)))
    sizes = " ".join(sorted(typed.sizes))
    close = names.listed([shape.name for shape in family[:_NEAREST]])
    then = f"; {otherwise}" if otherwise else ""
    return f"none of its family is known with {sizes} parameters; nearest: {close}{then}"


def _note(text: str, named: Named, typed: _Typed, shape: _Known) -> str:
    """Which shape was taken, and why."""
    size, context = decoder.parameters(named.made) / 1e9, named.made.context
    sentences = [f"{text}: taken for {named.name} ({size:.3g}B parameters, {context:,} tokens of context)"]
    sentences += [*_reasons(typed, shape)]
    return "; ".join(sentences)


def _reasons(typed: _Typed, shape: _Known) -> Iterator[str]:
    others = sorted(_others(typed, shape))
    if shape.name in _RULES["defaults"] and not shape.after <= set(typed.words):
        yield "its version is not said, and shapes of versions differ"
    yield "a finetune has the shape of its base, but may have another context or vocabulary"
    if seen := [word for word in others if word in _RULES["senses"]]:
        yield f"{' '.join(seen)}: the text model alone, without what sees or hears"
    if typed.formats:
        types = [format for format in typed.formats if format in ALL_QUANTS]
        stored = f"--quant {types[0]}" if types else "--quant or --bpw"
        yield f"{' '.join(typed.formats)} says how weights are stored, which {stored} sets"

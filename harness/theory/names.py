"""Map model names as people type them, of the hub or of Ollama, to the known shapes. Pure.

A name is a set of words: Qwen2.5-7B-Instruct and qwen2.5:7b-instruct are {qwen, 2.5, 7b, instruct}. Every
word must belong to the shape or be one that does not change it. A name that fits several shapes is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.base import data
from harness.base.text import alike
from harness.theory.decoder import Decoder
from harness.theory.ggml_quants import ALL_QUANTS
from harness.theory.hf_config import SHAPES

LONGEST = 64  # characters; the comparison is quadratic in length, and no known name is that long
MOST_LISTED = 12

_ALIASES = data.table("aliases.toml")["models"]
OWNERS = set(_ALIASES["owners"])
IGNORED, _ONLY_IF_TYPED = set(_ALIASES["ignored"]), set(_ALIASES["only_if_typed"])


class NotUnderstood(ValueError):
    """An unknown or ambiguous name; `hint`: what to do."""

    def __init__(self, hint: str, ambiguous: bool = False) -> None:
        super().__init__(hint)
        self.hint = hint
        self.ambiguous = ambiguous

    def sentence(self, kind: str, shown: str) -> str:
        """`unknown model qwen1.5-7; did you mean qwen1.5-7b?`"""
        return f"{'ambiguous' if self.ambiguous else 'unknown'} {kind} {shown}; {self.hint}"


class Named(NamedTuple):
    """Any model, and the name it goes by here. `note`: why a name stands for another; empty: it does not."""

    name: str
    made: Decoder
    note: str = ""


def named(text: str, shapes: Mapping[str, Decoder] = SHAPES, otherwise: str = "") -> Named:
    """The model with a name; names of `shapes` in lower case match as they are.

    Raises NotUnderstood, with a hint from the same family. `otherwise`: what to do for an unknown shape.
    """
    name = text.strip().lower()
    if name in shapes:
        return Named(name, shapes[name])
    words = _words(name)
    if not words or len(text) > LONGEST:
        raise NotUnderstood(_see_list(otherwise))
    if quant := re.search(rf"[-_:. ]({'|'.join(sorted(ALL_QUANTS, key=len, reverse=True))})$", name):
        base = named(name[: quant.start()], shapes, otherwise)
        raise NotUnderstood(f"the shape is {base.name}; {quant[1]} is a quantization, which is named apart")
    core = words - IGNORED
    core -= {date for word, date in _ALIASES["released"].items() if word in core}
    words_of = {shape: _words(shape) - IGNORED for shape in shapes}
    exact = [shape for shape in shapes if words_of[shape] == core]
    names_family = core & _families(shapes) and not core & set(_ALIASES["first_is_another"])
    wider = [shape for shape in shapes if core < words_of[shape]] if names_family else []
    fitting = exact or [shape for shape in wider if not (words_of[shape] - core) & _ONLY_IF_TYPED]
    if len(fitting) == 1:
        return with_context(fitting[0], shapes[fitting[0]], words, tuned=":" in name)
    if fitting:
        few = len(fitting) <= MOST_LISTED
        hint = did_you_mean(fitting) if few else f"{len(fitting)} are known: see harness theory --list-models"
        raise NotUnderstood(hint, ambiguous=True)
    raise NotUnderstood(_hint(name, core, words_of, otherwise))


def did_you_mean(names: Sequence[str]) -> str:
    return f"did you mean {listed(names, 'or')}?"


def listed(names: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    return f" {last} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _see_list(otherwise: str) -> str:
    return "see harness theory --list-models" + (f", or {otherwise}" if otherwise else "")


def _words(name: str) -> set[str]:
    """The words of a name in lower case; none of a path."""
    owner, slash, rest = name.rpartition("/")
    if slash and owner not in OWNERS:
        return set()
    return set(word_list(rest))


def word_list(name: str) -> list[str]:
    """The words of a name without an owner, in its order."""
    parts = re.split(r"[\s_:-]+", name)
    matches = [re.fullmatch(r"([a-z]{2,})(\d[\d.]*)", part) for part in parts]
    pairs = [match.groups() if match else (part,) for match, part in zip(matches, parts, strict=True)]
    return [word for pair in pairs for word in pair if word]


def _families(shapes: Iterable[str]) -> set[str]:
    """The words that names begin with: qwen, llama, mistral."""
    return {match[0] for name in shapes if (match := re.match("[a-z]+", name))} - _ONLY_IF_TYPED


def with_context(name: str, decoder: Decoder, words: set[str], tuned: bool) -> Named:
    """Tuned models and base models may differ in context alone. A tag of Ollama's is a tuned model."""
    suffix = "base" if "base" in words else "instruct" if tuned or "instruct" in words else None
    version = next((word for word in ("2", "2.5", "3") if word in words and "qwen" in words), "")
    differs = {(row["qwen"], row["kind"]): row["context"] for row in _ALIASES["contexts"]}
    context = differs.get((version, suffix or ""), decoder.context)
    if context == decoder.context or decoder is not SHAPES.get(name):
        return Named(name, decoder)
    return Named(f"{name}-{suffix}", replace(decoder, context=context))


def _hint(name: str, core: set[str], words_of: Mapping[str, set[str]], otherwise: str) -> str:
    """A suggestion from the same family, else what to do."""
    starts = {match[0] for word in re.split(r"[\s_:/-]+", name) if (match := re.match("[a-z]+", word))}
    unknown = (family for family in _ALIASES["not_known_yet"] if family.lower() not in _families(words_of))
    if other := next((family for family in unknown if family.lower() in starts), None):
        which = f"{other} is not known yet"
        if set(words_of) <= set(SHAPES):
            which = f"no {other} is among the dense models that can be run (harness theory knows more)"
        return which + (f"; {otherwise}" if otherwise else "")
    families = _families(words_of)
    family = core & families or {near for start in starts for near in alike(start, families)}
    inside = [shape for shape, words in words_of.items() if words & family]
    if within := [shape for shape in inside if words_of[shape] < core]:
        closest = max(within, key=lambda shape: len(words_of[shape]))
        extra = " ".join(sorted(core - words_of[closest]))
        return f'{closest} is known, "{extra}" is not' + (f"; {otherwise}" if otherwise else "")
    if near := alike(name, inside):
        return did_you_mean(near)
    return _see_list(otherwise)

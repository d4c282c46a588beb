"""Map model names as people type them, of the hub or of Ollama, to the known shapes. Pure.

A name is a set of words: Qwen2.5-7B-Instruct and qwen2.5:7b-instruct are {qwen, 2.5, 7b, instruct}. Every
word must belong to the shape or be one that does not change it. A name that fits several shapes is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from harness import data
from harness.theory.decoder import Decoder
from harness.theory.families import SHAPES
from harness.theory.gguf_types import ALL_QUANTS
from harness.theory.shapes import Shape

LONGEST = 64  # characters; the comparison is quadratic in length, and no known name is that long
_MOST_LISTED = 12

_ALIASES = data.table("aliases.toml")["models"]
_IGNORED, _ONLY_IF_TYPED = set(_ALIASES["ignored"]), set(_ALIASES["only_if_typed"])


class NotUnderstood(ValueError):
    """An unknown or ambiguous name; `hint`: what to do."""

    def __init__(self, hint: str, ambiguous: bool = False) -> None:
        super().__init__(hint)
        self.hint = hint
        self.ambiguous = ambiguous

    def sentence(self, kind: str, shown: str) -> str:
        """`unknown model qwen1.5-7; did you mean qwen1.5-7b?`"""
        return f"{'ambiguous' if self.ambiguous else 'unknown'} {kind} {shown}; {self.hint}"


class Model(NamedTuple):
    """A dense shape, and the name it goes by here."""

    name: str
    shape: Shape


class Named(NamedTuple):
    """Any model, and the name it goes by here."""

    name: str
    made: Shape | Decoder


def model(text: str, shapes: Mapping[str, Shape] = SHAPES, otherwise: str = "") -> Model:
    """The dense model that a name stands for. Raises as `named`."""
    found = named(text, shapes, otherwise)
    return Model(found.name, cast(Shape, found.made))


def named(text: str, shapes: Mapping[str, Shape | Decoder], otherwise: str = "") -> Named:
    """The model that a name stands for; names of `shapes` in lower case match as they are.

    Raises NotUnderstood, with a hint from the same family. `otherwise`: what to do for an unknown shape.
    """
    name = text.strip().lower()
    if name in shapes:
        return Named(name, shapes[name])
    words = _words(name)
    if not words or len(text) > LONGEST:
        raise NotUnderstood(_either("see harness theory --list-models", otherwise))
    if quant := re.search(rf"[-_:. ]({'|'.join(sorted(ALL_QUANTS, key=len, reverse=True))})$", name):
        base = named(name[: quant.start()], shapes, otherwise)
        raise NotUnderstood(f"the shape is {base.name}; {quant[1]} is a quantization, which is named apart")
    core = words - _IGNORED
    core -= {date for word, date in _ALIASES["released"].items() if word in core}
    of = {known: _words(known) - _IGNORED for known in shapes}
    exact = [known for known in shapes if of[known] == core]
    wider = [known for known in shapes if core & _families(shapes) and core < of[known]]
    found = exact or [known for known in wider if not (of[known] - core) & _ONLY_IF_TYPED]
    if len(found) == 1:
        return _with_context(found[0], shapes[found[0]], words, tuned=":" in name)
    if found:
        few = len(found) <= _MOST_LISTED
        hint = did_you_mean(found) if few else f"{len(found)} are known: see harness theory --list-models"
        raise NotUnderstood(hint, ambiguous=True)
    raise NotUnderstood(_hint(name, core, of, otherwise))


def did_you_mean(names: Sequence[str]) -> str:
    return f"did you mean {listed(names, 'or')}?"


def listed(names: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    return f" {last} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _either(first: str, otherwise: str) -> str:
    return f"{first}, or {otherwise}" if otherwise else first


def _words(name: str) -> set[str]:
    """The words of a name in lower case; none of a path."""
    owner, slash, rest = name.rpartition("/")
    if slash and owner not in _ALIASES["owners"]:
        return set()
    parts = re.split(r"[\s_:-]+", rest)
    found = [re.fullmatch(r"([a-z]{2,})(\d[\d.]*)", part) for part in parts]
    pairs = [match.groups() if match else (part,) for match, part in zip(found, parts, strict=True)]
    return {word for pair in pairs for word in pair if word}


def _families(shapes: Iterable[str]) -> set[str]:
    """The words that names begin with: qwen, llama, mistral."""
    return {match[0] for name in shapes if (match := re.match("[a-z]+", name))} - _ONLY_IF_TYPED


def _with_context(name: str, shape: Shape | Decoder, words: set[str], tuned: bool) -> Named:
    """Tuned models and base models may differ in context alone. A tag of Ollama's is a tuned model."""
    suffix = "base" if "base" in words else "instruct" if tuned or "instruct" in words else None
    version = next((word for word in ("2", "2.5", "3") if word in words and "qwen" in words), "")
    differs = {(each["qwen"], each["kind"]): each["context"] for each in _ALIASES["contexts"]}
    context = differs.get((version, suffix or ""), shape.context)
    if context == shape.context or shape is not SHAPES.get(name):
        return Named(name, shape)
    return Named(f"{name}-{suffix}", replace(shape, context=context))


def _hint(name: str, core: set[str], of: Mapping[str, set[str]], otherwise: str) -> str:
    """A suggestion from the same family, else what to do."""
    starts = {match[0] for word in re.split(r"[\s_:/-]+", name) if (match := re.match("[a-z]+", word))}
    unknown = (family for family in _ALIASES["not_known_yet"] if family.lower() not in _families(of))
    if other := next((family for family in unknown if family.lower() in starts), None):
        which = f"{other} is not known yet"
        if set(of) <= set(SHAPES):
            which = f"no {other} is among the dense models that can be run (harness theory knows more)"
        return which + (f"; {otherwise}" if otherwise else "")
    families = _families(of)
    family = core & families or {
        near for start in starts for near in difflib.get_close_matches(start, families, 1, 0.7)
    }
    inside = [known for known, words in of.items() if words & family]
    if within := [known for known in inside if of[known] < core]:
        closest = max(within, key=lambda known: len(of[known]))
        extra = " ".join(sorted(core - of[closest]))
        return f'{closest} is known, "{extra}" is not' + (f"; {otherwise}" if otherwise else "")
    if near := difflib.get_close_matches(name, inside, 1):
        return did_you_mean(near)
    return _either("see harness theory --list-models", otherwise)

"""What is known of a variant's quality: the perplexity of the same weights, measured or published. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from harness.recommend.answer import Quality
from harness.recommend.candidates import Candidate
from harness.results.kinds import Record

_16_BITS = ("f16", "fp16", "bf16")
_SIZE = re.compile(r"\d+(?:\.\d+)?b\b", re.IGNORECASE)


class Perplexity(NamedTuple):
    """Of a variant's weights. `source`: who measured it."""

    model: str
    stack: str
    quant: str
    value: float
    source: str


def published(records: Iterable[Record]) -> list[Perplexity]:
    """Those of published records."""
    found = []
    for record in records:
        value, source = (record.get("reported") or {}).get("perplexity"), record.get("source")
        if value and source:
            name = record["model"]["name"], record["stack"], record["variant"]
            found.append(Perplexity(*name, float(value), source["title"]))
    return found


def known(perplexities: Sequence[Perplexity], model: str) -> Callable[[Candidate], Quality | None]:
    """Looks up the loss of a candidate's weights: of this model, else of the nearest size of its family; null
    where none is known. Never that of another kind of weights."""
    of_model: dict[str, dict[tuple[str, str], float]] = {}
    sources: dict[str, str] = {}
    for each in perplexities:
        of_model.setdefault(each.model, {})[each.stack, each.quant] = each.value
        sources[each.model] = each.source
    alike = [name for name in of_model if _family(name) == _family(model)]
    near = sorted(alike, key=lambda name: _far(name, model))

    def of(candidate: Candidate) -> Quality | None:
        stack, quant = candidate.cell.variant.stack, candidate.type or str(candidate.cell.quant)
        if any(candidate.cell.variant.options.get(name, "f16") != "f16" for name in ("type_k", "type_v")):
            return None  # a quantized cache adds a loss of its own
        for name in near:
            found = of_model[name]
            plain = next((found[stack, q] for q in _16_BITS if (stack, q) in found), None)
            mine = found.get((stack, quant))
            if plain and mine:
                of_whom = "" if name == model else f"{name}, "
                return Quality(mine / plain - 1, f"{of_whom}{sources[name]}")
        return None

    return of


def _family(model: str) -> str:
    return _SIZE.split(model.lower(), maxsplit=1)[0]


def _far(name: str, model: str) -> float:
    sizes = [_SIZE.search(each.lower()) for each in (name, model)]
    if name == model:
        return -1.0
    if not all(sizes):
        return math.inf
    one, other = (float(found[0][:-1]) for found in sizes if found)
    return abs(math.log(max(one, 1e-9) / max(other, 1e-9)))

"""What is known of a variant's quality: scored here, else published for the same kind of weights. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from harness.analysis.records import quality as scores
from harness.recommend.answer import Quality
from harness.recommend.candidates import Candidate
from harness.results.kinds import Record

HERE = "measured here"
# Options that make the weights and the cache what they are; the others change speed and rounding alone.
_OPTIONS = ("double_quant", "dtype", "format", "bits", "type_k", "type_v")
_16_BITS = ("f16", "fp16", "bf16")
_SIZE = re.compile(r"\d+(?:\.\d+)?b\b", re.IGNORECASE)


_Key = tuple[str, ...]


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


def measured(records: Iterable[Record], model: str, fingerprint: str | None = None) -> dict[_Key, Quality]:
    """The quality of each variant of a model that was last scored, on the text that most of them have.

    `fingerprint`: of the model's weights: scores of other weights under the same name do not count. Null:
    not known, and all of the name do.
    """
    found = [each for each in records if each["kind"] == "scored" and each["model"]["name"] == model]
    if fingerprint is not None:
        found = [each for each in found if _content(fingerprint) in _scored_weights(each)]
    found.sort(key=lambda each: each["started_utc"])
    rows = [scores.row(each) for each in found]
    chosen = scores.comparable(rows)
    of: dict[_Key, Quality] = {}
    for record, row in zip(found, rows, strict=True):
        if row in chosen:
            figures = row["figures"]
            options, kld = record["options"], figures["kld_mean"]
            weights = record["model"]["weights"]
            stored = weights.get("quant") if weights.get("format") == "gguf" else options.get("dtype")
            quant = options.get("quant") or stored
            ends = None if kld["low"] is None or kld["high"] is None else (kld["low"], kld["high"])
            loss = math.expm1(figures["ln_ppl_ratio"]["value"])
            of[_key(record["stack"], quant, options)] = Quality(loss, HERE, kld["value"], ends)
    return of


def _scored_weights(record: Record) -> list[object]:
    """The content of the weights that were loaded, and of the 16-bit ones that they were compared with."""
    reference: Mapping[str, Any] = record["quality"].get("reference") or {}
    whole = reference.get("weights") or {}
    given = record["model"]["weights"].get("fingerprint"), whole.get("fingerprint")
    # A reference out of a file has the digest of the content alone.
    return [whole.get("sample"), *(_content(str(each)) for each in given if each)]


def _content(fingerprint: str) -> str:
    """Without what a copy may change, such as times."""
    return fingerprint.rpartition("-")[2]


def _key(stack: str, quant: object, options: Mapping[str, object]) -> _Key:
    return stack, str(quant).lower(), *(str(options.get(name)) for name in _OPTIONS)


def known(
    perplexities: Sequence[Perplexity], model: str, scored: Mapping[_Key, Quality]
) -> Callable[[Candidate], Quality | None]:
    """Looks up the quality of a candidate's weights: scored here, else published of this model, else of the
    nearest size of its family; null where none is known. Never that of another kind of weights."""
    of_model: dict[str, dict[tuple[str, str], float]] = {}
    sources: dict[str, str] = {}
    for each in perplexities:
        of_model.setdefault(each.model, {})[each.stack, each.quant] = each.value
        sources[each.model] = each.source
    alike = [name for name in of_model if _family(name) == _family(model)]
    near = sorted(alike, key=lambda name: _far(name, model))

    def of(candidate: Candidate) -> Quality | None:
        cell, options = candidate.cell, candidate.cell.options(1)
        given = candidate.type or options.get("quant") or options.get("dtype")
        if here := scored.get(_key(cell.variant.stack, given, options)):
            return here
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

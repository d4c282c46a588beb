"""The quality of a variant: scored here, else published for the same kind of weights. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.analysis import quality as analysis_quality
from harness.analysis.quality_figures import EQUAL_KLD
from harness.base import data
from harness.recommend.candidates import Candidate
from harness.records.kinds import Record
from harness.stacks.header import Value

MOST_LOSS = 0.02  # of the perplexity of 16-bit weights; more is not `balance`
PERPLEXITY_NOISE = 0.006  # its standard error, as llama.cpp prints it on wikitext


HERE = "measured here"
STUDY = "Single-user inference of Qwen1.5 (0.5B to 110B) on one RTX 4090, by noooop"
# Options that change the weights or the cache; the others change speed and rounding alone.
_OPTIONS = ("double_quant", "dtype", "format", "bits", "type_k", "type_v")
_16_BITS = ("f16", "fp16", "bf16")
_SIZE = re.compile(r"\d+(?:\.\d+)?b\b", re.IGNORECASE)


_Key = tuple[str, ...]


class Perplexity(NamedTuple):
    """Perplexity of a variant's weights. `source`: who measured it."""

    model: str
    stack: str
    quant: str
    value: float
    source: str


def published_quality() -> list[Perplexity]:
    """The perplexities of the published study."""
    return [
        Perplexity(
            f"qwen1.5-{row['model'].lower()}", "llamacpp", row["gguf_type"], float(row["perplexity"]), STUDY
        )
        for row in data.rows("study_tables/perplexity_wiki_qwen15_gguf.csv")
    ]


def measured_quality(
    records: Iterable[Record], model: str, fingerprint: str | None = None
) -> dict[_Key, Quality]:
    """The quality of each variant of a model that was last scored, on the text that most of them have.

    `fingerprint`: of the model's weights. Scores of other weights under the same name do not count. Null: the
    fingerprint is unknown, and all scores of the name count.
    """
    scored = [record for record in records if record["kind"] == "scored" and record["model"]["name"] == model]
    if fingerprint is not None:
        scored = [record for record in scored if _content(fingerprint) in _scored_weights(record)]
    scored.sort(key=lambda record: record["started_utc"])
    rows = [analysis_quality.row(record) for record in scored]
    chosen = analysis_quality.comparable(rows)
    by_key: dict[_Key, Quality] = {}
    for record, row in zip(scored, rows, strict=True):
        if row in chosen and "kld_mean" in row["figures"]:
            figures = row["figures"]
            options, kld = record["options"], figures["kld_mean"]
            weights = record["model"]["weights"]
            stored = weights.get("quant") if weights.get("format") == "gguf" else options.get("dtype")
            quant = options.get("quant") or stored
            ends = None if kld["low"] is None or kld["high"] is None else (kld["low"], kld["high"])
            loss = math.expm1(figures["ln_ppl_ratio"]["value"])
            by_key[_key(record["stack"], quant, options)] = Quality(loss, HERE, kld["value"], ends)
    return by_key


def _scored_weights(record: Record) -> list[object]:
    """The content of the weights that were loaded, and of the 16-bit ones that they were compared with."""
    reference: Mapping[str, Any] = record["quality"].get("reference") or {}
    whole = reference.get("weights") or {}
    fingerprints = record["model"]["weights"].get("fingerprint"), whole.get("fingerprint")
    # A reference out of a file has the digest of the content alone.
    return [whole.get("sample"), *(_content(str(fingerprint)) for fingerprint in fingerprints if fingerprint)]


def _content(fingerprint: str) -> str:
    """Strip the parts that a copy may change, such as times."""
    return fingerprint.rpartition("-")[2]


def _key(stack: str, quant: object, options: Mapping[str, Value]) -> _Key:
    return stack, str(quant).lower(), *(str(options.get(name)) for name in _OPTIONS)


def known_quality(
    perplexities: Sequence[Perplexity], model: str, scored: Mapping[_Key, Quality]
) -> Callable[[Candidate], Quality | None]:
    """Looks up the quality of a candidate's weights: scored here, else published of this model, else of the
    nearest size of its family; None where none is known. The kind of weights is always the same."""
    of_model: dict[str, dict[tuple[str, str], float]] = {}
    sources: dict[str, str] = {}
    for perplexity in perplexities:
        of_model.setdefault(perplexity.model, {})[perplexity.stack, perplexity.quant] = perplexity.value
        sources[perplexity.model] = perplexity.source
    alike = [name for name in of_model if _family(name) == _family(model)]
    near = sorted(alike, key=lambda name: _far(name, model))

    def of(candidate: Candidate) -> Quality | None:
        cell, options = candidate.cell, candidate.cell.options(1)
        type_name = candidate.type or options.get("quant") or options.get("dtype")
        if here := scored.get(_key(cell.variant.stack, type_name, options)):
            return here
        stack, quant = candidate.cell.variant.stack, candidate.type or str(candidate.cell.quant)
        if any(candidate.cell.variant.options.get(name, "f16") != "f16" for name in ("type_k", "type_v")):
            return None  # a quantized cache adds another loss
        for name in near:
            perplexities = of_model[name]
            plain = next((perplexities[stack, q] for q in _16_BITS if (stack, q) in perplexities), None)
            mine = perplexities.get((stack, quant))
            if plain and mine:
                of_whom = "" if name == model else f"{name}, "
                return Quality(mine / plain - 1, f"{of_whom}{sources[name]}")
        return None

    return of


def _family(model: str) -> str:
    return _SIZE.split(model.lower(), maxsplit=1)[0]


def _far(name: str, model: str) -> float:
    sizes = [_SIZE.search(name_with_size.lower()) for name_with_size in (name, model)]
    if name == model:
        return -1.0
    if not all(sizes):
        return math.inf
    one, other = (float(size[0][:-1]) for size in sizes if size)
    return abs(math.log(max(one, 1e-9) / max(other, 1e-9)))


@dataclass(frozen=True)
class Quality:
    """`loss`: perplexity over that of 16-bit weights, less 1. `source`: whose, of which model. `kld`: mean
    KL divergence from them in nats per token, with the ends of its 95% interval; None: not measured."""

    loss: float
    source: str
    kld: float | None = None
    kld_ci95: tuple[float, float] | None = None

    @property
    def kept(self) -> bool:
        """Whether so little is lost that `balance` takes it."""
        return self.loss <= MOST_LOSS if self.kld is None else self.kld < EQUAL_KLD

    @property
    def cost(self) -> float:
        """Nats per token that are lost, as far as they order types; of a published perplexity, those beyond
        its noise."""
        if self.kld is None:
            return max(0.0, self.loss - PERPLEXITY_NOISE)
        return 0.0 if self.kept else self.kld

    @property
    def words(self) -> str:
        return f"perplexity {self.loss:+.1%}" if self.kld is None else f"KLD {self.kld:.2g}"

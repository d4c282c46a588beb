"""Fit the terms that `harness recommend` predicts from, and judge them on machines and sources left out.

The public measurements (harness/data/public_speeds.csv) and the published study are fitted together, and the
terms that hold on any machine are stored. To judge them, the rows of one source on one machine are predicted
from a fit without that machine and without that source. Rows of older software are evidence, and not judged:
what is predicted is today's. From these errors comes the spread of each family (a maker's GPUs, or CPUs): the
smallest one with which 90% of rows lie in their 90% interval. In all figures each source on a machine counts
by the square root of its rows, as these are alike. A family of few sources gets at least the spread of those
that have more together, of very few twice that.

The published study is also taken for the user's own machine: a size, and a type of GGUF, is predicted from
the others.

    .venv/bin/python benchmarks/predictions.py [--store] [--own]

Targets: decode 11% (median), 85 to 95% of rows in their interval, at most 1.9 wide; prompts 25%.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in `harness recommend`

import numpy as np

from harness import records
from harness.base import data
from harness.recommend import examples
from harness.recommend.evidence import DECODE, ERRORS, FEW_SOURCES, PROMPTS
from harness.recommend.least_squares import Floats
from harness.recommend.speed import NORMAL_90, SHIPPED, Predictor, Terms, fitted_terms, stored
from harness.recommend.terms import family_name, fit_of
from harness.recommend.traits import GGML, Example, Range
from harness.report.text_table import Table
from harness.theory import public_speeds

STUDY = "published/rtx4090-qwen1.5"
SHARE = 0.9  # of rows that are to lie in their interval
ENOUGH_SOURCES = 10  # on machines, for a quantile of that share
TTFT_FROM = 128  # tokens; below, a prompt's time is mostly that of a step
# Of the study, not what they are said to be: autoawq's 32B did not fit the card's memory and was read over
# the bus, and the study printed 1.8B's B for 4B with exllamav2 (see the study's README).
EXCEPT = (
    *(("qwen1.5-32b", f"autoawq {kernel}") for kernel in ("gemm", "exllama", "exllamav2")),
    ("qwen1.5-4b", "autoawq exllamav2"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", action="store_true", help=f"write harness/data/{SHIPPED} and {ERRORS}")
    parser.add_argument("--own", action="store_true", help="the study as the user's own machine")
    arguments = parser.parse_args()
    if arguments.own:
        study = of_study()
        for title, key in (("size", lambda row: row.traits.model), ("type", lambda row: row.traits.type)):
            show_own(f"GGUF, a {title} left out", [row for row in study if row.traits.engine == GGML], key)
        return
    everything = evidence()
    terms = fitted(everything)
    table = by_family(left_out(everything, terms))
    Table(list(table[0]), [[*map(str, row.values())] for row in table]).show()
    if arguments.store:
        (data.HERE / SHIPPED).write_text(stored(of_kinds(terms)), encoding="utf-8")
        (data.HERE / ERRORS).write_text(table_text(table), encoding="utf-8")


def of_study() -> list[Example]:
    return examples.of_published(records.records(data.results(STUDY), print))


def evidence() -> list[Example]:
    """The study and the public measurements that are used."""
    return [*of_study(), *examples.of_public(public_speeds.used(public_speeds.rows()))]


def fitted(measured: Sequence[Example], near: Mapping[str, Terms] | None = None) -> dict[str, Terms]:
    """All terms, fitted to all of these. `near`: fitted to almost the same."""
    of_fits: dict[str, list[Example]] = {}
    for example in measured:
        of_fits.setdefault(fit_of(example.traits), []).append(example)
    return {
        fit: fitted_terms(of_fit, Terms(), near.get(fit) if near else None) for fit, of_fit in of_fits.items()
    }


def of_kinds(terms: Mapping[str, Terms]) -> dict[str, Terms]:
    """Those that hold on any machine."""
    return {fit: of_fit.of_kinds() for fit, of_fit in terms.items()}


@dataclass(frozen=True)
class LeftOut:
    """A measured time, and its prediction without its machine and its source. `sd`: of its logarithm."""

    example: Example
    phase: str
    measured: float
    predicted: Range

    @property
    def family(self) -> str:
        return family_name(self.example.traits)

    @property
    def off(self) -> float:
        """The logarithm of measured over predicted."""
        return math.log(self.measured / self.predicted.value)

    @property
    def sd(self) -> float:
        return math.log(self.predicted.high / self.predicted.value) / NORMAL_90

    @property
    def source(self) -> tuple[str, str]:
        return self.example.traits.device, self.example.traits.setup


class NoSpreads(dict[tuple[str, str], float]):
    """No spread beyond the terms', of any family."""

    def get(self, key: tuple[str, str], default: float = 0.0) -> float:  # type: ignore[override]
        return 0.0


def left_out(measured: Sequence[Example], near: Mapping[str, Terms]) -> Iterator[LeftOut]:
    """Each row of today's software, but for the study's, predicted without its machine and its source."""
    groups: dict[tuple[str, str, str], list[Example]] = {}
    for example in measured:
        if not example.traits.software:
            traits = example.traits
            groups.setdefault((fit_of(traits), traits.device, traits.setup), []).append(example)
    for (fit, device, source), rows in groups.items():
        others = [
            example
            for example in measured
            if fit_of(example.traits) == fit
            and example.traits.device != device
            and example.traits.setup != source
        ]
        predictor = Predictor((), of_kinds(fitted(others, near)), NoSpreads())
        yield from predicted(predictor, rows)


def predicted(predictor: Predictor, rows: Sequence[Example]) -> Iterator[LeftOut]:
    """Rows as on a machine and from a source of which nothing is known."""
    for row in rows:
        traits = replace(row.traits, device="unknown", setup="unknown")
        for n, ms in row.at_ms.items():
            yield LeftOut(row, DECODE, ms, predictor.latency_ms([traits], n)[0])
        for n, ms in row.first_tokens.items():
            first = predictor.first_token_ms([traits], n)[0]
            if first and n >= TTFT_FROM:
                yield LeftOut(row, PROMPTS, ms, first)


def by_family(rows: Iterator[LeftOut]) -> list[dict[str, str | int]]:
    """The table of errors and spreads, by family and phase."""
    of: dict[tuple[str, str], list[LeftOut]] = {}
    for row in rows:
        of.setdefault((row.family, row.phase), []).append(row)
    spreads = {key: spread(of_key, of) for key, of_key in of.items()}
    return [errors(key, of[key], spreads[key]) for key in sorted(of, key=lambda key: (key[1], key[0]))]


def spread(rows: Sequence[LeftOut], of: Mapping[tuple[str, str], Sequence[LeftOut]]) -> float:
    """What the times of a family spread beyond the terms."""
    count = sources(rows)
    if count >= ENOUGH_SOURCES:
        return _spread(rows)
    phase = [of_key for of_key in of.values() if of_key[0].phase == rows[0].phase]
    alike = [row for of_key in phase if sources(of_key) >= FEW_SOURCES for row in of_key] or rows
    return max(_spread(alike), _spread(rows)) * (2 if count < FEW_SOURCES else 1)


def sources(rows: Sequence[LeftOut]) -> int:
    """How many sources on machines there are."""
    return len({row.source for row in rows})


def _spread(rows: Sequence[LeftOut]) -> float:
    """The smallest spread with which that share of rows lies in its interval."""
    off, sd = np.array([row.off for row in rows]), np.array([row.sd for row in rows])
    needed = np.sqrt(np.maximum((off / NORMAL_90) ** 2 - sd**2, 0.0))
    order, weights = np.argsort(needed), _weights(rows)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(needed[order][min(int(np.searchsorted(reached, SHARE)), len(rows) - 1)])


def _weights(rows: Sequence[LeftOut]) -> Floats:
    of_rows = [row.source for row in rows]
    return np.array([1 / math.sqrt(of_rows.count(source)) for source in of_rows])


def _median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    return float(values[order][np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)])


def errors(key: tuple[str, str], rows: Sequence[LeftOut], extra: float) -> dict[str, str | int]:
    off = np.array([abs(math.expm1(row.off)) for row in rows])
    sd = np.array([math.hypot(row.sd, extra) for row in rows])
    inside = np.array([abs(row.off) for row in rows]) <= NORMAL_90 * sd
    weights = _weights(rows)
    sizes = [row.example.traits.read_bytes for row in rows]
    return {
        "family": key[0],
        "phase": key[1],
        "machines": len({row.example.traits.device for row in rows}),
        "sources": len({row.example.traits.setup for row in rows}),
        "rows": len(rows),
        "spread": f"{extra:.3f}",
        "median": f"{_median(off, weights):.3f}",
        "within_25": f"{np.average(off <= 0.25, weights=weights):.2f}",
        "inside": f"{np.average(inside, weights=weights):.2f}",
        "width": f"{math.exp(2 * NORMAL_90 * _median(sd, weights)):.2f}",
        "least_bytes": f"{min(sizes):.3g}",
        "most_bytes": f"{max(sizes):.3g}",
        "kinds": " ".join(sorted({row.example.traits.kind for row in rows})),
    }


def table_text(table: Sequence[Mapping[str, str | int]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def show_own(title: str, rows: Sequence[Example], key: Callable[[Example], str]) -> None:
    """The study as the user's own: rows with the same key are predicted from the others."""
    off, inside = [], []
    for name in sorted({key(row) for row in rows}):
        own = [replace(row, traits=replace(row.traits, setup="")) for row in rows]
        predictor = Predictor([row for row in own if key(row) != name])
        asked = [row for row in own if key(row) == name]
        for row, step in zip(asked, predictor.latency_ms([row.traits for row in asked], 1), strict=True):
            if (row.traits.model, row.traits.group) not in EXCEPT:
                off.append(abs(step.value / row.at_ms[1] - 1))
                inside.append(step.low <= row.at_ms[1] <= step.high)
    most = np.quantile(off, 0.9)
    print(f"{title}: B off by {np.median(off):.2%} (median), 90% within {most:.1%}; ", end="")
    print(f"{np.mean(inside):.0%} of {len(off)} in their interval")


if __name__ == "__main__":
    main()

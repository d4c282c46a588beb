"""Nights: every metric of each cell, campaign by campaign."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.analysis.columns import AnyRow
from harness.analysis.figures import COMPARED as METRICS
from harness.analysis.figures import Figure as Metric
from harness.analysis.verdicts import USABLE
from harness.dataset.table import synthetic

NAMED = ("cell", "model", "stack", "variant", "machine", "device", "content_key", "kind")
"""The columns that a night takes from its first row."""
NightRow = dict[str, Any]
"""A kind of record of one cell, on one device, in one campaign: columns().

`place` sorts campaigns, `began` is the start of one. `ok`, `usable`: how many of its `repeats` are. `why`:
the reasons of those that are not ok. Each metric: the mean over its ok repeats; `_error`: its relative
standard error from these, of two or more. `folders`: of the records, in the results folder."""
Place = tuple[str, str]
"""What sorts campaigns, and the start of the first record as text (ISO 8601)."""


def columns() -> dict[str, type]:
    """The columns of a night, with the types of their values."""
    of_metrics: dict[str, type] = {
        name: float for metric in METRICS for name in (metric.name, error_of(metric))
    }
    texts: dict[str, type] = dict.fromkeys((*NAMED, "workload", "campaign", "place", "began", "why"), str)
    numbers: dict[str, type] = dict.fromkeys(("repeats", "ok", "usable"), int)
    return texts | {"synthetic": bool} | numbers | of_metrics


def error_of(metric: Metric) -> str:
    return f"{metric.name}_error"


Rows = Iterable[tuple[AnyRow, str]]
"""Rows, each with the folder of its record."""


def nights(repeats: Rows, searches: Rows, scores: Rows, places: Mapping[str, Place]) -> Iterator[NightRow]:
    """The nights of these rows, cells in order of first appearance; of searches and scores the last of each
    cell in a campaign. `places`: of each campaign."""
    rows = [*repeats, *_latest(searches), *_latest(scores)]
    found: dict[tuple[object, ...], list[tuple[AnyRow, str]]] = {}
    for row, folder in rows:
        key = (row["kind"], row["cell"], row["machine"], row["device"], row["campaign"])
        found.setdefault(key, []).append((row, folder))
    for ran in found.values():
        alike = [row for row, _ in ran]
        first = alike[0]
        place, began = places[first["campaign"]]
        yield {
            **{name: first[name] for name in NAMED},  # type: ignore[literal-required]
            "workload": first.get("workload", "decode"),
            "synthetic": synthetic(first),
            "campaign": first["campaign"],
            "place": place,
            "began": began,
            "repeats": len(alike),
            "ok": sum(row["status"] == "ok" for row in alike),
            "usable": sum(row["status"] in USABLE for row in alike),
            "why": why([row for row in alike if row["status"] != "ok"]),
            "folders": [folder for _, folder in ran],
            **_figures(alike),
        }


def _latest(rows: Rows) -> Iterable[tuple[AnyRow, str]]:
    found: dict[tuple[str, str], tuple[AnyRow, str]] = {}
    for row, folder in sorted(rows, key=lambda each: str(each[0]["started_utc"])):
        found[row["campaign"], row["content_key"]] = row, folder
    return found.values()


def _figures(rows: Sequence[AnyRow]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for metric in METRICS:
        of = [row for row in rows if row["status"] in counts(metric)]
        values = [value for row in of if (value := metric.value(row)) is not None]
        logs = [math.log(each) for each in values]
        found[metric.name] = statistics.fmean(values) if values else None
        found[error_of(metric)] = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None
    return found


def counts(metric: Metric) -> Sequence[str]:
    """The statuses that count: the speed of a functional stack means nothing; its memory and longest context
    do."""
    return ("ok",) if metric.family == "slower" else USABLE


def why(rows: Sequence[AnyRow]) -> str:
    """`oom: CUDA out of memory; timeout: ...`, without duplicates."""
    reasons = (": ".join([row["status"], *row["reasons"][:1]]) for row in rows)
    return "; ".join(dict.fromkeys(reasons))


@dataclass(frozen=True)
class Nights:
    """`columns`: those of NightRow but `folders`, which `folders` finds by the place in a column."""

    columns: Mapping[str, Sequence[Any]]
    folders: Callable[[int], Sequence[str]]

    @classmethod
    def of(cls, rows: Sequence[NightRow]) -> Nights:
        return cls(
            {name: [row[name] for row in rows] for name in columns()}, lambda place: rows[place]["folders"]
        )

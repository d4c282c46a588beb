"""Nights: every metric of each cell, campaign by campaign."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.analysis.columns import AnyRow
from harness.analysis.figures import COMPARED, Figure
from harness.analysis.verdicts import USABLE
from harness.dataset.judging import Judged, rows_of
from harness.dataset.row_names import synthetic
from harness.dataset.rows import below
from harness.dataset.study import Study

NAMED = ("cell", "model", "stack", "variant", "machine", "device", "content_key", "kind")
"""The columns that a night takes from its first row."""
NightRow = dict[str, Any]
"""A kind of record of one cell, on one device, in one campaign: columns().

`place` sorts campaigns, `began` is the start of one. `ok`, `usable`: how many of its `repeats` are. `why`:
the reasons of those that are not ok. Each metric: the mean over its ok repeats; `_error`: its relative
standard error from these, of two or more. `folders`, `usable_folders`: of the records, relative to the
results folder."""


def columns() -> dict[str, type]:
    """The columns of a night, with the types of their values."""
    of_metrics: dict[str, type] = {
        name: float for metric in COMPARED for name in (metric.name, error_of(metric))
    }
    texts: dict[str, type] = dict.fromkeys((*NAMED, "workload", "campaign", "place", "began", "why"), str)
    numbers: dict[str, type] = dict.fromkeys(("repeats", "ok", "usable"), int)
    return texts | {"synthetic": bool} | numbers | of_metrics


def error_of(metric: Figure) -> str:
    return f"{metric.name}_error"


Rows = Iterable[tuple[AnyRow, str]]
"""Rows, each with the folder of its record."""


def nights(judged: Sequence[Judged], study: Study, root: Path) -> list[NightRow]:
    """The nights of some records below root, cells in order of first appearance; of searches and scores the
    last of each cell in a campaign. `study`: of these records, as its repeats were compared."""
    began: dict[str, tuple[str, str]] = {}  # the place and the first start of each campaign
    for record in judged:
        facts = record.facts
        if facts["kind"] != "checked":
            first = began.get(facts["campaign"], ("", facts["started_utc"]))[1]
            began[facts["campaign"]] = facts["place"], min(first, facts["started_utc"])
    rows: list[tuple[AnyRow, str]] = [
        (row, below(root, record.folder)) for row, record in zip(study.repeats, study.stored, strict=True)
    ]
    for kind in ("searched", "scored"):
        of_kind = [record for record in judged if record.facts["kind"] == kind]
        folders = (below(root, record.stored.folder) for record in of_kind)
        rows += _latest(zip(rows_of(of_kind), folders, strict=True))
    by_night: dict[tuple[object, ...], list[tuple[AnyRow, str]]] = {}
    for row, folder in rows:
        key = (row["kind"], row["cell"], row["machine"], row["device"], row["campaign"])
        by_night.setdefault(key, []).append((row, folder))
    return [_night(ran, began) for ran in by_night.values()]


def _night(ran: Sequence[tuple[AnyRow, str]], began: Mapping[str, tuple[str, str]]) -> NightRow:
    rows = [row for row, _ in ran]
    usable = [folder for row, folder in ran if row["status"] in USABLE]
    first = rows[0]
    order, start = began[first["campaign"]]
    return {
        **{name: first[name] for name in NAMED},  # type: ignore[literal-required]
        "workload": first.get("workload", "decode"),
        "synthetic": synthetic(first),
        "campaign": first["campaign"],
        "place": order,
        "began": start,
        "repeats": len(rows),
        "ok": sum(row["status"] == "ok" for row in rows),
        "usable": len(usable),
        "why": why([row for row in rows if row["status"] != "ok"]),
        "folders": [folder for _, folder in ran],
        "usable_folders": usable,
        **_figures(rows),
    }


def _latest(rows: Rows) -> Iterable[tuple[AnyRow, str]]:
    latest: dict[tuple[str, str], tuple[AnyRow, str]] = {}
    for row, folder in sorted(rows, key=lambda pair: str(pair[0]["started_utc"])):
        latest[row["campaign"], row["content_key"]] = row, folder
    return latest.values()


_BY_STATUSES = {
    statuses: [metric for metric in COMPARED if metric.statuses == statuses]
    for statuses in {metric.statuses for metric in COMPARED}
}
_NO_FIGURES = {name: None for metric in COMPARED for name in (metric.name, error_of(metric))}


def _figures(rows: Sequence[AnyRow]) -> dict[str, float | None]:
    figures: dict[str, float | None] = {**_NO_FIGURES}
    for statuses, metrics in _BY_STATUSES.items():
        counted = [row for row in rows if row["status"] in statuses]
        for metric in metrics:
            values = [value for row in counted if (value := metric.value(row)) is not None]
            if values:
                figures[metric.name] = statistics.fmean(values)
            if len(values) > 1:
                error = statistics.stdev(map(math.log, values)) / math.sqrt(len(values))
                figures[error_of(metric)] = error
    return figures


def why(rows: Sequence[AnyRow]) -> str:
    """`oom: CUDA out of memory; timeout: ...`, without duplicates."""
    reasons = (": ".join([row["status"], *row["reasons"][:1]]) for row in rows)
    return "; ".join(dict.fromkeys(reasons))

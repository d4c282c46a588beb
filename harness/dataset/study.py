"""The data of a report: rows and series as plain values. Nothing here reads or draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harness.analysis.rows import Attribution, Cell, Check, Repeat, Score, Search, ShownCell
from harness.results.kinds.parts import Machine
from harness.results.tables import TABLE_OF

Row = Mapping[str, object]
"""A row of any table: its columns are read by name."""
LONGEST_REASON = 32  # characters shown in a table cell; the full reason is below the table
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Latency in ms against `n`, a token's position or a prompt's length. At full resolution: only display is
    thinned. `prefill`: its first point is the first token, which is not drawn."""

    n: Floats
    ms: Floats
    prefill: bool = True

    @property
    def decode(self) -> Curve:
        return Curve(self.n[1:], self.ms[1:], prefill=False) if self.prefill else self


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of a worker over time. `vram_bytes`: null where no GPU was used."""

    seconds: Floats
    rss_bytes: Floats | None
    vram_bytes: Floats | None = None


@dataclass(frozen=True)
class Study:
    """All that a report shows.

    `cells`: one row per cell with a unique `name`; a figure that is null or missing is shown as a dash.
    `repeats`: one row per record. `checks`: one named row per check of a variant's logits. `searches`: one
    named row per search for the longest context. `scores`: one named row per score of a text. `attributions`:
    one row per cell, where its memory goes. By row name: `series`, the repeat to draw, including its first
    token (prefill, which is not drawn); `memory`; `prefill`, the median passes by depth; `baseline`, the row
    to compare with. `machines`: facts. `methods`: heading -> text, list or mapping, in display order;
    commands go under a heading with "repeat" or "command" in it. `warnings`: unreadable files."""

    title: str
    cells: Sequence[Cell]
    repeats: Sequence[Repeat] = ()
    checks: Sequence[Check] = ()
    searches: Sequence[Search] = ()
    scores: Sequence[Score] = ()
    attributions: Sequence[Attribution] = ()
    series: Mapping[str, Curve] = field(default_factory=dict)
    memory: Mapping[str, MemoryCurve] = field(default_factory=dict)
    prefill: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    baseline: Mapping[str, Cell] = field(default_factory=dict)
    machines: Sequence[Machine] = ()
    methods: Mapping[str, object] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    @property
    def rows(self) -> list[ShownCell]:
        """The cells, each with its `baseline`: a row or null."""
        return [{**row, "baseline": self.baseline.get(row["name"])} for row in self.cells]

    @property
    def models(self) -> dict[str, list[ShownCell]]:
        """The rows of each model, in order of first appearance."""
        found: dict[str, list[ShownCell]] = {}
        for row in self.rows:
            found.setdefault(str(row.get("model")), []).append(row)
        return found

    @property
    def decodes(self) -> dict[str, list[ShownCell]]:
        """Those of each model whose workload is a decode; no models without one."""
        found = {model: [row for row in rows if not timed(row)] for model, rows in self.models.items()}
        return {model: rows for model, rows in found.items() if rows}


def ok(row: Row) -> bool:
    return row.get("status") == "ok"


def failure(row: Row) -> str:
    """`oom`, or `error: ` and the reason; empty for a cell that is ok."""
    status = str(row.get("status"))
    if status == "ok":
        return ""
    reasons = row.get("reasons")
    if status == "oom" or not isinstance(reasons, Sequence) or not reasons:
        return status
    why = " ".join(str(reasons[0]).split())
    return f"{status}: {why if len(why) <= LONGEST_REASON else why[: LONGEST_REASON - 1] + '…'}"


def figure(row: Row | None, key: str) -> float | None:
    """A figure of a row as a finite number; null: none."""
    value = (row or {}).get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def part(row: Row, key: str) -> Row:
    """A row inside a row; empty without one."""
    value = row.get(key)
    return value if isinstance(value, Mapping) else {}


def parts(row: Row, key: str) -> list[Row]:
    """The rows in a list inside a row; empty without one."""
    value = row.get(key)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, Sequence) else []


def bounds(row: Row | None, key: str) -> tuple[float | None, float | None]:
    """The ends of an interval [low, high]; an open end is null, and both are null without an interval."""
    value = (row or {}).get(key)
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None, None
    low, high = (figure({"end": end}, "end") for end in value)
    return low, high


def labels(rows: Sequence[Row], model: str) -> list[str]:
    """Short labels of a model's cells: their names without the model and without a device that all share; the
    full names where these tell more rows apart."""
    names = [str(row["name"]) for row in rows]
    devices = {str(row.get("device")) for row in rows}
    shared = f" on {devices.pop()}" if len(devices) == 1 else ""
    short = [name.removeprefix(f"{model} ").removesuffix(shared) for name in names]
    return short if len(set(short)) == len(set(names)) else names


def timed(row: Row) -> str | None:
    """The kind of workload of a row that has timed rows: prefill, depth or turns; null for a decode."""
    kind = str(row.get("workload"))
    return kind if kind in TABLE_OF else None

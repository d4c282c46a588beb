"""`harness report --memory`: memory of each cell by part, after loading and at the peak."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.analysis.memory import PARTS, Attribution, Moment
from harness.base.text import few
from harness.cli import OK, say
from harness.dataset.rows import of_folder
from harness.dataset.study import attributions, provisional, study_of
from harness.records import no_records
from harness.report.figure_texts import state
from harness.report.text_table import NONE, Table, formatted, note


def run(folder: Path, as_json: bool, wide: bool) -> int:
    """Print the table, or one array; published figures only where nothing was measured. Raises ResultsError
    if there is no such folder."""
    found = of_folder(folder)
    if not found.judged:
        say(no_records(folder))
    study = study_of(found.own or found.judged)
    rows = attributions(study, warnings := [*study.warnings])
    for warning in [*few(found.skipped), *warnings]:
        say(warning)
    if as_json:
        print(json.dumps(rows, indent=1, allow_nan=False))
    else:
        states = {cell["name"]: state(cell) for cell in study.cells if provisional(cell)}
        _print_memory(rows, states, wide)
    return OK


def _print_memory(rows: Sequence[Attribution], states: Mapping[str, str], wide: bool) -> None:
    """Print the table. `states`: of cells whose status is not that of their repeats, by name."""
    kv = ["KV B/token", "KV B/token by theory"]
    headings = ["cell", "file", "total", *PARTS, "unattributed", *kv]
    lines = [line for row in rows for line in _lines(row, states)]
    shown = Table(headings, lines, [False] + [True] * (len(headings) - 1)).show(wide)
    explained = "; unattributed: total minus the parts, in % of the total" * ("unattributed" in shown)
    note(f"sizes in MB (1e6 bytes){explained}")
    if any(moment and moment["by_difference"] for row in rows for moment in (row["loaded"], row["peak"])):
        note("~: inferred: total minus the reported parts; unattributed is then unknown")


def _lines(row: Attribution, states: Mapping[str, str]) -> Iterator[list[str]]:
    """The cell's name, which may be long, and a line per moment: the file's size stands in the first, the KV
    cache in the last."""
    both = {"loaded": row["loaded"], "peak": row["peak"]}
    moments: list[tuple[str, Moment | None]] = [(name, at) for name, at in both.items() if at]
    moments = moments or [(NONE, None)]
    status = row["status"] if row["kind"] == "measured" else row["kind"]
    yield [f"{row['name']}  {states.get(row['name'], status)}", *[""] * (len(PARTS) + 5)]
    for number, (name, moment) in enumerate(moments):
        cell = [f"  {name}", _mb(row["file_bytes"]) if number == 0 else ""]
        kv = [formatted(row["measured_bytes_per_token"]), formatted(row["kv_bytes_per_token"])]
        yield [*cell, *_figures(moment), *(kv if number == len(moments) - 1 else ["", ""])]


def _figures(moment: Moment | None) -> list[str]:
    if moment is None:
        return [NONE] * (len(PARTS) + 2)
    rest, share = moment["unattributed_bytes"], moment["unattributed_share"]
    unattributed = NONE if rest is None else _mb(rest) + ("" if share is None else f" ({share:.1%})")
    parts = ("~" * (part in moment["by_difference"]) + _mb(moment["parts"][part]) for part in PARTS)
    return [_mb(moment["total_bytes"]), *parts, unattributed]


def _mb(value: int | None) -> str:
    return formatted(value, "{:,.1f}", 1e6)

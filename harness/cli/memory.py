"""`harness memory`: memory of each cell by part, after loading and at the peak."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence

from harness.analysis.records.attribution import PARTS
from harness.analysis.rows import Attribution, Moment
from harness.cli.exits import OK, say
from harness.cli.inputs import add_json, add_results, stored
from harness.dataset.gather import Gathered
from harness.report.table import NONE, Table, formatted, note
from harness.results import no_records


def add(parser: argparse.ArgumentParser) -> None:
    add_results(parser)
    add_json(parser, "one object per cell")


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or one array; published figures only where nothing was measured. Raises ResultsError
    if there is no such folder."""
    every = list(stored(arguments.dir))
    measured = [each for each in every if each.record["kind"] != "reported"]
    if not every:
        say(no_records(arguments.dir))
    gathered = Gathered(measured or every)
    rows = gathered.memory
    for warning in gathered.warnings:
        say(warning)
    if arguments.json:
        print(json.dumps(rows, indent=1, allow_nan=False))
    else:
        _print(rows)
    return OK


def _print(rows: Sequence[Attribution]) -> None:
    kv = ["KV B/token", "by theory"]
    headings = ["cell", "status", "at", "file", "total", *PARTS, "unattributed", *kv]
    lines = [line for row in rows for line in _lines(row)]
    Table(headings, lines, [False] * 3 + [True] * (len(headings) - 3)).show()
    note("sizes in MB (1e6 bytes); unattributed: total minus the parts, in % of the total")
    if any(at and at["by_difference"] for row in rows for at in (row["loaded"], row["peak"])):
        note("~: inferred: total minus the reported parts; unattributed is then unknown")


def _lines(row: Attribution) -> Iterator[list[str]]:
    """A line per moment; what belongs to the cell stands in the first, its KV cache in the last."""
    every = {"loaded": row["loaded"], "peak": row["peak"]}
    moments = [each for each in every.items() if each[1]] or [(NONE, None)]
    status = row["status"] if row["kind"] == "measured" else row["kind"]
    for index, (at, moment) in enumerate(moments):
        cell = [row["name"], status, at, _mb(row["file_bytes"])] if index == 0 else ["", "", at, ""]
        kv = [formatted(row["measured_bytes_per_token"]), formatted(row["kv_bytes_per_token"])]
        yield [*cell, *_figures(moment), *(kv if index == len(moments) - 1 else ["", ""])]


def _figures(moment: Moment | None) -> list[str]:
    if moment is None:
        return [NONE] * (len(PARTS) + 2)
    rest, share = moment["unattributed_bytes"], moment["unattributed_share"]
    unattributed = NONE if rest is None else _mb(rest) + ("" if share is None else f" ({share:.1%})")
    parts = ("~" * (part in moment["by_difference"]) + _mb(moment["parts"][part]) for part in PARTS)
    return [_mb(moment["total_bytes"]), *parts, unattributed]


def _mb(value: int | None) -> str:
    return formatted(value, "{:,.1f}", 1e6)

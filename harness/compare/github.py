"""A comparison for GitHub: one annotation per regression, and figures for github-action-benchmark."""

from __future__ import annotations

import json
from collections.abc import Sequence

from typing_extensions import NotRequired, TypedDict

from harness.analysis.figures import BY_NAME
from harness.base.text import plural, printable_lines
from harness.compare import Change, Comparison
from harness.compare.judge import INVALID, WORSE
from harness.compare.show import _percent, change_text
from harness.report.text_table import formatted


class BenchmarkEntry(TypedDict):
    """An entry in the format of github-action-benchmark."""

    name: str
    unit: str
    value: float
    range: NotRequired[str]
    extra: NotRequired[str]


def commands(comparison: Comparison) -> list[str]:
    """Workflow commands, one per line, the worst first: GitHub shows ten of each kind.

    `::error`: a regression in --fail-on. `::warning`: another regression, an invalid figure, a cell not
    compared or only in part, and a record that cannot be read.
    """
    worse = [row for row in comparison.rows if row["verdict"] in WORSE]
    lines = [
        _command("error" if row["fails"] else "warning", f"{row['verdict']}: {row['name']}", _gha_change(row))
        for row in sorted(worse, key=lambda row: (not row["fails"], -abs(row["change"] or 0.0)))
    ]
    invalid = [row for row in comparison.rows if row["verdict"] == INVALID]
    warnings = [(f"not compared: {row['name']}", row["reason"]) for row in invalid]
    warnings += [(f"not compared: {each['name']}", each["reason"]) for each in comparison.not_compared]
    warnings += [(f"compared in part: {each['name']}", each["reason"]) for each in comparison.partial]
    warnings += [("not read", damage) for damage in comparison.damages]
    return lines + [
        _command("warning", title, reason or "no figure on one of the two sides")
        for title, reason in dict.fromkeys(warnings)
    ]


def benchmark(rows: Sequence[Change]) -> list[BenchmarkEntry]:
    """The new figures for github-action-benchmark's tool customSmallerIsBetter.

    A figure that is better when larger is given as its inverse (ms per token). The longest context has no
    useful inverse and is left out, as are invalid figures. `range` is the row's `spread` (standard deviation
    of one repeat, moderated over all cells) as a plain number in the value's unit: the action calculates with
    it.
    """
    entries = []
    for row in rows:
        metric, unit, value = row["metric"], row["unit"], row["new"]
        inverse = BY_NAME[metric].inverse
        if value is None or row["verdict"] == INVALID or (row["better"] == "higher" and not inverse):
            continue
        if row["better"] == "higher" and inverse:
            (metric, unit), value = inverse, 1e3 / value
        # The action identifies entries by name alone, and these three are stable from night to night.
        name = f"{row['cell']} {metric} ({row['machine']}, {row['device']})"
        entry: BenchmarkEntry = {"name": name, "unit": unit, "value": value}
        if row["spread"] is not None:
            entry["range"] = f"± {row['spread'] * value:.6g}"
        entry["extra"] = f"{row['name']}\n{row['verdict']}: {_gha_change(row)}"
        entries.append(entry)
    return entries


def as_json(rows: Sequence[Change]) -> str:
    """The text of the action's output-file-path file."""
    return json.dumps(benchmark(rows), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _gha_change(row: Change) -> str:
    """`tok/s 20.1 -> 19.1, change -5.0%, 90% interval -5.6% to -4.4%, of 42 and 3 repeats, threshold 2%`"""
    figure = BY_NAME[row["metric"]]
    base, new = (formatted(value, figure.form, figure.scale) for value in (row["base"], row["new"]))
    parts = [f"{figure.label} {base} -> {new}"]
    if row["change"] is not None:
        parts.append(change_text("change", row["change"], row["change_ci90"]))
    if row["base_repeats"] and row["new_repeats"]:
        parts.append(f"of {row['base_repeats']} and {plural(row['new_repeats'], 'repeat')}")
    parts.append(f"threshold {_percent(row['threshold'])}")
    return ", ".join(parts) + (f"; {row['reason']}" if row["reason"] else "")


def _command(kind: str, title: str, message: str) -> str:
    """A workflow command, escaped as actions/toolkit's core does (packages/core/src/command.ts)."""
    title = _escaped(printable_lines(title)).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={title}::{_escaped(printable_lines(message))}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

"""A comparison as GitHub takes it: an annotation a regression, and figures for github-action-benchmark."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.compare import Comparison
from harness.compare.judge import INVALID, WORSE
from harness.system.wording import plural

Row = Mapping[str, Any]
# What is better when larger, as a cost: the name and unit of the inverse, and what it is a multiple of.
COSTS = {
    "tokens_per_s": ("ms_per_token", "ms/token", 1e3),
    "W_tokens_per_ms": ("us_per_token_of_context", "us/token", 1e3),
}


def commands(found: Comparison) -> list[str]:
    """Workflow commands, one a line: `::error` for a regression that was asked to fail, `::warning` for one
    that was not, for a figure that is invalid, for what was not compared or only in part, and for what could
    not be read. The worst come first: GitHub shows ten of each kind."""
    worse = sorted((row for row in found.rows if row["verdict"] in WORSE), key=_badness, reverse=True)
    lines = [
        _command("error" if row["fails"] else "warning", f"{row['verdict']}: {row['name']}", _change(row))
        for row in sorted(worse, key=lambda row: not row["fails"])
    ]
    lost = [*(row for row in found.rows if row["verdict"] == INVALID), *found.not_compared]
    told = [(f"not compared: {each['name']}", each["reason"]) for each in lost]
    told += [(f"compared in part: {each['name']}", each["reason"]) for each in found.partial]
    told += [("not read", damage) for damage in found.damages]
    return lines + [
        _command("warning", title, reason or "no figure on one of the two sides")
        for title, reason in dict.fromkeys(told)
    ]


def benchmark(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The new figures as github-action-benchmark's tool customSmallerIsBetter reads them: `name`, `unit`,
    `value`, `range` and `extra` of each cell and metric.

    What is better when larger stands as its inverse (ms per token); the longest context has no such one and
    is left out, as are invalid figures. `range` is the row's `spread`, the standard deviation of one repeat
    by what is known of all cells, as a bare number in the value's unit: the action does arithmetic with it.
    """
    return list(_entries(rows))


def as_json(rows: Sequence[Row]) -> str:
    """The text of the file that the action's output-file-path names."""
    return json.dumps(benchmark(rows), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _entries(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        metric, unit, value = row["metric"], row["unit"], row["new"]
        if value is None or row["verdict"] == INVALID:
            continue
        if row["better"] == "higher":
            if metric not in COSTS:
                continue
            metric, unit, multiple = COSTS[metric]
            value = multiple / value
        # The action tells entries apart by name alone, and these three are the same every night.
        name = f"{row['cell']} {metric} ({row['machine']}, {row['device']})"
        entry = {"name": name, "unit": unit, "value": value}
        if row["spread"] is not None:
            entry["range"] = f"± {row['spread'] * value:.6g}"
        yield entry | {"extra": f"{row['name']}\n{row['verdict']}: {_change(row)}"}


def _change(row: Row) -> str:
    """`tokens_per_s 20.1 -> 19.1 tok/s: -5.0% (90%: -5.6% to -4.4%), of 42 and 3 repeats, threshold 2%`"""
    figures = f"{row['metric']} {_figure(row['base'])} -> {_figure(row['new'])} {row['unit']}"
    parts = [figures if row["change"] is None else f"{figures}: {row['change']:+.1%}{_interval(row)}"]
    if row["base_repeats"] and row["new_repeats"]:
        parts.append(f"of {row['base_repeats']} and {plural(row['new_repeats'], 'repeat')}")
    parts.append(f"threshold {100 * row['threshold']:.3g}%")
    return ", ".join(parts) + (f"; {row['reason']}" if row["reason"] else "")


def _interval(row: Row) -> str:
    if not row["change_ci90"]:
        return ""
    low, high = row["change_ci90"]
    return f" (90%: {low:+.1%} to {high:+.1%})"


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def _badness(row: Row) -> float:
    return abs(float(row["change"] or 0.0))


def _command(kind: str, title: str, message: str) -> str:
    """A workflow command, escaped as actions/toolkit's core does (packages/core/src/command.ts)."""
    title = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={title}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

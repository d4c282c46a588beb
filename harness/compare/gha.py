"""A comparison for GitHub: one annotation per regression, and figures for github-action-benchmark."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.compare import Comparison
from harness.compare.judge import INVALID, WORSE
from harness.system.printing import printable_lines
from harness.system.wording import plural

Row = Mapping[str, Any]
# Metrics that are better when larger, as a cost: name, unit and scale of the inverse.
COSTS = {
    "tokens_per_s": ("ms_per_token", "ms/token", 1e3),
    "W_tokens_per_ms": ("us_per_token_of_context", "us/token", 1e3),
    "pp512": ("pp512_ms_per_token", "ms/token", 1e3),
    "tokens_per_s_16k": ("ms_per_token_16k", "ms/token", 1e3),
}


def commands(found: Comparison) -> list[str]:
    """Workflow commands, one per line, the worst first: GitHub shows ten of each kind.

    `::error`: a regression in --fail-on. `::warning`: another regression, an invalid figure, a cell not
    compared or only in part, and a record that cannot be read.
    """
    worse = sorted((row for row in found.rows if row["verdict"] in WORSE), key=_badness, reverse=True)
    lines = [
        _command("error" if row["fails"] else "warning", f"{row['verdict']}: {row['name']}", _change(row))
        for row in sorted(worse, key=lambda row: not row["fails"])
    ]
    lost = [*(row for row in found.rows if row["verdict"] == INVALID), *found.not_compared]
    warnings = [(f"not compared: {each['name']}", each["reason"]) for each in lost]
    warnings += [(f"compared in part: {each['name']}", each["reason"]) for each in found.partial]
    warnings += [("not read", damage) for damage in found.damages]
    return lines + [
        _command("warning", title, reason or "no figure on one of the two sides")
        for title, reason in dict.fromkeys(warnings)
    ]


def benchmark(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The new figures for github-action-benchmark's tool customSmallerIsBetter.

    Each cell and metric has `name`, `unit`, `value`, `range` and `extra`. A metric that is better when larger
    is given as its inverse (ms per token). The longest context has no useful inverse and is left out, as are
    invalid figures. `range` is the row's `spread` (standard deviation of one repeat, moderated over all
    cells) as a plain number in the value's unit: the action calculates with it.
    """
    return list(_entries(rows))


def as_json(rows: Sequence[Row]) -> str:
    """The text of the action's output-file-path file."""
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
        # The action identifies entries by name alone, and these three are stable from night to night.
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
    title = _escaped(printable_lines(title)).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={title}::{_escaped(printable_lines(message))}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

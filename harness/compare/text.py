"""Format a comparison for a terminal, as Markdown and as JSON. Differences of the environment come first."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from harness.analysis.series import paired
from harness.analysis.series.difference import FALSE_DISCOVERIES
from harness.compare import Comparison
from harness.compare.judge import BETTER, INVALID, SAME, UNCLEAR, WORSE
from harness.report.table import NONE, Table, formatted, in_markdown
from harness.system.wording import plural

Row = Mapping[str, Any]
VERDICTS = (*WORSE, *BETTER, UNCLEAR, INVALID, SAME)  # in display order
# metric: (label, format, unit divisor)
FIGURES = {
    "tokens_per_s": ("tok/s", "{:,.1f}", 1.0),
    "B_ms": ("B ms", "{:,.2f}", 1.0),
    "W_tokens_per_ms": ("W tok/ms", "{:,.0f}", 1.0),
    "ttft_ms": ("TTFT ms", "{:,.1f}", 1.0),
    "pp512": ("pp512 tok/s", "{:,.1f}", 1.0),
    "ttft_8k_ms": ("TTFT 8k ms", "{:,.1f}", 1.0),
    "tokens_per_s_16k": ("tok/s at 16k", "{:,.1f}", 1.0),
    "task_s": ("task s", "{:,.2f}", 1.0),
    "task_kept_s": ("task s, prefix kept", "{:,.2f}", 1.0),
    "memory_bytes": ("memory MB", "{:,.0f}", 1e6),
    "max_ctx": ("longest context", "{:,.0f}", 1.0),
    "perplexity": ("PPL", "{:,.4f}", 1.0),
}


def counts(found: Comparison) -> str:
    """`1 SLOWER, 11 SAME of 12 figures of 3 cells; 1 cell not compared`"""
    verdicts = Counter(row["verdict"] for row in found.rows)
    listed = ", ".join(f"{verdicts[word]} {word}" for word in VERDICTS if verdicts[word])
    cells = len({row["name"] for row in found.rows})
    line = (
        f"{listed} of {plural(len(found.rows), 'figure')} of {plural(cells, 'cell')}"
        if listed
        else "no figure"
    )
    if lost := len(found.not_compared):
        line += f"; {plural(lost, 'cell')} not compared"
    if found.partial:
        line += f"; {plural(len(found.partial), 'cell')} compared in part"
    return line


def tables(found: Comparison) -> list[Table]:
    """The tables of differences, cells not compared, shared shifts, and figures; empty ones are left out."""
    every = _environment(found), _not_compared(found), _shared(found), _figures(found)
    return [table for table in every if table.lines]


def meaning(found: Comparison) -> list[str]:
    """How to read the figures, in sentences."""
    thresholds = {row["family"]: row["threshold"] for row in found.rows}
    limits = ", ".join(f"{family} {_percent(value)}" for family, value in thresholds.items())
    if found.paired:
        return [
            "Figures are geometric means over rounds; a change is B against A in the same round, with its "
            "90% interval.",
            "SLOWER, LARGER, SHORTER, WORSE: worse. Mean and median of the change are at least half of the "
            f"threshold, and it is statistically significant ({_percent(paired.FALSE_DISCOVERIES)} false "
            "discoveries). SAME: the whole interval is within the threshold. UNCLEAR: neither. INVALID: not "
            "compared.",
            f"Thresholds, as relative change in cost: {limits}.",
        ]
    return [
        "Figures are geometric means over repeats; a change is new against baseline, with its 90% interval. "
        "own: the interval of the change beyond what all cells share.",
        *_between(found),
        "SLOWER, LARGER, SHORTER, WORSE: worse. The median and one of the two intervals exceed the threshold,"
        f" and the change is statistically significant ({_percent(FALSE_DISCOVERIES)} false discoveries)."
        " SAME: the whole interval is within the threshold. UNCLEAR: neither. INVALID: not compared.",
        f"Thresholds, as relative change in cost: {limits}.",
    ]


def _between(found: Comparison) -> list[str]:
    """How campaigns differ, and what to do where that is assumed."""
    of = {each["metric"]: each["between"] for each in found.shared}
    speed = [source for metric, source in of.items() if metric == "tokens_per_s"]
    advice = "; `harness ab` measures both sides in one campaign, without this noise"
    return [f"Noise of speed: {source}{advice if 'assumed' in source else ''}." for source in speed]


def title(found: Comparison) -> str:
    return f"{found.base} -> {found.new}"


def terminal(found: Comparison) -> str:
    """As plain text with aligned columns."""
    lines = [title(found), ""]
    for table in tables(found):
        lines += [f"{table.title}:", *table.text(), ""]
    return "\n".join([*lines, counts(found), *meaning(found)]) + "\n"


def markdown(found: Comparison) -> str:
    parts = [f"# {in_markdown(title(found))}", *(f"> {in_markdown(each)}" for each in found.notes)]
    parts += [table.markdown() for table in tables(found)]
    parts += [f"**{counts(found)}**", *meaning(found)]
    return "\n\n".join(parts) + "\n"


def array(found: Comparison) -> str:
    """One JSON array with an object per cell and metric; a cell that is not compared has one without figures.

    `lost`: new repeats that are not usable, and why. `differs`: other differences of this cell.
    """
    nothing = dict.fromkeys(found.rows[0] if found.rows else ("metric", "base", "new", "change"))
    invalid = [nothing | {"verdict": INVALID, "fails": False} | each for each in found.not_compared]
    lost = {each["name"]: each["reason"] for each in found.partial}
    rows = [
        row
        | {"base_of": found.base, "new_of": found.new, "lost": lost.get(row["name"])}
        | {
            "differs": [
                _change(each) for each in found.environment if row["name"] in (each["cells"] or [row["name"]])
            ]
        }
        for row in (*found.rows, *invalid)
    ]
    return json.dumps(rows, indent=1, allow_nan=False) + "\n"


def _change(each: Row) -> dict[str, Any]:
    return {key: each[key] for key in ("what", "base", "new")}


def _environment(found: Comparison) -> Table:
    lines = [
        [
            each["what"],
            each["base"],
            each["new"],
            "all" if each["cells"] is None else ", ".join(each["cells"]),
        ]
        for each in found.environment
    ]
    headings = ["what", "baseline", "new", "cells"]
    return Table(headings, lines, [False] * 4, title="Environment differences")


def _not_compared(found: Comparison) -> Table:
    lines = [[each["name"], each["reason"]] for each in found.not_compared]
    lines += [[each["name"], f"in part: {each['reason']}"] for each in found.partial]
    lines += [["a record", each] for each in found.damages]
    return Table(["cell", "why"], lines, [False] * 2, title="Not compared")


def _shared(found: Comparison) -> Table:
    lines = [
        [
            FIGURES[each["metric"]][0],
            _signed(each["change"]),
            " to ".join(map(_signed, each["ci90"])),
            f"all {each['cells']} cells: the machine, or something they share",
            each["between"],
        ]
        for each in found.shared
        if each["change"] is not None
    ]
    headings = ["figure", "change", "90% interval", "of", "noise"]
    return Table(headings, lines, [False, True, True, False, False], title="Shared by all cells")


def _figures(found: Comparison) -> Table:
    headings = [
        "cell",
        "figure",
        "baseline",
        "new",
        "change",
        "90% interval",
        "own",
        "repeats",
        "verdict",
        "why",
    ]
    worst_first = sorted(found.rows, key=lambda row: VERDICTS.index(row["verdict"]))
    lines = [_line(row) for row in worst_first]
    numeric = [False, False, True, True, True, True, True, True, False, False]
    marked = [row["verdict"] in (*WORSE, INVALID) for row in worst_first]
    return Table(headings, lines, numeric, marked, "Figures")


def _line(row: Row) -> list[str]:
    name, form, unit = FIGURES[row["metric"]]
    base, new = (formatted(row[side], form, unit) for side in ("base", "new"))
    change = NONE if row["change"] is None else _signed(row["change"])
    interval = " to ".join(map(_signed, row["change_ci90"] or ())) or NONE
    repeats = f"{row['base_repeats']}, {row['new_repeats']}"
    verdict = row["verdict"] + (" (fails)" if row["fails"] else "")
    own = " to ".join(map(_signed, row["own_ci90"] or ())) or NONE
    return [row["name"], name, base, new, change, interval, own, repeats, verdict, row["reason"] or ""]


def _signed(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # no minus before a zero


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"

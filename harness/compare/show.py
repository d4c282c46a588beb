"""A comparison for a terminal, as Markdown and as JSON. Differences of the environment come first."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from harness.analysis import paired
from harness.analysis.differences import FALSE_DISCOVERIES
from harness.analysis.figures import BY_NAME
from harness.base.text import plural, signed_percent
from harness.compare import Change, Comparison
from harness.compare.judge import BETTER, INVALID, SAME, UNCLEAR, WORSE
from harness.report.text_table import NONE, Table, formatted, in_markdown, more_columns, wrapped

VERDICTS = (*WORSE, *BETTER, UNCLEAR, INVALID, SAME)  # in display order


def counts(comparison: Comparison) -> str:
    """`1 SLOWER, 11 SAME of 12 figures of 3 cells; 1 cell not compared`"""
    verdicts = Counter(row["verdict"] for row in comparison.rows)
    listed = ", ".join(f"{verdicts[word]} {word}" for word in VERDICTS if verdicts[word])
    cells = len({row["name"] for row in comparison.rows})
    line = (
        f"{listed} of {plural(len(comparison.rows), 'figure')} of {plural(cells, 'cell')}"
        if listed
        else "no figure"
    )
    if lost := len(comparison.not_compared):
        line += f"; {plural(lost, 'cell')} not compared"
    if comparison.partial:
        line += f"; {plural(len(comparison.partial), 'cell')} compared in part"
    return line


def tables(comparison: Comparison) -> list[Table]:
    """The tables of differences, cells not compared, shared shifts, and figures; empty ones are left out."""
    every = _environment(comparison), _not_compared(comparison), _shared(comparison), text_figures(comparison)
    return [table for table in every if table.lines]


def meaning_text(comparison: Comparison, of_own: bool = True) -> list[str]:
    """How to read the figures, in sentences; none without figures. `of_own`: of the column `own` too."""
    if not comparison.rows:
        return []
    if comparison.paired:
        what, means, between = "rounds", "B against A in the same round", []
        exceeds, false = "Mean and median of the change are at least half of the", paired.FALSE_DISCOVERIES
    else:
        what, means, between = "repeats", "new against baseline", _between(comparison)
        exceeds, false = "The median and one of the two intervals exceed the", FALSE_DISCOVERIES
    own = " own: the interval of the change beyond what all cells share." * (of_own and not comparison.paired)
    later = " What is worse fails in the second campaign in a row or later, unless far beyond all before."
    thresholds = {row["family"]: row["threshold"] for row in comparison.rows}
    limits = ", ".join(f"{family} {_percent(value)}" for family, value in thresholds.items())
    return [
        f"Figures are geometric means over {what}; a change is {means}, with its 90% interval.{own}",
        *between,
        f"SLOWER, LARGER, COSTLIER, SHORTER, WORSE: worse. {exceeds} threshold, and the change is"
        f" statistically significant ({_percent(false)} false discoveries). SAME: the whole interval is"
        " within the threshold. UNCLEAR: neither. INVALID: not compared.",
        f"Thresholds, as relative change in cost: {limits}."
        + later * any(row["nights_to_fail"] > 1 for row in comparison.rows),
    ]


def _between(comparison: Comparison) -> list[str]:
    """How campaigns differ, and what to do where that is assumed."""
    speed = [shared["between"] for shared in comparison.shared if shared["metric"] == "tokens_per_s"]
    advice = "; `harness ab` measures both sides in one campaign, without this noise"
    return [f"Noise of speed: {source}{advice if 'assumed' in source else ''}." for source in speed]


def change_text(label: str, change: float, ends: Sequence[float] | None) -> str:
    """`tok/s -8.3%, 90% interval -9.1% to -7.5%`"""
    return (
        f"{label} {change:+.1%}, 90% interval {' to '.join(map('{:+.1%}'.format, ends or ())) or 'unknown'}"
    )


def title_text(comparison: Comparison) -> str:
    return f"{comparison.base} -> {comparison.new}"


def terminal(comparison: Comparison, wide: bool) -> str:
    """The comparison as plain text with aligned columns; unless `wide`, those that fit in the terminal."""
    lines = [title_text(comparison), ""]
    headings: Sequence[str] = []
    for table in tables(comparison):  # the figures come last
        fitted, left_out = table.fitted(wide)
        text = fitted.text() if wide else [wrapped(line, "    ") for line in fitted.text()]
        lines += [f"{table.title}:", *text, *map(wrapped, more_columns(left_out)), ""]
        headings = fitted.headings
    meanings = meaning_text(comparison, of_own="own" in headings)
    return "\n".join([*lines, counts(comparison), *map(wrapped, meanings)]) + "\n"


def markdown(comparison: Comparison) -> str:
    parts = [
        f"# {in_markdown(title_text(comparison))}",
        *(f"> {in_markdown(note)}" for note in comparison.notes),
    ]
    parts += [table.markdown() for table in tables(comparison)]
    parts += [f"**{counts(comparison)}**", *meaning_text(comparison)]
    return "\n\n".join(parts) + "\n"


def array(comparison: Comparison) -> str:
    """One JSON array with an object per cell and metric; a cell that is not compared has one without figures.

    `lost`: new repeats that are not usable, and why. `differs`: other differences of this cell.
    """
    nothing = dict.fromkeys(comparison.rows[0] if comparison.rows else ("metric", "base", "new", "change"))
    nothing |= {"verdict": INVALID, "fails": False}
    part = {lost["name"]: lost["reason"] for lost in comparison.partial}

    def of_cell(name: str) -> dict[str, object]:
        differs = [
            {"what": each["what"], "base": each["base"], "new": each["new"]}
            for each in comparison.environment
            if name in (each["cells"] or [name])
        ]
        return {
            "base_of": comparison.base,
            "new_of": comparison.new,
            "lost": part.get(name),
            "differs": differs,
        }

    rows = [{**row, **of_cell(row["name"])} for row in comparison.rows]
    rows += [{**nothing, **lost, **of_cell(lost["name"])} for lost in comparison.not_compared]
    return json.dumps(rows, indent=1, allow_nan=False) + "\n"


def _side_names(comparison: Comparison) -> tuple[str, str]:
    return ("A", "B") if comparison.paired else ("baseline", "new")


def _environment(comparison: Comparison) -> Table:
    lines = [
        [
            each["what"],
            each["base"],
            each["new"],
            "all" if each["cells"] is None else ", ".join(each["cells"]),
        ]
        for each in comparison.environment
    ]
    headings = ["what", *_side_names(comparison), "cells"]
    return Table(headings, lines, [False] * 4, title="Environment differences", needed=headings)


def _not_compared(comparison: Comparison) -> Table:
    lines = [[each["name"], each["reason"]] for each in comparison.not_compared]
    lines += [[each["name"], f"in part: {each['reason']}"] for each in comparison.partial]
    lines += [["a record", damage] for damage in comparison.damages]
    return Table(["cell", "why"], lines, [False] * 2, title="Not compared", needed=["why"])


def _shared(comparison: Comparison) -> Table:
    lines = [
        [
            BY_NAME[each["metric"]].label,
            signed_percent(each["change"]),
            " to ".join(map(signed_percent, each["ci90"] or ())),
            f"all {each['cells']} cells: the machine, or something they share",
            each["between"],
        ]
        for each in comparison.shared
        if each["change"] is not None
    ]
    headings = ["figure", "change", "90% interval", "of", "noise"]
    return Table(
        headings, lines, [False, True, True, False, False], title="Shared by all cells", needed=headings
    )


def text_figures(comparison: Comparison) -> Table:
    """A line for each figure of each cell, with its verdict, the worst first."""
    headings = ["cell", "figure", *_side_names(comparison), "change"]
    headings += ["90% interval", "own", "repeats", "verdict", "why"]
    worst_first = sorted(comparison.rows, key=lambda row: VERDICTS.index(row["verdict"]))
    numeric = [False, False, True, True, True, True, True, True, False, False]
    marked = ["red" * (row["verdict"] in (*WORSE, INVALID)) for row in worst_first]
    needed = [name for name in headings if name not in ("90% interval", "own", "repeats")]
    return Table(headings, [_line(row) for row in worst_first], numeric, marked, "Figures", needed=needed)


def _line(row: Change) -> list[str]:
    figure = BY_NAME[row["metric"]]
    return [
        row["name"],
        figure.label,
        *(formatted(value, figure.form, figure.scale) for value in (row["base"], row["new"])),
        NONE if row["change"] is None else signed_percent(row["change"]),
        *(
            " to ".join(map(signed_percent, ends or ())) or NONE
            for ends in (row["change_ci90"], row["own_ci90"])
        ),
        f"{row['base_repeats']}, {row['new_repeats']}",
        row["verdict"] + " (fails)" * row["fails"],
        row["reason"] or "",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"

"""The changes as text, page and GitHub annotations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from typing_extensions import NotRequired, TypedDict

from harness.analysis import paired
from harness.analysis.differences import FALSE_DISCOVERIES
from harness.analysis.figures import BY_NAME, COMPARED
from harness.base.text import plural, printable_lines
from harness.compare import Change, Comparison
from harness.compare.judge import BETTER, INVALID, SAME, UNCLEAR, WORSE
from harness.report import parts, plots
from harness.report.plots import Chart
from harness.report.templates import filled
from harness.report.text_table import NONE, Table, formatted, in_markdown, more_columns, wrapped

# A comparison for GitHub: one annotation per regression, and figures for github-action-benchmark.


class BenchmarkEntry(TypedDict):
    """An entry in the format of github-action-benchmark."""

    name: str
    unit: str
    value: float
    range: NotRequired[str]
    extra: NotRequired[str]


def commands(found: Comparison) -> list[str]:
    """Workflow commands, one per line, the worst first: GitHub shows ten of each kind.

    `::error`: a regression in --fail-on. `::warning`: another regression, an invalid figure, a cell not
    compared or only in part, and a record that cannot be read.
    """
    worse = [row for row in found.rows if row["verdict"] in WORSE]
    lines = [
        _command("error" if row["fails"] else "warning", f"{row['verdict']}: {row['name']}", _gha_change(row))
        for row in sorted(worse, key=lambda row: (not row["fails"], -abs(row["change"] or 0.0)))
    ]
    invalid = [row for row in found.rows if row["verdict"] == INVALID]
    warnings = [(f"not compared: {row['name']}", row["reason"]) for row in invalid]
    warnings += [(f"not compared: {each['name']}", each["reason"]) for each in found.not_compared]
    warnings += [(f"compared in part: {each['name']}", each["reason"]) for each in found.partial]
    warnings += [("not read", damage) for damage in found.damages]
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


# Format a comparison for a terminal, as Markdown and as JSON. Differences of the environment come first.


VERDICTS = (*WORSE, *BETTER, UNCLEAR, INVALID, SAME)  # in display order


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
    every = _environment(found), _not_compared(found), _shared(found), text_figures(found)
    return [table for table in every if table.lines]


def meaning_text(found: Comparison, of_own: bool = True) -> list[str]:
    """How to read the figures, in sentences; none without figures. `of_own`: of the column `own` too."""
    if not found.rows:
        return []
    if found.paired:
        what, means, between = "rounds", "B against A in the same round", []
        exceeds, false = "Mean and median of the change are at least half of the", paired.FALSE_DISCOVERIES
    else:
        what, means, between = "repeats", "new against baseline", _between(found)
        exceeds, false = "The median and one of the two intervals exceed the", FALSE_DISCOVERIES
    own = " own: the interval of the change beyond what all cells share." * (of_own and not found.paired)
    later = " What is worse fails in the second campaign in a row or later, unless far beyond all before."
    thresholds = {row["family"]: row["threshold"] for row in found.rows}
    limits = ", ".join(f"{family} {_percent(value)}" for family, value in thresholds.items())
    return [
        f"Figures are geometric means over {what}; a change is {means}, with its 90% interval.{own}",
        *between,
        f"SLOWER, LARGER, COSTLIER, SHORTER, WORSE: worse. {exceeds} threshold, and the change is"
        f" statistically significant ({_percent(false)} false discoveries). SAME: the whole interval is"
        " within the threshold. UNCLEAR: neither. INVALID: not compared.",
        f"Thresholds, as relative change in cost: {limits}."
        + later * any(row["nights_to_fail"] > 1 for row in found.rows),
    ]


def _between(found: Comparison) -> list[str]:
    """How campaigns differ, and what to do where that is assumed."""
    speed = [shared["between"] for shared in found.shared if shared["metric"] == "tokens_per_s"]
    advice = "; `harness ab` measures both sides in one campaign, without this noise"
    return [f"Noise of speed: {source}{advice if 'assumed' in source else ''}." for source in speed]


def change_text(label: str, change: float, ends: Sequence[float] | None) -> str:
    """`tok/s -8.3%, 90% interval -9.1% to -7.5%`"""
    return (
        f"{label} {change:+.1%}, 90% interval {' to '.join(map('{:+.1%}'.format, ends or ())) or 'unknown'}"
    )


def title_text(found: Comparison) -> str:
    return f"{found.base} -> {found.new}"


def terminal(found: Comparison, wide: bool) -> str:
    """The comparison as plain text with aligned columns; unless `wide`, those that fit in the terminal."""
    lines = [title_text(found), ""]
    headings: Sequence[str] = []
    for table in tables(found):  # the figures come last
        fitted, left_out = table.fitted(wide)
        text = fitted.text() if wide else [wrapped(line, "    ") for line in fitted.text()]
        lines += [f"{table.title}:", *text, *map(wrapped, more_columns(left_out)), ""]
        headings = fitted.headings
    meanings = meaning_text(found, of_own="own" in headings)
    return "\n".join([*lines, counts(found), *map(wrapped, meanings)]) + "\n"


def markdown(found: Comparison) -> str:
    parts = [f"# {in_markdown(title_text(found))}", *(f"> {in_markdown(each)}" for each in found.notes)]
    parts += [table.markdown() for table in tables(found)]
    parts += [f"**{counts(found)}**", *meaning_text(found)]
    return "\n\n".join(parts) + "\n"


def array(found: Comparison) -> str:
    """One JSON array with an object per cell and metric; a cell that is not compared has one without figures.

    `lost`: new repeats that are not usable, and why. `differs`: other differences of this cell.
    """
    nothing = dict.fromkeys(found.rows[0] if found.rows else ("metric", "base", "new", "change"))
    nothing |= {"verdict": INVALID, "fails": False}
    part = {lost["name"]: lost["reason"] for lost in found.partial}

    def of_cell(name: str) -> dict[str, object]:
        differs = [
            {"what": each["what"], "base": each["base"], "new": each["new"]}
            for each in found.environment
            if name in (each["cells"] or [name])
        ]
        return {"base_of": found.base, "new_of": found.new, "lost": part.get(name), "differs": differs}

    rows = [{**row, **of_cell(row["name"])} for row in found.rows]
    rows += [{**nothing, **lost, **of_cell(lost["name"])} for lost in found.not_compared]
    return json.dumps(rows, indent=1, allow_nan=False) + "\n"


def _side_names(found: Comparison) -> tuple[str, str]:
    return ("A", "B") if found.paired else ("baseline", "new")


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
    headings = ["what", *_side_names(found), "cells"]
    return Table(headings, lines, [False] * 4, title="Environment differences", needed=headings)


def _not_compared(found: Comparison) -> Table:
    lines = [[each["name"], each["reason"]] for each in found.not_compared]
    lines += [[each["name"], f"in part: {each['reason']}"] for each in found.partial]
    lines += [["a record", each] for each in found.damages]
    return Table(["cell", "why"], lines, [False] * 2, title="Not compared", needed=["why"])


def _shared(found: Comparison) -> Table:
    lines = [
        [
            BY_NAME[each["metric"]].label,
            _signed(each["change"]),
            " to ".join(map(_signed, each["ci90"] or ())),
            f"all {each['cells']} cells: the machine, or something they share",
            each["between"],
        ]
        for each in found.shared
        if each["change"] is not None
    ]
    headings = ["figure", "change", "90% interval", "of", "noise"]
    return Table(
        headings, lines, [False, True, True, False, False], title="Shared by all cells", needed=headings
    )


def text_figures(found: Comparison) -> Table:
    """A line for each figure of each cell, with its verdict, the worst first."""
    headings = ["cell", "figure", *_side_names(found), "change"]
    headings += ["90% interval", "own", "repeats", "verdict", "why"]
    worst_first = sorted(found.rows, key=lambda row: VERDICTS.index(row["verdict"]))
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
        NONE if row["change"] is None else _signed(row["change"]),
        *(" to ".join(map(_signed, ends or ())) or NONE for ends in (row["change_ci90"], row["own_ci90"])),
        f"{row['base_repeats']}, {row['new_repeats']}",
        row["verdict"] + " (fails)" * row["fails"],
        row["reason"] or "",
    ]


def _signed(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # no minus before a zero


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


# A comparison as one HTML page: what differs, the verdicts, and a plot of each change with its interval.


WORSE_COLOUR, BETTER_COLOUR, OTHER_COLOUR = plots.COLOURS[1], plots.COLOURS[2], plots.FAINT


def comparison_page(found: Comparison) -> str:
    """The whole file as text."""
    return filled(
        "comparison.html",
        title=title_text(found),
        notes=found.notes,
        tables=tables(found),
        counts=counts(found),
        meaning=meaning_text(found),
        figures=list(_page_figures(found.rows)),
    )


def _page_figures(rows: Sequence[Change]) -> Iterator[Chart]:
    """A figure per metric: the change of every cell, its interval, and the threshold in both directions."""
    for figure in COMPARED:
        shown = [row for row in rows if row["metric"] == figure.name and row["change_ci90"]]
        if shown:
            yield _changes(figure.name, figure.label, shown)


def _changes(metric: str, name: str, rows: Sequence[Change]) -> Chart:
    names = [row["name"] for row in rows]
    percents = [100 * (row["change"] or 0.0) for row in rows]
    ends: list[list[float | None] | None] = [[100 * end for end in row["change_ci90"] or ()] for row in rows]
    look = {"size": 9, "color": [_colour(row) for row in rows]}
    threshold = 100 * rows[0]["threshold"]
    return Chart(
        f"change-{metric}",
        f"Change of {name}",
        f"Change of {name}, new against baseline, with its 90% interval; dotted: the threshold.",
        [
            parts.scatter(
                name,
                percents,
                [plots.plain_figure(cell) for cell in names],
                plots.Mark(plots.INK, "circle"),
                "%{y}: %{text}, %{x:+.2f}%<extra></extra>",
                marker=look,
                error_x=parts.error_bars(percents, ends, plots.INK),
                text=[row["verdict"] for row in rows],
            )
        ],
        plots.named_layout(
            names,
            f"change of {name}, %",
            shapes=[
                plots.upright_figure(0.0, "solid"),
                *(plots.upright_figure(at, "dot") for at in (threshold, -threshold)),
            ],
        ),
        height=plots.names_height(names),
        across=2,
    )


def _colour(row: Change) -> str:
    if row["verdict"] in WORSE:
        return WORSE_COLOUR
    return BETTER_COLOUR if row["verdict"] in BETTER else OTHER_COLOUR

"""A history as one offline HTML page: the steps, then a plot of every metric of every cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache

from harness.analysis.figures import Figure
from harness.analysis.steps import SHORTEST
from harness.base.text import few, plural
from harness.compare.series import History, Series, Step
from harness.report.parts import lines, scatter
from harness.report.plots import COLOURS, Chart, Mark, figure_layout, plain_figure, upright_figure
from harness.report.templates import filled
from harness.report.text_table import Table

FEWEST = 2 * SHORTEST  # nights with a figure that a step needs
NO_STEPS = "No figure of any cell moved to another level."
TOO_FEW = f"There are too few nights: a step needs {FEWEST}, three before and three after."
CHANGES_SHOWN = 3  # of a step, in a terminal
HEADINGS = {
    "since": "the first night at the new level; across a gap, the nights around it",
    "cell": "model, stack and variant; the device where it is no CPU",
    "figure": "the metric that changed level",
    "verdict": "better or worse",
    "from": "median over the nights of the old level",
    "to": "median over the nights of the new level",
    "change": "relative change",
    "what changed": "differences in versions, options, clocks and the machine, over two nights before and"
    " after",
}
MEANINGS = (
    "A night is a campaign. Its figure is the mean over its ok repeats. A night without a figure is a gap,"
    " not a zero: a mark at the bottom of the plot gives the reason.",
    "A step is a move to another level for at least three nights, found as piecewise constants by penalised"
    " likelihood on logarithms, with the correlation of neighbouring nights. One or two outlying nights are"
    " not a step. Up to 5% of histories of 60 nights without a change show a step (docs/validation.md).",
    "The changes listed at a step happened at the same time. They need not be its cause.",
)
LEVEL, FAILED = COLOURS[1], "#8a4b00"
NIGHT = "%{x|%Y-%m-%d %H:%M}"
MOST_DRAWN = 100  # points of a figure, which has room for so many; of more nights, each is the median of some
MARGIN = 0.1  # above and below, at least this share of the figure: otherwise noise fills the plot


def history_page(title: str, history: History, steps: Sequence[Step], latest: Sequence[str] = ()) -> str:
    """The whole file as text; needs at least one series. `latest`: how the last night differs."""
    first, last = history.ends
    cells = {series.name: "" for series in history.series} | dict.fromkeys(history.cells_without_data, "")
    lead = (
        f"{counted(len(steps), 'step')} in {counted(len(cells), 'cell')}, over"
        f" {counted(history.campaigns, 'campaign')} from {first:%Y-%m-%d} to {last:%Y-%m-%d}."
    )
    drawn: dict[str, list[Chart]] = {}
    for series in history.series:
        drawn.setdefault(str(series.identity["model"]), []).append(figure(series, steps))
    missing = [
        f"{name}: no figure in {counted(nights, 'night')}; the last: {why}"
        for name, (nights, why) in history.cells_without_data.items()
    ]
    return filled(
        "history.html",
        title=title,
        lead=lead,
        warnings=[*latest, *missing, *few(history.warnings)],
        models=drawn,
        steps=steps_table(steps),
        no_steps=NO_STEPS if enough(history) else f"{NO_STEPS} {TOO_FEW}",
        meanings=MEANINGS,
    )


def counted(number: int, what: str) -> str:
    """`no steps`, `1 step`, `3 steps`."""
    return f"{plural(number, what) if number else f'no {what}s'}"


def figure(series: Series, steps: Sequence[Step]) -> Chart:
    """Nights as points, levels as lines, a dotted line at each step, failed nights at the bottom."""
    metric, levels = series.metric, series.levels
    unit, per = ("MB", 1e6) if metric.unit == "bytes" else (metric.unit, 1.0)
    began = series.began
    together = math.ceil(len(began) / MOST_DRAWN)
    parts = [range(at, min(at + together, len(began))) for at in range(0, len(began), together)]
    points = [_middle(series, part, per) for part in parts]
    points_drawn = [value for value in points if value is not None]
    low, high = min(points_drawn), max(points_drawn)
    headroom = max(MARGIN * (low + high) / 2, (high - low) * MARGIN)
    drawn: list[tuple[str | None, float | None]] = []
    for part, point in zip(parts, points, strict=True):
        if part[0] and began[part[0]] - began[part[0] - 1] > series.long:
            drawn.append((None, None))  # break the line across a gap
        drawn.append((_iso(began[part[len(part) // 2]]), point))
    hover = f"%{{y:,.5~g}} {plain_figure(unit)}<extra></extra>"
    nights = lines(
        "nights" if together == 1 else f"medians of {together} nights",
        [date for date, _ in drawn],
        [value for _, value in drawn],
        Mark(COLOURS[0], "circle"),
        f"{NIGHT}: {hover}",
    )
    nights["marker"]["size"], nights["line"] = 6, {"color": COLOURS[5], "width": 1}
    of_levels = lines(
        "levels",
        [at for level in levels for at in (_iso(began[level.first]), _iso(began[level.last]), None)],
        [at for level in levels for at in (level.value / per, level.value / per, None)],
        Mark(LEVEL, ""),
        f"level {hover}",
        dash="solid",
    )
    of_levels["line"]["width"] = 2.5
    failed = [(_iso(at), plain_figure(why)) for at, why in zip(began, series.whys, strict=True) if why]
    without = scatter(
        "no figure",
        [date for date, _ in failed],
        [low - headroom * 0.9] * len(failed),
        Mark(FAILED, "x"),
        f"{NIGHT}: %{{text}}<extra></extra>",
        text=[why for _, why in failed],
    )
    own = [step for step in steps if step.series is series]
    summary = "; ".join(f"{step.word} ({step.change:+.1%}) {step.when}" for step in reversed(own))
    return Chart(
        f"{series.name}-{metric.name}",
        f"{series.name}: {metric.label}",
        f"{metric.label} of {series.name}, night by night, and its levels. "
        + (f"{summary[:1].upper()}{summary[1:]}." if summary else "No step."),
        [nights, of_levels, *[without][: len(failed)]],
        figure_layout(
            "night (UTC)",
            metric.label,
            xaxis={"type": "date"},
            yaxis={"range": [low - headroom, high + headroom]},
            shapes=[upright_figure(step.began.isoformat(), "dot") for step in own],
        ),
        height=300,
        across=2,
    )


def _middle(series: Series, part: Sequence[int], per: float) -> float | None:
    """The median of some nights; None where none has a value."""
    values = [value / per for at in part if (value := series.values[at]) is not None]
    return statistics.median(values) if values else None


@lru_cache(maxsize=1 << 16)
def _iso(at: datetime) -> str:
    return at.isoformat()


def enough(history: History) -> bool:
    """Whether any series has enough nights for a step."""
    return any(sum(value is not None for value in each.values) >= FEWEST for each in history.series)


def steps_table(steps: Sequence[Step], most: int | None = None) -> Table:
    """A line for each step. `most`: of what else changed; None: all."""
    lines = [
        [
            *(step.when.removeprefix("on "), step.series.name, step.series.metric.label, step.word),
            *(_figure(step.series.metric, level.value) for level in (step.before, step.after)),
            *(f"{step.change:+.1%}", _changes(step, most)),
        ]
        for step in steps
    ]
    numeric = [heading in ("from", "to", "change") for heading in HEADINGS]
    marked = ["red" * (step.word == step.series.metric.worse) for step in steps]
    return Table([*HEADINGS], lines, numeric, marked, "Steps", [*HEADINGS.values()])


def _figure(metric: Figure, value: float) -> str:
    """A figure in its unit; MB are 1e6 bytes."""
    if metric.unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,.0f} {metric.unit}" if value >= 1e4 else f"{value:,.4g} {metric.unit}"


def _changes(step: Step, most: int | None) -> str:
    """What else changed, as text; at most the first `most` changes."""
    changes = [f"{change['what']}: {change['before']} -> {change['after']}" for change in step.changed]
    shown = changes[:most]
    more = f"; and {len(changes) - len(shown)} more" if len(changes) > len(shown) else ""
    return "; ".join(shown) + more or "nothing recorded"

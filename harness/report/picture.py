"""The picture of a model on the first screen: speed, size and perplexity in pairs, best at top left.

It is plain SVG and buttons, so that it is there before any script runs. Places are in percent of the frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.dataset.study import Row, figure
from harness.report import goals
from harness.report.cell_text import number
from harness.report.comparisons import pareto
from harness.report.drawing import Mark
from harness.report.goals import Group
from harness.report.marks import bits
from harness.report.ranking import STANDARD_ERRORS
from harness.report.table import NONE
from harness.system import wording

LEAST_SPAN = 0.2  # of an axis, as a share of its highest value
PAD = 0.07  # of an axis, beyond its outermost points
TICKS = 6  # about as many on an axis
FRONT_NAMED = 6  # variants of the front named in the caption
Value = tuple[float | None, float | None, float | None]  # with the ends of its interval


@dataclass(frozen=True)
class Measure:
    """One axis. `of`: the figure of a row. `falls`: lower is better. `from_zero`: the axis begins at 0."""

    title: str
    of: Callable[[Row], Value]
    form: str
    falls: bool = True
    from_zero: bool = False


@dataclass(frozen=True)
class Point:
    """A variant. `x`, `y` and the ends of the whisker, in percent from top left. `front`: nothing beats it
    in both. `open`: its size is by another measure than the axis. `lines`: its row, as text."""

    label: str
    short: str
    mark: Mark
    x: float
    y: float
    whisker: tuple[float, float] | None
    front: bool
    open: bool
    lines: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """`x_ticks`, `y_ticks`: place in percent and text. `front`: corners of the Pareto front."""

    name: str
    switch: str
    text: str
    x_title: str
    y_title: str
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    points: Sequence[Point]
    front: Sequence[tuple[float, float]]
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


def pictures(group: Group, marks: Mapping[str, Mark]) -> list[Picture]:
    """Speed against size; where perplexity is known, quality against size, and speed against quality."""
    by_B = goals.speed_is_B(group.named)
    key = goals.size_measure(group.named)[0]
    speed = Measure(
        f"tok/s{' at zero context' * by_B}", lambda row: goals.rate(row, by_B), "{:,.1f}", False, True
    )
    largest = max((goals.size(row, key)[0] or 0.0 for _, row in group.named), default=0.0)
    unit, per, form = ("GB", 1e9, "{:,.2f}") if largest >= goals.GB_FROM else ("MB", 1e6, "{:,.0f}")
    size = Measure(f"{unit}, {goals.SIZE_WORDS[key]}", lambda row: _size(row, key, per), form)
    quality = Measure("perplexity", _perplexity, "{:,.2f}")
    drawn = (
        _picture("speed", "Speed against size", group, marks, size, speed, key),
        _picture("quality", "Quality against size", group, marks, size, quality, key),
        _picture("both", "Speed against quality", group, marks, quality, speed, key),
    )
    return [each for each in drawn if each]


def _size(row: Row, measure: str, per: float) -> Value:
    value, _ = goals.size(row, measure)
    return (value / per if value is not None else None), None, None


def _perplexity(row: Row) -> Value:
    value, error = figure(row, "perplexity"), figure(row, "perplexity_stderr")
    if value is None or not error:
        return value, None, None
    return value, value - STANDARD_ERRORS * error, value + STANDARD_ERRORS * error


def _picture(
    name: str, switch: str, group: Group, marks: Mapping[str, Mark], x: Measure, y: Measure, size_key: str
) -> Picture | None:
    """Null with fewer than two points."""
    found = [(label, row, x.of(row), y.of(row)) for label, row in group.named]
    known = [
        (label, row, left[0], up)
        for label, row, left, up in found
        if left[0] is not None and up[0] is not None
    ]
    if len(known) < 2:
        return None
    values = [(at, up[0] or 0.0) for *_, at, up in known]
    front = pareto([(at, up if y.falls else -up) for at, up in values])
    across = _axis([at for at, _ in values], x.from_zero)
    ends = [end for *_, up in known for end in up if end is not None]
    high = max(up for _, up in values)  # a very wide interval does not flatten the rest
    upright = _axis([end for end in ends if end <= high * 1.5], y.from_zero)
    points = []
    for place, (label, row, at, up) in enumerate(known):
        lines = _lines(label, row, group)
        low, top = (_place(upright, end, not y.falls) if end is not None else None for end in up[1:])
        points.append(
            Point(
                label,
                str(row.get("variant") or label),
                marks[str(row["name"])],
                _place(across, at, False),
                _place(upright, up[0] or 0.0, not y.falls),
                (low, top) if low is not None and top is not None else None,
                place in front,
                x.title != "perplexity" and goals.size(row, size_key)[1] != size_key,
                lines,
            )
        )
    corners = sorted((points[place].x, points[place].y) for place in front)
    best = [known[place][0] for place in sorted(front, key=lambda place: values[place])]
    missing = len(group.named) - len(known)
    text = (
        f"{switch} of {group.title}: best at top left. Line: the Pareto front, which no variant beats in"
        f" both: {wording.named(best, FRONT_NAMED)}."
        + (" Open symbols: their size is by another measure." if any(p.open for p in points) else "")
        + (f" {missing} of {len(group.named)} ok cells lack a figure." if missing else "")
    )
    return Picture(
        name,
        switch,
        text,
        x.title + (", lower is better" if x.title == "perplexity" else ""),
        y.title + (", lower is better" if y.falls else ""),
        [(_place(across, tick, False), f"{tick:,.10g}") for tick in _ticks(*across)],
        [(_place(upright, tick, not y.falls), f"{tick:,.10g}") for tick in _ticks(*upright)],
        sorted(points, key=lambda point: (point.front, point.x)),
        corners,
        ["variant", x.title, y.title, "Pareto front"],
        [
            [label, x.form.format(at), y.form.format(up[0]), "yes" if place in front else ""]
            for place, (label, _, at, up) in enumerate(known)
        ],
    )


def _lines(label: str, row: Row, group: Group) -> list[str]:
    """A row as the tooltip shows it: its name, then the figures that it has."""
    by_B = goals.speed_is_B(group.named)
    value, low, high = goals.rate(row, by_B)
    speed = "" if value is None else f"{value:,.1f} tok/s{' at zero context' * by_B}"
    if value is not None and low is not None and high is not None:
        speed += f" (95% CI {low:,.1f} to {high:,.1f})"
    size, measure = goals.size(row, goals.size_measure(group.named)[0])
    flagged = row.get("flags")
    warnings = len(flagged) if isinstance(flagged, Sequence) else 0
    shown = {
        "": speed,
        " size": "" if size is None else f"{goals.sized(size)} {goals.SIZE_WORDS[measure]}",
        "perplexity ": number(row, "perplexity"),
        "bits ": bits(row)[0].removesuffix(" bits"),
        "B ms ": number(row, "B_ms"),
        "longest context ": goals.text(row, "max_ctx"),
    }
    lines = [
        f"{name if name != ' size' else ''}{text}" for name, text in shown.items() if text and text != NONE
    ]
    return [label, *lines, *([wording.plural(warnings, "warning")] if warnings else [])]


def _axis(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    lacking = (abs(high) * LEAST_SPAN or 1.0) - (high - low)
    if lacking > 0:  # so that differences of no matter look like none
        low, high = low - lacking / 2, high + lacking / 2
    pad = (high - low) * PAD
    if from_zero and low < high * 0.6:
        return 0.0, high + high * PAD
    return low - pad, high + pad


def _place(axis: tuple[float, float], value: float, rises: bool) -> float:
    """Percent from the left or the top. `rises`: higher values are nearer to the top."""
    low, high = axis
    share = min(1.0, max(0.0, (value - low) / (high - low)))
    return round(100 * (1 - share if rises else share), 2)


def _ticks(low: float, high: float) -> list[float]:
    """Round values within the axis."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [round(place * step, 10) for place in range(first, math.floor(high / step) + 1)]

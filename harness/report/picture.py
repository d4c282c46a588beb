"""The picture of a model on the first screen: speed, size and quality in pairs, best at top left.

The picture is plain SVG and buttons, and shows before any script runs. Places are in percent of the frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.columns import Cell
from harness.analysis.figures import shown_in
from harness.base import text as base_text
from harness.dataset.study import bounds
from harness.report import measures
from harness.report.measures import STANDARD_ERRORS
from harness.report.plots import Mark
from harness.report.ranked_groups import Group
from harness.report.tables import text_of
from harness.report.text_table import NONE
from harness.report.variant_looks import bits

LEAST_SPAN = 0.2  # of an axis, of its highest value: so differences of no matter look like none
PAD = 0.07  # of an axis, beyond its outermost points
TICKS = 6  # about as many on an axis
FRONT_NAMED = 6  # variants of the front named in the caption
Value = tuple[float | None, float | None, float | None]  # with the ends of its interval
Ends = tuple[float, float]


@dataclass(frozen=True)
class Measure:
    """One axis. `of`: the figure of a row. `falls`: lower is better. `from_zero`: the axis begins at 0.
    `is_log`: it is logarithmic, in whole decades, from LEAST_KLD."""

    title: str
    of: Callable[[Cell], Value]
    falls: bool = True
    from_zero: bool = False
    is_log: bool = False

    def drawn(self, row: Cell) -> Value:
        """The figure and its ends as the axis has them."""
        value, low, high = self.of(row)
        return self._scaled(value), self._scaled(low), self._scaled(high)

    def _scaled(self, value: float | None) -> float | None:
        return math.log10(max(value, measures.LEAST_KLD)) if self.is_log and value is not None else value

    def ends(self, values: Sequence[Value]) -> Ends:
        """The ends of the axis for these figures."""
        most = max(value or 0.0 for value, *_ in values)
        ends = [end for value in values for end in value if end is not None]
        if self.is_log:
            low, high = float(math.floor(min(ends))), float(math.ceil(max(ends)))
        else:  # a very wide interval does not flatten the rest
            ends = [end for end in ends if end <= most * 1.5]
            low, high = min(ends), max(ends)
        if (lacking := (abs(high) * LEAST_SPAN or 1.0) - (high - low)) > 0:
            low, high = low - lacking / 2, high + lacking / 2
        if self.from_zero and low < high * 0.6:
            return 0.0, high * (1 + PAD)
        pad = (high - low) * PAD
        return low - pad, high + pad

    def ticks(self, ends: Ends) -> list[tuple[float, str]]:
        """Round values on the axis with their texts."""
        low, high = ends
        rough = (high - low) / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
        step = 1 if self.is_log else step
        places = [round(n * step, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if self.is_log:
            return [(decade, f"{10**decade:g}" if decade > -4 else f"1e{decade:.0f}") for decade in places]
        return [(value, f"{value:,.10g}") for value in places]


@dataclass(frozen=True)
class Point:
    """A variant. `x`, `y` and the ends of the whiskers, in percent from top left. `front`: nothing beats it
    in both. `lines`: its row, as text."""

    label: str
    short: str
    mark: Mark
    x: float
    y: float
    whisker: Ends | None
    across: Ends | None
    front: bool
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
    front: Sequence[Ends]


def pictures(group: Group, marks: Mapping[str, Mark]) -> list[Picture]:
    """Speed against size; where quality is known, quality against size, and speed against quality: by KL
    divergence, else by perplexity; and where energy was measured, speed against energy."""
    by_B = measures.speed_is_B(group.named)
    size = measures.size_measure(group.named)
    sizes = [value for _, row in group.named if (value := size.of(row))]
    unit, per = ("GB", 1e9) if max(sizes, default=0.0) >= base_text.GB_FROM else ("MB", 1e6)

    def size_of(row: Cell) -> Value:
        value = size.of(row)
        return (value / per if value is not None else None), None, None

    x = Measure(f"{unit}, {size.name}", size_of)
    speed = Measure(f"tok/s{' at zero context' * by_B}", lambda row: measures.rate(row, by_B), False, True)
    quality = Measure("perplexity, lower is better", _perplexity)
    if measures.quality_is_kld(group.named):
        quality = Measure("KLD, nats per token, lower is better", _divergence, is_log=True)
    counters = dict.fromkeys(
        str(row["energy_source"]).split(":")[0] for _, row in group.named if row["energy_source"]
    )
    spent = next(figure for figure in shown_in("point") if figure.family == "energy")
    energy = Measure(
        f"{spent.label} ({', '.join(counters)}), lower is better", lambda row: (spent.number(row), None, None)
    )
    texts = {label: _lines(label, row, by_B, size) for label, row in group.named}
    drawn = (
        _picture("speed", "Speed against size", group, marks, texts, x, speed),
        _picture("quality", "Quality against size", group, marks, texts, x, quality),
        _picture("both", "Speed against quality", group, marks, texts, quality, speed),
        _picture("energy", "Speed against energy", group, marks, texts, energy, speed),
    )
    return [picture for picture in drawn if picture]


def _perplexity(row: Cell) -> Value:
    value, error = row["perplexity"], row["perplexity_stderr"]
    if value is None or not error:
        return value, None, None
    return value, value - STANDARD_ERRORS * error, value + STANDARD_ERRORS * error


def _divergence(row: Cell) -> Value:
    return row["kld_mean"], *bounds(row["kld_mean_ci95"])


def _picture(
    name: str,
    switch: str,
    group: Group,
    marks: Mapping[str, Mark],
    texts: Mapping[str, Sequence[str]],
    x: Measure,
    y: Measure,
) -> Picture | None:
    """The picture of two measures; None with fewer than two points. `texts`: of tooltips, by label."""
    every = [(label, row, x.drawn(row), y.drawn(row)) for label, row in group.named]
    known = [each for each in every if each[2][0] is not None and each[3][0] is not None]
    if len(known) < 2:
        return None
    values = [(left[0] or 0.0, up[0] or 0.0) for *_, left, up in known]
    front = pareto([(at, up if y.falls else -up) for at, up in values])
    across = x.ends([left for *_, left, _ in known])
    upright = y.ends([up for *_, up in known])
    points = [
        Point(
            label,
            row["variant"] or label,
            marks[row["name"]],
            _place(across, values[n][0], False),
            _place(upright, values[n][1], not y.falls),
            _whisker(upright, up, not y.falls),
            _whisker(across, left, False),
            n in front,
            texts[label],
        )
        for n, (label, row, left, up) in enumerate(known)
    ]
    best = [known[n][0] for n in sorted(front, key=lambda n: values[n])]
    missing = len(group.named) - len(known)
    word = "cells" if group.provisional else "ok cells"
    text = (
        f"{switch} of {group.title}: best at top left. Line: the Pareto front, which no variant beats in"
        f" both: {base_text.list_named(best, FRONT_NAMED)}; the others are pale."
        + (" Crosses: 95% intervals." if any(point.across for point in points) else "")
        + (f" {missing} of {len(group.named)} {word} lack a figure." if missing else "")
    )
    return Picture(
        name,
        switch,
        text,
        x.title,
        y.title,
        [(_place(across, at, False), tick) for at, tick in x.ticks(across)],
        [(_place(upright, at, not y.falls), tick) for at, tick in y.ticks(upright)],
        sorted(points, key=lambda point: (point.front, point.x)),
        sorted((points[n].x, points[n].y) for n in front),
    )


def pareto(points: Sequence[Ends]) -> set[int]:
    """Indices of the points that no other point dominates; lower is better."""
    front: set[int] = set()
    best = float("inf")
    last: Ends | None = None
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if points[i][1] < best or points[i] == last:
            front.add(i)
            best, last = points[i][1], points[i]
    return front


def _lines(label: str, row: Cell, by_B: bool, size: measures.SizeMeasure) -> list[str]:
    """A row as the tooltip shows it: its name, then the figures that it has."""
    value, low, high = measures.rate(row, by_B)
    speed = "" if value is None else f"{value:,.1f} tok/s{' at zero context' * by_B}"
    if value is not None and low is not None and high is not None:
        speed += f" (95% CI {low:,.1f} to {high:,.1f})"
    in_bytes = size.of(row)
    lines = [speed, "" if in_bytes is None else f"{base_text.sized(in_bytes)} {size.name}"]
    for figure in shown_in("point"):
        text = bits(row)[0] if figure.name == "bpw" else text_of(figure)(row)
        lines.append(f"{figure.label} {text}" if text != NONE else "")
    warnings = len(row["flags"])
    return [label, *filter(None, lines), *([base_text.plural(warnings, "warning")] if warnings else [])]


def _whisker(axis: Ends, value: Value, rises: bool) -> Ends | None:
    """The ends of an interval in percent; None where one is not known."""
    _, low, high = value
    return None if low is None or high is None else (_place(axis, low, rises), _place(axis, high, rises))


def _place(axis: Ends, value: float, rises: bool) -> float:
    """Percent from the left or the top. `rises`: higher values are nearer to the top."""
    low, high = axis
    share = min(1.0, max(0.0, (value - low) / (high - low)))
    return round(100 * (1 - share if rises else share), 2)

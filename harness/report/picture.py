"""The picture of a model on the first screen: speed, size and quality in pairs, best at top left.

The picture is plain SVG and buttons, and shows before any script runs. Places are in percent of the frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.columns import Cell
from harness.analysis.figures import shown_in
from harness.base import text as base_text
from harness.dataset.study import bounds
from harness.report import answers
from harness.report.answers import STANDARD_ERRORS, Group, SizeMeasure
from harness.report.plots import FAINT, Chart, Mark, Plotly, bits, figure_layout, key_sign, plain_figure
from harness.report.tables import text_of
from harness.report.text_table import NONE

LEAST_SPAN = 0.2  # of an axis, as a share of its highest value
PAD = 0.07  # of an axis, beyond its outermost points
TICKS = 6  # about as many on an axis
FRONT_NAMED = 6  # variants of the front named in the caption
Value = tuple[float | None, float | None, float | None]  # with the ends of its interval


@dataclass(frozen=True)
class Measure:
    """One axis. `of`: the figure of a row. `falls`: lower is better. `from_zero`: the axis begins at 0.
    `least`: of a logarithmic axis, the least that it shows; null: linear. `sizes`: it is the size."""

    title: str
    of: Callable[[Cell], Value]
    form: str
    falls: bool = True
    from_zero: bool = False
    least: float | None = None
    sizes: bool = False

    def scaled(self, row: Cell) -> Value:
        """The figure and its ends as they are drawn."""
        value, low, high = self.of(row)
        return self._scaled(value), self._scaled(low), self._scaled(high)

    def _scaled(self, value: float | None) -> float | None:
        return value if value is None or self.least is None else math.log10(max(value, self.least))

    def axis(self, values: Sequence[Value]) -> tuple[float, float]:
        """The ends of the axis for these figures, as drawn."""
        ends = [end for each in values for end in each if end is not None]
        if self.least is not None:  # whole decades
            return _axis([math.floor(min(ends)), math.ceil(max(ends))], False)
        high = max(value or 0.0 for value, *_ in values)  # a very wide interval does not flatten the rest
        return _axis([end for end in ends if end <= high * 1.5], self.from_zero)

    def ticks(self, axis: tuple[float, float]) -> list[tuple[float, str]]:
        """Values on the axis with their texts."""
        if self.least is None:
            return [(at, f"{at:,.10g}") for at in _ticks(*axis)]
        decades = range(math.ceil(axis[0]), math.floor(axis[1]) + 1)
        return [(at, f"{10**at:g}" if at > -4 else f"1e{at}") for at in decades]


@dataclass(frozen=True)
class Point:
    """A variant. `x`, `y` and the ends of the whiskers, in percent from top left. `front`: nothing beats it
    in both. `open`: its size is by another measure than the axis. `lines`: its row, as text."""

    label: str
    short: str
    mark: Mark
    x: float
    y: float
    whisker: tuple[float, float] | None
    across: tuple[float, float] | None
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
    """Speed against size; where quality is known, quality against size, and speed against quality: by KL
    divergence, else by perplexity; and where energy was measured, speed against energy."""
    by_B = answers.speed_is_B(group.named)
    key = answers.size_measure(group.named)
    speed = Measure(
        f"tok/s{' at zero context' * by_B}", lambda row: answers.rate(row, by_B), "{:,.1f}", False, True
    )
    largest = max((answers.goals_size(row, key)[0] or 0.0 for _, row in group.named), default=0.0)
    unit, per, form = ("GB", 1e9, "{:,.2f}") if largest >= base_text.GB_FROM else ("MB", 1e6, "{:,.0f}")
    size = Measure(f"{unit}, {key.name}", lambda row: _size(row, key, per), form, sizes=True)
    quality = Measure("perplexity", _perplexity, "{:,.2f}")
    if answers.quality_is_kld(group.named):
        quality = Measure("KLD, nats per token", _divergence, "{:g}", least=answers.LEAST_KLD)
    counters = {
        str(row["energy_source"]).split(":")[0]: None for _, row in group.named if row["energy_source"]
    }
    spent = next(figure for figure in shown_in("point") if figure.family == "energy")
    energy = Measure(
        f"{spent.label} ({', '.join(counters)})", lambda row: (spent.number(row), None, None), spent.form
    )
    drawn = (
        _picture("speed", "Speed against size", group, marks, size, speed, key),
        _picture("quality", "Quality against size", group, marks, size, quality, key),
        _picture("both", "Speed against quality", group, marks, quality, speed, key),
        _picture("energy", "Speed against energy", group, marks, energy, speed, key),
    )
    return [each for each in drawn if each]


def _size(row: Cell, measure: SizeMeasure, per: float) -> Value:
    value, _ = answers.goals_size(row, measure)
    return (value / per if value is not None else None), None, None


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
    x: Measure,
    y: Measure,
    by_size: SizeMeasure,
) -> Picture | None:
    """The picture of two measures; null with fewer than two points."""
    found = [(label, row, x.scaled(row), y.scaled(row)) for label, row in group.named]
    known = [each for each in found if each[2][0] is not None and each[3][0] is not None]
    if len(known) < 2:
        return None
    values = [(left[0] or 0.0, up[0] or 0.0) for *_, left, up in known]
    front = pareto([(at, up if y.falls else -up) for at, up in values])
    across = x.axis([left for *_, left, _ in known])
    upright = y.axis([up for *_, up in known])
    points = []
    for place, (label, row, left, up) in enumerate(known):
        lines = _lines(label, row, group)
        points.append(
            Point(
                label,
                row["variant"] or label,
                marks[row["name"]],
                _place(across, left[0] or 0.0, False),
                _place(upright, up[0] or 0.0, not y.falls),
                _whisker(upright, up, not y.falls),
                _whisker(across, left, False),
                place in front,
                x.sizes and answers.goals_size(row, by_size)[1] != by_size,
                lines,
            )
        )
    corners = sorted((points[place].x, points[place].y) for place in front)
    best = [known[place][0] for place in sorted(front, key=lambda place: values[place])]
    missing = len(group.named) - len(known)
    word = "cells" if group.provisional else "ok cells"
    text = (
        f"{switch} of {group.title}: best at top left. Line: the Pareto front, which no variant beats in"
        f" both: {base_text.list_named(best, FRONT_NAMED)}; the others are pale."
        + (" Crosses: 95% intervals." if any(p.across for p in points) else "")
        + (" Open symbols: their size is by another measure." if any(p.open for p in points) else "")
        + (f" {missing} of {len(group.named)} {word} lack a figure." if missing else "")
    )
    return Picture(
        name,
        switch,
        text,
        x.title + ("" if x.sizes else ", lower is better"),
        y.title + (", lower is better" if y.falls else ""),
        [(_place(across, at, False), tick) for at, tick in x.ticks(across)],
        [(_place(upright, at, not y.falls), tick) for at, tick in y.ticks(upright)],
        sorted(points, key=lambda point: (point.front, point.x)),
        corners,
        ["variant", x.title, y.title, "Pareto front"],
        [
            [label, x.form.format(x.of(row)[0]), y.form.format(y.of(row)[0]), "yes" if place in front else ""]
            for place, (label, row, *_) in enumerate(known)
        ],
    )


def pareto(points: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the points that no other point dominates; lower is better."""
    found: set[int] = set()
    best = float("inf")
    last: tuple[float, float] | None = None
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if points[i][1] < best or points[i] == last:
            found.add(i)
            best, last = points[i][1], points[i]
    return found


# The same picture for a PNG file, in which nothing can be hovered over: every point has its name, and the key
# says what each sign means.

NAME_PX = 6.8, 14  # a character's width, and a name's height
WIDTH, HEIGHT = 1100, 400  # px of the frame of a PNG file, about
Key = Sequence[tuple[str, str]]


def figure(of: Picture, hues: Key, shapes: Key) -> Chart:
    """A picture as plotly.js draws it, in percent of the frame. `hues`, `shapes`: as style_key()."""
    x, y = zip(*((point.x, point.y) for point in of.points), strict=True)
    sides = _sides(of.points)
    data: list[Plotly] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Pareto front",
            "x": [at for at, _ in of.front],
            "y": [up for _, up in of.front],
            "line": {"color": FAINT, "width": 1.5, "dash": "dot", "shape": "hv"},
        },
        {
            "type": "scatter",
            "mode": "markers+text",
            "x": x,
            "y": y,
            "text": [plain_figure(point.short) for point in of.points],
            "textposition": [sides[point.label] for point in of.points],
            "textfont": {"size": 12},
            "cliponaxis": False,
            "showlegend": False,
            "marker": {
                "color": [point.mark.colour for point in of.points],
                "symbol": [point.mark.symbol + "-open" * point.open for point in of.points],
                "size": 12,
                "opacity": [1 if point.front else 0.4 for point in of.points],
            },
        },
        *_key(hues, "circle"),
        *_key([(f"{text} bits per weight", symbol) for text, symbol in shapes]),
    ]
    if not all(point.front for point in of.points):
        data.append(key_sign("beaten in both", FAINT, "circle", 0.4))
    if any(point.open for point in of.points):
        data.append(key_sign("size by another measure", FAINT, "circle-open"))
    whiskers = [
        {**WHISKER, **ends, "line": {"color": point.mark.colour, "width": 1.5}}
        for point in of.points
        for ends in _ends(point)
    ]
    if whiskers:
        data.append(key_sign("95% confidence interval", FAINT, "line-ns-open"))
    axis = {"zeroline": False, "fixedrange": True}
    return Chart(
        of.name,
        of.switch,
        of.text,
        data,
        figure_layout(
            of.x_title,
            of.y_title,
            xaxis={**axis, "range": [0, 100], **_tick_texts(of.x_ticks)},
            yaxis={**axis, "range": [100, 0], **_tick_texts(of.y_ticks)},
            shapes=whiskers,
        ),
        of.headers,
        of.rows,
    )


WHISKER = {"type": "line", "layer": "below", "opacity": 0.6}


def _ends(point: Point) -> Iterator[dict[str, float]]:
    if point.whisker:
        yield {"x0": point.x, "x1": point.x, "y0": point.whisker[0], "y1": point.whisker[1]}
    if point.across:
        yield {"x0": point.across[0], "x1": point.across[1], "y0": point.y, "y1": point.y}


def _tick_texts(ticks: Sequence[tuple[float, str]]) -> Plotly:
    return {"tickvals": [place for place, _ in ticks], "ticktext": [text for _, text in ticks]}


def _key(entries: Key, symbol: str = "") -> list[Plotly]:
    """Entries of a legend: colours of this symbol, else symbols."""
    return [key_sign(text, of if symbol else FAINT, symbol or of) for text, of in entries]


def _sides(points: Sequence[Point]) -> dict[str, str]:
    """Where the name of each point stands: on the first side where it covers no other name and no point."""
    width, height = WIDTH / 100, HEIGHT / 100  # px per percent
    dots = [(point.x * width, point.y * height) for point in points]
    taken: list[tuple[float, float, float, float]] = []
    found = {}
    for point, (x, y) in sorted(zip(points, dots, strict=True), key=lambda each: not each[0].front):
        long, high = NAME_PX[0] * len(point.short), NAME_PX[1]
        boxes = {
            "middle right": (x + 8, y - high / 2),
            "middle left": (x - 8 - long, y - high / 2),
            "top center": (x - long / 2, y - 8 - high),
            "bottom center": (x - long / 2, y + 8),
        }

        def clear(left: float, top: float, long: float = long, high: float = high) -> bool:
            off = left < 0 or left + long > 100 * width
            over = any(
                left < a + c and a < left + long and top < b + d and b < top + high for a, b, c, d in taken
            )
            hidden = any(left - 6 < a < left + long + 6 and top - 6 < b < top + high + 6 for a, b in dots)
            return not (off or over or hidden)

        side = next((name for name, at in boxes.items() if clear(*at)), "top center")
        taken.append((*boxes[side], long, high))
        found[point.label] = side
    return found


def _lines(label: str, row: Cell, group: Group) -> list[str]:
    """A row as the tooltip shows it: its name, then the figures that it has."""
    by_B = answers.speed_is_B(group.named)
    value, low, high = answers.rate(row, by_B)
    speed = "" if value is None else f"{value:,.1f} tok/s{' at zero context' * by_B}"
    if value is not None and low is not None and high is not None:
        speed += f" (95% CI {low:,.1f} to {high:,.1f})"
    size, measure = answers.goals_size(row, answers.size_measure(group.named))
    warnings = len(row["flags"])
    lines = [speed, "" if size is None else f"{base_text.sized(size)} {measure.name}"]
    for figure in shown_in("point"):
        text = bits(row)[0] if figure.name == "bpw" else text_of(figure)(row)
        lines.append(f"{figure.label} {text}" if text != NONE else "")
    return [label, *filter(None, lines), *([base_text.plural(warnings, "warning")] if warnings else [])]


def _whisker(axis: tuple[float, float], value: Value, rises: bool) -> tuple[float, float] | None:
    """The ends of an interval in percent; null where one is not known."""
    _, low, high = value
    return None if low is None or high is None else (_place(axis, low, rises), _place(axis, high, rises))


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

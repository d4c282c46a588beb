"""Series as plotly.js draws them: lines, symbols and bars of the figures of rows, by their paths.

`v`: the entry of the legend that a series belongs to. `kind`: of an overlay, which the reader can hide.
`hover`: the text of a point, which the series' name follows; without it a point has none. `meta`: more for
page.js; see Chart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.base.lookup import value_at
from harness.dataset.study import Floats, bounds
from harness.report.plots import POINTS, Mark, Plotly, extent, packed, plain_figure, thinned

Values = Sequence[object] | Mapping[str, str]
"""Figures or names, or an array as plots.packed() gives it."""


def figure_at(row: Mapping[str, object], path: str) -> float | None:
    """The figure at a path such as `at.ttft_ms.median` or `utilisation.-1.mfu`; None if a part of the path is
    None or missing."""
    value = value_at(row, path)
    return value if isinstance(value, (int, float)) else None


def points(rows: Iterable[Mapping[str, object]], x: str, y: str) -> tuple[list[float], list[float]]:
    """The figures of rows at two paths, without the rows that lack one."""
    both = [(figure_at(row, x), figure_at(row, y)) for row in rows]
    pairs = [(left, round(up, 4)) for left, up in both if left is not None and up is not None]
    return [left for left, _ in pairs], [up for _, up in pairs]


def lines(
    name: str,
    x: Values,
    y: Values,
    mark: Mark,
    hover: str = "",
    v: int | None = None,
    kind: str = "",
    dash: str = "",
    meta: Mapping[str, object] | None = None,
    **more: object,
) -> Plotly:
    """A line with the symbols of its mark; a thin one without symbols if `dash` is given."""
    series = {**_series(name, x, y, hover, v, kind, meta), "mode": "lines" if dash else "lines+markers"}
    if dash:
        return {**series, "line": {"color": mark.colour, "width": 1, "dash": dash}, **more}
    marker = {"color": mark.colour, "symbol": mark.symbol, "size": 8}
    return {**series, "line": {"color": mark.colour, "width": 1.3}, "marker": marker, **more}


def line(x: Floats, y: Floats, name: str, v: int, mark: Mark, hover: str, points: int = POINTS) -> Plotly:
    """A thinned curve with a few symbols."""
    extents = extent(y)
    x, y = thinned(x, y, points)
    curve = lines(name, packed(x), packed(y), mark, hover, v, meta=extents)
    return {**curve, "marker": {**curve["marker"], "size": 7, "maxdisplayed": 8}}


def scatter(
    name: str,
    x: Values,
    y: Values,
    mark: Mark,
    hover: str = "",
    v: int | None = None,
    kind: str = "",
    meta: Mapping[str, object] | None = None,
    marker: Mapping[str, object] | None = None,
    **more: object,
) -> Plotly:
    """Symbols. `marker`: how they differ from those of the mark."""
    marker = {"color": mark.colour, "symbol": mark.symbol, "size": 8, **(marker or {})}
    return {**_series(name, x, y, hover, v, kind, meta), "mode": "markers", "marker": marker, **more}


def bars(
    name: str,
    x: Values,
    y: Values,
    colour: str | Sequence[str],
    hover: str = "",
    v: int | None = None,
    marker: Mapping[str, object] | None = None,
    **more: object,
) -> Plotly:
    """Bars; `marker`: more of their look."""
    series = {**_series(name, x, y, hover, v, "", None), "type": "bar"}
    return {**series, "marker": {"color": colour, "line": {"width": 0}, **(marker or {})}, **more}


def _series(
    name: str, x: Values, y: Values, hover: str, v: int | None, kind: str, meta: Mapping[str, object] | None
) -> Plotly:
    named = hover if "<extra>" in hover else f"{hover}<extra>%{{fullData.name}}</extra>"
    facts = {"v": v, "kind": kind or None, **(meta or {})}
    return {
        "type": "scatter",
        "name": plain_figure(name),
        "x": x,
        "y": y,
        **({"hovertemplate": named} if hover else {"hoverinfo": "skip"}),
        "meta": {key: value for key, value in facts.items() if value is not None},
    }


def error_bars(
    values: Sequence[float | None], ends: Iterable[Sequence[float | None] | None], colour: str, **more: object
) -> Plotly:
    """Whiskers to the ends of the intervals of these values; an open end has none."""
    intervals = [bounds(interval) for interval in ends]

    def lengths(ends: Iterable[float | None], sign: int) -> list[float]:
        pairs = zip(values, ends, strict=True)
        return [
            0 if value is None or end is None else max(0, round(sign * (end - value), 4))
            for value, end in pairs
        ]

    return {
        "type": "data",
        "symmetric": False,
        "array": lengths((high for _, high in intervals), 1),
        "arrayminus": lengths((low for low, _ in intervals), -1),
        "color": colour,
        "thickness": 1.5,
        **more,
    }

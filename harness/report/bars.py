"""Figures of B and W: one bar per variant with its confidence interval and its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.analysis.rows import ShownCell
from harness.dataset.study import bounds, failure, figure
from harness.report.cell_text import B, W, hidden, interval
from harness.report.drawing import (
    INK,
    NO_COLOUR,
    Figure,
    Mark,
    Named,
    Trace,
    layout,
    named_axis,
    words,
)
from harness.report.table import NONE, formatted

BAR_HEIGHT = 24
CEILINGS = {"": "limit by the data sheet", "_measured": "limit measured here"}


def bars(model: str, named: Named, marks: Mapping[str, Mark]) -> list[Figure]:
    """B and W of each variant with the confidence interval and the limits."""
    drawn = (
        _bars(model, named, marks, "B", "B_ms", "B_ci95_ms", "B: TPOT at zero context, ms", limit=_B_limit),
        _bars(
            *(model, named, marks, "W", "W_tokens_per_ms", "W_ci95"),
            "W: tokens of context per further ms of TPOT",
            limit=_W_limit,
        ),
    )
    return [each for each in drawn if each]


def _B_limit(row: ShownCell, which: str) -> float | None:
    B_ms, ratio = figure(row, "B_ms"), figure(row, f"B{which}_ratio")
    theory = figure(row, "B_theory_ms") if not which else None
    return theory if theory is not None else B_ms * ratio if B_ms is not None and ratio is not None else None


def _W_limit(row: ShownCell, which: str) -> float | None:
    W, ratio = figure(row, "W_tokens_per_ms"), figure(row, f"W{which}_ratio")
    theory = figure(row, "W_theory_tokens_per_ms") if not which else None
    return theory if theory is not None else W / ratio if W is not None and ratio else None


def _bars(
    model: str,
    named: Named,
    marks: Mapping[str, Mark],
    name: str,
    key: str,
    interval_key: str,
    title: str,
    limit: Callable[[ShownCell, str], float | None],
) -> Figure | None:
    values = [_shown(row, key) for _, row in named]
    if not any(value is not None for value in values):
        return None
    axis = named_axis([label for label, _ in named])
    names = axis["tickvals"]  # escaped
    low, high = zip(*(bounds(row, interval_key) for _, row in named), strict=True)
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": values,
            "marker": {
                "color": [marks[row["name"]].colour for _, row in named],
                "opacity": 0.6,  # overlays stay visible
                "pattern": {"shape": ["/" if row.get("status") == "invalid" else "" for _, row in named]},
            },
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [_over(v, end) for v, end in zip(values, high, strict=True)],
                "arrayminus": [_over(end, v) for v, end in zip(values, low, strict=True)],
                "color": INK,
                "thickness": 1.5,
                "width": 4,
            },
            "showlegend": False,
            "hovertemplate": f"%{{y}}: {name} %{{x:,.2f}}<extra></extra>",
        }
    ]
    limits = {which: [limit(row, which) for _, row in named] for which in CEILINGS}
    baselines = [figure(row.get("baseline"), key) for _, row in named]
    overlays = {}
    for points, word, symbol, sign in (
        (limits[""], CEILINGS[""], "line-ns-open", "|"),
        (limits["_measured"], CEILINGS["_measured"], "x-thin-open", "x"),
        (baselines, "baseline", "diamond-open", "◇"),
    ):
        if any(point is not None for point in points):
            data.append(_ticks(names, points, word, symbol))
            overlays[word] = f"{sign} {word}"
    missing = {
        y: _why(row, key) for y, value, (_, row) in zip(names, values, named, strict=True) if value is None
    }
    if missing:
        data.append(words(missing, at=0))
    digits = 3 if name == "B" else 0
    form = f"{{:,.{digits}f}}"
    return Figure(
        name,
        title,
        f"{title}, of each variant of {model}{_drawn([*low, *high], overlays)}.",
        data,
        layout(
            "",
            "",
            yaxis={**axis, "gridcolor": NO_COLOUR},
            xaxis={"rangemode": "tozero", "tickformat": ",~r"},
            margin={"l": 50, "r": 16, "t": 8, "b": 30},
            bargap=0.35,
        ),
        ["variant", name, "95% CI", *CEILINGS.values(), "baseline"],
        [
            [
                label,
                formatted(value, form) if value is not None else _why(row, key),
                interval(row, interval_key, digits),
                *(formatted(limits[which][place], form) for which in CEILINGS),
                formatted(baselines[place], form),
            ]
            for place, ((label, row), value) in enumerate(zip(named, values, strict=True))
        ],
        height=60 + BAR_HEIGHT * len(named),
        across=2,
        overlays=overlays,
    )


def _drawn(ends: Sequence[float | None], overlays: Mapping[str, str]) -> str:
    """The overlays of the bars, in words; many published figures have neither interval nor limit."""
    whiskers = (
        ", with 95% confidence intervals (an open end has no whisker)"
        if any(e is not None for e in ends)
        else ""
    )
    return whiskers + (f", compared with: {', '.join(overlays)}" if overlays else "")


def _shown(row: ShownCell, key: str) -> float | None:
    """The figure; null for a W that is not identifiable."""
    return None if key == "W_tokens_per_ms" and hidden(row) else figure(row, key)


def _why(row: ShownCell, key: str) -> str:
    text = (B if key == "B_ms" else W)(row, key)
    return text if text != NONE else failure(row) or NONE


def _over(low: float | None, high: float | None) -> float:
    return max(0.0, high - low) if low is not None and high is not None else 0.0


def _ticks(names: Sequence[str], points: Sequence[float | None], word: str, symbol: str) -> Trace:
    big = symbol.startswith("line")
    return {
        "type": "scatter",
        "mode": "markers",
        "name": word,
        "y": names,
        "x": points,
        "marker": {
            "symbol": symbol,
            "size": 16 if big else 9,
            "color": INK,
            "line": {"width": 2.5 if big else 1.5, "color": INK},
        },
        "meta": {"kind": word},
        "hovertemplate": f"%{{y}}: {word} %{{x:,.2f}}<extra></extra>",
    }

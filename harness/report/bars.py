"""Figures that compare cells: B and W as bars beside their limits, and MBU against model size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from harness.analysis.columns import Ends, ShownCell
from harness.analysis.figures import BY_NAME, Figure
from harness.base.lookup import value_at
from harness.dataset.study import Study, bounds, failure, finite, labels
from harness.report import parts
from harness.report.plots import (
    FAINT,
    INK,
    NO_COLOUR,
    Chart,
    Mark,
    Named,
    figure_layout,
    named_layout,
    names_height,
    plain_figure,
    reasons,
)
from harness.report.tables import B, W, hidden, interval
from harness.report.text_table import NONE, formatted

SIGNS = {  # beside the bars: symbol, its size, the width of its line, and its sign in words
    "limit by the data sheet": ("line-ns-open", 16, 2.5, "|"),
    "limit measured here": ("x-thin-open", 9, 1.5, "x"),
    "baseline": ("diamond-open", 9, 1.5, "◇"),
}


@dataclass(frozen=True)
class Fitted:
    """A figure of the line through latencies. `text`: of a row, in place of a figure that is not known.
    `limit`: the figure at the limit, of a figure and its ratio to the limit."""

    name: str
    title: str
    figure: Figure
    theory: str
    ratios: tuple[str, str]
    digits: int
    text: Callable[[ShownCell], str]
    limit: Callable[[float, float], float]


FITTED = (
    Fitted(
        "B",
        "B: TPOT at zero context, ms",
        BY_NAME["B_ms"],
        "B_theory_ms",
        ("B_ratio", "B_measured_ratio"),
        3,
        B,
        lambda ms, ratio: ms * ratio,
    ),
    Fitted(
        "W",
        "W: tokens of context per further ms of TPOT",
        BY_NAME["W_tokens_per_ms"],
        "W_theory_tokens_per_ms",
        ("W_ratio", "W_measured_ratio"),
        0,
        W,
        lambda tokens_per_ms, ratio: tokens_per_ms / ratio,
    ),
)


@dataclass(frozen=True)
class Bar:
    """`beside`: by name in SIGNS. `text`: the figure, or why there is none."""

    value: float | None
    interval: Ends | None
    beside: Mapping[str, float | None]
    text: str


def _bar(row: ShownCell, of: Fitted) -> Bar:
    value, other = finite(of.figure.number(row)), row["baseline"]
    ratios = (parts.figure_at(row, ratio) for ratio in of.ratios)
    by_sheet, measured = (of.limit(value, ratio) if value is not None and ratio else None for ratio in ratios)
    if (theory := parts.figure_at(row, of.theory)) is not None:
        by_sheet = theory
    beside = by_sheet, measured, of.figure.number(other) if other else None
    shown = None if of.name == "W" and hidden(row) else value
    text = of.text(row) if of.text(row) != NONE else failure(row) or NONE
    return Bar(
        shown,
        cast("Ends | None", value_at(row, of.figure.ends)),
        dict(zip(SIGNS, beside, strict=True)),
        text if shown is None else f"{shown:,.{of.digits}f}",
    )


def of_model(model: str, named: Named, marks: Mapping[str, Mark]) -> list[Chart]:
    """B and W of each variant with the confidence interval and the limits."""
    return [_chart(model, named, marks, of) for of in FITTED]


def _chart(model: str, named: Named, marks: Mapping[str, Mark], of: Fitted) -> Chart:
    bars = [_bar(row, of) for _, row in named]
    values = [bar.value for bar in bars]
    names = [plain_figure(label) for label, _ in named]
    hatched = [row["status"] == "invalid" for _, row in named]
    data = [
        parts.bars(
            of.name,
            values,
            names,
            [marks[row["name"]].colour for _, row in named],
            f"%{{y}}: {of.name} %{{x:,.2f}}<extra></extra>",
            orientation="h",
            marker={
                "opacity": 0.6,  # overlays stay visible
                "pattern": {"shape": ["/" * is_hatched for is_hatched in hatched]},
            },
            error_x=parts.error_bars(values, (bar.interval for bar in bars), INK, width=4),
            showlegend=False,
        )
    ]
    for word, (symbol, size, width, _) in SIGNS.items():
        points = [bar.beside[word] for bar in bars]
        if any(point is not None for point in points):
            look = {"size": size, "line": {"width": width, "color": INK}}
            hover = f"%{{y}}: {word} %{{x:,.2f}}<extra></extra>"
            data.append(parts.scatter(word, points, names, Mark(INK, symbol), hover, kind=word, marker=look))
    compared = [word for word in SIGNS if any(bar.beside[word] is not None for bar in bars)]
    if any(hatched):  # an entry of the legend
        look = {"opacity": 0.6, "pattern": {"shape": "/"}}
        data.append(parts.bars("hatched: invalid", [None], names[:1], FAINT, orientation="h", marker=look))
    why = {name: bar.text for name, bar in zip(names, bars, strict=True) if bar.value is None}
    has_ends = any(end is not None for bar in bars for end in bounds(bar.interval))
    return Chart(
        of.name,
        of.title,
        f"{of.title}, of each variant of {model}"
        + ", with 95% confidence intervals (an open end has no whisker)" * has_ends
        + (f", compared with: {', '.join(compared)}" if compared else "")
        + "."
        + " Hatched: invalid." * any(hatched),
        [*data, *reasons(why, 0)] if len(why) < len(named) else [],
        named_layout(
            [label for label, _ in named],
            grid=NO_COLOUR,
            xaxis={"tickformat": ",~r"},
            bargap=0.35,
            barmode="overlay",
        ),
        ["variant", of.name, "95% CI", *SIGNS],
        [
            [
                *(label, bar.text, interval(bar.interval, of.digits)),
                *(formatted(value, f"{{:,.{of.digits}f}}") for value in bar.beside.values()),
            ]
            for (label, _), bar in zip(named, bars, strict=True)
        ],
        height=names_height(named),
        across=2,
        known={word: (f"{sign} {word}", "") for word, (*_, sign) in SIGNS.items()},
    )


# MBU against model size.


def share(study: Study, marks: Mapping[str, Mark]) -> Chart | None:
    """MBU at B against model size, one line per variant: small models use less of the bandwidth."""
    by_label: dict[str, list[tuple[float, float, ShownCell]]] = {}
    for model, rows in study.decodes.items():
        for row, label in zip(rows, labels(rows, model), strict=True):
            size, ratio = finite(row["weight_bytes_per_token"]), finite(row["B_ratio"])
            if size is not None and ratio is not None and row["status"] == "ok":
                by_label.setdefault(label, []).append((size / 1e9, ratio, row))
    if max((len(points) for points in by_label.values()), default=0) < 2:
        return None
    data, table, legend = [], [], []
    for v, (label, points) in enumerate(by_label.items()):
        points.sort(key=lambda point: point[0])
        mark = marks[points[0][2]["name"]]
        data.append(
            parts.lines(
                label,
                [round(x, 6) for x, _, _ in points],
                [round(y, 5) for _, y, _ in points],
                mark,
                "%{text}: MBU %{y:.1%}, %{x:.3f} GB per token",
                v,
                text=[plain_figure(row["model"]) for *_, row in points],
            )
        )
        table += [[label, row["model"], f"{x:.3f}", f"{y:.1%}"] for x, y, row in points]
        legend.append((label, mark))
    return Chart(
        "share-of-limit",
        "MBU against model size",
        "Model bandwidth utilisation (MBU) of each variant at B, of the bandwidth of the data sheet, against"
        " the GB of weights read per token. A fixed cost per token matters most for small models.",
        data,
        figure_layout(
            "weights read per token, GB",
            "MBU at B",
            xaxis={"type": "log", "dtick": "D2"},
            yaxis={"tickformat": ".0%"},
        ),
        ["variant", "model", "GB per token", "MBU"],
        table,
        legend=legend,
    )

"""Figures that compare cells: B and W as bars beside their limits, and MBU against model size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import cast

from harness.analysis.columns import Ends, ShownCell
from harness.analysis.figures import BY_NAME
from harness.base.lookup import value_at
from harness.dataset.study import Study, failure, finite, labels
from harness.report import parts
from harness.report.figure_texts import hidden
from harness.report.plots import (
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
from harness.report.tables import text_of
from harness.report.text_table import NONE

BARS = {
    "B_ms": ("B", "B: TPOT at zero context, ms", "B_theory_ms"),
    "W_tokens_per_ms": ("W", "W: tokens of context per further ms of TPOT", "W_theory_tokens_per_ms"),
}
"""By figure: the chart's name and title, and the figure by the data sheet."""
SIGNS = {  # beside the bars: symbol, its size, the width of its line, and its sign in words
    "limit by the data sheet": ("line-ns-open", 16, 2.5, "|"),
    "baseline": ("diamond-open", 9, 1.5, "◇"),
}


def of_model(model: str, named: Named, marks: Mapping[str, Mark]) -> Iterator[Chart]:
    """B and W of each variant with the confidence interval, the limit and the baseline."""
    for figure_name, (name, title, theory) in BARS.items():
        figure = BY_NAME[figure_name]
        shown = [None if name == "W" and hidden(row) else finite(figure.number(row)) for _, row in named]
        names = [plain_figure(label) for label, _ in named]
        data = [
            parts.bars(
                name,
                shown,
                names,
                [marks[row["name"]].colour for _, row in named],
                f"%{{y}}: {name} %{{x:,.2f}}<extra></extra>",
                orientation="h",
                marker={
                    "opacity": 0.6,  # overlays stay visible
                    "pattern": {"shape": ["/" * (row["status"] == "invalid") for _, row in named]},
                },
                error_x=parts.error_bars(
                    shown, [cast("Ends | None", value_at(row, figure.ends)) for _, row in named], INK, width=4
                ),
                showlegend=False,
            )
        ]
        beside = (
            [parts.figure_at(row, theory) for _, row in named],
            [figure.number(row["baseline"]) if row["baseline"] else None for _, row in named],
        )
        signs = [
            (word, values)
            for word, values in zip(SIGNS, beside, strict=True)
            if any(x is not None for x in values)
        ]
        for word, values in signs:
            symbol, size, width, _ = SIGNS[word]
            look = {"size": size, "line": {"width": width, "color": INK}}
            hover = f"%{{y}}: {word} %{{x:,.2f}}<extra></extra>"
            data.append(parts.scatter(word, values, names, Mark(INK, symbol), hover, kind=word, marker=look))
        why = {
            plain_figure(label): text if (text := text_of(figure)(row)) != NONE else failure(row) or NONE
            for (label, row), value in zip(named, shown, strict=True)
            if value is None
        }
        yield Chart(
            name,
            title,
            f"{title}, of each variant of {model}, with 95% confidence intervals (an open end has no whisker)"
            + "".join(f", beside its {word}" for word, _ in signs)
            + ". Hatched: invalid.",
            [*data, *reasons(why, 0)] if len(why) < len(named) else [],
            named_layout(
                [label for label, _ in named],
                grid=NO_COLOUR,
                xaxis={"tickformat": ",~r"},
                bargap=0.35,
                barmode="overlay",
            ),
            height=names_height(named),
            across=2,
            known={word: (f"{sign} {word}", "") for word, (*_, sign) in SIGNS.items()},
        )


def share(study: Study, marks: Mapping[str, Mark]) -> Chart | None:
    """MBU at B against model size, one line per variant: small models use less of the bandwidth."""
    by_label: dict[str, list[tuple[float, float, ShownCell]]] = {}
    for model, rows in study.decodes.items():
        for row, label in zip(rows, labels(rows, model), strict=True):
            size, ratio = finite(row["weight_bytes_per_token"]), finite(row["B_ratio"])
            if size is not None and ratio is not None and row["status"] == "ok":
                by_label.setdefault(label, []).append((round(size / 1e9, 6), round(ratio, 5), row))
    if max((len(points) for points in by_label.values()), default=0) < 2:
        return None
    data, legend = [], []
    for v, (label, points) in enumerate(by_label.items()):
        points.sort(key=itemgetter(0))
        mark = marks[points[0][2]["name"]]
        legend.append((label, mark))
        models = [plain_figure(row["model"]) for *_, row in points]
        x, y = [size for size, *_ in points], [ratio for _, ratio, _ in points]
        hover = "%{text}: MBU %{y:.1%}, %{x:.3f} GB per token"
        data.append(parts.lines(label, x, y, mark, hover, v, text=models))
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
        legend=legend,
    )

"""A comparison as one HTML page: what differs, the verdicts, and a plot of each change with its interval."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.compare import Comparison, text
from harness.compare.judge import BETTER, WORSE
from harness.compare.text import FIGURES
from harness.report import drawing, markup
from harness.report.drawing import Figure

Row = Mapping[str, Any]
WORSE_COLOUR, BETTER_COLOUR, OTHER_COLOUR = drawing.COLOURS[1], drawing.COLOURS[2], drawing.FAINT
LINE_PX = 26


def page(found: Comparison) -> str:
    """The whole file as text."""
    return markup.filled(
        "comparison.html",
        title=text.title(found),
        notes=found.notes,
        tables=text.tables(found),
        counts=text.counts(found),
        meaning=text.meaning(found),
        figures=list(_figures(found.rows)),
    )


def _figures(rows: Sequence[Row]) -> Iterator[Figure]:
    """A figure per metric: the change of every cell, its interval, and the threshold in both directions."""
    for metric, (name, _, _) in FIGURES.items():
        shown = [row for row in rows if row["metric"] == metric and row["change_ci90"]]
        if shown:
            yield _changes(metric, name, shown)


def _changes(metric: str, name: str, rows: Sequence[Row]) -> Figure:
    percents = [[100 * value for value in (row["change"], *row["change_ci90"])] for row in rows]
    places = list(range(len(rows)))
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [at for at, _, _ in percents],
            "y": places,
            "text": [drawing.plain(f"{row['name']}: {row['verdict']}") for row in rows],
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [high - at for at, _, high in percents],
                "arrayminus": [at - low for at, low, _ in percents],
            },
            "marker": {"size": 9, "color": [_colour(row) for row in rows]},
            "hovertemplate": "%{text}, %{x:+.2f}%<extra></extra>",
        }
    ]
    threshold = 100 * rows[0]["threshold"]
    shapes = [drawing.upright(0.0, "solid"), *(drawing.upright(at, "dot") for at in (threshold, -threshold))]
    axis = {
        "tickvals": places,
        "ticktext": [drawing.plain(row["name"]) for row in rows],
        "autorange": "reversed",
    }
    shown = [[row["name"], f"{row['change']:+.2%}", *_ends(row), row["verdict"]] for row in rows]
    return Figure(
        name=f"change-{metric}",
        title=f"Change of {name}",
        text=f"Change of {name}, new against baseline, with its 90% interval; dotted: the threshold.",
        data=data,
        layout=drawing.layout(f"change of {name}, %", "", shapes=shapes, yaxis=axis),
        headers=["cell", "change", "from", "to", "verdict"],
        rows=shown,
        height=120 + LINE_PX * len(rows),
        across=2,
    )


def _ends(row: Row) -> Iterable[str]:
    return (f"{end:+.2%}" for end in row["change_ci90"])


def _colour(row: Row) -> str:
    if row["verdict"] in WORSE:
        return WORSE_COLOUR
    return BETTER_COLOUR if row["verdict"] in BETTER else OTHER_COLOUR

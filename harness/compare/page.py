"""A comparison as one HTML page: what differs, the verdicts, and a plot of each change with its interval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.analysis.figures import COMPARED
from harness.compare import Change, Comparison
from harness.compare.judge import BETTER, WORSE
from harness.compare.show import counts, meaning_text, tables, title_text
from harness.report import parts, plots
from harness.report.plots import Chart
from harness.report.templates import filled

WORSE_COLOUR, BETTER_COLOUR, OTHER_COLOUR = plots.COLOURS[1], plots.COLOURS[2], plots.FAINT


def comparison_page(comparison: Comparison) -> str:
    """The whole file as text."""
    return filled(
        "comparison.html",
        title=title_text(comparison),
        notes=comparison.notes,
        tables=tables(comparison),
        counts=counts(comparison),
        meaning=meaning_text(comparison),
        figures=list(_page_figures(comparison.rows)),
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

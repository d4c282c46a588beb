"""One self-contained HTML file of a Study: a view per model, one of all models, methods. It opens offline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.dataset.study import Study
from harness.report import agreement, answers, figures, marks, markup, quality, summary, views
from harness.report.ranking import CRITERION
from harness.report.views import View
from harness.results.files import write_output
from harness.system.wording import named

SYNTHETIC = (
    "Synthetic: random weights of the real model's exact shape; sizes are exact, latencies almost exact."
)


def write(path: Path, study: Study) -> None:
    """Write the page of a study. Raises ResultsError if the file cannot be written."""
    write_output(path, page(study))


def page(study: Study) -> str:
    """The page of a study as text."""
    found = views.views(study)
    hues, shapes = marks.key(study)
    return markup.filled(
        "study.html",
        title=study.title,
        study=study,
        views=found,
        opens=views.first(found, study),
        across=figures.sections(study).get("across", ("", []))[1],
        goals=answers.GOALS,
        hues=hues,
        shapes=shapes,
        sources=summary.sources(study.rows),
        source_notes=summary.source_notes(study.rows),
        counts=summary.counts(study),
        criterion=CRITERION if len(study.cells) > 1 else None,
        failures=shortened(summary.failures(study)),
        flagged=summary.flagged(study),
        shortened=shortened,
        contents=contents,
        synthetic=SYNTHETIC if any(row.get("weights") == "synthetic" for row in study.cells) else None,
        quality=quality.table(study.scores),
        quality_meaning=quality.MEANING,
        quality_notes=quality.notes(study.scores),
        agreement=agreement.table(study.checks),
        agreement_meaning=agreement.MEANING,
        agreement_notes=agreement.notes(study.checks),
        meanings=summary.meanings(study),
        costs=summary.costs(study),
        methods=list(_methods(study)),
    )


def contents(view: View) -> list[tuple[str, str]]:
    """Anchors and titles of the parts of a view that it has."""
    figured = [("latency", "Latency"), ("B", "Bars"), ("memory-over-time", "Memory over time")]
    drawn = [figure.name for figure in view.figures]
    return [
        *((f"{view.anchor}-{name}", title) for name, title in figured if name in drawn),
        *([(f"{view.anchor}-tables", "Tables")] if view.tables else []),
        *((f"{view.anchor}-{name}", chapter.title) for name, chapter in view.chapters.items()),
    ]


def shortened(failures: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[str, int, str]]:
    """Reason, number of cells, and the first of their names."""
    return [(reason, len(names), named(names, summary.NAMES_SHOWN)) for reason, names in failures]


def _methods(study: Study) -> Iterator[tuple[str, str | None, object]]:
    """Headings, with commands as typed in a shell, or else any plain value."""
    for heading, value in study.methods.items():
        lines = [value] if isinstance(value, str) else value if isinstance(value, (list, tuple)) else []
        typed = "repeat" in heading or "command" in heading
        commands = "\n".join(lines) if typed and all(isinstance(line, str) for line in lines) else None
        yield heading, commands or None, value

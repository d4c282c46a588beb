"""One self-contained HTML file of a Study: summary, tables, figures, methods. It opens offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.dataset.study import Study
from harness.report import agreement, columns, figures, markup, summary, tables
from harness.report.ranking import CRITERION
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
    rows, sections, chapters = study.rows, figures.sections(study), figures.chapters(study)
    of_models = [row for rows in study.decodes.values() for row in rows]
    used = {title: columns.used(every, of_models) for title, every in columns.TABLES.items()}
    contents = [
        *([("tables", "Tables")] if of_models else []),
        *([("agreement", "Same model?")] if study.checks else []),
        *((name, chapter.title) for name, chapter in chapters.items()),
        *((name, title) for name, (title, _) in sections.items()),
        ("methods", "Methods"),
    ]
    return markup.filled(
        "study.html",
        title=study.title,
        study=study,
        contents=contents,
        third_party=summary.third_party(rows),
        counts=summary.counts(study),
        per_model=summary.per_model(study),
        criterion=CRITERION if len(study.cells) > 1 else None,
        failures=[(why, named(names, summary.NAMES_SHOWN)) for why, names in summary.failures(study)],
        flagged=summary.flagged(study),
        rows=of_models,
        places={model: place for place, model in enumerate(study.decodes)},
        tables=[(tables.of_columns(title, of, of_models), of) for title, of in used.items() if of],
        synthetic=SYNTHETIC if any(row.get("weights") == "synthetic" for row in study.cells) else None,
        agreement=agreement.table(study.checks),
        agreement_meaning=agreement.MEANING,
        agreement_notes=agreement.notes(study.checks),
        chapters=chapters,
        sections=sections,
        meanings=summary.meanings(study),
        costs=summary.costs(study),
        methods=list(_methods(study)),
    )


def _methods(study: Study) -> Iterator[tuple[str, str | None, object]]:
    """Headings, with commands as typed in a shell, or else any plain value."""
    for heading, value in study.methods.items():
        lines = [value] if isinstance(value, str) else value if isinstance(value, (list, tuple)) else []
        typed = "repeat" in heading or "command" in heading
        commands = "\n".join(lines) if typed and all(isinstance(line, str) for line in lines) else None
        yield heading, commands or None, value

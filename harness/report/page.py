"""The page of a Study: a view per model, one of all models, and methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.text import list_named
from harness.dataset.study import Study, labels, ok
from harness.records.files import write_output
from harness.report import (
    agreement_table,
    answers,
    bars,
    curves,
    head,
    longest,
    memory,
    model_tables,
    picture,
    prefill,
    quality,
    ranked_groups,
    served,
    summary,
    variant_looks,
    workloads,
)
from harness.report.answers import CRITERION, Answer
from harness.report.chapters import Chapter, with_data
from harness.report.model_tables import ModelTable
from harness.report.picture import Picture
from harness.report.plots import Chart
from harness.report.templates import filled
from harness.report.variant_looks import marks

SYNTHETIC = (
    "Synthetic: random weights of the real model's exact shape; sizes are exact, latencies almost exact."
)


def figures_chapters(study: Study) -> dict[str, Chapter[Any]]:
    """Id of a section -> chapter; without empty chapters."""
    chapters: dict[str, Chapter[Any] | None] = {
        "longest": longest.chapter(study),
        "memory": memory.chapter(study),
        "prefill": prefill.chapter(study),
        **workloads.of_study(study),
    }
    return {name: chapter for name, chapter in chapters.items() if chapter}


def of_decodes(study: Study, model: str) -> list[Chart]:
    """The figures of a model's decodes."""
    rows, looks = study.decodes.get(model, []), marks(study)
    named = list(zip(labels(rows, model), rows, strict=True))
    return with_data(
        [
            curves.latency_curves(model, named, study.series, looks),
            *bars.of_model(model, named, looks),
            curves.memory_curves(model, named, study.memory, looks),
        ]
    )


@dataclass(frozen=True)
class Panel:
    """Answers on the first screen for cells that may be ranked together. `title`: empty for a single one."""

    title: str
    answers: Sequence[Answer]
    pictures: Sequence[Picture]
    notice: str = ""
    serving: Sequence[str] = ()
    servers: Sequence[str] = ()


@dataclass(frozen=True)
class View:
    """All of one model. `none_ok`: why no cell is ok, and the next step; None: one is. `chapters`: id ->
    chapter, of all models. `failures`: reason -> cells; `flagged`: the code of a warning -> cells with its
    detail."""

    anchor: str
    model: str
    counts: str
    none_ok: str | None
    panels: Sequence[Panel]
    figures: Sequence[Chart]
    tables: Sequence[ModelTable]
    chapters: Mapping[str, Chapter[Any]]
    failures: Sequence[tuple[str, Sequence[str]]]
    flagged: Sequence[tuple[str, Sequence[tuple[str, str]]]]


def views(study: Study) -> list[View]:
    """A view of each model, in order; models with only searches and memory come last."""
    chapters, looks, groups = figures_chapters(study), marks(study), ranked_groups.groups(study)
    of_chapters = [model for chapter in chapters.values() for model in chapter.rows]
    shown = []
    for number, model in enumerate(dict.fromkeys((*study.models, *(g.model for g in groups), *of_chapters))):
        ranked = [group for group in groups if group.model == model]
        part = study.of_model(model)
        shown.append(
            View(
                f"m{number}",
                model,
                summary.counts(part),
                None if any(group.provisional for group in ranked) else summary.none_ok(part),
                [
                    Panel(
                        group.title if len(ranked) > 1 else "",
                        answers.answers(group),
                        picture.pictures(group, looks),
                        summary.provisional_because(part) if group.provisional else "",
                        served.added(group.named, study.behind),
                        served.answers(group, study.behind),
                    )
                    for group in ranked
                    if group.named or group.searched or group.several
                ],
                of_decodes(study, model),
                model_tables.tables_of_model(model, study.decodes.get(model, []), study.series),
                {name: chapter for name, chapter in chapters.items() if model in chapter.rows},
                summary.failures(part),
                summary.flagged(part),
            )
        )
    return shown


def first_view(shown: Sequence[View], study: Study) -> str:
    """The anchor of the view that opens: of the model with the most series, then with the most ok cells."""

    def count(view: View) -> tuple[int, int]:
        rows = study.models.get(view.model, [])
        return sum(row["name"] in study.series for row in rows), sum(map(ok, rows))

    return max(shown, key=count).anchor if shown else ""


def write(path: Path, study: Study) -> None:
    """Write the page of a study. Raises ResultsError if the file cannot be written."""
    write_output(path, page(study))


def page(study: Study, version: str = "") -> str:
    """The page of a study as text. `version`: as in filled()."""
    across = bars.share(study, marks(study))
    origin, meanings = head.origin(study), summary.meanings(study)
    return of_views(study, views(study), origin, meanings, [across] if across else [], version)


def of_views(
    study: Study,
    shown: Sequence[View],
    origin: head.Origin | None,
    meanings: Sequence[str],
    across: Sequence[Chart] = (),
    version: str = "",
) -> str:
    """The page of these views of a study. `across`: figures of all models. `version`: as in filled()."""
    hues, shapes = variant_looks.style_key(study)
    return filled(
        "study.html",
        version=version,
        title=study.title,
        study=study,
        origin=origin,
        citations=head.citations(study.title, origin),
        views=shown,
        opens=first_view(shown, study),
        across=across,
        goals=list(
            dict.fromkeys(answer.goal for view in shown for panel in view.panels for answer in panel.answers)
        ),
        hues=hues,
        hues_of="Variant" if variant_looks.is_of_one_stack(study) else "Stack",
        shapes=shapes,
        sources=summary.sources(study.rows),
        source_notes=summary.source_notes(study.rows),
        counts=summary.counts(study),
        criterion=CRITERION if len(study.cells) > 1 else None,
        failures=shortened(summary.failures(study)),
        flagged=summary.flagged(study),
        shortened=shortened,
        contents=contents,
        synthetic=SYNTHETIC if summary.has_synthetic_figures(study.cells) else None,
        quality=quality.table(study.scores),
        quality_meaning=quality.MEANING,
        quality_notes=quality.notes(study.scores),
        agreement=agreement_table.agreement_table(study.checks),
        agreement_meaning=agreement_table.AGREEMENT_MEANING,
        agreement_notes=agreement_table.agreement_notes(study.checks),
        meanings=meanings,
        methods=list(_methods(study)),
    )


def waiting(title: str, why: str, version: str) -> str:
    """The page that is served until there are records."""
    return filled("waiting.html", version=version, title=title, why=why)


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
    return [(reason, len(names), list_named(names, summary.NAMES_SHOWN)) for reason, names in failures]


def _methods(study: Study) -> Iterator[tuple[str, str | None, object]]:
    """Headings, with commands as typed in a shell, or else any plain value."""
    for heading, value in study.methods.items():
        lines = [value] if isinstance(value, str) else value if isinstance(value, (list, tuple)) else []
        typed = "repeat" in heading or "command" in heading
        commands = "\n".join(lines) if typed and all(isinstance(line, str) for line in lines) else None
        yield heading, commands or None, value

"""The views of the page: one per model, with its answers, picture, figures, tables and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.dataset.study import Study, ok
from harness.report import answers, figures, goals, model_tables, picture, summary
from harness.report.answers import Answer
from harness.report.chapters import Chapter
from harness.report.drawing import Figure
from harness.report.marks import marks
from harness.report.model_tables import ModelTable
from harness.report.picture import Picture

IN_PICTURE = (  # figures that the picture stands for
    *("size-latency", "latency-perplexity", "size-perplexity", "latency-KLD", "size-KLD"),
)


@dataclass(frozen=True)
class Panel:
    """What the first screen says of cells that may be ranked together. `title`: empty where there is one."""

    title: str
    answers: Sequence[Answer]
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class View:
    """All of one model. `chapters`: id -> chapter, of all models. `failures`: reason -> cells; `flagged`: the
    code of a warning -> cells with its detail."""

    anchor: str
    model: str
    counts: str
    panels: Sequence[Panel]
    figures: Sequence[Figure]
    tables: Sequence[ModelTable]
    chapters: Mapping[str, Chapter]
    failures: Sequence[tuple[str, Sequence[str]]]
    flagged: Sequence[tuple[str, Sequence[tuple[str, str]]]]


def views(study: Study) -> list[View]:
    """In the order of the models; those of searches and memory alone come last."""
    chapters, drawn = figures.chapters(study), dict(figures.sections(study).values())
    looks, groups = marks(study), goals.groups(study)
    of_chapters = [model for chapter in chapters.values() for model in chapter.rows]
    found = []
    for number, model in enumerate(dict.fromkeys((*study.models, *(g.model for g in groups), *of_chapters))):
        own = [group for group in groups if group.model == model]
        part = replace(
            study,
            cells=[row for row in study.cells if str(row.get("model")) == model],
            searches=[row for row in study.searches if str(row.get("model")) == model],
        )
        found.append(
            View(
                f"m{number}",
                model,
                summary.counts(part),
                [
                    Panel(
                        group.title if len(own) > 1 else "",
                        answers.answers(group),
                        picture.pictures(group, looks),
                    )
                    for group in own
                    if group.named or group.searched
                ],
                [each for each in drawn.get(model, []) if each.name not in IN_PICTURE],
                model_tables.of_model(model, study.decodes.get(model, []), study.series),
                {name: chapter for name, chapter in chapters.items() if model in chapter.rows},
                summary.failures(part),
                summary.flagged(part),
            )
        )
    return found


def first(found: Sequence[View], study: Study) -> str:
    """The anchor of the view that opens: of the model with the most series, then with the most ok cells."""

    def count(view: View) -> tuple[int, int]:
        rows = study.models.get(view.model, [])
        return sum(row["name"] in study.series for row in rows), sum(map(ok, rows))

    return max(found, key=count).anchor if found else ""

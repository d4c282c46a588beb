"""The chapters and figures of a study: first those of all models, then those of each model."""

from __future__ import annotations

from harness.dataset.study import Study, labels
from harness.report import bars, comparisons, curves, depth, longest, memory, prefill, turns
from harness.report.chapters import Chapter
from harness.report.drawing import Figure
from harness.report.marks import marks as marks_of


def chapters(study: Study) -> dict[str, Chapter]:
    """Id of a section -> chapter; without empty chapters."""
    found = {
        "longest": longest.chapter(study),
        "memory": memory.chapter(study),
        "prefill": prefill.chapter(study),
        "depth": depth.chapter(study),
        "turns": turns.chapter(study),
    }
    return {name: chapter for name, chapter in found.items() if chapter}


def sections(study: Study) -> dict[str, tuple[str, list[Figure]]]:
    """Id of a section -> its title and its figures, of decodes."""
    marks = marks_of(study)
    found = {}
    across = comparisons.share(study, marks)
    if across:
        found["across"] = ("All models", [across])
    for number, (model, rows) in enumerate(study.decodes.items()):
        named = list(zip(labels(rows, model), rows, strict=True))
        drawn = (
            curves.latency(model, named, study.series, marks),
            *bars.bars(model, named, marks),
            *comparisons.tradeoffs(model, named, marks),
            curves.memory(model, named, study.memory, marks),
        )
        found[f"m{number}"] = (model, [figure for figure in drawn if figure])
    return found

"""The tables of a page as Markdown, CSV or JSON."""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Mapping, Sequence

from harness.analysis import figures as registry
from harness.analysis.columns import ShownCell
from harness.base.text import csv_text
from harness.dataset.study import Study
from harness.report import agreement_table, closing, quality, summary, tables
from harness.report.answers import CRITERION
from harness.report.page import figures_chapters
from harness.report.text_table import in_markdown

OF_BASELINE = ("baseline_B_ms", "baseline_W_tokens_per_ms")


def markdown(study: Study) -> str:
    """The summary of the page, its tables with the meanings of their columns, and the methods."""
    listed = [f"- {in_markdown(sentence)}" for sentence in closing.sentences(study)]
    failures = (f"{reason} ({', '.join(names)})" for reason, names in summary.failures(study))
    failed = [f"- {in_markdown(failure)}" for failure in failures]
    parts = [
        *(f"> {in_markdown(line)}" for line in summary.third_party(study.rows)),
        summary.counts(study),
        *(["\n".join(listed)] if listed else []),
        *(["## Invalid and failed cells", "\n".join(failed)] if failed else []),
    ]
    rows = [row for of_model in study.decodes.values() for row in of_model]
    used = {title: tables.used_columns(columns, rows) for title, columns in tables.TABLES.items()}
    parts += [
        tables.of_columns(title, columns, rows).markdown() for title, columns in used.items() if columns
    ]
    for chapter in figures_chapters(study).values():
        parts += [table.markdown() for table in chapter.of_all_models()]
        noted = [f"- {in_markdown(note)}" for notes in chapter.notes.values() for note in notes]
        parts += ["\n".join(noted)] if noted else []
    if study.scores:
        parts.append(quality.table(study.scores).markdown())
    if study.checks:
        parts.append(agreement_table.agreement_table(study.checks).markdown())
    parts += ["## Methods", *map(in_markdown, (*summary.meanings(study), CRITERION))]
    return "\n\n".join(parts) + "\n"


def csv(rows: Sequence[ShownCell]) -> str:
    """One line per cell, figures in full precision, empty if missing; see `status` and `reasons` for why."""
    lines: list[list[object]] = [[*registry.csv_headings("cells"), *OF_BASELINE]]
    for row in rows:
        flags = "; ".join(f"{flag['code']}: {flag['detail']}" for flag in row["flags"])
        values = registry.csv_values("cells", {**row, "flags": flags, "reasons": "; ".join(row["reasons"])})
        other = row["baseline"]
        lines.append([*values, *([other["B_ms"], other["W_tokens_per_ms"]] if other else [None, None])])
    return csv_text(lines)


def json(rows: Sequence[ShownCell]) -> str:
    """One array with one object per cell; missing values are null, never NaN."""
    return json_format.dumps([_finite(row) for row in rows], indent=1, allow_nan=False, default=str) + "\n"


def _finite(value: object) -> object:
    """Plain values; NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

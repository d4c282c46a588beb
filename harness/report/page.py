"""A Study as one HTML page, and as files."""

from __future__ import annotations

import gzip
import json as json_format
import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.analysis import figures as registry
from harness.analysis.columns import ShownCell
from harness.base.bounds import PAGE_FACTS
from harness.base.text import csv_text, list_named, sized
from harness.dataset.study import Study, labels, ok
from harness.records.files import write_output
from harness.report import (
    answers,
    bars,
    closing,
    curves,
    depth,
    head,
    longest,
    memory,
    picture,
    plots,
    prefill,
    quality,
    served,
    speculation,
    summary,
    tables,
    turns,
    users,
)
from harness.report.answers import CRITERION, Answer
from harness.report.parts import Chapter, with_data
from harness.report.picture import Picture
from harness.report.plots import Chart, marks
from harness.report.quality import ModelTable
from harness.report.text_table import in_markdown

# The chapters and figures of a study: first those of all models, then those of each model.


def figures_chapters(study: Study) -> dict[str, Chapter[Any]]:
    """Id of a section -> chapter; without empty chapters."""
    chapters = {
        "longest": longest.chapter(study),
        "memory": memory.chapter(study),
        "prefill": prefill.chapter(study),
        "depth": depth.chapter(study),
        "turns": turns.chapter(study),
        "users": users.chapter(study),
        "speculation": speculation.chapter(study),
    }
    return {name: chapter for name, chapter in chapters.items() if chapter}


def sections(study: Study) -> dict[str, tuple[str, list[Chart]]]:
    """Id of a section -> its title and its figures, of decodes."""
    looks = marks(study)
    found = {}
    across = bars.share(study, looks)
    if across:
        found["across"] = ("All models", [across])
    for number, (model, rows) in enumerate(study.decodes.items()):
        named = list(zip(labels(rows, model), rows, strict=True))
        charts = (
            curves.latency_curves(model, named, study.series, looks),
            *bars.of_model(model, named, looks),
            curves.memory_curves(model, named, study.memory, looks),
        )
        found[f"m{number}"] = (model, with_data(charts))
    return found


# Fill the templates of pages: each page is one file that draws its figures and opens offline.
#
# All values are escaped. Only what this package ships is not: the scripts and the style.


ONE_LINE = 100  # characters of a list that is shown as text


def filled(template: str, version: str = "", **values: Any) -> str:
    """The page of a template, as text. `version`: of a page that is served, and asks its server for newer
    ones."""
    plotly, packed = _plotly()
    scripts = [_asset("page.js"), *([_asset("live.js")] if version else [])]
    # Defence in depth behind escaping: only these scripts and plotly.js may run, and nothing may be fetched.
    hashes = " ".join(
        f"'sha256-{b64encode(sha256(s).digest()).decode()}'" for s in (*map(str.encode, scripts), plotly)
    )
    connects = "'self'" if version else "'none'"
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:;"
        f" base-uri 'none'; form-action 'none'; connect-src {connects}"
    )
    found = _environment().get_template(template)
    look = {
        "style": _asset("page.css"),
        "hues": plots.HUES,
        "night": plots.NIGHT,
        "shapes": plots.SHAPES,
    }
    return found.render(policy=policy, look=look, scripts=scripts, plotly=packed, version=version, **values)


@cache
def _plotly() -> tuple[bytes, str]:
    """plotly.js, and the same compressed: page.js unpacks it once a figure comes near the view."""
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs().encode()
    return script, b64encode(gzip.compress(script, mtime=0)).decode()


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("harness.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "bounded": _bounded,
        "one_line": _one_line,
        "hue": lambda colour: f"var(--h{colour.removeprefix('#')}, {colour})",
        "sized": _sized,
        "split_at_urls": re.compile(r"(https?://[^\s<>\"',;]+)").split,
    }
    json = {"allow_nan": False, "separators": (",", ":"), "ensure_ascii": False}
    made.policies["json.dumps_kwargs"] = json
    return made


def _asset(name: str) -> str:
    return (resources.files("harness.report") / "assets" / name).read_text(encoding="utf-8")


def _bounded(value: Any) -> Any:
    """A nested value with at most PAGE_FACTS plain ones; others are counted."""
    left = PAGE_FACTS

    def cut(value: Any) -> Any:
        nonlocal left
        if not isinstance(value, (Mapping, list, tuple)):
            left -= 1
            return value
        entries = [*value.items()] if isinstance(value, Mapping) else [*enumerate(value)]
        kept: list[tuple[Any, Any]] = []
        for key, inner in entries:
            if left <= 0:
                kept.append(("...", f"{len(entries) - len(kept):,} more"))
                break
            kept.append((key, cut(inner)))
        return dict(kept) if isinstance(value, Mapping) else [inner for _, inner in kept]

    return cut(value)


def _one_line(values: list[Any] | tuple[Any, ...]) -> str | None:
    """A short list of plain values as text; null: any other list."""
    nested = any(isinstance(each, (Mapping, list, tuple)) for each in values)
    texts = [str(each) for each in values]
    return None if nested or sum(map(len, texts)) >= ONE_LINE else ", ".join(texts) or "-"


def _sized(value: Any, key: object) -> Any:
    """The value of a key; large numbers of bytes in MB or GB."""
    big = str(key).endswith("bytes") and isinstance(value, (int, float)) and value >= 1e6
    return sized(value) if big else value


# The views of the page: one per model, with its answers, picture, figures, tables and failures.


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
    """All of one model. `none_ok`: why no cell is ok, and the next step; null: one is. `chapters`: id ->
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


def views(study: Study, drawn: Mapping[str, tuple[str, list[Chart]]]) -> list[View]:
    """A view of each model, in order; models with only searches and memory come last. `drawn`: the sections
    of decodes."""
    chapters, figures = figures_chapters(study), dict(drawn.values())
    looks, groups = marks(study), answers.groups(study)
    of_chapters = [model for chapter in chapters.values() for model in chapter.rows]
    found = []
    for number, model in enumerate(dict.fromkeys((*study.models, *(g.model for g in groups), *of_chapters))):
        own = [group for group in groups if group.model == model]
        part = replace(
            study,
            cells=[row for row in study.cells if row["model"] == model],
            searches=[row for row in study.searches if row["model"] == model],
        )
        found.append(
            View(
                f"m{number}",
                model,
                summary.counts(part),
                None if any(group.provisional for group in own) else summary.none_ok(part),
                [
                    Panel(
                        group.title if len(own) > 1 else "",
                        answers.answers(group),
                        picture.pictures(group, looks),
                        summary.provisional_because(part) if group.provisional else "",
                        served.added(group.named, study.behind),
                        served.answers(group, study.behind),
                    )
                    for group in own
                    if group.named or group.searched or group.several
                ],
                figures.get(model, []),
                quality.tables_of_model(model, study.decodes.get(model, []), study.series),
                {name: chapter for name, chapter in chapters.items() if model in chapter.rows},
                summary.failures(part),
                summary.flagged(part),
            )
        )
    return found


def first_view(found: Sequence[View], study: Study) -> str:
    """The anchor of the view that opens: of the model with the most series, then with the most ok cells."""

    def count(view: View) -> tuple[int, int]:
        rows = study.models.get(view.model, [])
        return sum(row["name"] in study.series for row in rows), sum(map(ok, rows))

    return max(found, key=count).anchor if found else ""


# One self-contained HTML file of a Study: a view per model, one of all models, methods; it opens offline.


SYNTHETIC = (
    "Synthetic: random weights of the real model's exact shape; sizes are exact, latencies almost exact."
)


def write(path: Path, study: Study) -> None:
    """Write the page of a study. Raises ResultsError if the file cannot be written."""
    write_output(path, page(study))


def page(study: Study, version: str = "") -> str:
    """The page of a study as text. `version`: as in filled()."""
    drawn = sections(study)
    origin = head.origin(study)
    across = drawn.get("across", ("", []))[1]
    return of_views(study, views(study, drawn), origin, summary.meanings(study), across, version)


def of_views(
    study: Study,
    found: Sequence[View],
    origin: head.Origin | None,
    meanings: Sequence[str],
    across: Sequence[Chart] = (),
    version: str = "",
) -> str:
    """The page of these views of a study. `across`: figures of all models. `version`: as in filled()."""
    hues, shapes = plots.style_key(study)
    return filled(
        "study.html",
        version=version,
        title=study.title,
        study=study,
        origin=origin,
        citations=head.citations(study.title, origin),
        views=found,
        opens=first_view(found, study),
        across=across,
        goals=list(
            dict.fromkeys(answer.goal for view in found for panel in view.panels for answer in panel.answers)
        ),
        hues=hues,
        hues_of="Variant" if plots.is_of_one_stack(study) else "Stack",
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
        agreement=quality.agreement_table(study.checks),
        agreement_meaning=quality.AGREEMENT_MEANING,
        agreement_notes=quality.agreement_notes(study.checks),
        meanings=meanings,
        costs=summary.costs(study),
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


# The tables as Markdown, CSV or JSON, and the titles of all figures.


OF_BASELINE = ("baseline_B_ms", "baseline_W_tokens_per_ms")


def markdown(study: Study) -> str:
    """The summary of the page, its tables with the meanings of their columns, and the methods."""
    parts = [*(f"> {in_markdown(line)}" for line in summary.third_party(study.rows)), *_sentences(study)]
    rows = [row for of_model in study.decodes.values() for row in of_model]
    used = {title: tables.used_columns(every, rows) for title, every in tables.TABLES.items()}
    parts += [tables.of_columns(title, of, rows).markdown() for title, of in used.items() if of]
    for chapter in figures_chapters(study).values():
        parts += [table.markdown() for table in chapter.of_all_models()]
        noted = [f"- {in_markdown(note)}" for notes in chapter.notes.values() for note in notes]
        parts += ["\n".join(noted)] if noted else []
    if study.scores:
        parts.append(quality.table(study.scores).markdown())
    if study.checks:
        parts.append(quality.agreement_table(study.checks).markdown())
    parts += ["## Methods", *(in_markdown(each) for each in (*summary.meanings(study), CRITERION))]
    return "\n\n".join(parts) + "\n"


def _sentences(study: Study) -> list[str]:
    """Counts, best cells per model, and failures."""
    stands_out = [f"- {in_markdown(sentence)}" for sentence in closing.sentences(study)]
    failed = [in_markdown(f"{reason} ({', '.join(names)})") for reason, names in summary.failures(study)]
    parts = [summary.counts(study), "\n".join(stands_out)]
    if failed:
        parts += ["## Invalid and failed cells", "\n".join(f"- {each}" for each in failed)]
    return [part for part in parts if part]


def csv(rows: Sequence[ShownCell]) -> str:
    """One line per cell, figures in full precision, empty if missing; see `status` and `reasons` for why."""
    lines: list[list[object]] = [[*registry.csv_headings("cells"), *OF_BASELINE]]
    for row in rows:
        values = registry.csv_values(
            "cells", {**row, "flags": _flags(row), "reasons": "; ".join(row["reasons"])}
        )
        other = row["baseline"]
        lines.append([*values, *([other["B_ms"], other["W_tokens_per_ms"]] if other else [None, None])])
    return csv_text(lines)


def json(rows: Sequence[ShownCell]) -> str:
    """One array with one object per cell; missing values are null, never NaN."""
    return json_format.dumps([_finite(row) for row in rows], indent=1, allow_nan=False, default=str) + "\n"


def titled(study: Study) -> list[tuple[str, Sequence[Chart]]]:
    """Every figure and picture of the page, by the title of its section."""
    key = plots.style_key(study)
    pictured = [
        (group.title, [picture.figure(each, *key) for each in picture.pictures(group, marks(study))])
        for group in answers.groups(study)
    ]
    in_chapters = [part for chapter in figures_chapters(study).values() for part in chapter.figures.items()]
    return [*pictured, *sections(study).values(), *in_chapters]


def _flags(row: ShownCell) -> str:
    return "; ".join(f"{flag['code']}: {flag['detail']}" for flag in row["flags"])


def _finite(value: object) -> object:
    """Plain values; NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

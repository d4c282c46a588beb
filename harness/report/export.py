"""The tables as Markdown, CSV or JSON, and the figures as PNG files."""

from __future__ import annotations

import csv as csv_format
import io
import json as json_format
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.dataset.study import Row, Study, bounds, part, parts
from harness.report import agreement, chapters, columns, figures, quality, summary, tables
from harness.report.drawing import Figure, plain
from harness.report.ranking import CRITERION
from harness.report.table import in_markdown
from harness.results import ResultsError
from harness.system.wording import csv_cell

WIDTH, SCALE = 1200, 2  # of a PNG file: CSS pixels, and device pixels per CSS pixel
LEGEND_ROW, LEGEND_COLUMNS = 22, 4

# Columns of the CSV, in this order; an interval becomes two columns.
FIELDS = (
    *(
        "cell",
        "name",
        "model",
        "stack",
        "variant",
        "kind",
        "weights",
        "status",
        "reasons",
        "repeats_ok",
        "repeats",
    ),
    *("machine", "device", "tokens", "n_ctx", "bpw"),
    *("quality", "perplexity", "kld_mean", "kld_mean_ci95", "top1", "ttft_ms"),
    *("W_tokens_per_ms", "W_ci95", "W_identifiable", "robust_W_tokens_per_ms", "W_theory_tokens_per_ms"),
    *(
        "W_ratio",
        "W_measured_ratio",
        "W_declared_ratio",
        "W_declared_measured_ratio",
        "B_ms",
        "B_ci95_ms",
        "robust_B_ms",
        "plain_B_ms",
        "B_as_w16_ms",
        "B_theory_ms",
        "B_ratio",
    ),
    *("B_measured_ratio", "shape", "slow_from_n", "last_n"),
    *("tokens_per_s", "tokens_per_s_ci95", "start_tokens_per_s", "end_tokens_per_s"),
    *("file_bytes", "model_bytes", "weight_bytes_per_token", "kv_bytes_per_token", "loaded_bytes"),
    *("kv_read", "peak_rss_bytes", "peak_vram_bytes", "peak_allocator_bytes", "kv_buffer_bytes"),
    *("compute_buffer_bytes", "max_ctx"),
    *("bandwidth_share", "bandwidth_bytes_per_s", "fixed_ms", "dominated_by", "flags"),
    *("weights_check", "baseline_B_ms", "baseline_W_tokens_per_ms"),
)
INTERVALS = ("W_ci95", "B_ci95_ms", "tokens_per_s_ci95", "kld_mean_ci95")


class FiguresError(Exception):
    """The figures cannot be drawn; the message is one sentence with the reason."""


def markdown(study: Study) -> str:
    """The summary of the page, its tables with the meanings of their columns, and the methods."""
    parts = [*(f"> {in_markdown(line)}" for line in summary.third_party(study.rows)), *_sentences(study)]
    rows = [row for of_model in study.decodes.values() for row in of_model]
    used = {title: columns.used(every, rows) for title, every in columns.TABLES.items()}
    parts += [tables.of_columns(title, of, rows).markdown() for title, of in used.items() if of]
    for chapter in figures.chapters(study).values():
        parts += [tables.of_columns(*each).markdown() for each in chapters.lines(chapter)]
        noted = [f"- {in_markdown(note)}" for notes in chapter.notes.values() for note in notes]
        parts += ["\n".join(noted)] if noted else []
    if study.scores:
        parts.append(quality.table(study.scores).markdown())
    if study.checks:
        parts.append(agreement.table(study.checks).markdown())
    parts += ["## Methods", *(in_markdown(each) for each in (*summary.meanings(study), CRITERION))]
    return "\n\n".join(parts) + "\n"


def _sentences(study: Study) -> list[str]:
    """Counts, best cells per model, and failures."""
    per_model = ((in_markdown(model), in_markdown(text)) for model, text in summary.per_model(study))
    stands_out = [f"- **{model}**: {text}" for model, text in per_model]
    failed = [in_markdown(f"{reason} ({', '.join(names)})") for reason, names in summary.failures(study)]
    parts = [summary.counts(study), "\n".join(stands_out)]
    if failed:
        parts += ["## Invalid and failed cells", "\n".join(f"- {each}" for each in failed)]
    return [part for part in parts if part]


def csv(rows: Sequence[Row]) -> str:
    """One line per cell, figures in full precision, empty if missing; see `status` and `reasons` for why."""
    out = io.StringIO()
    writer = csv_format.writer(out, lineterminator="\n")
    writer.writerow([name for field in FIELDS for name in _headings(field)])
    for row in rows:
        writer.writerow([csv_cell(value) for field in FIELDS for value in _values(row, field)])
    return out.getvalue()


def json(rows: Sequence[Row]) -> str:
    """One array with one object per cell; missing values are null, never NaN."""
    return json_format.dumps([_finite(row) for row in rows], indent=1, allow_nan=False, default=str) + "\n"


def png(folder: Path, study: Study) -> list[Path]:
    """Write every figure as `<section>-<figure>.png` and return the paths.

    Draws in the Chrome or Chromium of this machine, without the network. Raises FiguresError if there is none
    or it fails, ResultsError if the folder cannot be written.
    """
    wanted: list[dict[str, Any]] = []
    in_chapters = [part for chapter in figures.chapters(study).values() for part in chapter.figures.items()]
    for title, drawn in [*figures.sections(study).values(), *in_chapters]:
        for figure in drawn:
            path = folder / f"{_file_name(title)}-{figure.name}.png"
            if path in [each["path"] for each in wanted]:
                path = path.with_stem(f"{path.stem}-{len(wanted)}")
            opts = {"format": "png", "width": WIDTH, "height": figure.height, "scale": SCALE}
            wanted.append({"fig": _whole(figure, title), "path": path, "opts": opts})
            opts["height"] = wanted[-1]["fig"]["layout"]["height"]
    _make(folder)
    if wanted:
        _draw(wanted)
    return [each["path"] for each in wanted]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refusal:
        raise ResultsError(f"{folder}: the figures cannot be written: {refusal.strerror}") from refusal


def latency_png(path: Path, study: Study) -> None:
    """Draw latency against position of a study of one model. Raises as png() does."""
    for title, drawn in figures.sections(study).values():
        for figure in drawn:
            if figure.name == "latency":
                fig = _whole(figure, title)
                opts = {"format": "png", "width": WIDTH, "height": fig["layout"]["height"], "scale": SCALE}
                _make(path.parent)
                _draw([{"fig": fig, "path": path, "opts": opts}])
                return
    raise FiguresError("nothing to draw: no series has latencies of single tokens")


def _draw(wanted: Sequence[dict[str, Any]]) -> None:
    import kaleido
    from choreographer.errors import ChromeNotFoundError

    try:
        kaleido.write_fig_from_object_sync(wanted, kopts={"mathjax": False}, cancel_on_error=True)
    except ChromeNotFoundError as lack:
        hint = "install one, or set BROWSER_PATH"
        raise FiguresError(f"drawing figures needs Chrome or Chromium, and none was found; {hint}") from lack
    except (RuntimeError, OSError) as failed:
        why = failed.args[0] if failed.args else type(failed).__name__
        raise FiguresError(f"the browser that draws the figures failed: {why}") from failed


def _whole(figure: Figure, title: str) -> dict[str, Any]:
    """A figure with its title and legend, as on the page."""
    shown: set[int] = set()
    data = []
    for trace in figure.data:
        meta = trace.get("meta", {})
        if meta.get("chosen"):
            continue  # nothing is selected in a file
        own = "v" in meta and "kind" not in meta and meta["v"] not in shown
        shown |= {meta["v"]} if own else set()
        data.append({**trace, "showlegend": trace.get("showlegend", own if figure.legend else True)})
    lines = math.ceil(len(shown) / LEGEND_COLUMNS) * LEGEND_ROW
    legend = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}
    if shown:
        entry = {"entrywidthmode": "fraction", "entrywidth": 0.98 / LEGEND_COLUMNS}
        legend |= {"y": -60 / figure.height, "yanchor": "top", **entry}
    given = {
        "title": {"text": f"{plain(title)}: {plain(figure.title)}", "x": 0.01, "font": {"size": 15}},
        "margin": {**figure.layout["margin"], "t": 60 if shown else 90},
        "height": figure.height + 60 + lines,
        "showlegend": True,
        "legend": legend,
    }
    return {"data": data, "layout": {**figure.layout, **given}}


def _file_name(text: str) -> str:
    """Letters, digits and `.-`, so that no model's name leaves the folder."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:80] or "model"


def _headings(field: str) -> list[str]:
    return [f"{field}_low", f"{field}_high"] if field in INTERVALS else [field]


def _values(row: Row, field: str) -> list[object]:
    if field in INTERVALS:
        return list(bounds(row, field))
    if field.startswith("baseline_"):
        return [part(row, "baseline").get(field.removeprefix("baseline_"))]
    value = row.get(field)
    if field == "flags":
        return ["; ".join(f"{flag.get('code')}: {flag.get('detail')}" for flag in parts(row, field))]
    if isinstance(value, (list, tuple)):
        return ["; ".join(map(str, value))]
    return [_finite(value)]


def _finite(value: object) -> object:
    """Plain values; NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Figures of the page as PNG files, which a browser draws."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from harness.dataset.study import Study
from harness.records import ResultsError
from harness.report import answers, picture
from harness.report.page import figures_chapters, sections
from harness.report.plots import Chart, Plotly, marks, plain_figure, style_key

WIDTH, SCALE = 1200, 2  # of a PNG file: CSS pixels, and device pixels per CSS pixel
LEGEND_ROW, LEGEND_COLUMNS = 22, 4
LEGEND_SIGN, LEGEND_CHARACTER = 60, 8  # px of an entry: its sign, and a character of its name


class FiguresError(Exception):
    """The figures cannot be drawn; the message is one sentence with the reason."""


def titled(study: Study) -> list[tuple[str, Sequence[Chart]]]:
    """Every figure and picture of the page, by the title of its section."""
    key = style_key(study)
    pictured = [
        (group.title, [picture.figure(of, *key) for of in picture.pictures(group, marks(study))])
        for group in answers.groups(study)
    ]
    in_chapters = [part for chapter in figures_chapters(study).values() for part in chapter.figures.items()]
    return [*pictured, *sections(study).values(), *in_chapters]


def write(folder: Path, parts: Sequence[tuple[str, Sequence[Chart]]]) -> list[Path]:
    """Write every figure as `<section>-<figure>.png` and return the paths. `parts`: titles of sections, and
    their figures.

    Draws in the Chrome or Chromium of this machine, without the network. Raises FiguresError if there is none
    or it fails, ResultsError if the folder cannot be written.
    """
    wanted: list[Plotly] = []
    for title, drawn in parts:
        for figure in drawn:
            path = folder / f"{_file_name(title)}-{figure.name}.png"
            if path in [each["path"] for each in wanted]:
                path = path.with_stem(f"{path.stem}-{len(wanted)}")
            wanted.append(_wanted(path, figure, title))
    _make(folder)
    if wanted:
        _draw(wanted)
    return [each["path"] for each in wanted]


def _wanted(path: Path, figure: Chart, title: str) -> Plotly:
    """A file as kaleido takes it."""
    whole = whole_figure(figure, title)
    opts = {"format": "png", "width": WIDTH, "height": whole["layout"]["height"], "scale": SCALE}
    return {"fig": whole, "path": path, "opts": opts}


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refusal:
        raise ResultsError(f"{folder}: the figures cannot be written: {refusal.strerror}") from refusal


def write_latency(path: Path, study: Study) -> None:
    """Draw latency against position of a study of one model. Raises as write() does."""
    for title, drawn in sections(study).values():
        for figure in drawn:
            if figure.name == "latency":
                _make(path.parent)
                _draw([_wanted(path, figure, title)])
                return
    raise FiguresError("nothing to draw: no series has latencies of single tokens")


def _draw(wanted: Sequence[Plotly]) -> None:
    import kaleido
    from choreographer.errors import ChromeNotFoundError

    try:
        kaleido.write_fig_from_object_sync(wanted, kopts={"mathjax": False}, cancel_on_error=True)
    except ChromeNotFoundError as lack:
        hint = "install one, or set BROWSER_PATH"
        raise FiguresError(f"drawing figures needs Chrome or Chromium, and none was found; {hint}") from lack
    except OSError as failed:
        raise FiguresError(f"the figures cannot be drawn: {failed.strerror or failed}") from failed
    except RuntimeError as failed:
        why = failed.args[0] if failed.args else type(failed).__name__
        raise FiguresError(f"the browser that draws the figures failed: {why}") from failed


def whole_figure(figure: Chart, title: str) -> Plotly:
    """A figure with its title, and a legend of all that it draws."""
    entries: dict[object, str] = {}
    data = []
    for place, trace in enumerate([*figure.data, *figure.signs]):
        meta = trace.get("meta", {})
        kind = meta.get("kind")
        of = meta.get("v", place) if kind is None else kind
        named = kind is None or kind in figure.overlays
        shows = trace.get("showlegend", named and of not in entries)
        of_all = kind in figure.overlays and "v" in meta
        name = plain_figure(figure.overlays[kind]) if of_all else trace.get("name", "")
        if shows:
            entries[of] = name
        data.append({**trace, "name": name, "showlegend": shows})
    longest = max(map(len, entries.values()), default=0)
    columns = max(1, min(LEGEND_COLUMNS, WIDTH // (LEGEND_SIGN + LEGEND_CHARACTER * longest)))
    legend = {"orientation": "h", "x": 0, "y": -60 / figure.height, "yanchor": "top"}
    more = {
        "title": {
            "text": f"{plain_figure(title)}: {plain_figure(figure.title)}",
            "x": 0.01,
            "font": {"size": 15},
        },
        "margin": {**figure.layout["margin"], "t": 60},
        "height": figure.height + 60 + math.ceil(len(entries) / columns) * LEGEND_ROW,
        "showlegend": bool(entries),
        "legend": {**legend, "entrywidthmode": "fraction", "entrywidth": 0.98 / columns},
    }
    return {"data": data, "layout": {**figure.layout, **more}}


def _file_name(text: str) -> str:
    """Letters, digits and `.-`, so that no model's name leaves the folder."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:80] or "model"

"""One self-contained HTML file of a Study: summary, tables, figures, methods. It opens offline."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from harness.dataset.study import Study
from harness.report import agreement, chapters, columns, figures, markup, summary
from harness.report.chapters import Chapter
from harness.report.drawing import Figure
from harness.report.markup import listed
from harness.report.ranking import CRITERION
from harness.results import ResultsError

MEANINGS = (
    "latency(n) = B + (n - 1) / W, by ordinary least squares over the decode tokens. The first token is"
    " prefill and is reported as TTFT. B: TPOT extrapolated to zero context. W: tokens of context per further"
    " millisecond of TPOT.",
    "Figures of a cell are pooled over its ok repeats; each repeat runs in a separate process. Curves show"
    " one repeat, thinned for display (min-max and LTTB, keeping the highest spikes). All other figures use"
    " every token.",
    "MBU (model bandwidth utilisation): the time to read the bytes once at the bandwidth of the data sheet"
    " (spec) or at the measured bandwidth, over the time taken. MB are 1e6 bytes.",
)
Sections = Mapping[str, tuple[str, Sequence[Figure]]]
SYNTHETIC = (
    "Synthetic: random weights of the real model's exact shape; sizes are exact, latencies almost exact."
)


def write(path: Path, study: Study) -> None:
    """Write the page of a study. Raises ResultsError if the file cannot be written."""
    keep(path, page(study))


def keep(path: Path, text: str) -> None:
    """Write a page. Raises ResultsError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as refusal:
        raise ResultsError(f"{path}: the page cannot be written: {refusal.strerror}") from refusal


def page(study: Study) -> str:
    """The page of a study as text."""
    sections, found = figures.sections(study), figures.chapters(study)
    body = [
        f"<header><h1>{escape(study.title)}</h1>",
        *_summary(study, sections, found),
        "</header><main>",
        *_tables(study),
        *agreement.section(study.checks),
        *(line for name, each in found.items() for line in chapters.section(name, each)),
        *_figures(sections),
        *_methods(study),
        "</main>",
    ]
    return whole(study.title, "".join(body))


def whole(title: str, body: str) -> str:
    """Wrap a body of HTML into a file that draws its figures and opens offline."""
    from plotly.offline import get_plotlyjs

    scripts = [get_plotlyjs(), _asset("page.js")]
    # Defence in depth behind escaping: only these two scripts may run, and nothing may be fetched.
    hashes = " ".join(f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:;"
        " base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head>"
        f"<body>{body}{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def _asset(name: str) -> str:
    return (resources.files("harness.report") / "assets" / name).read_text(encoding="utf-8")


def _summary(study: Study, sections: Sections, found: Mapping[str, Chapter]) -> Iterable[str]:
    yield from (
        f"<p><strong>{_linked(sentence)}</strong></p>" for sentence in summary.third_party(study.rows)
    )
    yield f"<p class=lead>{escape(summary.counts(study))}</p>"
    yield listed(f"<b>{escape(model)}</b>: {escape(text)}" for model, text in summary.per_model(study))
    if len(study.cells) > 1:
        yield f"<p class=note>{escape(CRITERION)}</p>"
    failed = summary.failures(study)
    if failed:
        yield "<h2>Invalid and failed cells</h2>"
        yield listed(f"{escape(reason)} <small>({_names(names)})</small>" for reason, names in failed)
    flagged = summary.flagged(study)
    if flagged or study.warnings:
        yield "<h2>Warnings</h2>"
        yield listed(map(escape, study.warnings))
        for code, cells in flagged:
            heading = f"{escape(_spoken(code))} <small>({len(cells)})</small>"
            details = listed(f"{escape(name)}: {escape(detail)}" for name, detail in cells)
            yield f"<details><summary>{heading}</summary>{details}</details>"
    links = [
        *([("tables", "Tables")] if study.cells else []),
        *([("agreement", "Same model?")] if study.checks else []),
        *((key, chapter.title) for key, chapter in found.items()),
        *((key, title) for key, (title, _) in sections.items()),
        ("methods", "Methods"),
    ]
    yield (
        "<nav aria-label=Contents>" + " ".join(f'<a href="#{i}">{escape(t)}</a>' for i, t in links) + "</nav>"
    )


def _tables(study: Study) -> Iterable[str]:
    if not study.cells:
        return
    yield '<section id="tables"><h2>Tables</h2>'
    models = list(study.models)
    if len(models) > 1:
        options = "".join(f'<option value="{i}">{escape(model)}</option>' for i, model in enumerate(models))
        yield f'<p><label>Model <select id="only"><option value="">all</option>{options}</select></label></p>'
    for title, every in columns.TABLES.items():
        chosen = columns.used(every, study.rows)
        if chosen:
            lines = (
                (str(row["name"]), row, number)
                for number, rows in enumerate(study.models.values())
                for row in rows
            )
            yield f"<h3>{title}</h3>{markup.table(title, chosen, lines)}"
            yield markup.glossary(chosen)
    if any(row.get("weights") == "synthetic" for row in study.cells):
        yield f"<p class=note>{SYNTHETIC}</p>"
    yield "</section>"


def _figures(sections: Sections) -> Iterable[str]:
    for section, (title, drawn) in sections.items():
        yield f'<section id="{section}"><h2>{escape(title)}</h2><div class=figures>'
        yield "".join(markup.figure(each, section) for each in drawn) or "<p class=note>Nothing to draw.</p>"
        yield "</div></section>"


def _methods(study: Study) -> Iterable[str]:
    yield '<section id="methods"><h2>Methods</h2>'
    yield "".join(f"<p>{escape(text)}</p>" for text in MEANINGS)
    costs = summary.costs(study)
    if costs:
        yield "<h3>Where the time goes</h3>" + listed(map(escape, costs))
    for heading, value in study.methods.items():
        lines = [value] if isinstance(value, str) else value if isinstance(value, (list, tuple)) else []
        typed = "repeat" in heading or "command" in heading  # as typed in a shell
        shown = (
            _typed(lines)
            if typed and lines and all(isinstance(each, str) for each in lines)
            else _facts(value)
        )
        yield f"<h3>{escape(_spoken(heading))}</h3>{shown}"
    for number, machine in enumerate(study.machines):
        name = str(machine.get("slug") or number + 1)
        yield f"<h3>Machine {escape(name)}</h3>{_facts(machine)}"
    yield "</section>"


def _typed(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _plain(key: str) -> str:
    return key.replace("_", " ")


def _spoken(key: str) -> str:
    text = _plain(key)
    return text[:1].upper() + text[1:]


def _facts(value: Any) -> str:
    """Any plain value: mappings as terms, lists as items, text of several lines unchanged."""
    if isinstance(value, Mapping):
        known = {str(key): inner for key, inner in value.items() if inner is not None}
        items = "".join(f"<dt>{escape(_plain(key))}</dt><dd>{_fact(key, v)}</dd>" for key, v in known.items())
        return f"<dl>{items}</dl>"
    if isinstance(value, (list, tuple)):
        if (
            all(not isinstance(each, (Mapping, list, tuple)) for each in value)
            and sum(len(str(v)) for v in value) < 100
        ):
            return escape(", ".join(map(str, value))) or "-"
        return listed(_facts(each) for each in value)
    text = "-" if value is None else str(value)
    return f"<pre>{escape(text)}</pre>" if "\n" in text else _linked(text)


def _fact(key: str, value: Any) -> str:
    big = key.endswith("bytes") and isinstance(value, (int, float)) and value >= 2**20
    return f"{value / 2**30:,.2f} GiB" if big else _facts(value)


def _linked(text: str) -> str:
    """Text with its URLs as links."""
    parts = re.split(r"(https?://[^\s<>\"',;]+)", text)
    links = (f'<a href="{escape(each)}" rel="noreferrer">{escape(each)}</a>' for each in parts[1::2])
    plain = map(escape, parts[::2])
    return "".join(piece for pair in zip_longest(plain, links, fillvalue="") for piece in pair)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[: summary.NAMES_SHOWN])
    more = len(names) - summary.NAMES_SHOWN
    return escape(shown + (f" and {more} more" if more > 0 else ""))

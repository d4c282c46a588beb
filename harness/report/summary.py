"""A study in sentences: counts, how figures are formed, their sources, failures and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.analysis.attempts import disturbance_summary
from harness.analysis.columns import Cell, Outcome, Result, Search, ShownCell
from harness.base import text
from harness.dataset.study import Study, ok, provisional
from harness.records.kinds import served_elsewhere

NAMES_SHOWN = 12
LINE = (
    "latency(n) = B + (n - 1) / W, by ordinary least squares over the decode tokens; the flag"
    " spikes_left_out marks lines without spikes. The first token is prefill and is reported as TTFT. B: TPOT"
    " extrapolated to zero context. W: tokens of context per further millisecond of TPOT."
)
POOLED = "Figures of a cell are pooled over its ok repeats; each repeat runs in a separate process{client}."
OF_CLIENT = ", of a server elsewhere its client does"
DRAWN = (
    "Curves show one repeat, thinned for display (min-max and LTTB), their spikes as ticks at the upper edge."
    " All other figures use every token."
)
MBU = (
    "MBU (model bandwidth utilisation): the time to read the bytes once at the bandwidth of the data sheet"
    " (spec) or at the measured bandwidth, over the time taken. MB are 1e6 bytes, GB 1e9."
)
REASON = 200  # characters of a cause in a sentence
PROVISIONAL = (
    "Provisional: other programs or the machine itself disturbed every repeat, so that no cell is ok. The"
    " figures may be far from those of a quiet machine."
)
# What to do about the outcome that most cells of a model have.
NEXT_STEPS = {
    "oom": "take fewer bits or a shorter context: harness recommend MODEL lists what fits",
    "invalid": "harness doctor lists what disturbs measurements here; then run again with --retry-failed",
    "unavailable": "harness doctor says what the stack lacks on this machine",
    "refused": "harness run CONFIG --dry-run says which option to change",
    "interrupted": "run the same command again: it continues",
    "timeout": "fewer tokens (--tokens), or a longer protocol.timeout_s",
}
OTHERWISE = "log_tail in the cell's record.json has the last lines of its log; then --retry-failed"


def counts(study: Study) -> str:
    """`114 cells of 6 models: 100 ok, 10 oom, 4 invalid.`"""
    models = len(study.models)
    of_models = f" of {models} models" if models > 1 else ""
    cells = text.plural(len(study.cells), "cell")
    sentences = [f"{cells}{of_models}: {_outcomes(study.cells)}."] if study.cells else []
    if study.searches:
        count = f"{len(study.searches)} {'search' if len(study.searches) == 1 else 'searches'}"
        sentences.append(f"{count} for the longest context: {_outcomes(study.searches)}.")
    return " ".join(sentences) or "No cells."


def _outcomes(rows: Sequence[Outcome]) -> str:
    status = Counter(row["status"] for row in rows)
    return ", ".join(f"{count} {name}" for name, count in status.most_common())


def meanings(study: Study) -> list[str]:
    """How the figures are formed. A log has one series per variant, and nothing is pooled."""
    logged = bool(study.cells) and all(row["kind"] == "logged" for row in study.cells)
    client = OF_CLIENT if any(served_elsewhere(stored.record) for stored in study.ran) else ""
    return [LINE, DRAWN if logged else f"{POOLED.format(client=client)} {DRAWN}", MBU]


def third_party(rows: Sequence[ShownCell]) -> list[str]:
    """Sources of the published figures, and their notes; `rows` as in Study.rows."""
    return sources(rows) + source_notes(rows)


def sources(rows: Sequence[ShownCell]) -> list[str]:
    """Source and year of the published figures (`kind: reported`)."""
    sentences = []
    others = [other for row in rows if (other := row["baseline"])]
    for words, cells in (("cells hold", rows), ("cells are compared with", others)):
        by_source = Counter(_source(row) for row in cells if row["kind"] == "reported")
        sentences += [
            f"{count} of {len(rows)} {words} third-party figures, not measured here: {source}."
            for source, count in by_source.items()
        ]
    return sentences


def source_notes(rows: Sequence[ShownCell]) -> list[str]:
    """The sources' notes on a tenth of the cells or more."""
    notes = Counter(note for row in rows if (source := row["source"]) for note in source.get("notes", ()))
    frequent = {note: count for note, count in notes.items() if count > len(rows) / 10}
    return [f"{count} of {len(rows)} cells: {note}." for note, count in frequent.items()]


def _source(row: Cell) -> str:
    source = row["source"]
    if source is None:
        return (row["started_utc"] or "")[:4] or "no source given"
    parts = (source["title"], row["started_utc"][:4], source["url"], source["license"])
    return ", ".join(part for part in parts if part)


def failures(study: Study) -> list[tuple[str, list[str]]]:
    """Status and reason -> the cells that failed with it."""
    cells_of: dict[str, list[str]] = {}
    rows: list[Result] = [*study.cells, *study.searches]
    for row in rows:
        if not ok(row):
            reasons = "; ".join(row["reasons"])
            outcome = f"{row['status']}: {reasons}" if reasons else row["status"]
            cells_of.setdefault(outcome, []).append(row["name"])
    return list(cells_of.items())


def flagged(study: Study) -> list[tuple[str, list[tuple[str, str]]]]:
    """Code of a flag -> the cells that have it, each with the detail."""
    cells_of: dict[str, list[tuple[str, str]]] = {}
    rows: list[Cell | Search] = [*study.cells, *study.searches]
    for row in rows:
        for flag in row["flags"]:
            cells_of.setdefault(flag["code"], []).append((row["name"], flag["detail"]))
    return list(cells_of.items())


def has_synthetic_figures(rows: Sequence[Cell]) -> bool:
    return any(row["weights"] == "synthetic" and (ok(row) or provisional(row)) for row in rows)


def provisional_because(study: Study) -> str:
    """What provisional figures are, and what disturbed them."""
    disturbed = disturbance_summary(study.cells)
    return f"{PROVISIONAL} {disturbed}." if disturbed else PROVISIONAL


def none_ok(study: Study) -> str | None:
    """Why no cell of a study is ok, and what to do next; None: one is."""
    rows = [*study.cells, *study.searches]
    if not rows or any(map(ok, rows)):
        return None
    ((status, count),) = Counter(row["status"] for row in rows).most_common(1)
    mostly = 2 * sum(map(provisional, study.cells)) > count
    disturbed = disturbance_summary(study.cells) if status == "invalid" and mostly else None
    if disturbed:
        return f"No cell is ok. {disturbed}."
    reasons = [failure for failure in failures(study) if failure[0].startswith(status)]
    cause, _ = max(reasons, key=lambda failure: len(failure[1]))
    step = NEXT_STEPS.get(status, OTHERWISE)
    return f"No cell is ok. {count} of {len(rows)} {text.shortened(cause, REASON)}. Next: {step}."

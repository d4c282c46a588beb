"""Summary of a study: counts, the fastest, smallest and longest cells, failures with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from harness.analysis.rows import Cell, ShownCell
from harness.dataset.study import Row, Study, figure, ok
from harness.report import goals
from harness.report.goals import Group, Named, Ranked
from harness.report.ranking import Entry, leaders
from harness.system import wording

NAMES_SHOWN = 12
TIES_SHOWN = 4
LINE = (
    "latency(n) = B + (n - 1) / W, by ordinary least squares over the decode tokens; the flag"
    " spikes_left_out marks lines without spikes. The first token is prefill and is reported as TTFT. B: TPOT"
    " extrapolated to zero context. W: tokens of context per further millisecond of TPOT."
)
POOLED = "Figures of a cell are pooled over its ok repeats; each repeat runs in a separate process."
DRAWN = (
    "Curves show one repeat, thinned for display (min-max and LTTB), their spikes as ticks at the upper edge."
    " All other figures use every token."
)
MBU = (
    "MBU (model bandwidth utilisation): the time to read the bytes once at the bandwidth of the data sheet"
    " (spec) or at the measured bandwidth, over the time taken. MB are 1e6 bytes."
)


def counts(study: Study) -> str:
    """`114 cells of 6 models: 100 ok, 10 oom, 4 invalid.`"""
    models = len(study.models)
    of_models = f" of {models} models" if models > 1 else ""
    cells = wording.plural(len(study.cells), "cell")
    sentences = [f"{cells}{of_models}: {_outcomes(study.cells)}."] if study.cells else []
    if study.searches:
        count = f"{len(study.searches)} {'search' if len(study.searches) == 1 else 'searches'}"
        sentences.append(f"{count} for the longest context: {_outcomes(study.searches)}.")
    return " ".join(sentences) or "No cells."


def _outcomes(rows: Sequence[Row]) -> str:
    status = Counter(str(row.get("status")) for row in rows)
    return ", ".join(f"{count} {name}" for name, count in status.most_common())


def meanings(study: Study) -> list[str]:
    """How the figures are formed. A log has one series per variant, and nothing is pooled."""
    logged = bool(study.cells) and all(row.get("kind") == "logged" for row in study.cells)
    return [LINE, DRAWN if logged else f"{POOLED} {DRAWN}", MBU]


def third_party(rows: Sequence[ShownCell]) -> list[str]:
    """Sources of the published figures, and their notes; `rows` as in Study.rows."""
    return sources(rows) + source_notes(rows)


def sources(rows: Sequence[ShownCell]) -> list[str]:
    """Source and year of the published figures (`kind: reported`)."""
    found = []
    others = [other for row in rows if (other := row.get("baseline"))]
    for words, of in (("cells hold", rows), ("cells are compared with", others)):
        by_source = Counter(_source(row) for row in of if row.get("kind") == "reported")
        found += [
            f"{count} of {len(rows)} {words} third-party figures, not measured here: {source}."
            for source, count in by_source.items()
        ]
    return found


def source_notes(rows: Sequence[ShownCell]) -> list[str]:
    """What the sources say of a tenth of the cells or more."""
    notes = Counter(note for row in rows if (source := row.get("source")) for note in source.get("notes", ()))
    frequent = {note: count for note, count in notes.items() if count > len(rows) / 10}
    return [f"{count} of {len(rows)} cells: {note}." for note, count in frequent.items()]


def _source(row: Cell) -> str:
    source: Mapping[str, object] = row.get("source") or {}
    year = str(row.get("started_utc") or "")[:4]
    parts = (source.get("title"), year, source.get("url"), source.get("license"))
    return ", ".join(str(part) for part in parts if part) or "no source given"


def per_model(study: Study) -> list[tuple[str, str]]:
    """Model and its best cells; separate entries for other machines and for published figures."""
    return [(group.title, sentence(group)) for group in goals.groups(study)]


def sentence(group: Group) -> str:
    """The best cells of a group by each goal."""
    every, named, tried = group.every, group.named, group.searched
    best = (_fastest(named), _smallest(named, every), _longest(named, tried), _quality(every))
    clauses = [clause for clause in best if clause]
    if not tried and not any(ok(row) for _, row in every):
        clauses.insert(0, "no cell is ok")
    return f"{'; '.join(clauses) or 'nothing to compare'}."


def costs(study: Study) -> list[str]:
    """Cost per token by model and stack: fixed cost or reading bytes."""
    found = []
    for model, rows in study.decodes.items():
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in rows:
            if ok(row) and figure(row, "fixed_ms") is not None:
                place = str(row.get("stack")), str(row.get("machine")), str(row.get("device"))
                groups.setdefault(place, []).append(row)
        stacks = Counter(stack for stack, *_ in groups)
        for (stack, machine, device), group in groups.items():
            where = f" on {machine} ({device})" if stacks[stack] > 1 else ""
            by = Counter(row.get("dominated_by") for row in group)
            words = {"fixed": "the fixed cost dominates", "bytes": "reading bytes dominates"}
            which = [f"{text} in {by[key]} of {len(group)} cells" for key, text in words.items() if by[key]]
            dominates = f"; {' and '.join(which)}" if which else ""
            found.append(
                f"{model}, {stack}{where}: fixed cost {goals.text(group[0], 'fixed_ms')} ms per token,"
                f" independent of the bytes read{dominates}."
            )
    return found


def failures(study: Study) -> list[tuple[str, list[str]]]:
    """Status and reason -> the cells that failed with it."""
    found: dict[str, list[str]] = {}
    for row in (*study.cells, *study.searches):
        if not ok(row):
            reasons = [str(reason) for reason in row.get("reasons") or []]
            outcome = f"{row.get('status')}: {'; '.join(reasons)}" if reasons else str(row.get("status"))
            found.setdefault(outcome, []).append(str(row["name"]))
    return list(found.items())


def flagged(study: Study) -> list[tuple[str, list[tuple[str, str]]]]:
    """Code of a flag -> the cells that have it, each with the detail."""
    found: dict[str, list[tuple[str, str]]] = {}
    for row in (*study.cells, *study.searches):
        for flag in row.get("flags") or []:
            found.setdefault(str(flag.get("code")), []).append(
                (str(row["name"]), str(flag.get("detail", "")))
            )
    return list(found.items())


def _ranked(ranked: Ranked) -> str | None:
    return _clause(ranked.superlative, ranked.entries, ranked.cells, ranked.most)


def _clause(best: str, entries: Sequence[Entry], cells: int, most: bool = False) -> str | None:
    """`fastest: a (45.3 tok/s)`, or `fastest, not distinguishable: a (45.3 tok/s), b (45.1 tok/s)`. A single
    figure gets no superlative."""
    if not entries:
        return None
    if len(entries) == 1:
        return f"{entries[0].label}: {entries[0].text}"
    first, *tied = leaders(entries, most)
    of = "" if len(entries) == cells else f" of {len(entries)} cells with this figure"
    if not tied:
        return f"{best}{of}: {first.label} ({first.text})"
    if len(tied) + 1 == len(entries):
        least, last = sorted(entries, key=lambda each: each.value)[:: len(entries) - 1]
        ends = least.text if least.text == last.text else f"{least.text} to {last.text}"
        return f"{best}{of}: not distinguishable ({ends})"
    leading = [f"{each.label} ({each.text})" for each in (first, *tied)]
    return f"{best}{of}, not distinguishable: {wording.named(leading, TIES_SHOWN)}"


def _fastest(named: Named) -> str | None:
    return _ranked(goals.fastest(named))


def _smallest(named: Named, every: Named) -> str | None:
    return _ranked(goals.smallest(named, every))


def _longest(named: Named, searched: Named) -> str | None:
    entries, targets = goals.longest(named, searched)
    if len(entries) + len(targets) == 1:
        (only,) = entries + targets
        return f"{only.label}: {only.text} of context"
    clauses = [_clause("longest context", entries, len(entries), most=True)]
    if targets:
        least = min(targets, key=lambda each: each.value)
        stopped = f"{len(targets)} cells stopped" if len(targets) > 1 else f"{least.label} stopped"
        clauses.append(f"{stopped} at a target ({least.text}) and may hold more")
    return ", while ".join(clause for clause in clauses if clause)


def _quality(every: Named) -> str | None:
    ranked = goals.best_quality(every)
    if len(ranked.entries) == 1:
        return f"{ranked.entries[0].label}: {ranked.measure} {ranked.entries[0].text}"
    return _ranked(ranked)

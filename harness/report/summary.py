"""Summary of a study: counts, the fastest, smallest and longest cells, failures with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from harness.analysis.rows import Cell, ShownCell
from harness.dataset.study import Row, Study, figure, labels, ok, timed
from harness.report import columns
from harness.report.contexts import held
from harness.report.ranking import MEMORY_NOISE, Entry, entry, leaders, perplexity, speed
from harness.system import wording

# Measures of size with their noise; the smallest cell is by the first measure that the most ok cells have.
SIZES = (
    ("peak_vram_bytes", "least peak VRAM", MEMORY_NOISE),
    ("peak_rss_bytes", "least peak RSS", MEMORY_NOISE),
    ("loaded_bytes", "least memory after load", MEMORY_NOISE),
    ("file_bytes", "smallest file", 0.0),
    ("model_bytes", "smallest tensors", 0.0),
)
NAMES_SHOWN = 12
TIES_SHOWN = 4
LINE = (
    "latency(n) = B + (n - 1) / W, by ordinary least squares over the decode tokens. The first token is"
    " prefill and is reported as TTFT. B: TPOT extrapolated to zero context. W: tokens of context per further"
    " millisecond of TPOT."
)
POOLED = "Figures of a cell are pooled over its ok repeats; each repeat runs in a separate process."
DRAWN = (
    "Curves show one repeat, thinned for display (min-max and LTTB, keeping the highest spikes). All other"
    " figures use every token."
)
MBU = (
    "MBU (model bandwidth utilisation): the time to read the bytes once at the bandwidth of the data sheet"
    " (spec) or at the measured bandwidth, over the time taken. MB are 1e6 bytes."
)

Named = Sequence[tuple[str, Row]]


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
    """Source and year of the published figures (`kind: reported`); `rows` as in Study.rows."""
    found = []
    others = [other for row in rows if (other := row.get("baseline"))]
    for words, of in (("cells hold", rows), ("cells are compared with", others)):
        sources = Counter(_source(row) for row in of if row.get("kind") == "reported")
        found += [
            f"{count} of {len(rows)} {words} third-party figures, not measured here: {source}."
            for source, count in sources.items()
        ]
    notes = Counter(note for row in rows if (source := row.get("source")) for note in source.get("notes", ()))
    frequent = {note: count for note, count in notes.items() if count > len(rows) / 10}
    return found + [f"{count} of {len(rows)} cells: {note}." for note, count in frequent.items()]


def _source(row: Cell) -> str:
    source: Mapping[str, object] = row.get("source") or {}
    year = str(row.get("started_utc") or "")[:4]
    parts = (source.get("title"), year, source.get("url"), source.get("license"))
    return ", ".join(str(part) for part in parts if part) or "no source given"


def per_model(study: Study) -> list[tuple[str, str]]:
    """Model and its best cells; separate entries for other machines and for published figures."""
    places: dict[tuple[str, str, bool], tuple[list[Row], list[Row]]] = {}
    for number, rows in enumerate((study.rows, study.searches)):
        for row in rows:
            place = str(row.get("model")), str(row.get("machine")), row.get("kind") == "reported"
            places.setdefault(place, ([], []))[number].append(row)
    order = list(dict.fromkeys((*study.models, *(str(row.get("model")) for row in study.searches))))
    models = Counter(model for model, *_ in places)
    found = []
    for (model, machine, reported), (cells, searches) in sorted(
        places.items(), key=lambda each: order.index(each[0][0])
    ):
        where = f" on {machine}{', third-party' * reported}" if models[model] > 1 else ""
        found.append((model + where, _sentences(model, cells, searches)))
    return found


def _sentences(model: str, cells: Sequence[Row], searches: Sequence[Row]) -> str:
    every = list(zip(labels(cells, model), cells, strict=True))
    tried = [(label, row) for label, row in zip(labels(searches, model), searches, strict=True) if ok(row)]
    named = [(label, row) for label, row in every if ok(row) and not timed(row)]
    best = (_fastest(named), _smallest(named, every), _longest(named, tried), _perplexity(every))
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
                f"{model}, {stack}{where}: fixed cost {_text(group[0], 'fixed_ms')} ms per token, independent"
                f" of the bytes read{dominates}."
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
    for row in study.cells:
        for flag in row.get("flags") or []:
            found.setdefault(str(flag.get("code")), []).append(
                (str(row["name"]), str(flag.get("detail", "")))
            )
    return list(found.items())


def _text(row: Row, key: str) -> str:
    """A figure as the tables show it."""
    column = next(each for table in columns.TABLES.values() for each in table if each.key == key)
    return column.text(row, key)


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
    """By tokens per second among cells with the same number of tokens; by B if more cells have one."""
    by_tokens: dict[object, list[Entry]] = {}
    at_zero = []
    for label, row in named:
        rate = speed(label, row, "tokens_per_s", "tokens_per_s_ci95", f"{_text(row, 'tokens_per_s')} tok/s")
        if rate:
            by_tokens.setdefault(row.get("tokens"), []).append(rate)
        B = speed(label, row, "B_ms", "B_ci95_ms", f"B {_text(row, 'B_ms')} ms")
        if B and B_identifiable(row):
            at_zero.append(B)
    tokens, rates = max(by_tokens.items(), key=lambda each: len(each[1]), default=(None, []))
    if len(at_zero) > len(rates):
        return _clause("fastest at zero context", at_zero, len(named))
    over = f" over {tokens:,} tokens" if isinstance(tokens, int) else ""
    return _clause(f"fastest{over}", rates, len(named), most=True)


def B_identifiable(row: Row) -> bool:
    """Whether B is more than an extrapolation: an identifiable or flat line, or a published figure."""
    line = row.get("W_identifiable") is True or row.get("shape") == "flat"
    return line or (row.get("kind") == "reported" and not row.get("shape"))


def _smallest(named: Named, every: Named) -> str | None:
    """By the measure that the most cells have, with the perplexity of the cell."""
    measures = [
        (words, [(label, row) for label, row in named if figure(row, key)], key, noise)
        for key, words, noise in SIZES
    ]
    words, known, key, noise = max(measures, key=lambda each: len(each[1]))
    quality = [value for _, row in every if (value := figure(row, "perplexity")) is not None]
    entries = []
    for label, row in known:
        perplexity_of = figure(row, "perplexity")
        text = f"{_text(row, key)} MB"
        if len(known) == 1:
            text += f", {words.partition(' ')[2]}"
        elif perplexity_of is not None and len(quality) > 1 and perplexity_of > min(quality):
            text += f", perplexity {_text(row, 'perplexity')}"
        entries.append(entry(label, figure(row, key) or 0.0, noise, text))
    return _clause(words, entries, len(named))


def _longest(named: Named, searched: Named) -> str | None:
    """Skips cells that ran past their memory, as they dropped tokens. Cells that stopped at a target may hold
    more."""
    entries: list[Entry] = []
    targets: list[Entry] = []
    for label, row in named:
        if (length := figure(row, "max_ctx")) is None or not held(row):
            continue
        found = entry(label, length, 0.0, f"{_text(row, 'max_ctx')} tokens")
        (targets if row.get("max_ctx_is_target") else entries).append(found)
    for label, row in searched:
        if (length := figure(row, "verified_n_ctx")) is not None:
            entries.append(entry(label, length, 0.0, f"{length:,.0f} tokens"))
    if len(entries) + len(targets) == 1:
        (only,) = entries + targets
        return f"{only.label}: {only.text} of context"
    clauses = [_clause("longest context", entries, len(entries), most=True)]
    if targets:
        least = min(targets, key=lambda each: each.value)
        stopped = f"{len(targets)} cells stopped" if len(targets) > 1 else f"{least.label} stopped"
        clauses.append(f"{stopped} at a target ({least.text}) and may hold more")
    return ", while ".join(clause for clause in clauses if clause)


def _perplexity(every: Named) -> str | None:
    """A property of the weights, so it counts even if no run is ok."""
    entries = [
        found
        for label, row in every
        if (found := perplexity(label, row, _text(row, "perplexity"))) and row.get("status") != "invalid"
    ]
    if len(entries) == 1:
        return f"{entries[0].label}: perplexity {entries[0].text}"
    return _clause("lowest perplexity", entries, len(entries))

"""A study in plain sentences: what is fastest, leanest, longest, what failed and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.report.contexts import held
from harness.report.study import Row, Study, figure, labels, ok

# What "leanest" is taken of: the first that any ok cell of a model has.
SIZES = (
    ("peak_vram_bytes", "of video memory at its peak"),
    ("peak_rss_bytes", "of memory at its peak"),
    ("loaded_bytes", "once loaded"),
    ("file_bytes", "as a file"),
    ("model_bytes", "of tensors"),
)
NAMES_SHOWN = 12

Named = Sequence[tuple[str, Row]]


def counts(study: Study) -> str:
    """`114 cells of 6 models: 100 ok, 10 oom, 4 invalid.`"""
    status = Counter(str(row.get("status")) for row in study.cells)
    told = ", ".join(f"{count} {name}" for name, count in status.most_common())
    models = len(study.models)
    of_models = f" of {models} models" if models > 1 else ""
    cells = f"{len(study.cells)} {'cell' if len(study.cells) == 1 else 'cells'}"
    said = [f"{cells}{of_models}: {told}."] if study.cells else []
    if study.searches:
        outcomes = Counter(str(row.get("status")) for row in study.searches)
        told = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
        count = f"{len(study.searches)} {'search' if len(study.searches) == 1 else 'searches'}"
        said.append(f"{count} for the longest context: {told}.")
    return " ".join(said) or "No cells."


def per_model(study: Study) -> list[tuple[str, str]]:
    """Model and what stands out in it."""
    found = []
    searched: dict[str, list[Row]] = {}
    for row in study.searches:
        searched.setdefault(str(row.get("model")), []).append(row)
    for model in dict.fromkeys((*study.models, *searched)):
        named, tried = (
            _named(rows, model) for rows in (study.models.get(model, []), searched.get(model, []))
        )
        told: dict[str, list[str]] = {}
        for stands_out in (_fastest(named), _leanest(named), _longest(named, tried), _best(named)):
            if stands_out:
                told.setdefault(stands_out[0], []).append(stands_out[1])
        said = "; ".join(f"{label} {_and(what)}" for label, what in told.items())
        found.append(
            (model, f"{said}." if said else "nothing to compare." if named or tried else "no cell is ok.")
        )
    return found


def _named(rows: Sequence[Row], model: str) -> Named:
    """The ok ones, by what tells them apart."""
    return [(label, row) for label, row in zip(labels(rows, model), rows, strict=True) if ok(row)]


def costs(study: Study) -> list[str]:
    """Where the time goes, by model and stack: fixed cost or bytes."""
    found = []
    for model, rows in study.models.items():
        stacks: dict[str, list[Row]] = {}
        for row in rows:
            if ok(row) and figure(row, "fixed_ms") is not None:
                stacks.setdefault(str(row.get("stack")), []).append(row)
        for stack, group in stacks.items():
            fixed = figure(group[0], "fixed_ms")
            by = Counter(row.get("dominated_by") for row in group)
            words = {"fixed": "this is the larger part", "bytes": "the bytes are"}
            which = [f"in {by[key]} of {len(group)} {said}" for key, said in words.items() if by[key]]
            told = f"; {_and(which)}" if which else ""
            found.append(
                f"{model}, {stack}: {fixed:.2f} ms of a token are there however few bytes it reads{told}."
            )
    return found


def failures(study: Study) -> list[tuple[str, list[str]]]:
    """What is not ok and why -> the cells it befell; one reason is told once."""
    found: dict[str, list[str]] = {}
    for row in (*study.cells, *study.searches):
        if not ok(row):
            reasons = [str(reason) for reason in row.get("reasons") or []]
            said = f"{row.get('status')}: {'; '.join(reasons)}" if reasons else str(row.get("status"))
            found.setdefault(said, []).append(str(row["name"]))
    return list(found.items())


def flagged(study: Study) -> list[tuple[str, list[tuple[str, str]]]]:
    """Code of a flag -> the cells that carry it, each with the detail."""
    found: dict[str, list[tuple[str, str]]] = {}
    for row in study.cells:
        for flag in row.get("flags") or []:
            found.setdefault(str(flag.get("code")), []).append(
                (str(row["name"]), str(flag.get("detail", "")))
            )
    return list(found.items())


def _speed(row: Row) -> float | None:
    measured, B_ms = figure(row, "start_tokens_per_s"), figure(row, "B_ms")
    return measured if measured is not None else 1e3 / B_ms if B_ms else None


def _fastest(named: Named) -> tuple[str, str] | None:
    known = [(speed, label, row) for label, row in named if (speed := _speed(row)) is not None]
    if not known:
        return None
    speed, label, row = max(known, key=lambda each: each[0])
    B_ms = figure(row, "B_ms")
    each = f", {B_ms:.2f} ms each" if B_ms is not None else ""
    return label, f"is the fastest ({speed:.1f} tokens/s{each})"


def _leanest(named: Named) -> tuple[str, str] | None:
    """By the measure that the most variants have; only what was measured alike is compared."""
    sizes = [
        (words, [(size, label) for label, row in named if (size := figure(row, key))]) for key, words in SIZES
    ]
    words, known = max(sizes, key=lambda each: len(each[1]))
    if not known:
        return None
    size, label = min(known)
    of = "" if len(known) == len(named) else f" of the {len(known)} whose figure is known"
    return label, f"is the leanest{of} ({size / 1e6:,.0f} MB {words})"


def _longest(named: Named, searched: Named) -> tuple[str, str] | None:
    """What went on past what its memory holds has lost its context."""
    reached = [(figure(row, "max_ctx"), label) for label, row in named if held(row)]
    reached += [(figure(row, "verified_n_ctx"), label) for label, row in searched]
    known = [(length, label) for length, label in reached if length is not None]
    if not known:
        return None
    length, label = max(known, key=lambda each: each[0])
    ties = sum(other == length for other, _ in known) - 1
    also = f", as {ties} more" if ties else ""
    return label, f"has the longest context ({length:,.0f} tokens{also})"


def _best(named: Named) -> tuple[str, str] | None:
    known = [(value, label) for label, row in named if (value := figure(row, "perplexity")) is not None]
    if not known:
        return None
    value, label = min(known)
    return label, f"has the lowest perplexity ({value:.2f})"


def _and(clauses: Sequence[str]) -> str:
    return clauses[0] if len(clauses) == 1 else f"{', '.join(clauses[:-1])} and {clauses[-1]}"

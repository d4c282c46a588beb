"""Which cells of a model lead by each goal: speed, size, longest context, quality. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.dataset.study import Row, Study, bounds, figure, labels, ok, timed
from harness.report import columns
from harness.report.cell_text import PAST_TRAINING, past_training
from harness.report.contexts import held
from harness.report.ranking import MEMORY_NOISE, Entry, divergence, entry, perplexity, speed

# Measures of size with their noise; the smallest cell is by the first measure that the most ok cells have.
SIZES = (
    ("peak_vram_bytes", "least peak VRAM", MEMORY_NOISE),
    ("peak_rss_bytes", "least peak RSS", MEMORY_NOISE),
    ("loaded_bytes", "least memory after load", MEMORY_NOISE),
    ("file_bytes", "smallest file", 0.0),
    ("model_bytes", "smallest tensors", 0.0),
)

LEAST_KLD = 1e-6  # nats; figures draw what is less here: 16 bits differ by rounding alone
GB_FROM = 1e9  # bytes; smaller sizes are in MB
SIZE_WORDS = {
    "peak_vram_bytes": "peak VRAM",
    "peak_rss_bytes": "peak RSS",
    "loaded_bytes": "after load",
    "file_bytes": "file",
    "model_bytes": "tensors",
}

Named = Sequence[tuple[str, Row]]


@dataclass(frozen=True)
class Ranked:
    """The entries of one goal. `superlative`: such as `fastest over 256 tokens`; `cells`: how many could have
    had an entry; `most`: the highest leads."""

    superlative: str
    entries: Sequence[Entry]
    cells: int
    most: bool = False

    @property
    def measure(self) -> str:
        """What the lowest of is the best."""
        return self.superlative.removeprefix("lowest ")


@dataclass(frozen=True)
class Group:
    """Cells that may be ranked together: one model on one machine, measured here or published. With labels:
    `every` cell, `named`, the decodes that are ok, and `searched`, the searches that are ok."""

    model: str
    title: str
    every: Named
    named: Named
    searched: Named


def groups(study: Study) -> list[Group]:
    """In the order of the models; the title says machine and origin where a model has several groups."""
    places: dict[tuple[str, str, bool], tuple[list[Row], list[Row]]] = {}
    for number, rows in enumerate((study.rows, study.searches)):
        for row in rows:
            place = str(row.get("model")), str(row.get("machine")), row.get("kind") == "reported"
            places.setdefault(place, ([], []))[number].append(row)
    order = list(dict.fromkeys((*study.models, *(str(row.get("model")) for row in study.searches))))
    models = Counter(model for model, *_ in places)
    found = []
    for (model, machine, reported), of in sorted(places.items(), key=lambda each: order.index(each[0][0])):
        where = f" on {machine}{', third-party' * reported}" if models[model] > 1 else ""
        every, searched = (list(zip(labels(rows, model), rows, strict=True)) for rows in of)
        named = [(label, row) for label, row in every if ok(row) and not timed(row)]
        tried = [(label, row) for label, row in searched if ok(row)]
        found.append(Group(model, model + where, every, named, tried))
    return found


def text(row: Row, key: str) -> str:
    """A figure as the tables show it."""
    column = next(each for table in columns.TABLES.values() for each in table if each.key == key)
    return column.text(row, key)


def speed_is_B(named: Named) -> bool:
    """Whether speeds compare by B: more cells have an identifiable one than tok/s over as many tokens."""
    by_tokens: dict[object, int] = {}
    for _, row in named:
        if figure(row, "tokens_per_s") is not None:
            by_tokens[row.get("tokens")] = by_tokens.get(row.get("tokens"), 0) + 1
    at_zero = sum(figure(row, "B_ms") is not None and B_identifiable(row) for _, row in named)
    return at_zero > max(by_tokens.values(), default=0)


def fastest(named: Named) -> Ranked:
    """By tokens per second among cells with the same number of tokens; by B if more cells have one."""
    if speed_is_B(named):
        found = (
            speed(label, row, "B_ms", "B_ci95_ms", f"B {text(row, 'B_ms')} ms")
            for label, row in named
            if B_identifiable(row)
        )
        return Ranked("fastest at zero context", [each for each in found if each], len(named))
    by_tokens: dict[object, list[Entry]] = {}
    for label, row in named:
        rate = speed(label, row, "tokens_per_s", "tokens_per_s_ci95", f"{text(row, 'tokens_per_s')} tok/s")
        if rate:
            by_tokens.setdefault(row.get("tokens"), []).append(rate)
    tokens, rates = max(by_tokens.items(), key=lambda each: len(each[1]), default=(None, []))
    over = f" over {tokens:,} tokens" if isinstance(tokens, int) else ""
    return Ranked(f"fastest{over}", rates, len(named), most=True)


def B_identifiable(row: Row) -> bool:
    """Whether B is more than an extrapolation: an identifiable or flat line, or a published figure."""
    line = row.get("W_identifiable") is True or row.get("shape") == "flat"
    return line or (row.get("kind") == "reported" and not row.get("shape"))


def size_measure(named: Named) -> tuple[str, str, float]:
    """The measure of size that the most cells have: key, superlative, noise."""
    return max(SIZES, key=lambda each: sum(bool(figure(row, each[0])) for _, row in named))


def size(row: Row, measure: str) -> tuple[float | None, str]:
    """Bytes of a row by this measure, else by the first other that it has; and the measure."""
    for key in (measure, *(key for key, *_ in SIZES)):
        if (value := figure(row, key)) is not None:
            return value, key
    return None, measure


def sized(size: float) -> str:
    """`9.7 GB`, `660 MB`"""
    return f"{size / 1e9:,.1f} GB" if size >= GB_FROM else f"{size / 1e6:,.0f} MB"


def rate(row: Row, by_B: bool) -> tuple[float | None, float | None, float | None]:
    """Tokens per second with the ends of their 95% interval, null where unknown. `by_B`: at zero context."""
    if not by_B:
        return figure(row, "tokens_per_s"), *bounds(row, "tokens_per_s_ci95")
    fast, slow = (1e3 / end if end else None for end in bounds(row, "B_ci95_ms"))
    value = figure(row, "B_ms")
    return (1e3 / value if value and B_identifiable(row) else None), slow, fast


def smallest(named: Named, every: Named) -> Ranked:
    """By the measure that the most cells have, with the perplexity of the cell."""
    key, words, noise = size_measure(named)
    known = [(label, row) for label, row in named if figure(row, key)]
    quality = [value for _, row in every if (value := figure(row, "perplexity")) is not None]
    entries = []
    for label, row in known:
        perplexity_of = figure(row, "perplexity")
        shown = f"{text(row, key)} MB"
        if len(known) == 1:
            shown += f", {words.partition(' ')[2]}"
        elif perplexity_of is not None and len(quality) > 1 and perplexity_of > min(quality):
            shown += f", perplexity {text(row, 'perplexity')}"
        entries.append(entry(label, figure(row, key) or 0.0, noise, shown))
    return Ranked(words, entries, len(named))


def longest(named: Named, searched: Named) -> tuple[list[Entry], list[Entry]]:
    """Lengths that memory ended, and those that stopped at a target and may hold more. Skips cells that ran
    past their memory, as they dropped tokens."""
    ended: list[Entry] = []
    targets: list[Entry] = []
    for label, row in named:
        if (length := figure(row, "max_ctx")) is None or not held(row):
            continue
        found = entry(label, length, 0.0, _tokens(row, length))
        (targets if row.get("max_ctx_is_target") else ended).append(found)
    for label, row in searched:
        if (length := figure(row, "verified_n_ctx")) is not None:
            ended.append(entry(label, length, 0.0, _tokens(row, length)))
    return ended, targets


def _tokens(row: Row, length: float) -> str:
    target = "+" * bool(row.get("max_ctx_is_target"))
    return f"{length:,.0f}{target} tokens" + PAST_TRAINING * bool(past_training(row))


def quality_is_kld(named: Named) -> bool:
    """Whether qualities compare by KL divergence, whose interval is far narrower than a perplexity's: as many
    cells have one."""
    known = [[row for _, row in named if figure(row, key) is not None] for key in ("kld_mean", "perplexity")]
    return bool(known[0]) and len(known[0]) >= len(known[1])


def best_quality(every: Named) -> Ranked:
    """By KL divergence, else by perplexity. A property of the weights, so it counts even if no run is ok."""
    valid = [(label, row) for label, row in every if row.get("status") != "invalid"]
    if quality_is_kld(valid):
        measure, found = "KLD", [divergence(label, row, text(row, "kld_mean")) for label, row in valid]
    else:
        measure, found = (
            "perplexity",
            [perplexity(label, row, text(row, "perplexity")) for label, row in valid],
        )
    entries = [each for each in found if each]
    return Ranked(f"lowest {measure}", entries, len(entries))

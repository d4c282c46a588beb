"""The answers of a study: rankings, first lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.analysis.columns import Cell, Ends, Outcome, Result, Search, ShownCell
from harness.analysis.quality import EQUAL_KLD
from harness.base import text
from harness.dataset.study import Study, bounds, finite, labels, ok, provisional, timed
from harness.dataset.table import synthetic, trained_mark
from harness.records.kinds import served_elsewhere
from harness.report.tables import PAST_TRAINING, B, held, number, past_training
from harness.report.timed_rows import in_words
from harness.stacks.header import stacks

# Which cells lead in a figure, and which of them are not distinguishable. Pure.
#
# Two cells are distinguishable if their 95% confidence intervals do not overlap. A figure of one run without
# an interval gets the relative noise stated here; several runs that give no interval differ by an unknown
# amount, so that no other cell is distinguishable from theirs.


# Half of a 95% interval, as a share of the figure.
SPEED_NOISE = 0.02  # of one run; repeats on an idle machine differ by about 1%
MEMORY_NOISE = 0.01  # RSS of repeats of one cell
# llama.cpp prints 6.2332 +/- 0.0378 for Llama 3 8B on the test part of wikitext-2: a standard error of 0.6%
# (ggml-org/llama.cpp, pull request 6936).
PERPLEXITY_NOISE = 0.012
STANDARD_ERRORS = 1.96
CRITERION = (
    "Cells whose 95% confidence interval overlaps that of the best are listed with it. Where no interval is"
    " known, the report"
    f" assumes ±{SPEED_NOISE:.0%} for a speed of one run, ±{MEMORY_NOISE:.0%} for memory in use, and"
    f" ±{PERPLEXITY_NOISE:.1%} for a perplexity (llama.cpp prints a standard error of 0.6% on"
    f" wikitext-2). Several repeats that give no interval lead nothing, and nothing leads over them. KLDs"
    f" below {EQUAL_KLD} count as equal: there KLD does not order types by their scores at tasks"
    " (arXiv 2606.19558)."
)


@dataclass(frozen=True)
class Entry:
    """A cell's figure, with the ends of its 95% interval; `text`: as the table shows it."""

    label: str
    value: float
    low: float
    high: float
    text: str

    @property
    def is_unknown(self) -> bool:
        """Whether its noise is unknown."""
        return self.high == float("inf") and not self.low

    @property
    def shown(self) -> str:
        return f"{self.text}, no interval" if self.is_unknown else self.text


def entry(label: str, value: float, noise: float, text: str) -> Entry:
    """A figure with this relative noise."""
    return Entry(label, value, value * (1 - noise), value * (1 + noise), text)


def unknown(label: str, value: float, text: str) -> Entry:
    """A figure whose noise is unknown, which overlaps with every other."""
    return Entry(label, value, 0.0, float("inf"), text)


def speed(label: str, row: Cell, speed: float | None, interval: Ends | None, text: str) -> Entry | None:
    """A speed with its interval. That of a single run ignores run-to-run noise, so it is at least
    SPEED_NOISE; several runs without one are too few for it."""
    value = finite(speed)
    if value is None:
        return None
    stated = entry(label, value, SPEED_NOISE, text)
    if not interval:
        return unknown(label, value, text) if row["repeats"] > 1 else stated
    low, high = bounds(interval)
    low, high = 0.0 if low is None else low, float("inf") if high is None else high
    if row["repeats"] <= 1:
        low, high = min(low, stated.low), max(high, stated.high)
    return Entry(label, value, low, high, text)


def perplexity(label: str, row: Cell) -> Entry | None:
    value, error = row["perplexity"], row["perplexity_stderr"]
    if value is None:
        return None
    return entry(label, value, STANDARD_ERRORS * error / value if error else PERPLEXITY_NOISE, number(value))


def divergence(label: str, row: Cell) -> Entry | None:
    """A KL divergence with its interval; one below EQUAL_KLD is as good as none."""
    value, shown = row["kld_mean"], number(row["kld_mean"], "{:.5f}")
    if value is None:
        return None
    low, high = bounds(row["kld_mean_ci95"])
    if low is None or high is None:
        return unknown(label, value, shown)
    if value < EQUAL_KLD:
        low, high = 0.0, max(high, EQUAL_KLD)
    return Entry(label, value, low, high, shown)


def leaders(entries: Sequence[Entry], most: bool = False) -> list[Entry]:
    """The lowest (or highest) entry and those whose intervals overlap with it, in order."""
    ordered = sorted(entries, key=lambda each: -each.value if most else each.value)
    first = ordered[0]
    return [each for each in ordered if each.low <= first.high and first.low <= each.high]


# Which cells of a model lead by each goal: speed, size, longest context, quality. Pure.


@dataclass(frozen=True)
class SizeMeasure:
    """`best`: in words, that a cell has the least of it."""

    of: Callable[[Cell], float | None]
    name: str
    best: str
    noise: float


# The smallest cell is by the first measure that the most ok cells have.
SIZES = (
    SizeMeasure(lambda row: row["peak_vram_bytes"], "peak VRAM", "least peak VRAM", MEMORY_NOISE),
    SizeMeasure(lambda row: row["peak_rss_bytes"], "peak RSS", "least peak RSS", MEMORY_NOISE),
    SizeMeasure(lambda row: row["loaded_bytes"], "after load", "least memory after load", MEMORY_NOISE),
    SizeMeasure(lambda row: row["file_bytes"], "file", "smallest file", 0.0),
    SizeMeasure(lambda row: row["model_bytes"], "tensors", "smallest tensors", 0.0),
)

LEAST_KLD = 1e-6  # nats; figures draw what is less here: 16 bits differ by rounding alone

Named = Sequence[tuple[str, ShownCell]]


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
        """The measure whose lowest value is the best."""
        return self.superlative.removeprefix("lowest ")


@dataclass(frozen=True)
class Group:
    """Cells that may be ranked together: one model on one machine, measured here or published. With labels:
    `every` cell, `named`, the decodes that are ok, and `searched`, the searches that are ok. `provisional`:
    none is, and `named` are those that only the machine disturbed."""

    model: str
    title: str
    every: Named
    named: Named
    searched: Sequence[tuple[str, Search]]
    provisional: bool = False

    @property
    def several(self) -> Named:
        """The cells of several users at once, unless they failed."""
        usable = [(label, row) for label, row in self.every if ok(row) or provisional(row)]
        return [(label, row) for label, row in usable if row["users"]]


def has_synthetic_figures(rows: Sequence[Cell]) -> bool:
    return any(row["weights"] == "synthetic" and (ok(row) or provisional(row)) for row in rows)


def rankable(row: Cell) -> bool:
    """Whether it is a decode whose text is the model's."""
    return not timed(row) and not synthetic(row)


def group(model: str, title: str, every: Named, searched: Sequence[tuple[str, Search]]) -> Group:
    """A group of these cells and searches, with their labels."""
    named = [(label, row) for label, row in every if ok(row) and rankable(row)]
    return Group(model, title, every, named, [(label, row) for label, row in searched if ok(row)])


def groups(study: Study) -> list[Group]:
    """The groups in order of models; titles name machine and origin if a model has several."""
    places: dict[tuple[str, str, bool], tuple[list[ShownCell], list[Search]]] = {}
    for row in study.rows:
        place = row["model"], row["machine"], row["kind"] == "reported"
        places.setdefault(place, ([], []))[0].append(row)
    for search in study.searches:
        place = search["model"], search["machine"], search["kind"] == "reported"
        places.setdefault(place, ([], []))[1].append(search)
    order = list(dict.fromkeys((*study.models, *(row["model"] for row in study.searches))))
    models = Counter(model for model, *_ in places)
    found = []
    for (model, machine, reported), (cells, searches) in sorted(
        places.items(), key=lambda each: order.index(each[0][0])
    ):
        where = f" on {machine}{', third-party' * reported}" if models[model] > 1 else ""
        every = list(zip(labels(cells, model), cells, strict=True))
        found.append(
            group(model, model + where, every, list(zip(labels(searches, model), searches, strict=True)))
        )
    return found


PROVISIONAL = (
    "Provisional: other programs or the machine itself disturbed every repeat, so that no cell is ok. The"
    " figures may be far from those of a quiet machine."
)


def shown_groups(study: Study) -> list[Group]:
    """The groups; where no cell is ok, with the decodes that only the machine disturbed, as provisional."""
    found = []
    for group in groups(study):
        disturbed = [(label, row) for label, row in group.every if provisional(row) and rankable(row)]
        replaces = disturbed and not any(ok(row) for _, row in group.every)
        found.append(replace(group, named=disturbed, provisional=True) if replaces else group)
    return found


def speed_is_B(named: Named) -> bool:
    """Whether speeds compare by B: more cells have an identifiable one than tok/s over as many tokens."""
    by_tokens = Counter(row["tokens"] for _, row in named if finite(row["tokens_per_s"]) is not None)
    at_zero = sum(finite(row["B_ms"]) is not None and B_identifiable(row) for _, row in named)
    return at_zero > max(by_tokens.values(), default=0)


def fastest(named: Named) -> Ranked:
    """Rank by tokens per second among cells of equal length, or by B if more cells have one."""
    if speed_is_B(named):
        found = (
            speed(label, row, row["B_ms"], row["B_ci95_ms"], f"B {B(row)} ms")
            for label, row in named
            if B_identifiable(row)
        )
        return Ranked("fastest at zero context", [each for each in found if each], len(named))
    by_tokens: dict[int | None, list[Entry]] = {}
    for label, row in named:
        value = row["tokens_per_s"]
        if rate := speed(label, row, value, row["tokens_per_s_ci95"], f"{number(value, '{:,.1f}')} tok/s"):
            by_tokens.setdefault(row["tokens"], []).append(rate)
    tokens, rates = max(by_tokens.items(), key=lambda each: len(each[1]), default=(None, []))
    over = f" over {tokens:,} tokens" if tokens is not None else ""
    return Ranked(f"fastest{over}", rates, len(named), most=True)


def B_identifiable(row: Cell) -> bool:
    """Whether B is more than an extrapolation: an identifiable or flat line, or a published figure."""
    line = row["W_identifiable"] is True or row["shape"] == "flat"
    return line or (row["kind"] == "reported" and not row["shape"])


def size_measure(named: Named) -> SizeMeasure:
    """The measure of size that the most cells have."""
    return max(SIZES, key=lambda each: sum(bool(each.of(row)) for _, row in named))


def goals_size(row: Cell, measure: SizeMeasure) -> tuple[float | None, SizeMeasure]:
    """Bytes of a row by this measure, else by the first other that it has; and the measure."""
    for each in (measure, *SIZES):
        if (value := each.of(row)) is not None:
            return value, each
    return None, measure


def rate(row: Cell, by_B: bool) -> tuple[float | None, float | None, float | None]:
    """Tokens per second with the ends of their 95% interval, null where unknown. `by_B`: at zero context."""
    if not by_B:
        return finite(row["tokens_per_s"]), *bounds(row["tokens_per_s_ci95"])
    fast, slow = (1e3 / end if end else None for end in bounds(row["B_ci95_ms"]))
    value = finite(row["B_ms"])
    return (1e3 / value if value and B_identifiable(row) else None), slow, fast


def smallest(named: Named, every: Named) -> Ranked:
    """Rank by the measure that most cells have, with the cell's perplexity."""
    measure = size_measure(named)
    known = [(label, row, size) for label, row in named if (size := measure.of(row))]
    quality = [value for _, row in every if (value := row["perplexity"]) is not None]
    entries = []
    for label, row, size in known:
        perplexity_of = row["perplexity"]
        shown = f"{number(size, '{:,.0f}', 1e6)} MB"
        if len(known) == 1:
            shown += f", {measure.best.partition(' ')[2]}"
        elif perplexity_of is not None and len(quality) > 1 and perplexity_of > min(quality):
            shown += f", perplexity {number(perplexity_of)}"
        entries.append(entry(label, size, measure.noise, shown))
    return Ranked(measure.best, entries, len(named))


def longest(named: Named, searched: Sequence[tuple[str, Search]]) -> tuple[list[Entry], list[Entry]]:
    """Lengths that memory or the trained context ended, and those that stopped at a target and may hold more.
    Skips cells that ran past their memory, as they dropped tokens."""
    ended: list[Entry] = []
    targets: list[Entry] = []
    for label, row in named:
        if (length := row["max_ctx"]) is None or not held(row):
            continue
        target = row["max_ctx_is_target"]
        (targets if target else ended).append(entry(label, length, 0.0, _tokens(row, length, target)))
    for label, search in searched:
        if (length := search["verified_n_ctx"]) is not None:
            text = _tokens(search, length, False) + trained_mark(search)
            ended.append(entry(label, length, 0.0, text))
    return ended, targets


def _tokens(row: Cell | Search, length: float, is_target: bool) -> str:
    return f"{length:,.0f}{'+' * is_target} tokens" + PAST_TRAINING * bool(past_training(row["flags"]))


def quality_is_kld(named: Named) -> bool:
    """Whether qualities compare by KL divergence, whose interval is far narrower than a perplexity's: as many
    cells have one."""
    divergences = sum(row["kld_mean"] is not None for _, row in named)
    return bool(divergences) and divergences >= sum(row["perplexity"] is not None for _, row in named)


def best_quality(every: Named) -> Ranked:
    """Rank by KL divergence, else by perplexity. Quality belongs to the weights, so no ok run is needed."""
    valid = [(label, row) for label, row in every if row["status"] != "invalid" or provisional(row)]
    measure, of = ("KLD", divergence) if quality_is_kld(valid) else ("perplexity", perplexity)
    found = [of(label, row) for label, row in valid]
    entries = [each for each in found if each]
    return Ranked(f"lowest {measure}", entries, len(entries))


# The answer to each goal, first on the page: fastest, best quality that fits, longest context.


GOALS = ("Fastest", "Best quality that fits", "Longest context", "Several users")


@dataclass(frozen=True)
class Answer:
    """`leaders`: labels of the cells that lead; several are not distinguishable, and none wins. `text`: their
    figures, or why there is no answer. `note`: what else to know."""

    goal: str
    leaders: Sequence[str]
    text: str
    note: str = ""


def answers(group: Group) -> list[Answer]:
    """One answer per goal, in order; where several users alone were measured, that answer alone."""
    found = [_answers_fastest(group), _answers_quality(group), _answers_longest(group)]
    if group.provisional:
        found = [replace(each, text=f"provisional: {each.text}") if each.leaders else each for each in found]
    if not group.several:
        return found
    return [*(found if group.named or group.searched else ()), _answers_users(group)]


def _answers_users(group: Group) -> Answer:
    """The most tokens per second of all users together, where the most of them are served at once."""
    most = {label: max(row["users"], key=lambda at: at["users"]) for label, row in group.several}
    users = max(at["users"] for at in most.values())
    cells = dict(group.several)
    rates = [
        speed(label, cells[label], at["tokens_per_s"], None, "")
        for label, at in most.items()
        if at["users"] == users
    ]
    known = [each for each in rates if each]
    if not known:
        return Answer(GOALS[3], (), "; ".join(f"{label}: {in_words(row)}" for label, row in group.several))
    leading = leaders(known, most=True)
    words = in_words(cells[leading[0].label])
    if len(leading) > 1:
        ends = sorted(each.value for each in leading)
        words = (
            f"{text.plural(users, 'user')}: {ends[0]:,.0f} to {ends[-1]:,.0f} tok/s together, not"
            " distinguishable"
        )
    disturbed = "provisional: " * provisional(cells[leading[0].label])
    return Answer(GOALS[3], tuple(each.label for each in leading), disturbed + words)


def _answers_fastest(group: Group) -> Answer:
    ranked = fastest(group.named)
    if not ranked.entries:
        return Answer(GOALS[0], (), "no speed is known")
    without = [each.label for each in ranked.entries if each.is_unknown]
    note = f"without an interval: {text.list_named(without, TIES_SHOWN)}" if without else ""
    return _answer(GOALS[0], group, leaders(ranked.entries, ranked.most), ("speed", "size"), note)


def _answers_quality(group: Group) -> Answer:
    """Of variants that ran: the lowest KL divergence or perplexity; the most BPW where none is known."""
    ranked = best_quality(group.named)
    if ranked.entries:
        measure = ranked.measure
        missing = len(group.named) - len(ranked.entries)
        note = f"{missing} of {len(group.named)} cells have no {measure}" if missing else ""
        return _answer(GOALS[1], group, leaders(ranked.entries), (measure, "speed", "size"), note)
    known = [entry(label, bits, 0.0, "") for label, row in group.named if (bits := row["bpw"]) is not None]
    if not known:
        return Answer(GOALS[1], (), "no perplexity is known")
    note = "by bits per weight: no perplexity is known"
    return _answer(GOALS[1], group, leaders(known, most=True), ("bits", "speed", "size"), note)


def _answers_longest(group: Group) -> Answer:
    ended, targets = longest(group.named, group.searched)
    if not ended and not targets:
        headers = [stacks().get(row["stack"]) for _, row in group.every]
        servers = headers and all(each and "context" in each.cannot for each in headers)
        how = "a server does not show it" if servers else "harness run MODEL|CONFIG --max-ctx"
        return Answer(GOALS[2], (), f"not measured: {how}")
    leading = leaders(ended or targets, most=True)
    note = ""
    if ended and targets:
        count = f"{len(targets)} cells" if len(targets) > 1 else targets[0].label
        least = min(targets, key=lambda each: each.value)
        note = f"{count} stopped at a target of {least.text} and may hold more"
    shown = _answer(GOALS[2], group, leading, ("speed",), note)
    if len(leading) > 1:
        return Answer(GOALS[2], shown.leaders, f"{leading[0].text} each", note)
    return Answer(GOALS[2], shown.leaders, ", ".join(filter(None, (leading[0].text, shown.text))), note)


def _answer(
    goal: str, group: Group, leading: Sequence[Entry], shown: Sequence[str], note: str = ""
) -> Answer:
    """One leader with all figures shown; of several, the range of the first figure."""
    cells = dict(group.every)
    rows = [cells[each.label] for each in leading if each.label in cells]
    labels = tuple(each.label for each in leading)
    if len(leading) == 1:
        texts = [_text(group, row, what) for row in rows for what in shown]
        return Answer(goal, labels, ", ".join(filter(None, texts)), note)
    values = [value for row in rows if (value := _value(group, row, shown[0])) is not None]
    text = _worded(group, shown[0], min(values), max(values))
    return Answer(goal, labels, f"{text}, not distinguishable", note)


def _value(group: Group, row: Cell, what: str) -> float | None:
    if what == "speed":
        return rate(row, speed_is_B(group.named))[0]
    return {"perplexity": row["perplexity"], "KLD": row["kld_mean"], "bits": row["bpw"]}[what]


def _worded(group: Group, what: str, low: float, high: float) -> str:
    """`89.0 to 90.0 tok/s`, `perplexity 10.88`"""
    form = {"speed": "{:,.1f}", "KLD": "{:.5f}"}.get(what, "{:.2f}")
    ends = ("under 0.00001" if what == "KLD" and end < 1e-5 else form.format(end) for end in (low, high))
    text = " to ".join(dict.fromkeys(ends))
    if what == "speed":
        return f"{text} tok/s{' at zero context' * speed_is_B(group.named)}"
    return f"{text} bits per weight" if what == "bits" else f"{what} {text}"


def _text(group: Group, row: Cell, what: str) -> str:
    """A figure of a row in words; empty without it."""
    if what == "size":
        size, measure = goals_size(row, size_measure(group.named))
        return "" if size is None else f"{text.sized(size)} {measure.name}"
    value = _value(group, row, what)
    return "" if value is None else _worded(group, what, value, value)


# Summary of a study: counts, the fastest, smallest and longest cells, failures with reasons.


NAMES_SHOWN = 12
TIES_SHOWN = 4
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
    client = OF_CLIENT if any(served_elsewhere(each.record) for each in study.ran) else ""
    return [LINE, DRAWN if logged else f"{POOLED.format(client=client)} {DRAWN}", MBU]


def third_party(rows: Sequence[ShownCell]) -> list[str]:
    """Sources of the published figures, and their notes; `rows` as in Study.rows."""
    return sources(rows) + source_notes(rows)


def sources(rows: Sequence[ShownCell]) -> list[str]:
    """Source and year of the published figures (`kind: reported`)."""
    found = []
    others = [other for row in rows if (other := row["baseline"])]
    for words, of in (("cells hold", rows), ("cells are compared with", others)):
        by_source = Counter(_source(row) for row in of if row["kind"] == "reported")
        found += [
            f"{count} of {len(rows)} {words} third-party figures, not measured here: {source}."
            for source, count in by_source.items()
        ]
    return found


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


def per_model(study: Study) -> list[tuple[str, str]]:
    """Model and its best cells; separate entries for other machines and for published figures."""
    return [(group.title, sentence(group)) for group in shown_groups(study)]


def sentence(group: Group) -> str:
    """The best cells of a group by each goal."""
    every, named, tried = group.every, group.named, group.searched
    best = (_fastest(named), _smallest(named, every), _longest(named, tried), _quality(every))
    clauses = [clause for clause in best if clause]
    if not tried and not any(ok(row) for _, row in every):
        clauses.insert(0, "no cell is ok" + ", figures are provisional" * group.provisional)
    return f"{'; '.join(clauses) or 'nothing to compare'}."


def costs(study: Study) -> list[str]:
    """Cost per token by model and stack: fixed cost or reading bytes."""
    found = []
    for model, rows in study.decodes.items():
        groups: dict[tuple[str, str, str], list[ShownCell]] = {}
        for row in rows:
            if ok(row) and row["fixed_ms"] is not None:
                place = row["stack"], row["machine"], str(row["device"])
                groups.setdefault(place, []).append(row)
        stacks = Counter(stack for stack, *_ in groups)
        for (stack, machine, device), group in groups.items():
            where = f" on {machine} ({device})" if stacks[stack] > 1 else ""
            by = Counter(row["dominated_by"] for row in group)
            words = {"fixed": "the fixed cost dominates", "bytes": "reading bytes dominates"}
            which = [f"{text} in {by[key]} of {len(group)} cells" for key, text in words.items() if by[key]]
            dominates = f"; {' and '.join(which)}" if which else ""
            found.append(
                f"{model}, {stack}{where}: fixed cost {number(group[0]['fixed_ms'])} ms per token,"
                f" independent of the bytes read{dominates}."
            )
    return found


def failures(study: Study) -> list[tuple[str, list[str]]]:
    """Status and reason -> the cells that failed with it."""
    found: dict[str, list[str]] = {}
    rows: list[Result] = [*study.cells, *study.searches]
    for row in rows:
        if not ok(row):
            reasons = "; ".join(row["reasons"])
            outcome = f"{row['status']}: {reasons}" if reasons else row["status"]
            found.setdefault(outcome, []).append(row["name"])
    return list(found.items())


def flagged(study: Study) -> list[tuple[str, list[tuple[str, str]]]]:
    """Code of a flag -> the cells that have it, each with the detail."""
    found: dict[str, list[tuple[str, str]]] = {}
    rows: list[Cell | Search] = [*study.cells, *study.searches]
    for row in rows:
        for flag in row["flags"]:
            found.setdefault(flag["code"], []).append((row["name"], flag["detail"]))
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
        without = sum(each.is_unknown for each in entries)
        return f"{best}{of}: not distinguishable ({ends}{f'; {without} without an interval' * bool(without)})"
    leading = [f"{each.label} ({each.shown})" for each in (first, *tied)]
    return f"{best}{of}, not distinguishable: {text.list_named(leading, TIES_SHOWN)}"


def _fastest(named: Named) -> str | None:
    return _ranked(fastest(named))


def _smallest(named: Named, every: Named) -> str | None:
    return _ranked(smallest(named, every))


def _longest(named: Named, searched: Sequence[tuple[str, Search]]) -> str | None:
    entries, targets = longest(named, searched)
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
    ranked = best_quality(every)
    if len(ranked.entries) == 1:
        return f"{ranked.entries[0].label}: {ranked.measure} {ranked.entries[0].text}"
    return _ranked(ranked)

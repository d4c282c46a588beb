"""The answers of a report: which cell is the fastest, the smallest, the best in quality, the longest in
context. The terminal, the page and Markdown show the same ones. Pure.

Cells are ranked within a group: one model on one machine, measured here or published. Two cells are
distinguishable if their 95% confidence intervals do not overlap. A figure of one run without an interval
gets the relative noise stated here; several runs that give no interval differ by an unknown amount, so that
no other cell is distinguishable from theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.analysis.columns import Cell, Search, ShownCell
from harness.analysis.quality_figures import EQUAL_KLD
from harness.base import text
from harness.dataset.study import Study, bounds, finite, labels, ok, provisional, timed
from harness.dataset.table import synthetic, trained_mark
from harness.report.tables import PAST_TRAINING, held, past_training
from harness.report.timed_rows import PROMPT, WithPrompt, in_words, prompt_rate
from harness.stacks.header import stacks

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
LEAST_KLD = 1e-6  # nats; figures draw what is less here: 16 bits differ by rounding alone
NAMED = 4  # cells that lead together, in a sentence
GOALS = ("Fastest", "Smallest", "Best quality that fits", "Longest context", "Several users")
FASTEST, SMALLEST, QUALITY, LONGEST, USERS = GOALS

Named = Sequence[tuple[str, ShownCell]]
Value = tuple[float, float, float]
"""A figure and the ends of its 95% interval."""


# Cells that may be ranked together.


@dataclass(frozen=True)
class Group:
    """One model on one machine, measured here or published. With labels: `every` cell, `named`, the decodes
    that are ok, and `searched`, the searches that are ok. `provisional`: none is, and `named` are those that
    only the machine disturbed."""

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


def group(model: str, title: str, cells: Sequence[ShownCell], searches: Sequence[Search]) -> Group:
    """A group of these cells and searches; where no cell is ok, of the decodes that only the machine
    disturbed. Decodes of random weights are not ranked."""
    every = list(zip(labels(cells, model), cells, strict=True))
    decodes = [(label, row) for label, row in every if not timed(row) and not synthetic(row)]
    searched = [(label, row) for label, row in zip(labels(searches, model), searches, strict=True) if ok(row)]
    disturbed = [(label, row) for label, row in decodes if provisional(row)]
    if disturbed and not any(map(ok, cells)):
        return Group(model, title, every, disturbed, searched, provisional=True)
    return Group(model, title, every, [(label, row) for label, row in decodes if ok(row)], searched)


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
    return [
        group(
            model,
            model + (f" on {machine}{', third-party' * reported}" if models[model] > 1 else ""),
            *places[model, machine, reported],
        )
        for model, machine, reported in sorted(places, key=lambda place: order.index(place[0]))
    ]


# What cells are ranked by.


@dataclass(frozen=True)
class Measure:
    """`name`: what a cell without the figure lacks. `of`: a cell's figure; None without one. `number`: writes
    it, `unit`: what stands around it. `most`: the highest is the best."""

    name: str
    of: Callable[[Cell], Value | None]
    number: Callable[[float], str]
    unit: str = "{}"
    most: bool = False

    def text(self, *values: float) -> str:
        """`90.0 tok/s`, or of several figures `89.0 to 90.0 tok/s`."""
        ends = dict.fromkeys((self.number(min(values)), self.number(max(values))))
        return self.unit.format(" to ".join(ends))


def with_noise(value: float, noise: float) -> Value:
    """A figure with this relative noise."""
    return value, value * (1 - noise), value * (1 + noise)


def rate(row: Cell, by_B: bool) -> tuple[float | None, float | None, float | None]:
    """Tokens per second with the ends of their 95% interval, None where unknown. `by_B`: at zero context."""
    if not by_B:
        return finite(row["tokens_per_s"]), *bounds(row["tokens_per_s_ci95"])
    fast, slow = (1e3 / end if end else None for end in bounds(row["B_ci95_ms"]))
    value = finite(row["B_ms"])
    return (1e3 / value if value and B_identifiable(row) else None), slow, fast


def B_identifiable(row: Cell) -> bool:
    """Whether B is more than an extrapolation: an identifiable or flat line, or a published figure."""
    line = row["W_identifiable"] is True or row["shape"] == "flat"
    return line or (row["kind"] == "reported" and not row["shape"])


def speed_is_B(named: Named) -> bool:
    """Whether speeds compare by B: more cells have an identifiable one than tok/s over as many tokens."""
    by_tokens = Counter(row["tokens"] for _, row in named if finite(row["tokens_per_s"]) is not None)
    at_zero = sum(finite(row["B_ms"]) is not None and B_identifiable(row) for _, row in named)
    return at_zero > max(by_tokens.values(), default=0)


def _speed(named: Named) -> Measure:
    """Of any number of tokens; at zero context where speeds compare by B."""
    by_B = speed_is_B(named)
    unit = "{} tok/s at zero context" if by_B else "{} tok/s"
    return Measure("speed", lambda row: _noisy(row, *rate(row, by_B)), "{:,.1f}".format, unit, most=True)


def _comparable_speed(named: Named) -> Measure:
    """Of the number of tokens that most cells decoded: rates over others do not compare."""
    measure = _speed(named)
    if speed_is_B(named):
        return measure
    by_tokens = Counter(row["tokens"] for _, row in named if measure.of(row))
    tokens = next((tokens for tokens, _ in by_tokens.most_common(1)), None)
    over = f" over {tokens:,} tokens" if tokens is not None else ""
    return replace(
        measure, name=f"speed{over}", of=lambda row: measure.of(row) if row["tokens"] == tokens else None
    )


def _noisy(row: Cell, value: float | None, low: float | None, high: float | None) -> Value | None:
    """A speed with its interval. That of a single run ignores run-to-run noise, so it is at least
    SPEED_NOISE; several runs without one are too few for it."""
    if value is None:
        return None
    _, least, most = with_noise(value, SPEED_NOISE)
    if low is None and high is None:
        return (value, 0.0, math.inf) if row["repeats"] > 1 else (value, least, most)
    low, high = low or 0.0, math.inf if high is None else high
    return (value, low, high) if row["repeats"] > 1 else (value, min(low, least), max(high, most))


@dataclass(frozen=True)
class SizeMeasure:
    """A figure of memory or of a file, by its key in a row."""

    key: str
    name: str
    noise: float

    def of(self, row: Mapping[str, object]) -> float | None:
        value = row[self.key]
        return value if isinstance(value, (int, float)) else None


# Cells are ranked by the first measure that the most of them have.
SIZES = (
    SizeMeasure("peak_vram_bytes", "peak VRAM", MEMORY_NOISE),
    SizeMeasure("peak_rss_bytes", "peak RSS", MEMORY_NOISE),
    SizeMeasure("loaded_bytes", "after load", MEMORY_NOISE),
    SizeMeasure("file_bytes", "file", 0.0),
    SizeMeasure("model_bytes", "tensors", 0.0),
)


def size_measure(named: Named) -> SizeMeasure:
    """The measure of size that the most cells have."""
    return max(SIZES, key=lambda size: sum(bool(size.of(row)) for _, row in named))


def _size(size: SizeMeasure) -> Measure:
    def of(row: Cell) -> Value | None:
        value = size.of(row)
        return with_noise(value, size.noise) if value else None

    return Measure(f"size ({size.name})", of, text.sized, f"{{}} {size.name}")


def quality_is_kld(named: Named) -> bool:
    """Whether qualities compare by KL divergence, whose interval is far narrower than a perplexity's: as many
    cells have one."""
    divergences = sum(row["kld_mean"] is not None for _, row in named)
    return bool(divergences) and divergences >= sum(row["perplexity"] is not None for _, row in named)


def _perplexity(row: Cell) -> Value | None:
    value, error = row["perplexity"], row["perplexity_stderr"]
    if value is None:
        return None
    return with_noise(value, STANDARD_ERRORS * error / value if error else PERPLEXITY_NOISE)


def _divergence(row: Cell) -> Value | None:
    """A KL divergence with its interval; one below EQUAL_KLD is as good as none."""
    value, (low, high) = row["kld_mean"], bounds(row["kld_mean_ci95"])
    if value is None:
        return None
    if low is None or high is None:
        return value, 0.0, math.inf
    return (value, 0.0, max(high, EQUAL_KLD)) if value < EQUAL_KLD else (value, low, high)


PERPLEXITY = Measure("perplexity", _perplexity, "{:.2f}".format, "perplexity {}")
KLD = Measure("KLD", _divergence, lambda kld: "under 0.00001" if kld < 1e-5 else f"{kld:.5f}", "KLD {}")


def _quality(named: Named) -> Measure:
    return KLD if quality_is_kld(named) else PERPLEXITY


# The answers.


@dataclass(frozen=True)
class Entry:
    """A cell's figure, with the ends of its 95% interval. `text`: of a figure that has more to it."""

    label: str
    value: float
    low: float
    high: float
    text: str = ""


def leaders(entries: Sequence[Entry], most: bool = False) -> list[Entry]:
    """The lowest (or highest) entry and those whose intervals overlap with it, in order."""
    ordered = sorted(entries, key=lambda entry: -entry.value if most else entry.value)
    first = ordered[0]
    return [entry for entry in ordered if entry.low <= first.high and first.low <= entry.high]


@dataclass(frozen=True)
class Answer:
    """`leaders`: labels of the cells that lead; several are not distinguishable, and none wins. `figures`:
    theirs, the one that decides first, or why there is no answer. `note`: what else to know."""

    goal: str
    leaders: Sequence[str]
    figures: Sequence[str]
    note: str = ""

    @property
    def text(self) -> str:
        return ", ".join(self.figures)


def answers(group: Group) -> list[Answer]:
    """One answer per goal, in order; where several users alone were measured, that answer alone."""
    found = _ranked(group)
    if group.provisional:
        found = [
            replace(answer, figures=(f"provisional: {answer.figures[0]}", *answer.figures[1:]))
            if answer.leaders
            else answer
            for answer in found
        ]
    if not group.several:
        return found
    return [*(found if group.named or group.searched else ()), _of_users(group)]


def _ranked(group: Group) -> list[Answer]:
    """The answers to all goals but that of several users."""
    named = group.named
    speed, size, quality = _speed(named), _size(size_measure(named)), _quality(named)
    return [
        _answer(FASTEST, named, _comparable_speed(named), (size,)),
        _answer(SMALLEST, named, size, (quality,)),
        _answer(QUALITY, named, quality, (speed, size)),
        _longest(group, speed),
    ]


def _answer(goal: str, named: Named, measure: Measure, further: Sequence[Measure]) -> Answer:
    """One leader with its further figures; of several, the range of the figure."""
    entries = [Entry(label, *value) for label, row in named if (value := measure.of(row))]
    if not entries:
        return Answer(goal, (), (f"no {measure.name} is known",))
    leading = leaders(entries, measure.most)
    figures = [measure.text(*(entry.value for entry in leading))]
    if len(leading) > 1:
        figures.append("not distinguishable")
    else:
        row = dict(named)[leading[0].label]
        figures += [other.text(value[0]) for other in further if (value := other.of(row))]
    missing = len(named) - len(entries)
    without = [entry.label for entry in entries if math.isinf(entry.high) and not entry.low]
    has = "has" if missing == 1 else "have"
    notes = (
        f"{missing} of {len(named)} cells {has} no {measure.name}" if missing else "",
        f"without an interval: {text.list_named(without, NAMED)}" if without and len(entries) > 1 else "",
    )
    return Answer(goal, tuple(entry.label for entry in leading), figures, "; ".join(filter(None, notes)))


def _longest(group: Group, speed: Measure) -> Answer:
    """Of lengths that memory or the trained context ended, else of those that stopped at a target and may
    hold more. Skips cells that ran past their memory, as they dropped tokens."""
    ended: list[Entry] = []
    targets: list[Entry] = []
    for label, row in group.named:
        if (length := row["max_ctx"]) is not None and held(row):
            plus = "+" * row["max_ctx_is_target"]
            entry = Entry(label, length, length, length, f"{length:,.0f}{plus} tokens{_past(row)}")
            (targets if plus else ended).append(entry)
    for label, search in group.searched:
        if (length := search["verified_n_ctx"]) is not None:
            shown = f"{length:,.0f} tokens{_past(search)}{trained_mark(search)}"
            ended.append(Entry(label, length, length, length, shown))
    if not ended and not targets:
        headers = [stacks().get(row["stack"]) for _, row in group.every]
        servers = headers and all(header and "context" in header.cannot for header in headers)
        how = "a server does not show it" if servers else "harness run MODEL|CONFIG --max-ctx"
        return Answer(LONGEST, (), (f"not measured: {how}",))
    note = ""
    if ended and targets:
        count = f"{len(targets)} cells" if len(targets) > 1 else targets[0].label
        least = min(targets, key=lambda entry: entry.value)
        note = f"{count} stopped at a target of {least.text} and may hold more"
    leading = leaders(ended or targets, most=True)
    if len(leading) > 1:
        figures = [f"{leading[0].text} each"]
    else:
        rate_of = [
            value for label, row in group.every if label == leading[0].label if (value := speed.of(row))
        ]
        figures = [leading[0].text, *(speed.text(value[0]) for value in rate_of)]
    return Answer(LONGEST, tuple(entry.label for entry in leading), figures, note)


def _past(row: Cell | Search) -> str:
    return PAST_TRAINING * bool(past_training(row["flags"]))


def _of_users(group: Group) -> Answer:
    """The most tokens per second of all users together, where the most of them are served at once."""
    cells = dict(group.several)
    most = {label: max(row["users"], key=lambda at: at["users"]) for label, row in cells.items()}
    users = max(at["users"] for at in most.values())
    entries = [
        Entry(label, *value)
        for label, at in most.items()
        if at["users"] == users
        if (value := _noisy(cells[label], finite(at["tokens_per_s"]), None, None))
    ]
    if not entries:
        return Answer(USERS, (), ["; ".join(f"{label}: {in_words(row)}" for label, row in cells.items())])
    leading = leaders(entries, most=True)
    first = cells[leading[0].label]
    words = in_words(first)
    if len(leading) > 1:
        low, *_, high = sorted(entry.value for entry in leading)
        together = f"{low:,.0f} to {high:,.0f} tok/s together"
        words = f"{text.plural(users, 'user')}: {together}, not distinguishable"
    disturbed = "provisional: " * provisional(first)
    return Answer(USERS, tuple(entry.label for entry in leading), (disturbed + words).split(", "))


def sentence(group: Group, prompts: Mapping[str, WithPrompt]) -> tuple[str, str] | None:
    """The answers in one sentence, behind what it is about; None where nothing was ranked and no cell failed.
    Without that of several users. `prompts`:
    the decodes with the speed of a prompt, by name."""
    known = [answer for answer in _ranked(group) if answer.leaders]
    if not known:
        failed = group.every and not any(ok(row) for _, row in group.every)
        return (group.title, "no cell is ok.") if failed and not group.searched else None
    doubt = "provisional: " * group.provisional
    if len({label for label, _ in (*group.named, *group.searched)}) == 1:
        label = known[0].leaders[0]
        return f"{group.title} {label}", f"{doubt}{_of_one(known, dict(group.named).get(label), prompts)}."
    clauses: dict[Sequence[str], list[Answer]] = {}
    for answer in known:
        clauses.setdefault(answer.leaders if len(answer.leaders) == 1 else answer.goal, []).append(answer)
    return group.title, f"{doubt}{'; '.join(map(_clause, clauses.values()))}."


def _of_one(known: Sequence[Answer], row: ShownCell | None, prompts: Mapping[str, WithPrompt]) -> str:
    """The figures of a single cell, which nothing is compared with."""
    figures = []
    for answer in known:
        if answer.goal == LONGEST:
            figures.append(f"a context of {answer.figures[0]}")
        else:
            figures += answer.figures
    if row and (reads := prompt_rate(prompts[row["name"]])):
        disturbed = "about " * prompts[row["name"]]["prompt_provisional"]
        figures.insert(1, f"reads a prompt of {PROMPT} tokens at {disturbed}{reads:,.0f} tok/s")
    return "; ".join(dict.fromkeys(figures))


def _clause(same: Sequence[Answer]) -> str:
    """`fastest and smallest: a q4_0 (90.0 tok/s, 4.0 GB peak RSS)`, of goals with the same leader."""
    *goals, last = (answer.goal.lower() for answer in same)
    goal = f"{', '.join(goals)} and {last}" if goals else last
    figures = ", ".join(dict.fromkeys(figure for answer in same for figure in answer.figures))
    notes = "; ".join(filter(None, (figures, *(answer.note for answer in same))))
    return f"{goal}: {text.list_named(same[0].leaders, NAMED)} ({notes})"

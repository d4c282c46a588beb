"""The answers of a report: which cell is the fastest, the smallest, the best in quality, the longest in
context. The terminal, the page and Markdown show the same ones. Pure.

Cells are ranked within a group: one model on one machine, measured here or published. Two cells are
distinguishable if their 95% confidence intervals do not overlap. A figure of one run without an interval
gets the relative noise stated here; several runs that give no interval differ by an unknown amount, so that
no other cell is distinguishable from theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.analysis.columns import Cell, Search, ShownCell
from harness.analysis.quality_figures import EQUAL_KLD
from harness.base import text
from harness.dataset.search_rows import trained_mark
from harness.dataset.study import finite, ok, provisional
from harness.report.figure_texts import PAST_TRAINING, held, past_training
from harness.report.measures import (
    MEMORY_NOISE,
    PERPLEXITY_NOISE,
    SPEED_NOISE,
    Measure,
    _noisy,
    measure_of_comparable_speed,
    measure_of_quality,
    measure_of_size,
    measure_of_speed,
    size_measure,
)
from harness.report.ranked_groups import Group, Named
from harness.report.timed_rows import PROMPT, WithPrompt, in_words, prompt_rate
from harness.stacks.header import stacks

CRITERION = (
    "Cells whose 95% confidence interval overlaps that of the best are listed with it. Where no interval is"
    " known, the report"
    f" assumes ±{SPEED_NOISE:.0%} for a speed of one run, ±{MEMORY_NOISE:.0%} for memory in use, and"
    f" ±{PERPLEXITY_NOISE:.1%} for a perplexity (llama.cpp prints a standard error of 0.6% on"
    f" wikitext-2). Several repeats that give no interval lead nothing, and nothing leads over them. KLDs"
    f" below {EQUAL_KLD} count as equal: there KLD does not order types by their scores at tasks"
    " (arXiv 2606.19558)."
)
NAMED = 4  # cells that lead together, in a sentence
GOALS = ("Fastest", "Smallest", "Best quality that fits", "Longest context", "Several users")
FASTEST, SMALLEST, QUALITY, LONGEST, USERS = GOALS


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
    ranked = _ranked(group)
    if group.provisional:
        ranked = [
            replace(answer, figures=(f"provisional: {answer.figures[0]}", *answer.figures[1:]))
            if answer.leaders
            else answer
            for answer in ranked
        ]
    if not group.several:
        return ranked
    return [*(ranked if group.named or group.searched else ()), _of_users(group)]


def _ranked(group: Group) -> list[Answer]:
    """The answers to all goals but that of several users."""
    named = group.named
    speed, size, quality = (
        measure_of_speed(named),
        measure_of_size(size_measure(named)),
        measure_of_quality(named),
    )
    return [
        _answer(FASTEST, named, measure_of_comparable_speed(named), (size,)),
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
    most = {label: max(row["users"], key=lambda load: load["users"]) for label, row in cells.items()}
    users = max(load["users"] for load in most.values())
    entries = [
        Entry(label, *value)
        for label, load in most.items()
        if load["users"] == users
        if (value := _noisy(cells[label], finite(load["tokens_per_s"]), None, None))
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
    answered = [answer for answer in _ranked(group) if answer.leaders]
    if not answered:
        failed = group.every and not any(ok(row) for _, row in group.every)
        return (group.title, "no cell is ok.") if failed and not group.searched else None
    doubt = "provisional: " * group.provisional
    if len({label for label, _ in (*group.named, *group.searched)}) == 1:
        label = answered[0].leaders[0]
        return f"{group.title} {label}", f"{doubt}{_of_one(answered, dict(group.named).get(label), prompts)}."
    clauses: dict[Sequence[str], list[Answer]] = {}
    for answer in answered:
        clauses.setdefault(answer.leaders if len(answer.leaders) == 1 else answer.goal, []).append(answer)
    return group.title, f"{doubt}{'; '.join(map(_clause, clauses.values()))}."


def _of_one(answered: Sequence[Answer], row: ShownCell | None, prompts: Mapping[str, WithPrompt]) -> str:
    """The figures of a single cell, which nothing is compared with."""
    figures = []
    for answer in answered:
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

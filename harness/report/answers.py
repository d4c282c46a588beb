"""The answer to each goal, first on the page: fastest, best quality that fits, longest context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.dataset.study import Row, figure
from harness.report import goals
from harness.report.goals import Group
from harness.report.ranking import Entry, entry, leaders

GOALS = ("Fastest", "Best quality that fits", "Longest context")


@dataclass(frozen=True)
class Answer:
    """`leaders`: labels of the cells that lead; several are not distinguishable, and none wins. `text`: their
    figures, or why there is no answer. `note`: what else to know."""

    goal: str
    leaders: Sequence[str]
    text: str
    note: str = ""


def answers(group: Group) -> list[Answer]:
    """One answer per goal, in order."""
    return [_fastest(group), _quality(group), _longest(group)]


def _fastest(group: Group) -> Answer:
    ranked = goals.fastest(group.named)
    if not ranked.entries:
        return Answer(GOALS[0], (), "no speed is known")
    return _answer(GOALS[0], group, leaders(ranked.entries, ranked.most), ("speed", "size"))


def _quality(group: Group) -> Answer:
    """Of what ran: the lowest KL divergence or perplexity; the most bits per weight where none is known."""
    ranked = goals.best_quality(group.named)
    if ranked.entries:
        measure = ranked.measure
        missing = len(group.named) - len(ranked.entries)
        note = f"{missing} of {len(group.named)} cells have no {measure}" if missing else ""
        return _answer(GOALS[1], group, leaders(ranked.entries), (measure, "speed", "size"), note)
    known = [
        entry(label, bits, 0.0, "") for label, row in group.named if (bits := figure(row, "bpw")) is not None
    ]
    if not known:
        return Answer(GOALS[1], (), "no perplexity is known")
    note = "by bits per weight: no perplexity is known"
    return _answer(GOALS[1], group, leaders(known, most=True), ("bits", "speed", "size"), note)


def _longest(group: Group) -> Answer:
    ended, targets = goals.longest(group.named, group.searched)
    if not ended and not targets:
        return Answer(GOALS[2], (), "no search and no growing run")
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
    rows = [dict(group.every).get(each.label, {}) for each in leading]
    labels = tuple(each.label for each in leading)
    if len(rows) == 1:
        return Answer(goal, labels, ", ".join(filter(None, (_text(group, rows[0], w) for w in shown))), note)
    values = [value for row in rows if (value := _value(group, row, shown[0])) is not None]
    text = _worded(group, shown[0], min(values), max(values))
    return Answer(goal, labels, f"not distinguishable: {text}", note)


def _value(group: Group, row: Row, what: str) -> float | None:
    if what == "speed":
        return goals.rate(row, goals.speed_is_B(group.named))[0]
    return figure(row, {"perplexity": "perplexity", "KLD": "kld_mean", "bits": "bpw"}[what])


def _worded(group: Group, what: str, low: float, high: float) -> str:
    """`89.0 to 90.0 tok/s`, `perplexity 10.88`"""
    form = {"speed": "{:,.1f}", "KLD": "{:.5f}"}.get(what, "{:.2f}")
    ends = ("under 0.00001" if what == "KLD" and end < 1e-5 else form.format(end) for end in (low, high))
    text = " to ".join(dict.fromkeys(ends))
    if what == "speed":
        return f"{text} tok/s{' at zero context' * goals.speed_is_B(group.named)}"
    return f"{text} bits per weight" if what == "bits" else f"{what} {text}"


def _text(group: Group, row: Row, what: str) -> str:
    """A figure of a row in words; empty without it."""
    if what == "size":
        size, measure = goals.size(row, goals.size_measure(group.named)[0])
        return "" if size is None else f"{goals.sized(size)} {goals.SIZE_WORDS[measure]}"
    value = _value(group, row, what)
    return "" if value is None else _worded(group, what, value, value)

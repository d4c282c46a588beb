"""Which cells lead in a figure, and which of them are not distinguishable. Pure.

Two cells are distinguishable if their 95% confidence intervals do not overlap. A figure without an interval
gets the relative noise stated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.dataset.study import Row, bounds, figure

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
    f" assumes ±{SPEED_NOISE:.0%} for a speed, ±{MEMORY_NOISE:.0%} for memory in use, and"
    f" ±{PERPLEXITY_NOISE:.1%} for a perplexity (llama.cpp prints a standard error of 0.6% on"
    " wikitext-2)."
)


@dataclass(frozen=True)
class Entry:
    """A cell's figure, with the ends of its 95% interval; `text`: as the table shows it."""

    label: str
    value: float
    low: float
    high: float
    text: str


def entry(label: str, value: float, noise: float, text: str) -> Entry:
    """A figure with this relative noise."""
    return Entry(label, value, value * (1 - noise), value * (1 + noise), text)


def speed(label: str, row: Row, key: str, interval_key: str, text: str) -> Entry | None:
    """A speed with its interval. The interval of a single run ignores run-to-run noise, so it is widened to
    at least SPEED_NOISE."""
    value = figure(row, key)
    if value is None:
        return None
    stated = entry(label, value, SPEED_NOISE, text)
    if not row.get(interval_key):
        return stated
    low, high = bounds(row, interval_key)
    low, high = 0.0 if low is None else low, float("inf") if high is None else high
    if (row.get("repeats") or 1) == 1:
        low, high = min(low, stated.low), max(high, stated.high)
    return Entry(label, value, low, high, text)


def perplexity(label: str, row: Row, text: str) -> Entry | None:
    value, error = figure(row, "perplexity"), figure(row, "perplexity_stderr")
    if value is None:
        return None
    return entry(label, value, STANDARD_ERRORS * error / value if error else PERPLEXITY_NOISE, text)


def divergence(label: str, row: Row, text: str) -> Entry | None:
    """A KL divergence with its interval; a point where none is known."""
    value = figure(row, "kld_mean")
    if value is None:
        return None
    low, high = bounds(row, "kld_mean_ci95")
    return Entry(label, value, value if low is None else low, value if high is None else high, text)


def leaders(entries: Sequence[Entry], most: bool = False) -> list[Entry]:
    """The lowest (or highest) entry and those whose intervals overlap with it, in order."""
    ordered = sorted(entries, key=lambda each: -each.value if most else each.value)
    first = ordered[0]
    return [each for each in ordered if each.low <= first.high and first.low <= each.high]

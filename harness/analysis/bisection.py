"""Find the step between two ends at which a figure changed, by paired measurements. Pure.

Places are numbered from 0, the good end. Each is measured in turns with place 0, until an interval decides on
which side of half of the whole change it lies. What no interval decides is passed over, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.analysis.paired import FEWEST_ROUNDS, Change, changes, direction
from harness.analysis.racing import looks

CONFIDENCE = 0.99  # of an interval that decides: it is looked at after 8, 16, 32 and 64 rounds
PRECISE = 0.75  # least over most of an interval: narrower than this, half of it is known well enough
CHANGED, SAME = "CHANGED", "SAME"  # of two places
GOOD, BAD, BETWEEN = "like GOOD", "like BAD", "BETWEEN"  # of a place between them
UNCLEAR, FAILED = "UNCLEAR", "FAILED"


@dataclass(frozen=True)
class Pair:
    """Two places. `differences`: the cost of `new` minus that of `base`, in each round that has both;
    `failure`: why there is none."""

    base: int
    new: int
    differences: Sequence[float]
    failure: str | None = None
    verdict: str = FAILED

    def change(self, confidence: float = CONFIDENCE) -> Change:
        """Of the costs; needs a difference."""
        return changes({"": self.differences}, confidence)[""]


Enough = Callable[[Sequence[float]], bool]
"""Whether these differences decide."""
Measure = Callable[[int, int, Enough], Pair]
"""Measures two places until there are enough differences, or a limit is met."""


@dataclass(frozen=True)
class Found:
    """`pairs`: all that was measured, the ends first. `answer`: the closest places known to lie on either
    side of the change, and None if the ends do not differ. `rest`: the cost of the whole change that is not
    the answer's; None: none, within the noise."""

    pairs: Sequence[Pair]
    answer: Pair | None = None
    rest: float | None = None


def search(last: int, measure: Measure, threshold: float, rounds: int) -> Found:
    """Find where the figure changed between place 0 and `last`. `threshold`: the smallest relative change to
    be found; `rounds`: the most of a pair."""
    bound, judged_at = math.log1p(threshold), looks(FEWEST_ROUNDS, rounds)
    pairs: list[Pair] = []

    def pair(base: int, new: int, judge: Callable[[Change], str], enough: Callable[[Change], bool]) -> Pair:
        def decides(differences: Sequence[float]) -> bool:
            # Judged after each round, an interval would exclude anything some day.
            if len(differences) not in judged_at:
                return False
            change = Pair(base, new, differences).change()
            return judge(change) != UNCLEAR and enough(change)

        measured_pair = measure(base, new, decides)
        verdict = judge(measured_pair.change()) if measured_pair.differences else FAILED
        pairs.append(Pair(base, new, measured_pair.differences, measured_pair.failure, verdict))
        return pairs[-1]

    def of_ends(change: Change) -> str:
        if change.ends is None:
            return UNCLEAR
        low, high = change.ends
        if direction(change, bound) and low * high > 0:
            return CHANGED
        return SAME if -bound < low and high < bound else UNCLEAR

    def precise(change: Change) -> bool:
        least, most = _size(change)
        return of_ends(change) == SAME or least >= PRECISE * most

    ends = pair(0, last, of_ends, precise)
    if ends.verdict != CHANGED:
        return Found(pairs)
    whole, low, high, passed = ends.change(), 0, last, set[int]()
    while places := [at for at in range(low + 1, high) if at not in passed]:
        middle = min(places, key=lambda at: abs(2 * at - low - high))
        measured_pair = pair(0, middle, lambda change: side_of(change, whole), lambda _: True)
        if measured_pair.verdict == GOOD:
            low = middle
        elif measured_pair.verdict in (BAD, BETWEEN):
            high = middle
        else:
            passed.add(middle)
    if (low, high) == (0, last):
        return Found(pairs, ends)
    step = pair(low, high, of_ends, precise)
    if not step.differences:
        return Found(pairs, step)
    own = step.change()
    noise = math.hypot(*((most - least) / 2 for least, most in filter(None, (whole.ends, own.ends))))
    rest = whole.cost - own.cost
    return Found(pairs, step, rest if abs(rest) > max(noise, bound) else None)


def side_of(change: Change, whole: Change) -> str:
    """On which side of half of the whole change a place lies, by its change from the good end."""
    if change.ends is None:
        return UNCLEAR
    sign = math.copysign(1, whole.cost)
    least, most = _size(whole)
    (low, high), middle = sorted(sign * end for end in change.ends), sign * change.middle
    if max(high, middle) < least / 2:
        return GOOD
    if min(low, middle) > most / 2:
        return BAD
    return BETWEEN if most / 4 < low and high < 3 / 4 * least else UNCLEAR


def _size(change: Change) -> tuple[float, float]:
    """The least and the most that a change of known sign may be."""
    least, most = sorted(map(abs, change.ends or (0.0, math.inf)))
    return least, most

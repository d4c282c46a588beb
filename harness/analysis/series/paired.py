"""Two sides measured in turns in one campaign: the change from their differences round by round. Pure.

The machine's day, and what drifts more slowly than a round, is in both costs of a round and cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from scipy.special import stdtr, stdtrit

from harness.analysis.series.between import Repeats, spread
from harness.analysis.series.difference import CONFIDENCE, Change
from harness.analysis.series.spread import moderated

FALSE_DISCOVERIES = 0.005  # expected share of false ones among reported changes
FEWEST_ROUNDS = 8  # a variance from fewer may come out small by chance, and would end the measurement early


def changes(rounds: Mapping[str, Sequence[float]], confidence: float = CONFIDENCE) -> dict[str, Change]:
    """By pair: the change from the differences of the costs (B minus A) in each round; at least one each. The
    spread of the differences is moderated over the pairs. `confidence`: of the intervals."""
    known = {name: spread([Repeats(values)]) for name, values in rounds.items()}
    spreads = moderated(known)
    found = {}
    for name, values in rounds.items():
        own, usual = known[name], spreads.get(name)
        cost, middle = fmean(values), median(values)
        if own is None or usual is None:
            found[name] = Change(cost, middle)
            continue
        variance = own.variance if own.far_beyond(usual) else usual.variance
        error = math.sqrt(variance / len(values))
        half = float(stdtrit(usual.freedom, (1 + confidence) / 2)) * error
        p = 2 * float(stdtr(usual.freedom, -abs(cost) / error))
        found[name] = Change(cost, middle, (cost - half, cost + half), p)
    return found


def direction(change: Change, threshold: float) -> int:
    """1: slower, -1: faster, by half of `threshold` (a cost) or more in the mean and in the median; 0: no."""
    for sign in (1, -1):
        if min(sign * change.cost, sign * change.middle) >= threshold / 2:
            return sign
    return 0


def wide(change: Change, threshold: float) -> bool:
    """Whether the interval is not yet narrower than half of `threshold`."""
    return change.ends is None or change.ends[1] - change.ends[0] >= threshold / 2

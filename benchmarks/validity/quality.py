"""How often do intervals of a score cover the truth, and how often is a change of quality seen that is none?

Windows are independent, and normal in the change of ln PPL (0.02 nats from window to window); their KLD is
skewed, as that of a text is (gamma of shape 4).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.validity.row import Row
from harness.analysis import quality_figures
from harness.analysis.differences import FALSE_DISCOVERIES
from harness.analysis.paired import discoveries

WINDOWS = (3, 4, 8, 16, 64)
SPREAD, NLL, KLD, SHAPE = 0.02, 3.0, 0.05, 4.0  # nats
VARIANTS, THRESHOLD = 20, 0.02


def rates(campaigns: int) -> Iterator[Row]:
    """Of ten times as many scores as `campaigns` in each case."""
    for count in WINDOWS:
        found = covered(count, 10 * campaigns)
        words = ", ".join(f"{name} {share:.1%}" for name, share in found.items())
        yield Row(f"covered: {count} windows", words, "88 to 92%, and 93 to 97%")
    for count in (each for each in WINDOWS if each >= quality_figures.FEWEST_WINDOWS):
        yield Row(
            f"{VARIANTS} variants alike, {count} windows, any is WORSE or BETTER",
            f"{false_verdicts(count, campaigns):.1%}",
            "<= 2%",
        )


def covered(count: int, scores: int, seed: int = 0) -> dict[str, float]:
    """The shares of intervals that cover the truth, by figure."""
    chance = np.random.default_rng(seed)
    hits = np.zeros(3)
    for _ in range(scores):
        nll = chance.normal(NLL, 0.5, count)
        change = quality_figures.change(
            nll.tolist(), (nll + chance.normal(0.01, SPREAD, count)).tolist(), 0.9
        )
        kld = chance.gamma(SHAPE, KLD / SHAPE, count)
        of = quality_figures.of_means({"nll": nll.tolist(), "kld": kld.tolist()})
        known = (
            (change.ends or (0, 0), 0.01),
            ((of["ppl"]["low"], of["ppl"]["high"]), np.exp(NLL)),
            ((of["kld_mean"]["low"], of["kld_mean"]["high"]), KLD),
        )
        hits += [low <= truth <= high for (low, high), truth in known]
    return dict(zip(("ln PPL, 90%", "PPL, 95%", "KLD, 95%"), (hits / scores).tolist(), strict=True))


def false_verdicts(count: int, campaigns: int, seed: int = 0) -> float:
    """The share of comparisons of variants that did not change in which one is seen to."""
    chance, bound = np.random.default_rng(seed), np.log1p(THRESHOLD)
    wrong = 0
    for _ in range(campaigns):
        found = {
            number: quality_figures.change([0.0] * count, chance.normal(0, SPREAD, count).tolist(), 0.9)
            for number in range(VARIANTS)
        }
        kept = discoveries(
            {number: each.p for number, each in found.items() if each.p is not None}, FALSE_DISCOVERIES
        )
        ends = [found[number].ends for number in kept]
        wrong += any(each and (each[0] > bound or each[1] < -bound) for each in ends)
    return wrong / campaigns

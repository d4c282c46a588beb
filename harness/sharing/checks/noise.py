"""Whether a series has the noise of a clock, or was smoothed, or copied from another with changes. Pure.

The differences of neighbouring tokens have an autocorrelation of -0.5 in noise without memory, and of at most
0 in noise that fades: -0.95 to -0.19 in the published series, -0.09 to -0.03 in llama.cpp on two busy CPUs. A
mean over k tokens makes it larger, and the differences up to k times smaller than those of the warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from scipy import stats

from harness.results.token_times import Floats
from harness.sharing.checks.clocks import decode_ns, windows_ns
from harness.sharing.checks.evidence import Evidence

LEAST_TOKENS = 100
EVEN_NS = 2.0  # no clock and no kernel is that even
SMOOTH = 0.2  # of the noise of the warm-up: below, however it was smoothed
SMOOTHER, NO_MEMORY = 0.7, -0.15  # together: the trace of a moving mean
MEMORY = 0.2  # alone: no noise has that
ALIKE = 0.95  # rank correlation of the differences of two series


def check(evidence: Evidence) -> Iterator[str]:
    """The traces of smoothing in a series, one sentence each."""
    series = decode_ns(evidence)
    if len(series) < LEAST_TOKENS or not evidence.usable:
        return
    noise = spread(series)
    if noise <= EVEN_NS:
        yield f"its tokens differ by {noise:.1f} ns: no machine is that even"
        return
    windows = [spread(np.array(each, dtype=float)) for each in windows_ns(evidence.record) if len(each) > 4]
    if not windows or min(windows) <= EVEN_NS:
        return
    ratio, memory = noise / min(windows), autocorrelation(series)
    if ratio < SMOOTH:
        yield f"its series has {ratio:.0%} of the noise of its own warm-up: it was smoothed"
    elif memory > MEMORY or (ratio < SMOOTHER and memory > NO_MEMORY):
        traces = f"{ratio:.0%} of the noise of its own warm-up, and neighbours are alike ({memory:+.2f})"
        yield f"its series has {traces}: it was smoothed"


def spread(series: Floats) -> float:
    """The median size of the differences of neighbours, which spikes and slopes do not move."""
    differences = np.diff(series)
    return float(np.median(np.abs(differences - np.median(differences))))


def autocorrelation(series: Floats) -> float:
    """Rank correlation of neighbouring differences: -0.5 for noise without memory."""
    differences = np.diff(series)
    return float(stats.spearmanr(differences[:-1], differences[1:]).statistic)


def copies(found: Sequence[Evidence]) -> Iterator[tuple[int, str]]:
    """The records whose series is another's, with or without small changes: index, and a sentence each."""
    by_length: dict[int, list[int]] = {}
    for index, each in enumerate(found):
        series = decode_ns(each)
        if len(series) >= LEAST_TOKENS and not each.is_reported and spread(series) > EVEN_NS:
            by_length.setdefault(len(series), []).append(index)
    for alike in by_length.values():
        ranks = [stats.rankdata(np.diff(decode_ns(found[index]))) for index in alike]
        noise = np.array([(each - each.mean()) / (each.std() * len(each) ** 0.5) for each in ranks])
        for a, index in enumerate(alike):
            for b in np.flatnonzero(noise[a + 1 :] @ noise[a] > ALIKE) + a + 1:
                yield alike[b], f"its series is that of {found[index].name}, or that with a little noise"

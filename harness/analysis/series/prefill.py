"""Analyse a sweep of prefill passes: plateau, slope, ridge point, steps, time to first token. Pure.

A pass over n tokens takes max(plateau, plateau + slope (n - r) + quadratic (n^2 - r^2)) ms. The ridge point
is where computing alone, slope n + quadratic n^2, takes as long as the plateau: there the roofs of the rate,
n / plateau and 1 / slope, cross. It does not depend on whether computing overlaps with reading or follows it.

One kernel's latency bends upwards. Where it rises steeply and then far less, a stack has changed to another
kernel; plateau, slope and ridge are those of the last one. docs/measuring.md has the coverage of the
intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from harness.analysis.series.line import CONFIDENCE, Floats
from harness.analysis.series.prefill_fit import Fit, fitted

TARGETS = (512, 2048, 8192, 32768)  # tokens of a prompt whose TTFT is estimated
FEWEST = 8  # lengths of a fit
CONCAVE = 3.0  # times the slope after a kernel change; tile steps of one kernel reach 2
NEAR_TOP = 0.9  # of the greatest height above the chord: the first tile of the kernel, not its highest
RISE = 0.1  # of latency above its chord at a kernel change, and beyond a plateau that has an end
SLOPES_SHARE = 0.25  # of the first length's latency that may be slope: with more, no plateau was seen
FURTHEST = 5.0  # times the longest measured pass, without a quadratic term: attention is not known
FURTHEST_QUADRATIC = 16.0
STEP, STEP_SIGMAS = 0.02, 6.0  # of the latency; robust standard deviations between neighbours


@dataclass(frozen=True)
class Step:
    """Latency jumps by `jump_ms` between two neighbouring lengths, the second being `n`."""

    n: int
    jump_ms: float


@dataclass(frozen=True)
class FirstToken:
    """Time of a pass over `n` tokens. `ci95_ms`: null where one pass alone gives no interval. `how`:
    measured, extrapolated, or null with the `reason`."""

    n: int
    ms: float | None = None
    ci95_ms: tuple[float, float] | None = None
    how: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Prefill:
    """`kernel_from_n`: the shortest length of the kernel that the figures describe. `slope_ms`: per token;
    `quadratic_ms`: per token squared, null where not identifiable. `ridge_n`: null with `ridge_reason`; a
    null end of its interval lies past the longest pass. `rounds`: passes per length."""

    rounds: int
    shortest_n: int
    longest_n: int
    kernel_from_n: int | None = None
    plateau_ms: float | None = None
    plateau_ci95_ms: tuple[float, float] | None = None
    slope_ms: float | None = None
    slope_ci95_ms: tuple[float, float] | None = None
    quadratic_ms: float | None = None
    ridge_n: float | None = None
    ridge_ci95: tuple[float | None, float | None] | None = None
    ridge_reason: str | None = None
    steps: tuple[Step, ...] = ()
    first_tokens: tuple[FirstToken, ...] = ()


def analyse(
    n: Floats, ms: Floats, rounds: Floats, chunk: int | None = None, changes_after: int | None = None
) -> Prefill:
    """Of passes at one depth; needs at least one. `chunk`: tokens that the stack computes at once; a longer
    prompt takes several passes (llama.cpp's n_ubatch). `changes_after`: the longest pass before a known
    change of kernel, which nothing is extrapolated across. Raises ValueError for latencies that are not
    positive."""
    if not np.all(np.isfinite(ms) & (ms > 0)):
        raise ValueError("a pass has no positive latency")
    lengths = np.unique(n)
    passes = [ms[n == length] for length in lengths]
    medians = np.array([float(np.median(each)) for each in passes])
    found = Prefill(len(np.unique(rounds)), int(lengths[0]), int(lengths[-1]))
    found = replace(found, steps=steps(lengths, medians))
    single = lengths <= chunk if chunk else np.ones(len(lengths), dtype=bool)
    fit = None
    if single.sum() < FEWEST:
        found = replace(found, ridge_reason=f"fewer than {FEWEST} lengths within one pass")
    else:
        start = kernel_start(lengths[single], medians[single])
        fit = fitted(lengths[single][start:], medians[single][start:])
        found = _figures(found, fit, lengths[single][start:])
    longer = lengths >= chunk if chunk else ~single
    of_prompts = fitted(lengths[longer], medians[longer], bends=False) if longer.sum() >= FEWEST else None
    if of_prompts is not None and of_prompts.quadratic:
        found = replace(found, quadratic_ms=float(of_prompts.coefficients[0, 2]))
    first = []
    for target in TARGETS:
        if lengths[0] <= target <= lengths[-1]:
            first.append(_measured(target, lengths, passes))
        elif reason := _no_basis(target, found, fit or of_prompts, changes_after):
            first.append(FirstToken(target, reason=reason))
        else:
            drawn = _extrapolated(target, fit, of_prompts, chunk)
            first.append(FirstToken(target, float(drawn[0]), _bounds(drawn), "extrapolated"))
    return replace(found, first_tokens=tuple(first))


def kernel_start(n: Floats, ms: Floats) -> int:
    """Index of the shortest length of the last kernel: past the points where latency lies a tenth or more
    above the line from its first to its last, and rises three times as steeply as after them. The last tile
    of a kernel, of which a sweep may end, is less than that above it."""
    least = np.minimum.accumulate(ms[::-1])[::-1]  # not raised by single slow passes
    start = 0
    while len(n) - start > FEWEST:
        x, y = n[start:], least[start:]
        chord = y[0] + (y[-1] - y[0]) * (x - x[0]) / (x[-1] - x[0])
        above = (y - chord)[: -FEWEST + 1]
        top = int((above >= NEAR_TOP * above.max()).argmax())
        if above.max() <= 0 or top == 0 or y[top] < (1 + RISE) * chord[top]:
            break
        after = (y[-1] - y[top]) / (x[-1] - x[top])
        if (y[top] - y[0]) / (x[top] - x[0]) < CONCAVE * after:
            break
        # The kernel before it may have been slower at its end than the new one is.
        level = least < (1 + RISE) * y[top]
        slow = np.flatnonzero(level & (ms > (1 + RISE) * least) & (np.arange(len(n)) >= start + top))
        start = int(slow[-1]) + 1 if len(slow) else start + top
    return start


def steps(n: Floats, ms: Floats) -> tuple[Step, ...]:
    """Jumps between neighbouring lengths, by 2% more than the tokens are more, or down by 2%, that noise does
    not explain and the next length confirms."""
    if len(n) < FEWEST:
        return ()
    logs = np.log(ms)
    usual = STEP_SIGMAS * 1.4826 * float(np.median(np.abs(np.diff(logs, 2)))) / math.sqrt(6)
    found = []
    for at in range(1, len(n)):
        before, after = logs[max(at - 2, 0) : at], logs[at : at + 2]
        up = float(after.min() - before.max() - math.log(n[at] / n[at - 1]))
        down = float(before.min() - after.max())
        if max(up, down) > max(STEP, usual):
            found.append(Step(int(n[at]), float(ms[at] - ms[at - 1])))
    return tuple(found)


def _figures(found: Prefill, fit: Fit, n: Floats) -> Prefill:
    """Plateau, slope and ridge of one kernel, or the reason why there is no ridge."""
    plateau, slope, quadratic = map(float, fit.coefficients[0])
    longest = float(n[-1])
    bounds = _bounds(fit.coefficients[:, 1])
    found = replace(found, kernel_from_n=int(n[0]))
    if slope * n[0] > SLOPES_SHARE * plateau:
        return replace(
            found,
            slope_ms=slope,
            slope_ci95_ms=bounds,
            ridge_reason=f"the shortest pass, of {n[0]:.0f} tokens, is no plateau: latency already grows",
        )
    found = replace(found, plateau_ms=plateau, plateau_ci95_ms=_bounds(fit.coefficients[:, 0]))
    if bounds[0] <= 0 or fit.at(longest)[0] < (1 + RISE) * plateau:
        return replace(found, ridge_reason=f"not reached: latency hardly grows up to {longest:.0f} tokens")
    quadratic_ms = quadratic if fit.quadratic else None
    found = replace(found, slope_ms=slope, slope_ci95_ms=bounds, quadratic_ms=quadratic_ms)
    low, high = _bounds(fit.ridges)
    ridge = float(fit.ridges[0])
    if ridge > longest:
        share = (slope * longest + quadratic * longest**2) / plateau
        return replace(
            found,
            ridge_reason=f"not reached: at {longest:.0f} tokens computing takes {share:.0%} of the plateau",
        )
    return replace(found, ridge_n=ridge, ridge_ci95=(low, high if high <= longest else None))


def _no_basis(target: int, found: Prefill, fit: Fit | None, changes_after: int | None) -> str | None:
    """Why the time of `target` tokens cannot be extrapolated; null: it can."""
    longest = found.longest_n
    if target < found.shortest_n:
        return f"the shortest measured pass has {found.shortest_n:,} tokens"
    if fit is None or found.slope_ms is None:
        return found.ridge_reason
    if changes_after is not None and longest <= changes_after < target:
        return f"past {changes_after:,} tokens the stack runs another kernel, which was not measured"
    if target <= FURTHEST * longest:
        return None
    if found.quadratic_ms is None:
        return f"too far from the {longest:,} tokens measured, which do not show what attention adds"
    return None if target <= FURTHEST_QUADRATIC * longest else f"too far from the {longest:,} tokens measured"


def _extrapolated(target: int, fit: Fit | None, of_prompts: Fit | None, chunk: int | None) -> Floats:
    """By draw: along prompts of several chunks where they were measured, else chunk by chunk, where what
    attention to earlier chunks adds is left out."""
    if of_prompts is not None:
        return of_prompts.at(target)
    assert fit is not None
    if not chunk:
        return fit.at(target)
    full, rest = divmod(target, chunk)
    return full * fit.at(chunk) + (fit.at(rest) if rest else 0.0)


def _measured(target: int, lengths: Floats, passes: list[Floats]) -> FirstToken:
    """The median of the passes at `target`, or on the line between its neighbours, with Student's
    interval."""
    after = int(np.searchsorted(lengths, target))
    before = after if lengths[after] == target else after - 1
    share = 0.0 if before == after else float((target - lengths[before]) / (lengths[after] - lengths[before]))
    ends = ((passes[before], 1 - share), (passes[after], share))
    middle = sum(weight * float(np.median(each)) for each, weight in ends)
    fewest = min(len(each) for each, _ in ends)
    if fewest < 2:
        return FirstToken(target, middle, None, "measured")
    variance = sum(weight**2 * float(each.var(ddof=1)) / len(each) for each, weight in ends)
    half = float(stdtrit(fewest - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)
    return FirstToken(target, middle, (middle - half, middle + half), "measured")


def _bounds(drawn: Floats) -> tuple[float, float]:
    """The interval of a figure from its draws, without that of the data."""
    tail = (1 - CONFIDENCE) / 2
    # `lower` and `higher` keep infinite draws from becoming NaN.
    low = float(np.quantile(drawn[1:], tail, method="lower"))
    return low, float(np.quantile(drawn[1:], 1 - tail, method="higher"))

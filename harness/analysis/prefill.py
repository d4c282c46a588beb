"""Analyse a sweep of prefill passes: plateau, slope, ridge point, steps, time to first token. Pure.

A pass over n tokens takes max(plateau, plateau + slope (n - r) + quadratic (n^2 - r^2)) ms. The ridge
point is where computing alone, slope n + quadratic n^2, takes as long as the plateau: there the roofs of
the rate, n / plateau and 1 / slope, cross. The ridge point is the same whether computing
overlaps with reading or follows it.

One kernel's latency bends upwards. Where it rises steeply and then far less, a stack has changed to
another kernel; plateau, slope and ridge are those of the last one. docs/validation.md has the coverage of
the intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harness.analysis import cell_intervals
from harness.analysis.line_fit import Floats, students_half
from harness.analysis.prefill_fit import Estimate, Fit, estimated, fitted

TARGETS = (512, 2048, 8192, 32768)  # tokens of a prompt whose TTFT is estimated
FEWEST = 8  # lengths of a fit
CONCAVE = 3.0  # times the slope after a kernel change; tile steps of one kernel reach 2
NEAR_TOP = 0.9  # of the greatest height above the chord: the first tile of the kernel, not its highest
RISE = 0.1  # of latency above its chord at a kernel change, and beyond a plateau that has an end
SLOPES_SHARE = 0.25  # of the first length's latency that may be slope: with more, no plateau was seen
FURTHEST = 5.0  # times the longest measured pass, without a quadratic term: attention is not known
FURTHEST_QUADRATIC = 16.0
# Standard error of a normal sample's median over that of its mean, in the limit; 1.16 for three values.
MEDIAN_ERROR = math.sqrt(math.pi / 2)
STEP, STEP_SIGMAS = 0.02, 6.0  # of the latency; robust standard deviations between neighbours


@dataclass(frozen=True)
class Passes:
    """Passes at one depth, a value each: tokens, ms, round, and the process that made it, from 0."""

    n: Floats
    ms: Floats
    rounds: Floats
    process: NDArray[np.int64]

    @cached_property
    def lengths(self) -> Floats:
        return np.unique(self.n)

    @cached_property
    def levelled(self) -> Floats:
        """ms as if every process were as fast as their mean."""
        return np.asarray(self.ms / self._levels[self.process])

    @cached_property
    def of_processes(self) -> Floats:
        """Medians, [process, length]; where a process lacks a length, that of all, at its level. Empty for
        one process."""
        if len(self._medians) == 1:
            return np.empty((0, len(self.lengths)))
        of_all = np.outer(self._levels, self.medians)
        return np.where(np.isnan(self._medians), of_all, self._medians)

    @cached_property
    def medians(self) -> Floats:
        """ms at each of the lengths."""
        return np.array([*map(self.median_ms, self.lengths)])

    def median_ms(self, length: float) -> float:
        return float(np.median(self.levelled[self.n == length]))

    @cached_property
    def _medians(self) -> Floats:
        medians = np.full((int(self.process.max()) + 1, len(self.lengths)), np.nan)
        for process, of_one in enumerate(medians):
            for place, length in enumerate(self.lengths):
                if len(ms := self.ms[(self.process == process) & (self.n == length)]):
                    of_one[place] = np.median(ms)
        return medians

    @cached_property
    def _levels(self) -> Floats:
        """ms of each process over those of the mean one, at the lengths that all have."""
        common = self._medians[:, ~np.isnan(self._medians).any(axis=0)]
        if len(common) == 1 or not common.size or common.min() <= 0:
            return np.ones(len(common))
        own = np.log(common).mean(axis=1)
        return np.asarray(np.exp(own - own.mean()))


@dataclass(frozen=True)
class Step:
    """Latency jumps by `jump_ms` between two neighbouring lengths, the second being `n`."""

    n: int
    jump_ms: float


@dataclass(frozen=True)
class FirstToken:
    """Time in ms of a pass over `n` tokens. `how`: measured, extrapolated, or None with the `reason`."""

    n: int
    ms: Estimate | None = None
    how: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Prefill:
    """Intervals are of the noise within processes until between_processes() has widened them.

    `kernel_from_n`: the shortest length of the kernel that the figures describe. `slope`: ms per token;
    `quadratic_ms`: per token squared, None where not identifiable. `ridge`: tokens; None with
    `ridge_reason`; the end of its interval is None where it lies past the longest pass. `rounds`: passes per
    length."""

    rounds: int
    shortest_n: int
    longest_n: int
    kernel_from_n: int | None = None
    plateau: Estimate | None = None
    slope: Estimate | None = None
    quadratic_ms: float | None = None
    ridge: Estimate | None = None
    ridge_reason: str | None = None
    steps: tuple[Step, ...] = ()
    first_tokens: tuple[FirstToken, ...] = ()


def analyse(passes: Passes, chunk: int | None = None, changes_after: int | None = None) -> Prefill:
    """Analyse passes at one depth, at least one. `chunk`: tokens that the stack computes at once; a longer
    prompt takes several passes (llama.cpp's n_ubatch). `changes_after`: the longest pass before a known
    change of kernel, which nothing is extrapolated across. Raises ValueError for latencies that are not
    positive."""
    if not np.all(np.isfinite(passes.ms) & (passes.ms > 0)):
        raise ValueError("a pass has no positive latency")
    lengths, processes = passes.lengths, passes.of_processes
    medians = passes.medians
    prefill = Prefill(len(np.unique(passes.rounds)), int(lengths[0]), int(lengths[-1]))
    prefill = replace(prefill, steps=steps(lengths, medians))
    single = lengths <= chunk if chunk else np.ones(len(lengths), dtype=bool)
    fit = None
    if single.sum() < FEWEST:
        prefill = replace(prefill, ridge_reason=f"fewer than {FEWEST} lengths within one pass")
    else:
        start = kernel_start(lengths[single], medians[single])
        kernel = np.flatnonzero(single)[start:]
        fit = fitted(lengths[kernel], medians[kernel], processes[:, kernel])
        prefill = _figures(prefill, fit, lengths[kernel])
    longer = np.flatnonzero(lengths >= chunk if chunk else ~single)
    of_prompts = None
    if len(longer) >= FEWEST:
        of_prompts = fitted(lengths[longer], medians[longer], processes[:, longer], bends=False)
    if of_prompts is not None and of_prompts.quadratic:
        prefill = replace(prefill, quadratic_ms=float(of_prompts.coefficients[0, 2]))
    first = []
    for target in TARGETS:
        if lengths[0] <= target <= lengths[-1]:
            first.append(_measured(target, passes))
        elif reason := _no_basis(target, prefill, fit or of_prompts, changes_after):
            first.append(FirstToken(target, reason=reason))
        else:
            of_series = _extrapolated(target, fit, of_prompts, chunk)
            first.append(FirstToken(target, estimated(of_series), "extrapolated"))
    return replace(prefill, first_tokens=tuple(first))


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
    jumps = []
    for at in range(1, len(n)):
        before, after = logs[max(at - 2, 0) : at], logs[at : at + 2]
        up = float(after.min() - before.max() - math.log(n[at] / n[at - 1]))
        down = float(before.min() - after.max())
        if max(up, down) > max(STEP, usual):
            jumps.append(Step(int(n[at]), float(ms[at] - ms[at - 1])))
    return tuple(jumps)


def _figures(prefill: Prefill, fit: Fit, n: Floats) -> Prefill:
    """Plateau, slope and ridge of one kernel, or the reason why there is no ridge."""
    plateau, slope = estimated(fit.coefficients[:, 0]), estimated(fit.coefficients[:, 1])
    quadratic, longest = float(fit.coefficients[0, 2]), float(n[-1])
    prefill = replace(prefill, kernel_from_n=int(n[0]))
    if slope.value * n[0] > SLOPES_SHARE * plateau.value:
        reason = f"the shortest pass, of {n[0]:.0f} tokens, is no plateau: latency already grows"
        return replace(prefill, slope=slope, ridge_reason=reason)
    prefill = replace(prefill, plateau=plateau)
    is_rising = slope.ends is not None and (slope.ends[0] or 0.0) > 0
    if not is_rising or fit.at(longest)[0] < (1 + RISE) * plateau.value:
        return replace(prefill, ridge_reason=f"not reached: latency hardly grows up to {longest:.0f} tokens")
    prefill = replace(prefill, slope=slope, quadratic_ms=quadratic if fit.quadratic else None)
    ridge = estimated(fit.ridges)
    if ridge.value > longest:
        share = (slope.value * longest + quadratic * longest**2) / plateau.value
        reason = f"not reached: at {longest:.0f} tokens computing takes {share:.0%} of the plateau"
        return replace(prefill, ridge_reason=reason)
    return replace(prefill, ridge=_within(ridge, prefill.longest_n))


def _within(ridge: Estimate, longest: int) -> Estimate:
    """A ridge whose interval is open where it ends past the longest pass."""
    low, high = ridge.ends or (None, None)
    return replace(ridge, ends=(low, None)) if high is not None and high > longest else ridge


def _no_basis(target: int, prefill: Prefill, fit: Fit | None, changes_after: int | None) -> str | None:
    """Why the time of `target` tokens cannot be extrapolated; None: it can."""
    longest = prefill.longest_n
    if target < prefill.shortest_n:
        return f"the shortest measured pass has {prefill.shortest_n:,} tokens"
    if fit is None or prefill.slope is None:
        return prefill.ridge_reason
    if changes_after is not None and longest <= changes_after < target:
        return f"past {changes_after:,} tokens the stack runs another kernel, which was not measured"
    if target <= FURTHEST * longest:
        return None
    if prefill.quadratic_ms is None:
        return f"too far from the {longest:,} tokens measured, which do not show what attention adds"
    return None if target <= FURTHEST_QUADRATIC * longest else f"too far from the {longest:,} tokens measured"


def _extrapolated(target: int, fit: Fit | None, of_prompts: Fit | None, chunk: int | None) -> Floats:
    """Extrapolate each series, along measured prompts of several chunks, else chunk by chunk without the cost
    of attention to earlier chunks."""
    if of_prompts is not None:
        return of_prompts.at(target)
    assert fit is not None
    if not chunk:
        return fit.at(target)
    full, rest = divmod(target, chunk)
    return full * fit.at(chunk) + (fit.at(rest) if rest else 0.0)


def _measured(target: int, passes: Passes) -> FirstToken:
    """The median of the passes at `target`, or on the line between its neighbours, with Student's interval,
    for the standard error of a median."""
    lengths, processes = passes.lengths, passes.of_processes
    after = int(np.searchsorted(lengths, target))
    before = after if lengths[after] == target else after - 1
    share = 0.0 if before == after else float((target - lengths[before]) / (lengths[after] - lengths[before]))
    weights = {before: 1 - share, after: share} if share else {after: 1.0}
    middle = sum(weight * float(passes.medians[at]) for at, weight in weights.items())
    of_each = tuple(np.sum([weight * processes[:, at] for at, weight in weights.items()], axis=0).tolist())
    ends = None
    around = {at: passes.levelled[passes.n == lengths[at]] for at in weights}
    if min(map(len, around.values())) > 1:
        half = math.hypot(*(weight * _median_half(around[at]) for at, weight in weights.items()))
        ends = middle - half, middle + half
    return FirstToken(target, Estimate(middle, ends, of_each), "measured")


def _median_half(values: Floats) -> float:
    """Half the 95% interval of the median of at least two values."""
    return students_half(values) * (MEDIAN_ERROR if len(values) > 2 else 1.0)


def by_depth(repeats: Sequence[Mapping[str, Sequence[int]]]) -> dict[int, Passes]:
    """The passes of some prefill.parquet of one cell by depth, each file of another process."""
    passes_at: dict[int, list[Floats]] = {}
    rounds = 0
    for process, columns in enumerate(filter(None, repeats)):
        depth, n, took, own = (
            np.asarray(columns[name], dtype=float) for name in ("depth", "n", "latency_ns", "round")
        )
        passes = np.stack([n, took / 1e6, own + rounds, np.full(len(n), process)])
        rounds += int(own.max()) + 1
        for length in np.unique(depth):
            passes_at.setdefault(int(length), []).append(passes[:, depth == length])
    joined = {depth: np.hstack(passes) for depth, passes in passes_at.items()}
    return {
        depth: Passes(n, ms, rounds_of, np.unique(process, return_inverse=True)[1].ravel())
        for depth, (n, ms, rounds_of, process) in joined.items()
    }


def between_processes(
    cells: Sequence[Mapping[int, Prefill]], campaigns: Sequence[tuple[str, str]]
) -> list[dict[int, Prefill]]:
    """The analyses by depth of some cells, with intervals of the mean process: as those of tok/s, from the
    spread of processes in the campaign of each, see cell_intervals.intervals."""
    estimates = [
        {(depth, name): estimate for depth, of in cell.items() for name, estimate in _estimates(of).items()}
        for cell in cells
    ]
    widened: list[dict[tuple[int, str], Estimate]] = [{} for _ in cells]
    for key in dict.fromkeys(key for of_cell in estimates for key in of_cell):
        samples = [of_cell[key].sample() if key in of_cell else None for of_cell in estimates]
        between = cell_intervals.intervals(samples, campaigns)
        for of_cell, wider, sample, ends in zip(estimates, widened, samples, between, strict=True):
            if sample:  # one process keeps its own interval where its campaign gives none
                keeps = ends is None and len(sample.values) == 1
                wider[key] = of_cell[key] if keeps else replace(of_cell[key], ends=ends)
    return [
        {
            depth: replace(
                of,
                plateau=wider.get((depth, "plateau")),
                slope=wider.get((depth, "slope")),
                ridge=_within(wider[depth, "ridge"], of.longest_n) if of.ridge else None,
                first_tokens=tuple(
                    replace(first, ms=wider.get((depth, str(first.n)))) for first in of.first_tokens
                ),
            )
            for depth, of in cell.items()
        }
        for cell, wider in zip(cells, widened, strict=True)
    ]


def _estimates(prefill: Prefill) -> dict[str, Estimate]:
    """The figures with an interval, by name; a TTFT by its tokens."""
    named = {"plateau": prefill.plateau, "slope": prefill.slope, "ridge": prefill.ridge}
    named |= {str(first.n): first.ms for first in prefill.first_tokens}
    return {name: estimate for name, estimate in named.items() if estimate}

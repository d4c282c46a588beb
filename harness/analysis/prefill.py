"""Prefill: its fit, its compute-bound part, its verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from harness.analysis import repeat_figures, traffic
from harness.analysis.columns import PrefillDepth, PrefillRow, Utilisation
from harness.analysis.line_fit import CONFIDENCE, Floats, students_half
from harness.analysis.repeat_figures import Sample
from harness.analysis.warnings import Flag, Warnings
from harness.base.text import plural
from harness.records.kinds import Record
from harness.stacks.header import Header, stacks
from harness.theory import floors
from harness.theory.floors import Ceiling, Demand

# Fit a plateau, a slope and a quadratic term to the passes of one kernel, with resampled series. Pure.


FEWEST_PAST = 3  # lengths from the bend on
BENDS = 40  # candidates for it
POLISHED = 5  # Gauss-Newton steps from the best of them: a bend between two costs the slope a percent
REWEIGHTED = 2  # times
TINY = 1e-6  # of the longest pass: a fit by a line may fall below zero
SINGULAR = 1e-12  # of the largest eigenvalue: terms that are not distinguishable
DRAWS, SEED = 300, 0
TILES = 128  # tokens: the residuals of so many neighbours correlate, as matrix tiles are as large
ATTENTION_FROM = 2048  # tokens; below, attention is some percent of a pass, which tile steps hide
EVIDENCE = 10.0  # of the Bayesian information criterion for the quadratic term, as in shapes.py
MATTERS = 0.01  # of the longest pass: a quadratic term below is no attention


@dataclass(frozen=True)
class Fit:
    """Coefficients [series, (plateau, slope, quadratic)] and bends [series]. The series: the data, resampled
    ones (DRAWS), then those of each process. What a method gives has a value of each."""

    coefficients: Floats
    bends: Floats
    quadratic: bool

    def at(self, n: float) -> Floats:
        """Latency at n."""
        past = np.maximum(n, self.bends)
        terms = np.column_stack([np.ones(len(past)), past - self.bends, past**2 - self.bends**2])
        return np.asarray((self.coefficients * terms).sum(axis=1))

    def levels(self, n: Floats) -> Floats:
        """Latency of the data's fit at each length; positive."""
        plateau, slope, quadratic = self.coefficients[0]
        past, bend = np.maximum(n, self.bends[0]), self.bends[0]
        level = plateau + slope * (past - bend) + quadratic * (past**2 - bend**2)
        return np.asarray(np.maximum(level, TINY * level.max()))

    @property
    def ridges(self) -> Floats:
        """The ridges, where slope n + quadratic n^2 = plateau; infinite without a slope."""
        plateau, slope, quadratic = self.coefficients.T
        with np.errstate(divide="ignore", invalid="ignore"):
            found = 2 * plateau / (slope + np.sqrt(slope**2 + 4 * quadratic * plateau))
        return np.where((slope > 0) & np.isfinite(found), found, np.inf)


def fitted(n: Floats, ms: Floats, processes: Floats, bends: bool = True) -> Fit:
    """Least squares of relative errors, and the same of DRAWS resampled series: the fit with blocks of its
    own relative residuals (Kuensch 1989, doi:10.1214/aos/1176347265). `processes`: [process, length], fitted
    in the same way. `bends`: with a plateau before the slope."""
    candidates = np.unique(np.geomspace(n[0], n[-FEWEST_PAST], BENDS)) if bends else n[:1]
    fit = _refined(n, ms, candidates, quadratic=False)
    if n[-1] >= ATTENTION_FROM:
        bent = _refined(n, ms, candidates, quadratic=True)
        straight = _solved(n, fit.levels(n), ms[None], candidates, quadratic=False)
        better = _bic(n, ms, straight, 3) - _bic(n, ms, bent, 4) > EVIDENCE
        matters = bent.coefficients[0, 2] * n[-1] ** 2 > MATTERS * ms[-1]
        if better and matters and bent.coefficients[0, 1] > 0:
            fit = bent
    level = fit.levels(n)
    size = int(np.clip(round(TILES / max(float(np.median(np.diff(n))), 1.0)), 1, max(len(n) // 4, 1)))
    blocks = len(n) / size
    residuals = (ms / level - 1) * math.sqrt(blocks / max(blocks - (4 if fit.quadratic else 3), 1.0))
    starts = np.random.default_rng(SEED).integers(0, len(n), (DRAWS, math.ceil(blocks)))
    picked = (starts[:, :, None] + np.arange(size)) % len(n)
    drawn = level * (1 + residuals[picked.reshape(DRAWS, -1)[:, : len(n)]])
    return _solved(n, level, np.vstack([ms, drawn, processes]), candidates, fit.quadratic)


def _refined(n: Floats, ms: Floats, candidates: Floats, quadratic: bool) -> Fit:
    """The fit, with errors relative to itself: relative to the data, what lies high would count less."""
    fit = _solved(n, ms, ms[None], candidates, quadratic)
    for _ in range(REWEIGHTED):
        fit = _solved(n, fit.levels(n), ms[None], candidates, quadratic)
    return fit


def _solved(n: Floats, weights: Floats, series: Floats, candidates: Floats, quadratic: bool) -> Fit:
    """The best fit of each of `series` [draw, length]. Errors count relative to `weights`."""
    best = np.full(len(series), np.inf)
    at = np.zeros(len(series))
    scaled = series / weights
    for bend in candidates:
        terms = _terms(n, np.array([bend]), quadratic)[0] / weights[:, None]
        terms /= np.linalg.norm(terms, axis=0)
        left = ((scaled - scaled @ np.linalg.pinv(terms).T @ terms.T) ** 2).sum(axis=1)
        better = left < best
        best[better], at[better] = left[better], bend
    coefficients, best = _at_bends(n, weights, scaled, at, quadratic)
    for _ in range(POLISHED if len(candidates) > 1 else 0):
        slope, curve = coefficients[:, 1:].T
        moves = np.where(n > at[:, None], -(slope + 2 * curve * at)[:, None], 0.0) / weights
        terms = np.dstack([_terms(n, at, quadratic) / weights[:, None], moves])
        moved = np.clip(at + _least_squares(terms, scaled)[:, -1], candidates[0], candidates[-1])
        others, left = _at_bends(n, weights, scaled, moved, quadratic)
        better = left < best
        best[better], at[better], coefficients[better] = left[better], moved[better], others[better]
    return Fit(coefficients, at, quadratic)


def _at_bends(
    n: Floats, weights: Floats, scaled: Floats, bends: Floats, quadratic: bool
) -> tuple[Floats, Floats]:
    """Coefficients of each draw with its bend, and the squares that are left."""
    terms = _terms(n, bends, quadratic) / weights[:, None]
    solved = _least_squares(terms, scaled)
    coefficients = np.zeros((len(bends), 3))
    coefficients[:, : 2 + quadratic] = solved
    return coefficients, ((scaled - np.einsum("dnt,dt->dn", terms, solved)) ** 2).sum(axis=1)


def _terms(n: Floats, bends: Floats, quadratic: bool) -> Floats:
    """[draw, length, term]"""
    bends = bends[:, None]
    past = np.maximum(n, bends)
    return np.dstack([np.ones(past.shape), past - bends, past**2 - bends**2])[:, :, : 2 + quadratic]


def _least_squares(terms: Floats, scaled: Floats) -> Floats:
    """Coefficients [draw, term]; the smallest where several fit alike. By normal equations of columns of one
    length: three or four terms, and a hundred times faster than a decomposition of each draw's."""
    scale = np.linalg.norm(terms, axis=1, keepdims=True)
    scale[scale == 0] = 1
    columns = terms / scale
    rows = columns.transpose(0, 2, 1)
    inverse = np.linalg.pinv(rows @ columns, rcond=SINGULAR, hermitian=True)
    return np.asarray((inverse @ (rows @ scaled[:, :, None]))[:, :, 0] / scale[:, 0])


def _bic(n: Floats, ms: Floats, fit: Fit, terms: int) -> float:
    left = float(((ms / fit.levels(n) - 1) ** 2).sum())
    return len(n) * math.log(max(left, 1e-300) / len(n)) + terms * math.log(len(n))


# Analyse a sweep of prefill passes: plateau, slope, ridge point, steps, time to first token. Pure.
#
# A pass over n tokens takes max(plateau, plateau + slope (n - r) + quadratic (n^2 - r^2)) ms. The ridge
# point is where computing alone, slope n + quadratic n^2, takes as long as the plateau: there the roofs of
# the rate, n / plateau and 1 / slope, cross. The ridge point is the same whether computing
# overlaps with reading or follows it.
#
# One kernel's latency bends upwards. Where it rises steeply and then far less, a stack has changed to
# another kernel; plateau, slope and ridge are those of the last one. docs/validation.md has the coverage of
# the intervals.


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
        found = np.full((int(self.process.max()) + 1, len(self.lengths)), np.nan)
        for process, of_one in enumerate(found):
            for place, length in enumerate(self.lengths):
                if len(ms := self.ms[(self.process == process) & (self.n == length)]):
                    of_one[place] = np.median(ms)
        return found

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
    """Time of a pass over `n` tokens. `ci95_ms`: null where one pass alone gives no interval. `how`:
    measured, extrapolated, or null with the `reason`. `processes`: the time in each of several."""

    n: int
    ms: float | None = None
    ci95_ms: tuple[float, float] | None = None
    how: str | None = None
    reason: str | None = None
    processes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Prefill:
    """Intervals are of the noise within processes until between_processes() has widened them.

    `kernel_from_n`: the shortest length of the kernel that the figures describe. `slope_ms`: per token;
    `quadratic_ms`: per token squared, null where not identifiable. `ridge_n`: null with `ridge_reason`; a
    null end of its interval lies past the longest pass. `rounds`: passes per length. `processes`: by
    figure, its value in each of several processes."""

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
    processes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def analyse(passes: Passes, chunk: int | None = None, changes_after: int | None = None) -> Prefill:
    """Analyse passes at one depth, at least one. `chunk`: tokens that the stack computes at once; a longer
    prompt takes several passes (llama.cpp's n_ubatch). `changes_after`: the longest pass before a known
    change of kernel, which nothing is extrapolated across. Raises ValueError for latencies that are not
    positive."""
    if not np.all(np.isfinite(passes.ms) & (passes.ms > 0)):
        raise ValueError("a pass has no positive latency")
    lengths, processes = passes.lengths, passes.of_processes
    medians = passes.medians
    found = Prefill(len(np.unique(passes.rounds)), int(lengths[0]), int(lengths[-1]))
    found = replace(found, steps=steps(lengths, medians))
    single = lengths <= chunk if chunk else np.ones(len(lengths), dtype=bool)
    fit = None
    if single.sum() < FEWEST:
        found = replace(found, ridge_reason=f"fewer than {FEWEST} lengths within one pass")
    else:
        start = kernel_start(lengths[single], medians[single])
        kernel = np.flatnonzero(single)[start:]
        fit = fitted(lengths[kernel], medians[kernel], processes[:, kernel])
        found = _figures(found, fit, lengths[kernel])
    longer = np.flatnonzero(lengths >= chunk if chunk else ~single)
    of_prompts = None
    if len(longer) >= FEWEST:
        of_prompts = fitted(lengths[longer], medians[longer], processes[:, longer], bends=False)
    if of_prompts is not None and of_prompts.quadratic:
        found = replace(found, quadratic_ms=float(of_prompts.coefficients[0, 2]))
    first = []
    for target in TARGETS:
        if lengths[0] <= target <= lengths[-1]:
            first.append(_measured(target, passes))
        elif reason := _no_basis(target, found, fit or of_prompts, changes_after):
            first.append(FirstToken(target, reason=reason))
        else:
            of_series = _extrapolated(target, fit, of_prompts, chunk)
            first.append(
                FirstToken(
                    target,
                    float(of_series[0]),
                    _bounds(of_series),
                    "extrapolated",
                    processes=_of_processes(of_series),
                )
            )
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
    of_each = {
        "plateau_ms": _of_processes(fit.coefficients[:, 0]),
        "slope_ms": _of_processes(fit.coefficients[:, 1]),
        "ridge_n": _of_processes(fit.ridges),
    }
    found = replace(found, kernel_from_n=int(n[0]), processes=of_each)
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
    return FirstToken(target, middle, ends, "measured", processes=of_each)


def _median_half(values: Floats) -> float:
    """Half the 95% interval of the median of at least two values."""
    return students_half(values) * (MEDIAN_ERROR if len(values) > 2 else 1.0)


def _bounds(of_series: Floats) -> tuple[float, float]:
    """The interval of a figure from its draws."""
    drawn = of_series[1 : 1 + DRAWS]
    tail = (1 - CONFIDENCE) / 2
    # `lower` and `higher` keep infinite draws from becoming NaN.
    low = float(np.quantile(drawn, tail, method="lower"))
    return low, float(np.quantile(drawn, 1 - tail, method="higher"))


def _of_processes(of_series: Floats) -> tuple[float, ...]:
    return tuple(of_series[1 + DRAWS :].tolist())


# A record's sweep of prefill passes against theory: its figures, MFU and MBU, kernel changes, flags. Pure.


NEAR = 4  # tokens after a known change within which the kernel's start confirms it: half a tile of MMQ
SAME = 0.1  # ridges that differ by less, or within the interval, agree
FLOOR_POINTS = 40  # of a line on a logarithmic axis
NAMED = 3  # faster than possible, in a flag


def by_depth(repeats: Sequence[Mapping[str, Sequence[int]]]) -> dict[int, Passes]:
    """The passes of some prefill.parquet of one cell by depth, each file of another process."""
    found: dict[int, list[Floats]] = {}
    rounds = 0
    for process, columns in enumerate(filter(None, repeats)):
        depth, n, took, own = (
            np.asarray(columns[name], dtype=float) for name in ("depth", "n", "latency_ns", "round")
        )
        passes = np.stack([n, took / 1e6, own + rounds, np.full(len(n), process)])
        rounds += int(own.max()) + 1
        for each in np.unique(depth):
            found.setdefault(int(each), []).append(passes[:, depth == each])
    joined = {depth: np.hstack(passes) for depth, passes in found.items()}
    return {
        depth: Passes(n, ms, rounds_of, np.unique(process, return_inverse=True)[1].ravel())
        for depth, (n, ms, rounds_of, process) in joined.items()
    }


def analysed(record: Record, depths: Mapping[int, Passes]) -> dict[int, Prefill]:
    """The analysis at each depth. Raises ValueError for latencies that are not positive."""
    header, least = stacks().get(record["stack"]), min(depths, default=0)
    changes = _kernel_changes(record["variant"], header)
    found = {}
    for depth, passes in sorted(depths.items()):
        ahead = [after for after, _ in changes if depth == least and after >= passes.n.max()]
        found[depth] = analyse(passes, _chunk(record, header), min(ahead, default=None))
    return found


Key = tuple[int, str]
"""Depth, and the name of a figure."""


def between_processes(
    cells: Sequence[Mapping[int, Prefill]], campaigns: Sequence[tuple[str, str]]
) -> list[dict[int, Prefill]]:
    """The analyses by depth of some cells, with intervals of the mean process: as those of tok/s, from the
    spread of processes in the campaign of each, see repeat_figures.intervals."""
    samples = [
        {(depth, name): each for depth, of in cell.items() for name, each in _samples(of).items()}
        for cell in cells
    ]
    ends: list[dict[Key, tuple[float, float] | None]] = [{} for _ in cells]
    for key in dict.fromkeys(key for of_cell in samples for key in of_cell):
        between = repeat_figures.intervals([of_cell.get(key) for of_cell in samples], campaigns)
        for of_cell, found, interval in zip(samples, ends, between, strict=True):
            # One process keeps its own interval where its campaign gives none.
            if key in of_cell and (interval or len(of_cell[key].values) > 1):
                found[key] = interval
    return [
        {
            depth: _widened(of, {name: each for (at, name), each in found.items() if at == depth})
            for depth, of in cell.items()
        }
        for cell, found in zip(cells, ends, strict=True)
    ]


def _samples(found: Prefill) -> dict[str, Sample]:
    """The figures with an interval, by name; a TTFT by its tokens."""
    named = [
        ("plateau_ms", found.plateau_ms, found.plateau_ci95_ms, found.processes.get("plateau_ms", ())),
        ("slope_ms", found.slope_ms, found.slope_ci95_ms, found.processes.get("slope_ms", ())),
        ("ridge_n", found.ridge_n, found.ridge_ci95, found.processes.get("ridge_n", ())),
        *((str(each.n), each.ms, each.ci95_ms, each.processes) for each in found.first_tokens),
    ]
    samples = {}
    for name, value, ends, processes in named:
        if value is None:
            continue
        logs = [math.log(each) for each in processes if 0 < each < math.inf] or [math.log(value)]
        moved = math.log(value) - fmean(logs)  # the fit of all is the centre
        within = max((abs(math.log(end / value)) for end in ends or () if end and end > 0), default=0.0)
        samples[name] = Sample([each + moved for each in logs], within)
    return samples


def _widened(found: Prefill, ends: Mapping[str, tuple[float, float] | None]) -> Prefill:
    ridge = ends.get("ridge_n", found.ridge_ci95)
    if ridge and ridge[1] is not None and ridge[1] > found.longest_n:
        ridge = ridge[0], None
    return replace(
        found,
        plateau_ci95_ms=ends.get("plateau_ms", found.plateau_ci95_ms),
        slope_ci95_ms=ends.get("slope_ms", found.slope_ci95_ms),
        ridge_ci95=ridge,
        first_tokens=tuple(
            replace(each, ci95_ms=ends.get(str(each.n), each.ci95_ms)) for each in found.first_tokens
        ),
    )


def row(
    record: Record, depths: Mapping[int, Passes], by_depth: Mapping[int, Prefill], bandwidth: float | None
) -> PrefillRow:
    """The figures of a sweep at its least depth, which is an empty cache but where none was measured, and a
    part of them at the others. `by_depth`: of each, at least one. `bandwidth`: measured on its machine,
    bytes/s."""
    least = min(depths)
    passes, found = depths[least], by_depth[least]
    known = _kernel_changes(record["variant"], stacks().get(record["stack"]))
    longest = float(passes.n.max())
    needs, ceiling = traffic.prefill_demand(record), traffic.prefill_ceiling(record)
    bandwidth = None if traffic.elsewhere_in_memory(record) else bandwidth
    theory = {
        which: floors.prefill_ridge(needs, ceiling, which) if needs and ceiling and not least else None
        for which in ("every", "last")
    }
    seen = [each for each in known if _is_seen(found, each[0])]
    return {
        **_at_depth(least, passes, found),
        "rounds": found.rounds,
        "shortest_n": found.shortest_n,
        "plateau_ci95_ms": _listed(found.plateau_ci95_ms),
        "slope_ci95_ms": _listed(found.slope_ci95_ms),
        "quadratic_ms": found.quadratic_ms,
        "ridge_theory": theory,
        "bytes_per_s": ceiling.bytes_per_s if ceiling else None,
        "flops": ceiling.flops if ceiling else None,
        "floors": None if least else _floors(needs, ceiling, longest),
        "comparison": _comparison(found, needs, ceiling, theory["last"], seen),
        "steps": [{"n": step.n, "jump_ms": step.jump_ms} for step in found.steps],
        "ttft": [
            {
                "n": each.n,
                "ms": each.ms,
                "ci95_ms": each.ci95_ms and repeat_figures.positive(*each.ci95_ms),
                "how": each.how,
                "reason": each.reason,
            }
            for each in found.first_tokens
            if not least
        ],
        "utilisation": _utilisation(passes, least, needs, ceiling, bandwidth),
        "depths": [
            _at_depth(depth, deeper, by_depth[depth])
            for depth, deeper in sorted(depths.items())
            if depth > least
        ],
    }


def faster_than_possible(record: Record, depths: Mapping[int, Passes], bandwidth: float | None) -> list[Flag]:
    """A flag where passes took under 90% of the time to read the weights, or to compute, at the higher
    ceiling: the clock was read before the device was done."""
    needs, ceiling = traffic.prefill_demand(record), traffic.prefill_ceiling(record)
    rate = max(ceiling.bytes_per_s if ceiling else 0.0, bandwidth or 0.0)
    if needs is None or not rate:
        return []
    at_most = Ceiling(rate, ceiling.flops if ceiling else math.inf)
    # Weights and cache may be smaller than by the shape, which knows no types of the cache.
    loaded, kv = traffic.weight_bytes_per_token(record), traffic.kv_bytes_per_token(record)
    needs = floors.with_kv(needs, min(needs.kv_bytes_per_token, kv or math.inf))
    fewer = max(0.0, needs.weight_bytes_per_token - (loaded or math.inf))
    cached = traffic.cache_bytes(record) + fewer
    fast = []
    for depth, passes in depths.items():
        for length in passes.lengths:
            took = passes.median_ms(length)
            read, flops = floors.pass_work(needs, int(length), depth)
            least = max((read - cached) / at_most.bytes_per_s, flops / at_most.flops) * 1e3
            if took < floors.UNSYNCHRONISED * least:
                fast.append((int(length), took, least))
    if not fast:
        return []
    which = "; ".join(f"{n} tokens in {took:.2f} ms, at least {least:.2f}" for n, took, least in fast[:NAMED])
    more = f" and {len(fast) - NAMED} more lengths" if len(fast) > NAMED else ""
    return [Warnings.prefill_faster_than_limit.flag(passes=which + more)]


def _at_depth(depth: int, passes: Passes, found: Prefill) -> PrefillDepth:
    return {
        "depth": depth,
        "longest_n": found.longest_n,
        "longest_ms": passes.median_ms(found.longest_n),
        "kernel_from_n": found.kernel_from_n,
        "plateau_ms": found.plateau_ms,
        "slope_ms": found.slope_ms,
        "ridge_n": found.ridge_n,
        "ridge_ci95": _listed(found.ridge_ci95),
        "ridge_reason": found.ridge_reason,
    }


def _chunk(record: Record, header: Header | None) -> int | None:
    """Most tokens in one pass over the weights: the record's, else the stack's default; null: all."""
    option = header.options.get("n_ubatch") if header else None
    found = (record.get("options") or {}).get("n_ubatch") or (option and option.default)
    return found if isinstance(found, int) else None


def _kernel_changes(variant: str, header: Header | None) -> list[tuple[int, str]]:
    """Known changes of kernel of this variant: the longest pass before, and what follows."""
    changes = header.kernel_changes if header else ()
    return [(each.longest, each.then) for each in changes if each.variant in variant]


def _is_seen(found: Prefill, after: int) -> bool:
    """Whether the sweep shows this change: a step there, or where the last kernel begins."""
    at_step = any(step.n == after + 1 for step in found.steps)
    start = found.kernel_from_n
    return at_step or (start is not None and start > 1 and abs(start - after - 1) <= NEAR)


def _utilisation(
    passes: Passes,
    depth: int,
    needs: Demand | None,
    ceiling: Ceiling | None,
    bandwidth: float | None,
) -> list[Utilisation]:
    """MFU and MBU at lengths that double, and at the longest."""
    if needs is None:
        return []
    found: list[Utilisation] = []
    lengths = passes.lengths
    wanted = {float(2**power) for power in range(24)} | {float(lengths[-1])}
    for length in lengths[np.isin(lengths, list(wanted))]:
        took = passes.median_ms(length) / 1e3
        read, flops = floors.pass_work(needs, int(length), depth)
        found.append(
            {
                "n": int(length),
                "ms": took * 1e3,
                "mfu": flops / took / ceiling.flops if ceiling else None,
                "mbu": read / took / ceiling.bytes_per_s if ceiling else None,
                "mbu_measured": read / took / bandwidth if bandwidth else None,
            }
        )
    return found


def _floors(
    needs: Demand | None, ceiling: Ceiling | None, longest: float
) -> dict[str, list[list[float]]] | None:
    """Theory's least ms by lm_head, as [n, ms], up to the longest pass."""
    if needs is None or ceiling is None:
        return None
    lengths = np.unique(np.geomspace(1, longest, FLOOR_POINTS).round()).astype(int)
    return {
        which: [
            [int(n), round(floors.prefill_floor_s(needs, ceiling, int(n), which) * 1e3, 4)] for n in lengths
        ]
        for which in ("every", "last")
    }


def _comparison(
    found: Prefill,
    needs: Demand | None,
    ceiling: Ceiling | None,
    theory: float | None,
    seen: Sequence[tuple[int, str]],
) -> str | None:
    """How the measured ridge differs from theory's (lm_head on the last token), and what makes it differ: the
    ridge is the plateau over the time of a token, so its ratio is the ratio of both."""
    if needs is None or ceiling is None or theory is None or found.slope_ms is None:
        return None
    read_ms = needs.weight_bytes_per_token / ceiling.bytes_per_s * 1e3
    token_ms = 2e3 * needs.layer_params / ceiling.flops
    changes = ", ".join(f"past {plural(after, 'token')} {what}" for after, what in seen)
    rate = f"at {ceiling.flops / 1e12:.0f} TFLOP/s"
    why = f"a further token takes {found.slope_ms / token_ms:.1f} times its computing {rate}"
    if found.plateau_ms is not None:
        plateau = found.plateau_ms / read_ms
        why = f"the plateau takes {plateau:.1f} times the reading of the weights, {why}"
    why += f"; the stack changes {changes}" if changes else ""
    if found.ridge_n is None:
        return f"{found.ridge_reason}; in theory {theory:.0f}: {why}"
    both = f"({found.ridge_n:.0f}, theory {theory:.0f})"
    low, high = found.ridge_ci95 or (math.inf, 0.0)  # no interval: it holds nothing
    agrees = (low or 0.0) <= theory <= (math.inf if high is None else high)
    if agrees or abs(found.ridge_n / theory - 1) < SAME:
        return f"close to theory {both}, where both roofs differ alike: {why}"
    return f"{'later' if found.ridge_n > theory else 'earlier'} than in theory {both}: {why}"


def _listed(ends: tuple[float | None, float | None] | None) -> list[float | None] | None:
    return None if ends is None else list(ends)

"""The line latency(n) = B + (n - 1) / W, the noise around it, and the shape of a series."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import scipy
from numpy.typing import NDArray

from harness.analysis.columns import AnyRow, Ends, Repeat, Spikes, is_score, is_search, no_spikes
from harness.analysis.differences import Spread
from harness.records.tables import TABLE_OF

# How wide is the interval of a least-squares figure where errors of neighbouring tokens correlate? Pure.
#
# The errors of successive means are modelled as white noise, plus either noise that forgets within some
# hundred tokens (autoregressive of order one) or a random walk that begins with the series. How strong each
# part is, is not estimated but averaged over: each candidate counts by its restricted likelihood (Patterson
# and Thompson 1971, doi:10.1093/biomet/58.3.545) and a prior. A plug-in estimate would be too small, since
# few means tell slow noise from none. The rates are in docs/validation.md, the script is
# benchmarks/validity/one_series.py.


Floats = NDArray[np.float64]

# Tokens after which correlation has fallen to 1/e: doubled from the shortest up to the longest, or to this
# share of the series. Rho 0.99 is 100 tokens. What is remembered for longer looks like a walk.
SHORTEST_MEMORY, LONGEST_MEMORY, LONGEST_SHARE = 8, 128, 1 / 16
# Variances of the correlated part over that of white noise, per mean; of a walk at its end. Weaker ones
# hardly widen an interval, and the last are next to no white noise.
CORRELATED = (3.0, 10.0, 100.0, 1e4)
WALKS = (3.0, 10.0, 30.0, 100.0, 1e3, 1e5)
# Odds against white noise alone, chosen so that simulated intervals cover 95% where that can be had.
ODDS_CORRELATED, ODDS_WALK = 0.05, 0.15


class _Candidates(NamedTuple):
    """Covariances over the variance of white noise, [candidate, mean, mean]; whitening matrices; logarithms
    of determinants; logarithms of prior odds."""

    covariances: Floats
    whitening: Floats
    log_determinants: Floats
    log_odds: Floats


def half_widths(values: Floats, terms: Floats, figures: Floats, size: int, confidence: float) -> Floats:
    """Half-widths of the intervals of linear figures of `values`, which are means of `size` tokens.

    `terms`: [mean, term], what explains the values besides noise; fewer terms than means. `figures`:
    [figure, mean], the weight of each mean in a figure.
    """
    known = _candidates(len(values), size)
    whitened = known.whitening @ np.column_stack([terms, values])
    inner = whitened.transpose(0, 2, 1) @ whitened
    squares, products = inner[:, :-1, :-1], inner[:, :-1, -1:]
    coefficients = np.linalg.solve(squares, products)
    explained = (products * coefficients).sum(axis=(1, 2))
    # What rounding leaves of a series without noise is noise enough.
    residual = np.maximum(inner[:, -1, -1] - explained, 1e-30 * inner[:, -1, -1] + 1e-300)
    freedom = len(values) - terms.shape[1]
    likelihood = freedom * np.log(residual) + known.log_determinants + np.linalg.slogdet(squares)[1]
    weights = known.log_odds - likelihood / 2
    weights = np.exp(weights - weights.max())
    variances = np.einsum("fi,kif->fk", figures, known.covariances @ figures.T)
    return _quantiles(np.sqrt(variances * residual / freedom), weights / weights.sum(), freedom, confidence)


def _quantiles(errors: Floats, weights: Floats, freedom: int, confidence: float) -> Floats:
    """Where a mixture of Student's t holds `confidence`: by bisection. `errors`: [figure, candidate]."""
    low, high = np.zeros(len(errors)), 100 * errors.max(axis=1)
    for _ in range(40):
        middle = (low + high) / 2
        inside = (2 * scipy.special.stdtr(freedom, middle[:, None] / errors) - 1) @ weights
        low, high = np.where(inside < confidence, middle, low), np.where(inside < confidence, high, middle)
    return np.asarray(high)


@lru_cache(maxsize=4)
def _candidates(count: int, size: int) -> _Candidates:
    """Candidates for `count` means of `size` tokens each."""
    place = np.arange(count)
    covariances, odds = [np.eye(count)], [1.0]
    longest = max(LONGEST_MEMORY, count * size * LONGEST_SHARE)
    memories = SHORTEST_MEMORY * 2 ** np.arange(math.floor(math.log2(longest / SHORTEST_MEMORY)) + 1)
    for memory in memories:
        correlated = _correlated(np.abs(place[:, None] - place), memory / size)
        for ratio in CORRELATED:
            covariances.append(np.eye(count) + ratio * correlated)
            odds.append(ODDS_CORRELATED / len(memories) / len(CORRELATED))
    # Means of a walk over each block: its variance at the middle, less a sixth for the smoothing by the mean.
    walk = (np.minimum(place[:, None], place) + 0.5 - np.eye(count) / 6) / count
    for ratio in WALKS:
        covariances.append(np.eye(count) + ratio * walk)
        odds.append(ODDS_WALK / len(WALKS))
    stacked = np.array(covariances)
    roots = np.linalg.cholesky(stacked)
    log_determinants = 2 * np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(axis=1)
    return _Candidates(stacked, np.linalg.inv(roots), log_determinants, np.log(odds))


def _correlated(apart: NDArray[np.int64], memory: float) -> Floats:
    """Correlation of means of exponentially correlated noise, `apart` and `memory` in lengths of a mean."""
    lost = -math.expm1(-1 / memory)
    covariance = memory**2 * lost**2 * np.exp(-np.maximum(apart - 1, 0) / memory)
    variance = 2 * memory * (1 - memory * lost)
    return np.asarray(np.where(apart == 0, 1.0, covariance / variance))


# Fit latency(n) = B + (n - 1) / W: least squares, its 95% interval, and a robust line. Pure.
#
# B is TPOT extrapolated to zero context; W is tokens of context per added ms.


Numbers = TypeVar("Numbers", float, Floats)

BLOCK = 256  # tokens that share a stair of llama.cpp's staircase
FEWEST_BLOCKS = 3  # from which on an interval knows the staircase
SHORTEST_MEAN, MOST_MEANS = 16, 160  # tokens of a mean; means of a series, which cost their number cubed
SHORT_MEAN, FEWEST_MEANS, SHORT_MEANS = 4, 8, 16  # the same of fewer blocks: 32 tokens at least
FEWEST_POINTS = 3  # of a sweep's interval
FAR = 5  # times the range of positions; B from further away says nothing of zero context
ROBUST_BLOCK = 64  # a median of this many tokens ignores spikes
CONFIDENCE = 0.95
HALVES_DIFFER = 0.01  # p-value below which the halves of a series differ
FEWEST_FREEDOM = 4  # of that test: eight blocks


@dataclass(frozen=True)
class Line:
    """`B_ms`: latency at zero context. `slope_ms`: added ms per token of context; W is its inverse."""

    B_ms: float
    slope_ms: float

    @property
    def W_tokens_per_ms(self) -> float | None:
        """Tokens of context per added ms; null where the slope is not positive."""
        return 1 / self.slope_ms if self.slope_ms > 0 else None

    def at(self, x: Numbers) -> Numbers:
        """Latency in ms at x tokens of context."""
        return self.B_ms + self.slope_ms * x


def least_squares(x: Floats, y: Floats) -> Line:
    """y = B + slope x. Needs at least two points."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    return Line(float(y.mean() - slope * x.mean()), slope)


def blocks(values: Floats, size: int = BLOCK) -> Floats:
    """Rows of `size` consecutive values; an incomplete last row is dropped."""
    count = len(values) // size
    return values[: count * size].reshape(count, size)


@dataclass(frozen=True)
class Interval:
    """95% intervals: half-widths for B (ms) and slope (ms per token) around `centre`, and for the mean."""

    centre: Line
    B_half_ms: float
    slope_half_ms: float
    mean_half_ms: float


def interval(x: Floats, ms: Floats) -> Interval | None:
    """Least squares through means of some tokens, with an interval for correlated noise (see
    autocorrelation.py); null for fewer than 32 tokens.

    From 768 tokens on, what recurs every 256 tokens is fitted too: a partial last stair does not tilt the
    line.
    """
    size = _mean_tokens(len(ms))
    if len(ms) // size < FEWEST_MEANS:
        return None
    centres, means = blocks(x, size).mean(axis=1), blocks(ms, size).mean(axis=1)
    length = float(np.ptp(centres))
    recurring = _recurring(len(centres), _places(len(ms), size))
    terms = np.column_stack([np.ones(len(centres)), centres / length, recurring])
    fitted = np.linalg.pinv(terms)
    figures = np.stack([fitted[0], fitted[1] / length, np.full(len(means), 1 / len(means))])
    B_ms, slope_ms, _ = map(float, figures @ means)
    halves = map(float, half_widths(means, terms, figures, size, CONFIDENCE))
    centre = Line(B_ms, slope_ms) if recurring.size else least_squares(x, ms)
    return _reaching(x, ms, Interval(centre, *halves))


def interval_of_points(x: Floats, ms: Floats) -> Interval | None:
    """The interval of least squares through a few independent points, by Student's t of the residuals; null
    for fewer than three."""
    if len(ms) < FEWEST_POINTS:
        return None
    line, freedom = least_squares(x, ms), len(ms) - 2
    residuals = ms - line.at(x)
    error = float(scipy.special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(
        float(residuals @ residuals) / freedom
    )
    slope_half = error / math.sqrt(float(((x - x.mean()) ** 2).sum()))
    mean_half = error / math.sqrt(len(ms))
    return _reaching(
        x, ms, Interval(line, math.hypot(mean_half, slope_half * x.mean()), slope_half, mean_half)
    )


def _reaching(x: Floats, ms: Floats, known: Interval) -> Interval:
    """The interval; where zero context is far from all positions, with any B up to the latency measured."""
    if x[0] <= FAR * np.ptp(x):
        return known
    B_half = max(known.B_half_ms, float(ms.mean()), abs(known.centre.B_ms))
    return replace(known, B_half_ms=B_half)


def differing_halves(x: Floats, ms: Floats) -> tuple[Line, Line] | None:
    """The lines through the two halves of a series, where they explain its block means significantly better
    than one line does (Chow 1960, doi:10.2307/1910133); null: they do not, or there are too few blocks.

    The test takes blocks to be independent, so it also finds noise that is slower than they are long.
    """
    centres, means = blocks(x).mean(axis=1), blocks(ms).mean(axis=1)
    middle, freedom = len(centres) // 2, len(centres) - 4
    if freedom < FEWEST_FREEDOM:
        return None
    first, second = (
        least_squares(centres[:middle], means[:middle]),
        least_squares(centres[middle:], means[middle:]),
    )
    apart = float(
        ((means - np.concatenate([first.at(centres[:middle]), second.at(centres[middle:])])) ** 2).sum()
    )
    together = float(((means - least_squares(centres, means).at(centres)) ** 2).sum())
    p = scipy.special.fdtrc(2, freedom, (together / max(apart, 1e-300) - 1) * freedom / 2)
    return (first, second) if p <= HALVES_DIFFER else None


def _mean_tokens(count: int) -> int:
    """Tokens of each mean in a series of `count`."""
    short = count < FEWEST_BLOCKS * BLOCK
    size, most = (SHORT_MEAN, SHORT_MEANS) if short else (SHORTEST_MEAN, MOST_MEANS)
    while count // size > most:
        size *= 2
    return size


def _places(count: int, size: int) -> int:
    """Means of a pattern of 256 tokens that are distinguishable in a series of `count`; 1: none."""
    return max(BLOCK // size, 1) if count >= FEWEST_BLOCKS * BLOCK else 1


def _recurring(count: int, places: int) -> Floats:
    """Terms of a pattern that adds nothing on average: [mean, place in the pattern]."""
    return np.equal.outer(np.arange(count) % places, np.arange(1, places)) - 1 / places


def robust(x: Floats, ms: Floats) -> Line | None:
    """Least squares through medians of 64 tokens, half of which may be spikes; null: fewer than 3 medians."""
    centres, medians = blocks(x, ROBUST_BLOCK).mean(axis=1), np.median(blocks(ms, ROBUST_BLOCK), axis=1)
    return least_squares(centres, medians) if len(centres) >= FEWEST_BLOCKS else None


def block_spread(half_width: float, n_tokens: int) -> Spread | None:
    """The spread behind a half-width of `interval`; null where a series of so many tokens has none."""
    decoded = n_tokens - 1
    size = _mean_tokens(decoded)
    if decoded // size < FEWEST_MEANS:
        return None
    freedom = decoded // size - 1 - _places(decoded, size)
    return Spread((half_width / float(scipy.special.stdtrit(freedom, (1 + CONFIDENCE) / 2))) ** 2, freedom)


# The metrics compared from run to run: unit, which direction is better, and how to read one from a row.


Reader = Callable[[Repeat], float | None]


@dataclass(frozen=True)
class Metric:
    """One metric. `better`: lower or higher; `family`: threshold that applies; `worse`, `improved`: verdicts.

    `value`: its value in a row of a repeat, a search or a score; null: none. `error`: its relative standard
    error within that repeat, from blocks of tokens; null: too few blocks.
    """

    name: str
    unit: str
    better: str
    family: str
    value: Callable[[AnyRow], float | None]
    error: Callable[[AnyRow], float | None]
    worse: str = "SLOWER"
    improved: str = "FASTER"

    def cost(self, value: float) -> float:
        """Logarithm of the figure or of its inverse, so that higher is worse. A difference of two costs is a
        relative change, and noise is symmetric."""
        return math.log(value) if self.better == "lower" else -math.log(value)

    def figure(self, cost: float) -> float:
        """The figure that has this cost."""
        return math.exp(cost if self.better == "lower" else -cost)

    def change(self, cost: float) -> float:
        """The relative change of the figure, new / base - 1, from a difference of costs."""
        return math.expm1(cost if self.better == "lower" else -cost)


def _positive(value: float | None) -> float | None:
    return float(value) if value is not None and value > 0 else None


def _of(read: Reader) -> Callable[[AnyRow], float | None]:
    """A figure of repeats alone."""
    return lambda row: None if is_search(row) or is_score(row) else _positive(read(row))


def _of_a_length(read: Reader) -> Reader:
    """A value that is comparable only at a fixed length: null for a `grow` workload, which may run longer."""
    return lambda row: None if row["workload"] == "grow" else read(row)


def _error(read: Callable[[Repeat], Ends | None]) -> Callable[[AnyRow], float | None]:
    def error(row: Repeat) -> float | None:
        low, high = read(row) or (None, None)
        if low is None or high is None or min(low, high) <= 0:
            return None
        spread = block_spread((math.log(high) - math.log(low)) / 2, row["n_tokens"] or 0)
        return math.sqrt(spread.variance) if spread else None

    return _of(error)


def _slope(row: Repeat) -> float | None:
    """W, where the slope is distinguishable from zero."""
    return row["W_tokens_per_ms"] if row["W_identifiable"] else None


def _peak_bytes(row: Repeat) -> float | None:
    """Peak memory: the resident set on a CPU; on a GPU the allocator's peak, else the device's. Null for
    workloads of timed rows, whose memory includes copies of the context."""
    if row["workload"] in TABLE_OF:
        return None
    if row["device"] == "cpu":
        return row["peak_rss_bytes"]
    return _positive(row["peak_allocator_bytes"]) or row["peak_vram_bytes"]


def _longest(row: AnyRow) -> float | None:
    """Longest context in tokens: of a search, or of a `grow` workload."""
    if is_score(row):
        return None
    return _positive(row["verified_n_ctx"] if is_search(row) else row["max_ctx"])


def _perplexity(row: AnyRow) -> float | None:
    """The perplexity of a score, from which rows of repeats take it."""
    return _positive(row["perplexity"]) if is_score(row) else None


def _pass_ms(row: Repeat, n: int) -> float | None:
    """Time of a pass over n tokens at an empty cache: measured, or on the line between its neighbours."""
    passes = [each for each in row["passes"] if each["depth"] == 0]
    if not passes or not passes[0]["n"] <= n <= passes[-1]["n"]:
        return None
    return float(np.interp(n, [each["n"] for each in passes], [each["ms"] for each in passes]))


def _pp512(row: Repeat) -> float | None:
    ms = _pass_ms(row, 512)
    return 512e3 / ms if ms else None


def _at_16k(row: Repeat) -> float | None:
    at = row["depths"]["at"] if row["depths"] else []
    return next((each["tokens_per_s"] for each in at if each["depth"] == 16_384), None)


def _task_s(kept: bool) -> Reader:
    return lambda row: next((task["task_s"] for task in row["tasks"] if task["prefix_kept"] is kept), None)


def _none(row: AnyRow) -> None:
    return None


METRICS: tuple[Metric, ...] = (
    Metric(
        *("tokens_per_s", "tok/s", "higher", "slower"),
        _of(_of_a_length(lambda row: row["tokens_per_s"])),
        _error(lambda row: row["tokens_per_s_ci95"]),
    ),
    Metric(
        *("B_ms", "ms", "lower", "slower"),
        _of(lambda row: row["B_ms"]),
        _error(lambda row: row["B_ci95_ms"]),
    ),
    Metric("W_tokens_per_ms", "tok/ms", "higher", "slower", _of(_slope), _error(lambda row: row["W_ci95"])),
    Metric("ttft_ms", "ms", "lower", "slower", _of(lambda row: row["ttft_ms"]), _none),
    Metric("pp512", "tok/s", "higher", "slower", _of(_pp512), _none),
    Metric("ttft_8k_ms", "ms", "lower", "slower", _of(lambda row: _pass_ms(row, 8192)), _none),
    Metric("tokens_per_s_16k", "tok/s", "higher", "slower", _of(_at_16k), _none),
    Metric("task_s", "s", "lower", "slower", _of(_task_s(kept=False)), _none),
    Metric("task_kept_s", "s", "lower", "slower", _of(_task_s(kept=True)), _none),
    Metric(
        *("memory_bytes", "bytes", "lower", "memory", _of(_of_a_length(_peak_bytes)), _none),
        *("LARGER", "SMALLER"),
    ),
    Metric("max_ctx", "tokens", "higher", "context", _longest, _none, "SHORTER", "LONGER"),
    Metric("perplexity", "", "lower", "quality", _perplexity, _none, "WORSE", "BETTER"),
)
FAMILIES = tuple(dict.fromkeys(metric.family for metric in METRICS))


# Does decode at depth take the time that shallower depths predict? Spilled memory is slower. Pure.


SANE = 1.5  # times the predicted latency; memory across a bus is at least 10 times slower

Depths = Sequence[Sequence[float]]
"""[tokens of context, ms of a decode step], by increasing depth."""


def speed_ratios(depths: Depths) -> list[float]:
    """Latency over predicted latency from the third depth on, by a line through the shallower depths."""
    ratios = []
    for place in range(2, len(depths)):
        n, ms = np.array(depths[:place], dtype=float).T
        line = least_squares(n, ms)
        predicted = line.at(float(depths[place][0])) if line.slope_ms > 0 else float(ms.mean())
        ratios.append(float(depths[place][1]) / predicted)
    return ratios


def speed_ratio(depths: Depths) -> float | None:
    """Latency over predicted latency at the deepest point; null: fewer than three depths."""
    ratios = speed_ratios(depths)
    return ratios[-1] if ratios else None


def too_slow(depths: Depths) -> str | None:
    """Why decode is unreasonably slow at depth, as a sentence; null: it is not, or unknown."""
    for (n, ms), times in zip(depths[2:], speed_ratios(depths), strict=True):
        if times > SANE:
            slower = f"decodes {times:.1f} times slower at {n:.0f} tokens"
            return f"{slower} than shallower depths predict: {ms:.1f} ms"
    return None


# Classify the shape of latency(n): line, staircase, hinge, mode change, or flat. Pure.
#
# Uses medians of blocks of 256 tokens, which ignore spikes. A richer shape replaces the line when the
# Bayesian information criterion prefers it by 10 (very strong evidence: Kass and Raftery 1995) and the
# difference matters: the line's error exceeds 0.5% of the latency, and the richer shape's is under two
# thirds of that.


SHAPES_FEWEST_BLOCKS = 8  # under 2,048 tokens a bend cannot be distinguished from noise
FEWEST_IN_SEGMENT = 3
KNEES_PER_BLOCK = 8  # candidates per block: a knee may lie between blocks
EVIDENCE = 10.0
MISSES = 0.005  # of the median latency
LEFT = 2 / 3
FLAT = 0.05  # a slope under this share of another's, or a rise under this share of the level, is flat
STAIR_EXPLAINED = 0.5  # of the variance that recurs every 256 tokens
OUTLIER = 6.0  # robust standard deviations


@dataclass(frozen=True)
class Segment:
    """Positions from `from_n` to `to_n`, inclusive, and the line through them."""

    from_n: int
    to_n: int
    line: Line


@dataclass(frozen=True)
class Shape:
    """`name`: line, staircase, hinge, mode change, flat, or short (too few tokens to classify)."""

    name: str
    segments: tuple[Segment, ...]


def shape_of(n: Floats, ms: Floats, known: Interval | None) -> Shape:
    """The shape of a series without its first token; needs at least two tokens. `known`: the interval of its
    line."""
    x = n - 1
    whole = Segment(int(n[0]), int(n[-1]), least_squares(x, ms))
    if len(ms) < SHAPES_FEWEST_BLOCKS * BLOCK:
        return Shape("short", (whole,))
    centres, medians = blocks(x).mean(axis=1), np.median(blocks(ms), axis=1)
    count, level = len(centres), float(np.median(medians))
    straight, straight_rss = _line(centres, medians)

    def better(rss: float, terms: int, than: float, than_terms: int) -> bool:
        evidence = _bic(than, count, than_terms) - _bic(rss, count, terms)
        return evidence > EVIDENCE and _miss(rss, count, terms) < LEFT * _miss(than, count, than_terms)

    if _miss(straight_rss, count, 2) > MISSES * level:
        hinge, hinge_knee, hinge_rss = _hinge(centres, medians)
        two, mode_block, mode_rss = _two_lines(centres, medians)
        bends = better(hinge_rss, 3, straight_rss, 2)
        breaks = better(mode_rss, 5, straight_rss, 2)
        if breaks and not (bends and not better(mode_rss, 5, hinge_rss, 3)):
            return Shape("mode change", _cut(n, _parting(x, ms, mode_block, two), two))
        if bends:
            plateau = Line(hinge.B_ms, 0.0)
            slope = Line(hinge.B_ms - hinge.slope_ms * hinge_knee, hinge.slope_ms)
            return Shape("hinge", _cut(n, hinge_knee, (plateau, slope)))
    if _is_flat(known, straight.slope_ms * float(np.ptp(x)), level):
        return Shape("flat", (whole,))
    return Shape("staircase" if _has_stairs(n, ms) else "line", (whole,))


def is_flat(segment: Segment, level_ms: float) -> bool:
    """Whether latency rises over a segment by less than 5% of its level."""
    return abs(segment.line.slope_ms) * (segment.to_n - segment.from_n) < FLAT * level_ms


def _is_flat(known: Interval | None, rise_ms: float, level: float) -> bool:
    """Whether the slope is not distinguishable from zero, or too small to matter."""
    hidden = known is not None and abs(known.centre.slope_ms) <= known.slope_half_ms
    return hidden or abs(rise_ms) < 0.01 * level


def _has_stairs(n: Floats, ms: Floats) -> bool:
    """Whether residuals fall over each 256 tokens, then jump by the cost of 256 tokens of context."""
    line = least_squares(n, ms)
    residuals = ms - line.at(n)
    spread = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
    kept = np.abs(residuals - np.median(residuals)) <= OUTLIER * spread
    phase = n[kept].astype(np.int64) % BLOCK
    seen = np.bincount(phase, minlength=BLOCK)
    profile = np.bincount(phase, residuals[kept], minlength=BLOCK) / np.maximum(seen, 1)
    profile -= profile.mean()
    falling = 0.5 - (np.arange(BLOCK) + 0.5) / BLOCK
    # The correlation with a falling ramp that begins at each phase, all at once.
    overlaps = np.fft.irfft(np.fft.rfft(profile) * np.conj(np.fft.rfft(falling)), BLOCK)
    height = float(overlaps.max()) / float(falling @ falling)
    rest = profile - height * np.roll(falling, int(overlaps.argmax()))
    explained = 1 - float(rest @ rest) / max(float(profile @ profile), 1e-300)
    return explained > STAIR_EXPLAINED and height > 0.5 * BLOCK * line.slope_ms


def _line(x: Floats, y: Floats) -> tuple[Line, float]:
    line = least_squares(x, y)
    residuals = y - line.at(x)
    return line, float(residuals @ residuals)


def _hinge(x: Floats, y: Floats) -> tuple[Line, float, float]:
    """Fit a plateau (B) up to a knee and a rising slope: line, best knee, residual sum of squares."""
    ends = x[FEWEST_IN_SEGMENT - 1], x[-FEWEST_IN_SEGMENT]
    knees = np.linspace(*ends, num=KNEES_PER_BLOCK * len(x))
    past = np.maximum(x - knees[:, None], 0)
    centred = past - past.mean(axis=1, keepdims=True)
    slopes = centred @ y / (centred**2).sum(axis=1)
    left = ((y - y.mean() - slopes[:, None] * centred) ** 2).sum(axis=1)
    best = int(np.where(slopes > 0, left, np.inf).argmin())
    line, rss = _line(past[best], y)
    return line, float(knees[best]), rss if line.slope_ms > 0 else math.inf


def _two_lines(x: Floats, y: Floats) -> tuple[tuple[Line, Line], int, float]:
    """Fit two lines that need not meet: lines, first block of the second, residual sum of squares."""
    found = []
    for at in range(FEWEST_IN_SEGMENT, len(x) - FEWEST_IN_SEGMENT + 1):
        (first, first_rss), (second, second_rss) = _line(x[:at], y[:at]), _line(x[at:], y[at:])
        found.append((first_rss + second_rss, at, (first, second)))
    rss, block, lines = min(found, key=lambda each: each[0])
    return lines, block, rss


def _parting(x: Floats, ms: Floats, block: int, lines: tuple[Line, Line]) -> float:
    """The x where two lines part, to the token, searched within a block of the best block boundary."""
    near = slice((block - 1) * BLOCK, (block + 1) * BLOCK)
    first, second = (np.abs(ms[near] - line.at(x[near])) for line in lines)
    cost = np.cumsum(first) + second.sum() - np.cumsum(second)
    return float(x[near][int(cost.argmin())])


def _cut(n: Floats, knee: float, lines: tuple[Line, Line]) -> tuple[Segment, Segment]:
    at = int(knee) + 1  # knees are of x = n - 1
    return Segment(int(n[0]), at, lines[0]), Segment(at + 1, int(n[-1]), lines[1])


def _bic(rss: float, count: int, terms: int) -> float:
    return count * math.log(max(rss, 1e-300) / count) + terms * math.log(count)


def _miss(rss: float, count: int, terms: int) -> float:
    """Residual standard deviation of a shape."""
    return math.sqrt(rss / (count - terms))


# Find single tokens that took far longer than their neighbours. Pure.


NEIGHBOURS = 65  # a spike stands out from the median of this many tokens
SPIKE_SHARE, SPIKE_SIGMAS = 0.5, 10.0  # above that median by half of it and by ten robust standard deviations
LEAST_SPIKES = 4  # to estimate a period


def running_median(ms: Floats) -> Floats | None:
    """Median of the window around each token, padded at both ends; null: shorter than a window."""
    if len(ms) < NEIGHBOURS:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(ms, NEIGHBOURS)
    middle = NEIGHBOURS // 2
    return np.pad(np.partition(windows, middle, axis=1)[:, middle], middle, mode="edge")


def spike_places(ms: Floats, usual: Floats) -> NDArray[np.intp]:
    """Indices of the spikes; `usual`: the running median."""
    above = ms - usual
    spread = 1.4826 * float(np.median(np.abs(above)))
    return np.flatnonzero((above > SPIKE_SHARE * usual) & (above > SPIKE_SIGMAS * spread))


def spikes_of(ms: Floats, usual: Floats | None) -> Spikes:
    if usual is None:
        return no_spikes()
    at = spike_places(ms, usual)
    at = at[at > 0]  # a slow second token is handled in flags.py
    if len(at) == 0:
        return no_spikes()
    above = ms - usual
    period = float(np.median(np.diff(at))) if len(at) >= LEAST_SPIKES else None
    return {"count": len(at), "size_ms": float(np.median(above[at])), "period_tokens": period}


# Find blocks of latencies that repeat earlier ones to the last digit: copies carry no information. Pure.


# Tokens of a block, and different values among them: fewer may recur by chance where a clock is coarse.
COPIES_BLOCK, DIFFERENT = 16, 8


def copies(ms: NDArray[np.float64]) -> int:
    """How many latencies lie in blocks that occurred before."""
    if len(ms) < 2 * COPIES_BLOCK:
        return 0
    values = np.unique(ms, return_inverse=True)[1].ravel()
    names, width = values, 1  # equal names: blocks of this width are equal
    while width < COPIES_BLOCK:
        pairs = names[:-width] * len(ms) + names[width:]
        names, width = np.unique(pairs, return_inverse=True)[1].ravel(), 2 * width
    again = np.ones(len(names), dtype=bool)
    again[np.unique(names, return_index=True)[1]] = False
    copied = again & (_different(values) >= DIFFERENT)
    return int(np.count_nonzero(np.convolve(copied, np.ones(COPIES_BLOCK))))


def _different(values: NDArray[np.intp]) -> NDArray[np.int64]:
    """A lower bound on each block's different values: those that the tokens of a block before it lack."""
    order = np.argsort(values, kind="stable")
    apart = np.diff(order)
    recent = order[1:][(np.diff(values[order]) == 0) & (apart < COPIES_BLOCK)]
    new = np.ones(len(values), dtype=np.int64)
    new[recent] = 0
    return np.convolve(new, np.ones(COPIES_BLOCK, dtype=np.int64), "valid")

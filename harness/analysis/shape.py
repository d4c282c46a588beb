"""Classify the shape of latency(n): line, staircase, hinge, mode change, or flat. Pure.

Uses medians of blocks of 256 tokens, which ignore spikes. A richer shape replaces the line when the
Bayesian information criterion prefers it by 10 (very strong evidence: Kass and Raftery 1995) and the
difference matters: the line's error exceeds 0.5% of the latency, and the richer shape's is under two
thirds of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.analysis.line_fit import BLOCK, Floats, Interval, Line, blocks, least_squares

SHAPES_FEWEST_BLOCKS = 8  # under 2,048 tokens a bend cannot be distinguished from noise
FEWEST_IN_SEGMENT = 3
KNEES_PER_BLOCK = 8  # candidates per block: a knee may lie between blocks
EVIDENCE = 10.0
MISSES = 0.005  # of the median latency
LEFT = 2 / 3
FLAT = 0.05  # a slope under this share of another's, or a rise under this share of the level, is flat
STAIR_EXPLAINED = 0.5  # of the variance that recurs every 256 tokens
RISES = 0.01  # of the level: a whole series that rises by less is flat
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


def shape_of(n: Floats, ms: Floats, around: Interval | None) -> Shape:
    """The shape of a series without its first token; needs at least two tokens. `around`: the interval of its
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
    hidden = around is not None and abs(around.centre.slope_ms) <= around.slope_half_ms
    if hidden or abs(straight.slope_ms * float(np.ptp(x))) < RISES * level:
        return Shape("flat", (whole,))
    return Shape("staircase" if _has_stairs(n, ms) else "line", (whole,))


def is_flat(segment: Segment, level_ms: float) -> bool:
    """Whether latency rises over a segment by less than 5% of its level."""
    return abs(segment.line.slope_ms) * (segment.to_n - segment.from_n) < FLAT * level_ms


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
    candidates = []
    for at in range(FEWEST_IN_SEGMENT, len(x) - FEWEST_IN_SEGMENT + 1):
        (first, first_rss), (second, second_rss) = _line(x[:at], y[:at]), _line(x[at:], y[at:])
        candidates.append((first_rss + second_rss, at, (first, second)))
    rss, block, lines = min(candidates, key=lambda each: each[0])
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

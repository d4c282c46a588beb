"""Find the longest context that fits, in few tries. Pure: the caller tries, and says what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Need = Callable[[int], float]
"""Bytes that a context of n tokens is expected to take. Never less for more tokens."""

CALIBRATING_SHARE = 4  # where nothing was accounted for, a quarter of the guess shows how far it is off
PATIENCE = 7  # tries, after which a guess at the edge of what is left is one of noise: halve that
CLOSE = 8  # of what is left
APART = 1.25  # two contexts tell a slope when one is so much the longer; else noise would


@dataclass(frozen=True)
class Space:
    """The contexts there are: multiples of `granule`, from the lowest to the highest, both multiples."""

    granule: int
    lowest: int
    highest: int

    def __post_init__(self) -> None:
        if not 0 < self.granule <= self.lowest <= self.highest or (self.lowest | self.highest) % self.granule:
            raise ValueError(f"no contexts: {self}")

    def floor(self, n_ctx: float) -> int:
        """The longest context of at most so many tokens, within the space."""
        return max(self.lowest, min(self.highest, int(n_ctx) // self.granule * self.granule))


@dataclass(frozen=True)
class Try:
    """A context that was tried. `peak_bytes`: the most that it took; null where nobody knows."""

    n_ctx: int
    fits: bool
    peak_bytes: int | None = None


def predicted(space: Space, need: Need, limit_bytes: float) -> int | None:
    """The longest context whose need is within the limit; null where that of the lowest is not."""
    if need(space.lowest) > limit_bytes:
        return None
    low, high = space.lowest, space.highest + space.granule
    while high - low > space.granule:
        middle = low + (high - low) // (2 * space.granule) * space.granule
        low, high = (middle, high) if need(middle) <= limit_bytes else (low, middle)
    return low


def longest(space: Space, tries: Sequence[Try]) -> int | None:
    """The longest context that fits, as far as tried; null where none does. What fails, fails above too."""
    shortest_failing = _ceiling(space, tries)
    return max((t.n_ctx for t in tries if t.fits and t.n_ctx < shortest_failing), default=None)


def corrected(need: Need, tries: Sequence[Try]) -> Need:
    """The need, moved to what the contexts that fitted really took: by the last of them, or, where two are
    far enough apart to tell, by the line through both."""
    known = sorted((t.n_ctx, t.peak_bytes - need(t.n_ctx)) for t in tries if t.fits and t.peak_bytes)
    if not known:
        return need
    n, off = known[-1]
    shorter = [each for each in known if each[0] * APART <= n]
    slope = (off - shorter[-1][1]) / (n - shorter[-1][0]) if shorter else 0.0
    return lambda n_ctx: need(n_ctx) + off + slope * (n_ctx - n)


def following(
    space: Space,
    tries: Sequence[Try],
    need: Need | None,
    limit_bytes: float,
    accounted: bool,
    doubt_bytes: float = 0,
) -> int | None:
    """The context to try next; null when the longest is known: the one above it fails, or there is none.

    `need`: null where nothing is known of it. `accounted`: whether it is the stack's own account, which is
    tried as it stands, less `doubt_bytes`: what fits tells how far off it was, what fails tells nothing.
    """
    low, high = longest(space, tries) or space.lowest - space.granule, _ceiling(space, tries)
    if high - low <= space.granule:
        return None
    if need is None:
        return _middle(space, low, high) if high <= space.highest else space.floor(2 * max(low, 2048))
    now = corrected(need, tries)
    guess = predicted(space, now, limit_bytes) or space.lowest
    if not tries and not accounted:
        return space.floor(guess / CALIBRATING_SHARE)
    if not tries:
        return predicted(space, now, limit_bytes - doubt_bytes) or space.lowest
    if len(tries) >= PATIENCE and min(guess - low, high - guess) * CLOSE < high - low:
        leap = low + space.granule * 2 ** (len(tries) - PATIENCE)
        return _middle(space, low, high) if high <= space.highest or leap >= high else leap
    if low < guess < high:
        return guess
    measured = sum(t.fits and t.peak_bytes is not None for t in tries)
    if guess >= high and not accounted and measured == 1:
        return _middle(space, low, high)  # a second one that fits tells the slope
    # It is known to be wrong: step away from it, ever wider, and halve what is left once that is passed.
    wrong = [t for t in tries if t.fits == (guess <= low)]
    if guess >= high and doubt_bytes and not measured:
        guess = predicted(space, now, limit_bytes - doubt_bytes * 2 ** len(wrong)) or space.lowest
        if low < guess < high:
            return guess
    if guess <= low:
        beyond = sum(t.n_ctx > guess for t in wrong)
        step = low + space.granule * 2**beyond
    else:
        step = high - space.granule * 2 ** (len(wrong) - 1)
    return step if low < step < high else _middle(space, low, high)


def _ceiling(space: Space, tries: Sequence[Try]) -> int:
    """The shortest context that is known to fail."""
    return min([space.highest + space.granule, *(t.n_ctx for t in tries if not t.fits)])


def _middle(space: Space, low: int, high: int) -> int:
    return low + max(1, (high - low) // (2 * space.granule)) * space.granule

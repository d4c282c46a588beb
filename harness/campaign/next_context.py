"""Which context to try next, from what the tries so far took and what a context should take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Need = Callable[[int], float]
"""Expected bytes of a context of n tokens. Never decreases with n."""

CALIBRATING_SHARE = 4  # without an account, a try at a quarter of the guess calibrates the estimate
PATIENCE = 7  # tries, after which a guess at the edge of the interval is noise: bisect instead
CLOSE = 8  # a guess within 1/8 of the interval is at its edge
APART = 1.25  # ratio of two contexts from which a slope is fitted; closer ones would fit noise


@dataclass(frozen=True)
class Space:
    """All valid context lengths: multiples of `granule` from `lowest` to `highest`, both included."""

    granule: int
    lowest: int
    highest: int

    def __post_init__(self) -> None:
        if not 0 < self.granule <= self.lowest <= self.highest or (self.lowest | self.highest) % self.granule:
            raise ValueError(f"no contexts: {self}")

    def floor(self, n_ctx: float) -> int:
        """The longest valid context of at most `n_ctx` tokens (at least `lowest`)."""
        return max(self.lowest, min(self.highest, int(n_ctx) // self.granule * self.granule))


@dataclass(frozen=True)
class Try:
    """A context that was tried. `peak_bytes`: its peak memory; None if not known."""

    n_ctx: int
    fits: bool
    peak_bytes: int | None = None


def predicted(space: Space, need: Need, limit_bytes: float) -> int | None:
    """The longest context whose need is within the limit; None if not even the shortest is."""
    if need(space.lowest) > limit_bytes:
        return None
    low, high = space.lowest, space.highest + space.granule
    while high - low > space.granule:
        middle = low + (high - low) // (2 * space.granule) * space.granule
        low, high = (middle, high) if need(middle) <= limit_bytes else (low, middle)
    return low


def longest(space: Space, tries: Sequence[Try]) -> int | None:
    """The longest tried context that fits; None if none does. Every context above a failing one fails."""
    shortest_failing = _ceiling(space, tries)
    return max((t.n_ctx for t in tries if t.fits and t.n_ctx < shortest_failing), default=None)


def corrected(need: Need, tries: Sequence[Try]) -> Need:
    """The need, corrected by the measured peaks: by the offset at the longest context that fits, or by the
    line through two if they are at least APART."""
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
    margin_bytes: float = 0,
) -> int | None:
    """The context to try next; None when the longest is known (the next one fails or does not exist).

    `need`: None if not known. `accounted`: whether it is the stack's own account, which is tried directly,
    less `margin_bytes`. A try that fits shows the account's error; a try that fails does not.
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
        return predicted(space, now, limit_bytes - margin_bytes) or space.lowest
    if len(tries) >= PATIENCE and min(guess - low, high - guess) * CLOSE < high - low:
        leap = low + space.granule * 2 ** (len(tries) - PATIENCE)
        return _middle(space, low, high) if high <= space.highest or leap >= high else leap
    if low < guess < high:
        return guess
    measured = sum(t.fits and t.peak_bytes is not None for t in tries)
    if guess >= high and not accounted and measured == 1:
        return _middle(space, low, high)  # a second one that fits gives the slope
    # The guess is known to be wrong: step away from it, doubling each time, then bisect the rest.
    wrong = [t for t in tries if t.fits == (guess <= low)]
    if guess >= high and margin_bytes and not measured:
        guess = predicted(space, now, limit_bytes - margin_bytes * 2 ** len(wrong)) or space.lowest
        if low < guess < high:
            return guess
    if guess <= low:
        beyond = sum(t.n_ctx > guess for t in wrong)
        step = low + space.granule * 2**beyond
    else:
        step = high - space.granule * 2 ** (len(wrong) - 1)
    return step if low < step < high else _middle(space, low, high)


def _ceiling(space: Space, tries: Sequence[Try]) -> int:
    """The shortest context known to fail; one above the highest if none is."""
    return min([space.highest + space.granule, *(t.n_ctx for t in tries if not t.fits)])


def _middle(space: Space, low: int, high: int) -> int:
    return low + max(1, (high - low) // (2 * space.granule)) * space.granule

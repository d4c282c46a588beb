"""Requests as the client of a stream saw them: chunks that are no step of decoding, and requests without
timing.

A gap between two chunks is one token's latency only where each chunk brought one token. An empty first chunk
makes the first gap a part of prefill; chunks that the network delivered together have gaps of zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness.base.text import plural
from harness.records.foreign.log import Floats, Log, LogError, Request, Series, left_out

AT_ONCE = 0.01  # of the median gap: below it a chunk came with the one before
MOST_AT_ONCE = 0.1  # share of such gaps from which on tokens come in groups
PREFILL_GAP = 5.0  # times the median gap: a first gap above it, and above all others, belongs to prefill
LEAST_GAPS = 4  # fewer have no median to compare with
SAME = 1e-3  # relative: the first gap repeats the TTFT
MOST_EXTRA = 0.05  # share of chunks without a token above which a chunk is not a token

REPEATED = "the first gap repeats the TTFT, so there are more gaps than tokens - 1: it is left out"
PREFILL = "the first chunk brought no token: the long gap after it belongs to prefill, and TTFT includes it"
FIRST_AT_ONCE = "the first tokens came at once (a gap of zero): the series begins with the last of them"
SPREAD = "a few tokens came at once (gaps of zero): the gap before them is spread over them"
EXTRA = "there are more gaps than tokens - 1: some chunks brought no token"
NO_TIMING = (
    "no timing (no gaps): the client read none of the chunks as text, as with reasoning_content, or got the "
    "answer in one"
)
DRAFTS = (
    "speculative decoding: a step gives several tokens, so a gap is not one token's latency: totals only, "
    "and tok/s holds for this draft and text; for B and W measure without a draft"
)


class Requests:
    """The requests of a log, collected one by one, with notes on how many were repaired or left out."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._series: dict[str, Series] = {}
        self._totals: dict[str, Request] = {}
        self._repairs: dict[str, int] = {}
        self._failed = self._untimed = 0

    def add(
        self,
        name: str,
        prompt_tokens: int,
        first_ms: float | None,
        gaps_ms: Sequence[float],
        tokens: int | None,
        drafts: bool = False,
    ) -> None:
        """A request with the gaps between its chunks. `tokens`: how many it generated, by the tool's own
        count; null: not known. `drafts`: decoded with a draft, so it has totals only."""
        request = Request(tokens, first_ms, None, prompt_tokens or None)
        if request.fault:
            self.add_totals(name, request)
        elif len(gaps_ms) == 0 and (tokens != 1 or not first_ms):
            self._untimed += 1
        elif len(gaps_ms) == 0 or drafts:
            ms = math.fsum(gaps_ms)
            rate = 1e3 * (tokens - 1) / ms if tokens and ms > 0 else None
            self.add_totals(name, Request(tokens, first_ms, rate, prompt_tokens or None))
        else:
            self._series[name], repairs = series(prompt_tokens, first_ms, gaps_ms, tokens)
            for what in repairs:
                self._repairs[what] = self._repairs.get(what, 0) + 1

    def add_totals(self, name: str, request: Request) -> None:
        self._totals[name] = request

    def add_failed(self) -> None:
        self._failed += 1

    def log(self, notes: Sequence[str] = ()) -> Log:
        """All of them. Raises LogError if none has a result."""
        usable = len(self._series) + len(self._totals)
        count = usable + self._failed + self._untimed
        missing = left_out(self._failed, count)
        if self._untimed:
            missing.append(f"{self._untimed} of {count} requests left out: {NO_TIMING}")
        if not usable:
            why = "; ".join(missing)
            raise LogError(f"the {self._form} has no successful request" + (f": {why}" if why else ""))
        of = "" if count == 1 else f" of {count}"
        repairs = [f"{plural(times, 'request')}{of}: {what}" for what, times in self._repairs.items()]
        return Log(self._form, self._series, self._totals, [*missing, *repairs, *notes])


def series(
    prompt_tokens: int, first_ms: float | None, gaps_ms: Sequence[float], tokens: int | None
) -> tuple[Series, list[str]]:
    """A request as a series, and its repairs.

    With fewer chunks than tokens a gap spans several tokens. One chunk less is normal: the last token may end
    the stream without text.
    """
    gaps: Floats = np.asarray(gaps_ms, dtype=float)
    first = float(first_ms) if first_ms else math.nan  # a TTFT of 0 was not measured
    if (gaps < 0).any():
        at = int(np.argmax(gaps < 0))
        n = prompt_tokens + 1 + np.arange(len(gaps) + 1, dtype=float)
        negative = f"the gap before chunk {at + 2} is {gaps[at]:.6g} ms"
        return Series(n, np.concatenate([[first], gaps]), negative), []
    chunks, skipped, repairs = len(gaps) + 1, 0, []
    extra = 0 if tokens is None else chunks - tokens
    at_once = AT_ONCE * float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 0.0
    if extra > 0 and math.isclose(gaps[0], first, rel_tol=SAME):
        gaps, extra = gaps[1:], extra - 1
        repairs.append(REPEATED)
    elif extra > 0 and _is_prefill(gaps):
        first += float(gaps[0])
        gaps, extra = gaps[1:], extra - 1
        repairs.append(PREFILL)
    if extra > 0 and len(gaps) and gaps[-1] <= at_once:
        gaps, extra = gaps[:-1], extra - 1  # the end of the stream, without a token
    together = 0
    while together < len(gaps) and gaps[together] <= at_once:
        together += 1
    if 0 < together < len(gaps):
        gaps, skipped = gaps[together:], skipped + together
        repairs.append(FIRST_AT_ONCE)
    fault = None
    grouped = int((gaps <= at_once).sum())
    if tokens is not None and tokens > chunks + 1:
        fault = f"its {tokens} tokens came in {chunks} chunks, so a gap is not one token's latency"
    elif extra > max(1, MOST_EXTRA * chunks):
        fault = f"its {tokens} tokens came in {chunks} chunks, so a chunk is not one token"
    elif grouped > MOST_AT_ONCE * len(gaps):
        fault = f"{grouped} of its {len(gaps)} gaps are zero: a gap is not one token's latency"
    elif grouped:
        gaps = _spread(gaps, at_once)
        repairs.append(SPREAD)
    if extra > 0 and not fault:
        repairs.append(EXTRA)
    n = prompt_tokens + 1 + skipped + np.arange(len(gaps) + 1, dtype=float)
    return Series(n, np.concatenate([[first], gaps]), fault), repairs


def _is_prefill(gaps: Floats) -> bool:
    rest = gaps[1:]
    if len(rest) < LEAST_GAPS:
        return False
    return bool(gaps[0] > PREFILL_GAP * np.median(rest) and gaps[0] > rest.max())


def _spread(gaps: Floats, at_once: float) -> Floats:
    """Each gap in equal parts over the tokens that came with it. The first gap is not zero."""
    groups = np.cumsum(gaps > at_once) - 1
    means = np.bincount(groups, weights=gaps) / np.bincount(groups)
    return np.asarray(means[groups], dtype=float)

"""The gaps between the chunks of a stream, as a client saw them -> a series.

A gap between two chunks is one token's latency only where each chunk brought one token. An empty first chunk
makes the first gap a part of prefill; chunks that the network delivered together have gaps of zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness.records.foreign.log import Floats, Series

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
    "left out, with no timing (no gaps): the client read none of the chunks as text, as with "
    "reasoning_content, or got the answer in one"
)


def series(
    prompt_tokens: float, first_ms: float | None, gaps_ms: Sequence[float], tokens: float | None
) -> tuple[Series, list[str]]:
    """A request as a series, and its repairs. `tokens`: how many it generated, by the tool's own count.

    With fewer chunks than tokens a gap spans several tokens. One chunk less is normal: the last token may end
    the stream without text.
    """
    gaps: Floats = np.asarray(gaps_ms, dtype=float)
    first = float(first_ms) if first_ms else math.nan  # a TTFT of 0 was not measured
    chunks, repairs, fault = len(gaps) + 1, [], None
    extra = 0 if tokens is None else chunks - tokens
    at_once = AT_ONCE * float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 0.0
    if (gaps < 0).any():
        at = int(np.argmax(gaps < 0))
        fault = f"the gap before chunk {at + 2} is {gaps[at]:.6g} ms"
        extra = 0
    if extra > 0 and math.isclose(gaps[0], first, rel_tol=SAME):
        gaps, extra = gaps[1:], extra - 1
        repairs.append(REPEATED)
    elif (
        extra > 0
        and len(gaps) > LEAST_GAPS
        and gaps[0] > max(PREFILL_GAP * np.median(gaps[1:]), gaps[1:].max())
    ):
        first += float(gaps[0])
        gaps, extra = gaps[1:], extra - 1
        repairs.append(PREFILL)
    if extra > 0 and len(gaps) and gaps[-1] <= at_once:
        gaps, extra = gaps[:-1], extra - 1  # the end of the stream, without a token
    together = 0 if fault else next((at for at, gap in enumerate(gaps) if gap > at_once), 0)
    if together:
        gaps = gaps[together:]
        repairs.append(FIRST_AT_ONCE)
    grouped = int((gaps <= at_once).sum())
    if fault:
        pass
    elif tokens is not None and tokens > chunks + 1:
        fault = f"its {tokens} tokens came in {chunks} chunks, so a gap is not one token's latency"
    elif extra > max(1, MOST_EXTRA * chunks):
        fault = f"its {tokens} tokens came in {chunks} chunks, so a chunk is not one token"
    elif grouped > MOST_AT_ONCE * len(gaps):
        fault = f"{grouped} of its {len(gaps)} gaps are zero: a gap is not one token's latency"
    elif grouped:  # each gap in equal parts over the tokens that came with it
        groups = np.cumsum(gaps > at_once) - 1
        gaps = (np.bincount(groups, weights=gaps) / np.bincount(groups))[groups]
        repairs.append(SPREAD)
    if extra > 0 and not fault:
        repairs.append(EXTRA)
    n = prompt_tokens + 1 + together + np.arange(len(gaps) + 1, dtype=float)
    return Series(n, np.concatenate([[first], gaps]), fault), repairs

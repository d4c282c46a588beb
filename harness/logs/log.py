"""The result of reading a log: per-token series, totals per request, and notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from harness.system.endings import NotFinished, NotStarted
from harness.system.wording import shortened

Floats = NDArray[np.float64]


class LogError(NotFinished):
    """The file is not a usable log; the message is one printable sentence, even if it quotes the file."""

    def __init__(self, sentence: str) -> None:
        super().__init__(shortened(sentence, most=1000))


class OptionError(LogError, NotStarted):
    """An option does not fit the file, or an option is needed; the message names it."""


@dataclass(frozen=True)
class Series:
    """One generation: each token's position, and its latency in ms.

    The first token is prefill: its latency is NaN where the log has no TTFT. `fault`: why the series is not
    usable; null: no known fault.
    """

    n: Floats
    ms: Floats
    fault: str | None = None


@dataclass(frozen=True)
class Request:
    """Totals of one request, from a log without per-token latencies; null: not known. Raises TypeError."""

    new_tokens: int
    first_token_ms: float | None
    tokens_per_s: float | None

    def __post_init__(self) -> None:
        for each in vars(self).values():
            if not isinstance(each, int | float | None) or (each is not None and not math.isfinite(each)):
                raise TypeError("a total that is not a number")


@dataclass(frozen=True)
class Log:
    """`series`, `requests`: by name, in file order. `notes`: sentences on what was inferred and on what the
    format lacks."""

    format: str
    series: dict[str, Series] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    notes: Sequence[str] = ()


def generation(prompt_tokens: int, first_ms: float, gaps_ms: Sequence[float], tokens: int | None) -> Series:
    """A request as a series. `tokens`: how many it generated, by the tool's own count; null: not known.

    A client counts the chunks of a stream. With fewer chunks than tokens a gap spans several tokens and is
    not one token's latency. One chunk less is normal: the last token may end the stream without text.
    """
    n = prompt_tokens + 1 + np.arange(len(gaps_ms) + 1, dtype=float)
    fault = None
    if tokens is not None and tokens > len(n) + 1:
        fault = f"its {tokens} tokens came in {len(n)} chunks, so a gap is not one token's latency"
    return Series(n, np.asarray([first_ms, *gaps_ms], dtype=float), fault)


def overlapping(spans: Sequence[tuple[float, float]]) -> bool:
    """Whether any two requests, by start and end, ran at the same time."""
    ordered = sorted(spans)
    return any(later[0] < earlier[1] for earlier, later in pairwise(ordered))


SHARED = "requests ran concurrently: these are latencies of a shared server, not of a single user"


def left_out(failed: int, requests: int) -> list[str]:
    """A note on requests without a result; empty where all have one."""
    return [f"{failed} of {requests} requests failed or were cancelled and are left out"] if failed else []

"""The result of reading a log: per-token series, totals per request, and notes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.base.files import NotFinished, NotStarted
from harness.base.text import shortened

Floats = NDArray[np.float64]

# No request has more; a total beyond them is damage, or of another unit.
MOST_TOKENS, MOST_PER_S, LONGEST_MS = 1e9, 1e6, 1e9
MOST_FAULTS = 5  # named in a note
LEAST_DEPTHS = 3  # that make a line

SHARED = "requests ran concurrently: these are latencies of a shared server, not of a single user"
DRAFTS = (
    "speculative decoding: a step gives several tokens, so a gap is not one token's latency: totals only, "
    "and tok/s holds for this draft and text; for B and W measure without a draft"
)
SERVE = "for per-token times run `vllm bench serve --save-result --save-detailed` against the same server"


class LogError(NotFinished):
    """The file is not a usable log; the message is one printable sentence, even if it quotes the file."""

    def __init__(self, sentence: str) -> None:
        super().__init__(shortened(sentence, most=1000))


class OptionError(LogError, NotStarted):
    """An option does not fit the file, or an option is needed; the message names it."""


MS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
UNITS = dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s")
UNITS |= dict.fromkeys(("ms", "msec", "millis", "milliseconds"), "ms")
UNITS |= dict.fromkeys(("us", "µs", "usec", "micros", "microseconds"), "us")
UNITS |= dict.fromkeys(("ns", "nsec", "nanos", "nanoseconds"), "ns")
_ZONE = re.compile(r"(Z|[+-]\d\d:\d\d)$")


def moments_ms(texts: Iterable[str]) -> Floats:
    """Dates in ISO 8601, all in one time zone, in ms since the first; NaN for an empty text. Raises
    ValueError."""
    moments = np.array([_ZONE.sub("", text.strip()) for text in texts], "datetime64[ns]")
    since: Floats = (moments - moments[:1]) / np.timedelta64(1, "ms")
    return since


def number(value: Any) -> float:
    """A number of JSON, or one in text. Raises LogError for one with a comma, and ValueError, TypeError."""
    if isinstance(value, str) and "," in value:
        raise LogError(
            f"{value} has a comma, and numbers are read with a decimal point and without groups of thousands:"
            " run the tool with LC_ALL=C"
        )
    return float(value) if isinstance(value, str) else value + 0


@dataclass(frozen=True)
class Series:
    """One generation: each token's position, and its latency in ms.

    The first token is prefill: its latency is NaN where the log has no TTFT. `fault`: why the series is not
    usable; None: no known fault.
    """

    n: Floats
    ms: Floats
    fault: str | None = None


@dataclass(frozen=True)
class Request:
    """Totals of one request or test, from a log without per-token latencies; None: not known. Raises
    TypeError.

    `decode_ms`: the time that `tokens_per_s` was computed from, where a tool gives that. `spread`: of a mean
    over repetitions, the standard deviation of its rate, as a share.
    """

    new_tokens: int | None
    first_token_ms: float | None
    tokens_per_s: float | None
    prompt_tokens: int | None = None
    decode_ms: float | None = None
    spread: float | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(total, int | float | None) for total in vars(self).values()):
            raise TypeError("a total that is not a number")
        if self.first_token_ms == 0:  # was not measured
            object.__setattr__(self, "first_token_ms", None)

    @property
    def fault(self) -> str | None:
        """The first total that no request can have, with its value; None: all are possible."""
        counts = {"tokens": self.new_tokens, "prompt tokens": self.prompt_tokens}
        for name, tokens in counts.items():
            if tokens is not None and not (0 <= tokens <= MOST_TOKENS and tokens == int(tokens)):
                return f"{name}: {tokens:.15g}"
        times = {"time to first token": self.first_token_ms, "decode time": self.decode_ms}
        for name, ms in times.items():
            if ms is not None and not 0 < ms <= LONGEST_MS:
                return f"{name}: {ms:.15g} ms"
        if self.tokens_per_s is not None and not 0 < self.tokens_per_s <= MOST_PER_S:
            return f"tokens/s: {self.tokens_per_s:.15g}"
        return None


@dataclass(frozen=True)
class Log:
    """`series`, `requests`: by name, in file order. `notes`: sentences on repairs, and on gaps of the format.
    `equal_lengths`: the series are variants of one workload, so that a shorter one stopped early; requests
    have lengths of their own."""

    format: str
    series: Mapping[str, Series] = field(default_factory=dict)
    requests: Mapping[str, Request] = field(default_factory=dict)
    notes: Sequence[str] = ()
    equal_lengths: bool = False


def usable(log: Log) -> Log:
    """The log without requests that have an impossible total, and a note on these. Raises LogError if no
    other is left."""
    faults = {name: fault for name, request in log.requests.items() if (fault := request.fault)}
    if not faults:
        return log
    named = "; ".join(f"{name}: {fault}" for name, fault in [*faults.items()][:MOST_FAULTS])
    count = len(log.requests) + len(log.series)
    note = f"{len(faults)} of {count} requests left out, with impossible values: {named}"
    note += "; ..." if len(faults) > MOST_FAULTS else ""
    if len(faults) == count:
        raise LogError(f"the {log.format} has no usable request: {note}")
    possible = {name: request for name, request in log.requests.items() if name not in faults}
    return replace(log, requests=possible, notes=[note, *log.notes])


def overlapping(spans: Iterable[tuple[float, float]]) -> bool:
    """Whether any two requests, by start and end, ran at the same time."""
    return any(later[0] < earlier[1] for earlier, later in pairwise(sorted(spans)))


def distinct(names: Iterable[str]) -> list[str]:
    """The names, with a number where one occurs again: `tg128`, `tg128 #2`."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(f"{name} #{seen[name]}" if seen[name] > 1 else name)
    return numbered


def once(requests: Mapping[str, Request]) -> tuple[dict[str, Request], list[str]]:
    """Each request once, and a note on those printed again: a tool that prints the totals of one request in
    two places gives the same time of the prompt and the same rate to the last digit."""
    distinct_requests: dict[str, Request] = {}
    seen: set[Request] = set()
    for name, request in requests.items():
        if request not in seen or request.first_token_ms is None:
            distinct_requests[name] = request
        seen.add(request)
    again = len(requests) - len(distinct_requests)
    return distinct_requests, [
        f"requests printed twice, which count once: {again} of {len(requests)}"
    ] if again else []


def at_depths(points: Iterable[tuple[float, float]]) -> Series | None:
    """Points (n, ms) as a series in the order of n, equal n as their mean; None: fewer than LEAST_DEPTHS."""
    by_depth: dict[float, list[float]] = {}
    for n, ms in points:
        by_depth.setdefault(n, []).append(ms)
    if len(by_depth) < LEAST_DEPTHS:
        return None
    depths = sorted(by_depth)
    return Series(np.array(depths, float), np.array([float(np.mean(by_depth[n])) for n in depths]))

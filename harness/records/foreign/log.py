"""The result of reading a log: per-token series, totals per request, and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    """Totals of one request or test, from a log without per-token latencies; null: not known. Raises
    TypeError.

    `decode_ms`: the time that `tokens_per_s` was computed from, where a tool gives that; see timed().
    `spread`: of a mean over repetitions, the standard deviation of its rate, as a share.
    """

    new_tokens: int | None
    first_token_ms: float | None
    tokens_per_s: float | None
    prompt_tokens: int | None = None
    decode_ms: float | None = None
    spread: float | None = None

    def __post_init__(self) -> None:
        for each in vars(self).values():
            if not isinstance(each, int | float | None):
                raise TypeError("a total that is not a number")
        if self.first_token_ms == 0:  # was not measured
            object.__setattr__(self, "first_token_ms", None)

    @property
    def fault(self) -> str | None:
        """The first total that no request can have, with its value; null: none."""
        counts = {"tokens": self.new_tokens, "prompt tokens": self.prompt_tokens}
        for name, tokens in counts.items():
            if tokens is not None and not (0 <= tokens <= MOST_TOKENS and tokens == int(tokens)):
                return f"{name}: {tokens:.15g}"
        if self.first_token_ms is not None and not 0 < self.first_token_ms <= LONGEST_MS:
            return f"time to first token: {self.first_token_ms:.15g} ms"
        if self.decode_ms is not None and not 0 < self.decode_ms <= LONGEST_MS:
            return f"decode time: {self.decode_ms:.15g} ms"
        if self.tokens_per_s is not None and not 0 < self.tokens_per_s <= MOST_PER_S:
            return f"tokens/s: {self.tokens_per_s:.15g}"
        return None


def timed(
    new_tokens: int, first_token_ms: float | None, decode_ms: float | None, prompt_tokens: int | None
) -> Request:
    """A request whose rate is its tokens over the time of decode."""
    rate = 1e3 * new_tokens / decode_ms if decode_ms else None
    return Request(new_tokens, first_token_ms, rate, prompt_tokens, decode_ms)


@dataclass(frozen=True)
class Log:
    """`series`, `requests`: by name, in file order. `notes`: sentences on inferred values, and on gaps of
    the format. `equal_lengths`: the series are variants of one workload, so that a shorter one stopped
    early; requests have lengths of their own."""

    format: str
    series: dict[str, Series] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    notes: Sequence[str] = ()
    equal_lengths: bool = False


@dataclass(frozen=True)
class Content:
    """A log's text, and the JSON objects in it: of one document, one a line, or either behind lines of
    standard error; empty: it is not JSON objects."""

    text: str
    objects: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Reader:
    """One form of log of one tool: `is_one` recognises it by its content, `read` raises LogError."""

    format: str
    is_one: Callable[[Content], bool]
    read: Callable[[Content], Log]


def of_objects(
    form: str, is_one: Callable[[Mapping[str, Any]], bool], read: Callable[[Sequence[Mapping[str, Any]]], Log]
) -> Reader:
    """A reader of JSON objects that are all of one form."""
    return Reader(
        form,
        lambda content: bool(content.objects) and all(map(is_one, content.objects)),
        lambda content: read(content.objects),
    )


def of_text(form: str, is_one: Callable[[str], object], read: Callable[[str], Log]) -> Reader:
    """A reader of text."""
    return Reader(form, lambda content: bool(is_one(content.text)), lambda content: read(content.text))


def overlapping(spans: Sequence[tuple[float, float]]) -> bool:
    """Whether any two requests, by start and end, ran at the same time."""
    ordered = sorted(spans)
    return any(later[0] < earlier[1] for earlier, later in pairwise(ordered))


def usable(log: Log) -> Log:
    """The log without requests that have an impossible total, and a note on these. Raises LogError if no
    other is left."""
    faults = {name: fault for name, each in log.requests.items() if (fault := each.fault)}
    if not faults:
        return log
    named = "; ".join(f"{name}: {fault}" for name, fault in [*faults.items()][:MOST_FAULTS])
    count = len(log.requests) + len(log.series)
    note = f"{len(faults)} of {count} requests left out, with impossible values: {named}"
    note += "; ..." if len(faults) > MOST_FAULTS else ""
    if len(faults) == count:
        raise LogError(f"the {log.format} has no usable request: {note}")
    kept = {name: each for name, each in log.requests.items() if name not in faults}
    return replace(log, requests=kept, notes=[note, *log.notes])


SHARED = "requests ran concurrently: these are latencies of a shared server, not of a single user"


def left_out(failed: int, requests: int) -> list[str]:
    """A note on requests without a result; empty where all have one."""
    return [f"{failed} of {requests} requests failed or were cancelled and are left out"] if failed else []


def distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number where one occurs again: `tg128`, `tg128 #2`."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name} #{seen[name]}" if seen[name] > 1 else name)
    return found


def numbered(found: Sequence[Request]) -> dict[str, Request]:
    return {f"request {number}": request for number, request in enumerate(found, 1)}


def once(found: Mapping[str, Request]) -> tuple[dict[str, Request], list[str]]:
    """Each request once, and a note on those printed again: a tool that prints the totals of one request in
    two places gives the same time of the prompt and the same rate to the last digit."""
    kept: dict[str, Request] = {}
    seen: set[Request] = set()
    for name, request in found.items():
        if request not in seen or request.first_token_ms is None:
            kept[name] = request
        seen.add(request)
    again = len(found) - len(kept)
    return kept, [f"requests printed twice, which count once: {again} of {len(found)}"] if again else []

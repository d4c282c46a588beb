"""The metrics compared from run to run: unit, which direction is better, and how to read one from a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.series.line import block_spread
from harness.results.tables import TABLE_OF

Row = Mapping[str, object]


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
    value: Callable[[Row], float | None]
    error: Callable[[Row], float | None]
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


def _positive(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def _of(key: str) -> Callable[[Row], float | None]:
    return lambda row: _positive(row, key)


def _of_a_length(value: Callable[[Row], float | None]) -> Callable[[Row], float | None]:
    """A value that is comparable only at a fixed length: null for a `grow` workload, which may run longer."""
    return lambda row: None if row.get("workload") == "grow" else value(row)


def _of_a_decode(value: Callable[[Row], float | None]) -> Callable[[Row], float | None]:
    """Null for workloads of timed rows, whose memory includes copies of the context."""
    return lambda row: None if row.get("workload") in TABLE_OF else value(row)


def _interval(key: str) -> Callable[[Row], float | None]:
    def error(row: Row) -> float | None:
        known = row.get(key)
        if not isinstance(known, Sequence) or None in known or min(known) <= 0:
            return None
        spread = block_spread(
            (math.log(known[1]) - math.log(known[0])) / 2, int(_positive(row, "n_tokens") or 0)
        )
        return math.sqrt(spread.variance) if spread else None

    return error


def _slope(row: Row) -> float | None:
    """W, where the slope is distinguishable from zero."""
    return _positive(row, "W_tokens_per_ms") if row.get("W_identifiable") else None


def _peak_bytes(row: Row) -> float | None:
    """Peak memory: the resident set on a CPU; on a GPU the allocator's peak, else the device's."""
    if row.get("device") == "cpu":
        return _positive(row, "peak_rss_bytes")
    return _positive(row, "peak_allocator_bytes") or _positive(row, "peak_vram_bytes")


def _longest(row: Row) -> float | None:
    """Longest context in tokens: of a search, or of a `grow` workload."""
    return _positive(row, "verified_n_ctx") or _positive(row, "max_ctx")


def _perplexity(row: Row) -> float | None:
    """Of a score; the rows of repeats have it from there."""
    return _positive(row, "perplexity") if row.get("kind") == "scored" else None


def _rows(row: Row, key: str) -> list[Row]:
    """The rows in a list inside a row; empty without one."""
    value = row.get(key)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, Sequence) else []


def _pass_ms(row: Row, n: int) -> float | None:
    """Time of a pass over n tokens at an empty cache: measured, or on the line between its neighbours."""
    passes = [each for each in _rows(row, "passes") if each["depth"] == 0]
    lengths, ms = ([float(str(each[key])) for each in passes] for key in ("n", "ms"))
    if not passes or not lengths[0] <= n <= lengths[-1]:
        return None
    return float(np.interp(n, lengths, ms))


def _pp512(row: Row) -> float | None:
    ms = _pass_ms(row, 512)
    return 512e3 / ms if ms else None


def _at_16k(row: Row) -> float | None:
    depths = row.get("depths")
    at = _rows(depths, "at") if isinstance(depths, Mapping) else []
    return next((_positive(each, "tokens_per_s") for each in at if each["depth"] == 16_384), None)


def _task_s(kept: bool) -> Callable[[Row], float | None]:
    def seconds(row: Row) -> float | None:
        tasks = (each for each in _rows(row, "tasks") if each["prefix_kept"] is kept)
        return next((_positive(each, "task_s") for each in tasks), None)

    return seconds


def _none(row: Row) -> None:
    return None


METRICS: tuple[Metric, ...] = (
    Metric(
        "tokens_per_s",
        "tok/s",
        "higher",
        "slower",
        _of_a_length(_of("tokens_per_s")),
        _interval("tokens_per_s_ci95"),
    ),
    Metric("B_ms", "ms", "lower", "slower", _of("B_ms"), _interval("B_ci95_ms")),
    Metric("W_tokens_per_ms", "tok/ms", "higher", "slower", _slope, _interval("W_ci95")),
    Metric("ttft_ms", "ms", "lower", "slower", _of("ttft_ms"), _none),
    Metric("pp512", "tok/s", "higher", "slower", _pp512, _none),
    Metric("ttft_8k_ms", "ms", "lower", "slower", lambda row: _pass_ms(row, 8192), _none),
    Metric("tokens_per_s_16k", "tok/s", "higher", "slower", _at_16k, _none),
    Metric("task_s", "s", "lower", "slower", _task_s(kept=False), _none),
    Metric("task_kept_s", "s", "lower", "slower", _task_s(kept=True), _none),
    Metric(
        *("memory_bytes", "bytes", "lower", "memory", _of_a_decode(_of_a_length(_peak_bytes)), _none),
        *("LARGER", "SMALLER"),
    ),
    Metric("max_ctx", "tokens", "higher", "context", _longest, _none, "SHORTER", "LONGER"),
    Metric("perplexity", "", "lower", "quality", _perplexity, _none, "WORSE", "BETTER"),
)
FAMILIES = tuple(dict.fromkeys(metric.family for metric in METRICS))

"""The metrics compared from run to run: unit, which direction is better, and how to read one from a row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.analysis.columns import AnyRow, Ends, Repeat, UsersRow, is_score, is_search
from harness.analysis.line_fit import block_spread
from harness.base.files import TABLE_OF

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


def _users(read: Callable[[UsersRow], float | None]) -> Callable[[AnyRow], float | None]:
    """A figure with the most users at once."""
    return _of(lambda row: read(row["users"][-1]) if row["users"] else None)


def _tpot(which: Literal["median", "p99"]) -> Callable[[UsersRow], float | None]:
    return lambda at: at["tpot_ms"][which] if at["tpot_ms"] else None


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
    Metric("users_tokens_per_s", "tok/s", "higher", "slower", _users(lambda at: at["tokens_per_s"]), _none),
    Metric(
        *("users_output_tokens_per_s", "tok/s", "higher", "slower"),
        _users(lambda at: at["output_tokens_per_s"]),
        _none,
    ),
    Metric(
        "user_tokens_per_s", "tok/s", "higher", "slower", _users(lambda at: at["user_tokens_per_s"]), _none
    ),
    Metric("user_ttft_ms", "ms", "lower", "slower", _users(lambda at: at["ttft_ms"]["median"]), _none),
    Metric("user_ttft_p99_ms", "ms", "lower", "slower", _users(lambda at: at["ttft_ms"]["p99"]), _none),
    Metric("user_tpot_ms", "ms", "lower", "slower", _users(_tpot("median")), _none),
    Metric("user_tpot_p99_ms", "ms", "lower", "slower", _users(_tpot("p99")), _none),
    Metric(
        *("memory_bytes", "bytes", "lower", "memory", _of(_of_a_length(_peak_bytes)), _none),
        *("LARGER", "SMALLER"),
    ),
    Metric(
        *("joules_per_token", "J", "lower", "energy", _of(lambda row: row["joules_per_token"]), _none),
        *("COSTLIER", "CHEAPER"),
    ),
    Metric("max_ctx", "tokens", "higher", "context", _longest, _none, "SHORTER", "LONGER"),
    Metric("perplexity", "", "lower", "quality", _perplexity, _none, "WORSE", "BETTER"),
)
FAMILIES = tuple(dict.fromkeys(metric.family for metric in METRICS))

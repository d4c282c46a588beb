"""The part of a row that a sweep of prefill passes becomes. Missing values are null."""

from __future__ import annotations

from typing_extensions import TypedDict

Ends = list[float | None]
"""Low and high end of an interval; null: open."""


class PrefillStep(TypedDict):
    n: int
    jump_ms: float


class FirstTokenRow(TypedDict):
    """TTFT of a prompt of `n` tokens. `how`: measured, extrapolated, or null with the `reason`."""

    n: int
    ms: float | None
    ci95_ms: Ends | None
    how: str | None
    reason: str | None


class Utilisation(TypedDict):
    """Of the data sheet's rates at a pass of `n` tokens; `mbu_measured`: of the bandwidth measured here."""

    n: int
    ms: float
    mfu: float | None
    mbu: float | None
    mbu_measured: float | None


class PrefillDepth(TypedDict):
    """Passes behind `depth` tokens in the cache."""

    depth: int
    longest_n: int
    longest_ms: float
    kernel_from_n: int | None
    plateau_ms: float | None
    slope_ms: float | None
    ridge_n: float | None
    ridge_ci95: Ends | None
    ridge_reason: str | None


class PrefillRow(PrefillDepth):
    """A sweep of prefill passes; see series.prefill and records.prefill. TTFT, theory and the comparison with
    it are of an empty cache alone."""

    rounds: int
    shortest_n: int
    plateau_ci95_ms: Ends | None
    slope_ci95_ms: Ends | None
    quadratic_ms: float | None
    ridge_theory: dict[str, float | None]
    """by lm_head: on `every` token, or on the `last`"""
    bytes_per_s: float | None
    flops: float | None
    floors: dict[str, list[list[float]]] | None
    """by lm_head, theory's least time as [n, ms]"""
    comparison: str | None
    steps: list[PrefillStep]
    ttft: list[FirstTokenRow]
    utilisation: list[Utilisation]
    depths: list[PrefillDepth]
    """the deeper ones"""

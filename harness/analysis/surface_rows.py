"""The parts of a row that tables of timed rows become. Missing values are null."""

from __future__ import annotations

from typing_extensions import TypedDict

from harness.analysis.prefill_rows import Ends


class PassRow(TypedDict):
    """Prefill passes over `n` tokens behind `depth` tokens in the cache. `ms`: their median."""

    depth: int
    n: int
    ms: float
    passes: int


class AtDepthRow(TypedDict):
    """Decode with `depth` tokens in the cache."""

    depth: int
    ms: float
    tokens_per_s: float
    tokens_per_s_ci95: Ends | None
    windows: int


class DepthsRow(TypedDict):
    """Windows of decode; see series.windows. `curved`: a line does not describe them."""

    at: list[AtDepthRow]
    curved: bool


class TurnRow(TypedDict):
    """`depth`: tokens in the cache before; `evaluated`: of the turn's prefill; `decoded`: after the first
    token, which `prefill_ms` includes."""

    turn: int
    depth: int
    evaluated: int
    prefill_ms: float
    decode_ms: float
    decoded: int


class TaskRow(TypedDict):
    """A conversation; see records.surface."""

    prefix_kept: bool
    first_ttft_ms: float
    later_ttft_ms: float | None
    prefill_s: float
    task_s: float
    turns: list[TurnRow]


class SurfaceFigures(TypedDict):
    """Of workloads whose result is a table."""

    passes: list[PassRow]
    depths: DepthsRow | None
    tasks: list[TaskRow]

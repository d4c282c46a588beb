"""What others measured, by family of machines: how much, and how far off predictions were.

A family is a maker's GPUs, or CPUs. benchmarks.predictions --store writes the table: each machine was
predicted without its own rows and without all rows of the same source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from harness.base import data
from harness.base.text import plural
from harness.recommend.traits import BOARD

ERRORS = "prediction_errors.csv"  # in harness/data
DECODE, PROMPTS = "decode", "prompts"
NORMAL_90 = 1.645  # half of an interval of 90%, in standard deviations
UNKNOWN = "unknown"  # the family of a GPU whose maker is not known
FEW_ROWS, FEW_MACHINES, FEW_SOURCES = 5, 3, 3  # of fewer, shares and medians say nothing
# The spread of a family that nobody measured, as a logarithm, beyond that of its unknown kernels.
UNKNOWN_SPREAD = {DECODE: 0.3, PROMPTS: 0.6}
# CPUs that nobody measured, on which llama.cpp's kernels may compute more slowly than memory is read: an
# interval of 90% ends at four or ten times the time, for prompts at thrice that. SSE has half the width of
# AVX2, and no fused multiplication and addition; on RISC-V there may be no vectors at all. Other Arm CPUs run
# the kernels of the boards that were measured, and have the spread of any family that was not.
_UNMEASURED_CPUS = {
    (kind, phase): math.log(times) / NORMAL_90
    for kind, of_decode in (("x86 without AVX2", 4), ("RISC-V", 10))
    for phase, times in ((DECODE, of_decode), (PROMPTS, 3 * of_decode))
}


@dataclass(frozen=True)
class Evidence:
    """A row of the table. `kinds`: of layers that were measured; `least_bytes`, `most_bytes`: read in a step
    of them. `spread`: of the logarithm of times, beyond what the fitted terms say. `median`: error;
    `width`: of intervals, high over low."""

    family: str
    phase: str
    machines: int
    sources: int
    rows: int
    spread: float
    median: float
    within_25: float
    inside: float
    width: float
    least_bytes: float
    most_bytes: float
    kinds: tuple[str, ...]

    @property
    def is_few(self) -> bool:
        return self.rows < FEW_ROWS or self.machines < FEW_MACHINES or self.sources < FEW_SOURCES

    @property
    def of_whom(self) -> str:
        if self.family in ("CPU", BOARD):
            return plural(self.machines, self.family)
        return f"{plural(self.machines, 'machine')} of {self.family}"


@cache
def table() -> Mapping[tuple[str, str], Evidence]:
    """By family and phase."""
    rows = [
        Evidence(
            family=row["family"],
            phase=row["phase"],
            machines=int(row["machines"]),
            sources=int(row["sources"]),
            rows=int(row["rows"]),
            spread=float(row["spread"]),
            median=float(row["median"]),
            within_25=float(row["within_25"]),
            inside=float(row["inside"]),
            width=float(row["width"]),
            least_bytes=float(row["least_bytes"]),
            most_bytes=float(row["most_bytes"]),
            kinds=tuple(row["kinds"].split()),
        )
        for row in data.rows(ERRORS)
    ]
    return {(row.family, row.phase): row for row in rows}


def spreads() -> Mapping[tuple[str, str], float]:
    """By family and phase."""
    return {**{key: row.spread for key, row in table().items()}, **_UNMEASURED_CPUS}


def how_far_off(family: str) -> str:
    """How far off predictions of decode were on this family's machines."""
    row = table().get((family, DECODE))
    if row is None:
        maker, _, stack = family.partition(", ")
        whose = "a GPU of an unknown maker (--vendor)" if maker == UNKNOWN else f"machines of {maker}"
        if not stack:
            return f"how far off: unknown for {whose}, so the intervals are wide."
        return (
            f"how far off: unknown for {stack}: no speed of it was used; it is predicted as llama.cpp with as"
            " many bytes, and the intervals are wide."
        )
    if row.is_few:
        return (
            f"how far off: too few to say: others measured {plural(row.rows, 'row')} on {row.of_whom}, so"
            " the intervals are wide."
        )
    return (
        f"how far off: on {row.of_whom} that others measured, each predicted without its own rows and those"
        f" of the same source, {row.median:.1%} (median of {plural(row.rows, 'row')}, large sources counted"
        f" less); {row.within_25:.0%} within 25%, {row.inside:.0%} in their interval."
    )

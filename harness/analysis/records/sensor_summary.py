"""What the machine's sensors said while a repeat was timed: samples aligned to tokens, and what a row has of
it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Record = dict[str, Any]
Columns = Mapping[str, Sequence[int | None]]

# Of these the lowest, the median and the highest are kept; the others count, or are bits, or (the slowest
# CPU's clock) tell of a CPU that idles.
GAUGES = (
    *("cpu_temp_millidegrees_c", "cpu_clock_max_khz", "pi_arm_clock_hz"),
    *("gpu_temp_degrees_c", "gpu_sm_clock_mhz", "gpu_memory_clock_mhz", "gpu_power_mw"),
)
# Columns of a device's temperature and clock, the truest first, and what makes degrees and MHz of them.
_TEMPERATURES = {"cpu": (("cpu_temp_millidegrees_c", 1e-3),), "gpu": (("gpu_temp_degrees_c", 1.0),)}
_CLOCKS = {
    "cpu": (("pi_arm_clock_hz", 1e-6), ("cpu_clock_max_khz", 1e-3)),
    "gpu": (("gpu_sm_clock_mhz", 1.0),),
}


@dataclass(frozen=True)
class Timed:
    """The timed part. `start_ns`: generation began; `stamps_ns`: of each token, in the samples' clock, our
    flushes between them included; `first_n`: position of the first."""

    start_ns: int
    stamps_ns: tuple[int, ...]
    first_n: int

    @property
    def end_ns(self) -> int:
        return self.stamps_ns[-1]

    def holds(self, t_ns: int) -> bool:
        return self.start_ns <= t_ns <= self.end_ns

    def n_at(self, t_ns: int) -> int:
        """The position of the token in the making at a time; past the ends that of the first or the last."""
        index = int(np.searchsorted(self._stamps, t_ns))
        return self.first_n + min(index, len(self.stamps_ns) - 1)

    def tokens_by(self, t_ns: int) -> float:
        """Tokens that had come by a time from the first to the last stamp, the one in the making in part."""
        return float(np.interp(t_ns, self._stamps, np.arange(1, len(self.stamps_ns) + 1)))

    @cached_property
    def _stamps(self) -> np.ndarray[Any, Any]:
        return np.asarray(self.stamps_ns, dtype=float)


def timed(done: Record | None, stamps_ns: Sequence[int], prompt_tokens: int) -> Timed | None:
    """Of a repeat that came to its end with a token at least; else null. `stamps_ns`: of the tokens, counted
    from `done.start_ns` without the flushes between them."""
    if done is None or not stamps_ns:
        return None
    shift = np.zeros(len(stamps_ns) + 1, dtype=np.int64)
    for index, flush_ns in done["flushes"]:
        shift[min(index, len(stamps_ns))] += flush_ns
    absolute = done["start_ns"] + np.asarray(stamps_ns, dtype=np.int64) + np.cumsum(shift)[:-1]
    return Timed(done["start_ns"], tuple(absolute.tolist()), prompt_tokens + 1)


def gauges(columns: Columns, during: Timed | None) -> dict[str, dict[str, float]]:
    """Temperatures, clocks and power over the timed part: lowest, median, highest of the samples in it."""
    if during is None:
        return {}
    inside = [index for index, t_ns in enumerate(columns.get("t_ns", ())) if t_ns and during.holds(t_ns)]
    found = {}
    for name in GAUGES:
        read = [value for index in inside if name in columns and (value := columns[name][index]) is not None]
        if read:
            median = statistics.median(read)
            found[name] = {"lowest": min(read), "median": median, "highest": max(read)}
    return found


def row(record: Record) -> Record:
    """`hottest_c` and `median_clock_mhz` of the record's device over the timed part; null where unknown."""
    while_timed = (record.get("sensors") or {}).get("timed") or {}
    of = "cpu" if record.get("device") == "cpu" else "gpu"
    return {
        "hottest_c": _first(while_timed, _TEMPERATURES[of], "highest"),
        "median_clock_mhz": _first(while_timed, _CLOCKS[of], "median"),
    }


def _first(while_timed: Record, columns: Sequence[tuple[str, float]], which: str) -> float | None:
    return next((while_timed[name][which] * unit for name, unit in columns if name in while_timed), None)

"""What the CPUs did between two readings of their times. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Times = Mapping[str, float]
"""CPU seconds of all CPUs since boot, by the categories of psutil.cpu_times."""

BUSY_SHARE = 0.10  # of all CPUs, from which on other processes disturb a measurement
IDLE = ("idle", "iowait")


def busy_share(before: Times, after: Times, idle: Sequence[str] = IDLE) -> float | None:
    """Share of CPU time between two readings that was not `idle`; None if the CPU time counters do not
    advance."""
    seconds = spent(before, after)
    total = sum(seconds.values())
    return None if total <= 0 else 1 - sum(seconds.get(name, 0) for name in idle) / total


def spent(before: Times, after: Times) -> dict[str, float]:
    """Seconds by category, without guest time, which Linux also counts as user time."""
    return {
        name: max(0.0, seconds - before[name])
        for name, seconds in after.items()
        if not name.startswith("guest")
    }

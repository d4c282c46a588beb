"""Units of time in logs: given, from a column's name, or inferred; and whether a unit is plausible."""

from __future__ import annotations

import re

from harness.records.foreign.log import OptionError

MS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
# Plausible latencies of one token, in ms. Nothing decodes 10,000 tokens/s for a single user. Slower than
# 1 token/s is rare: an assumed unit is not accepted there. A named one is accepted up to a minute per token.
LEAST_MS, MOST_ASSUMED_MS, MOST_NAMED_MS = 0.1, 1e3, 60e3
EPOCH_S = (1e9, 5e9)  # 2001 to 2128, as seconds since 1970
SPELLINGS = {
    "s": "s sec secs second seconds",
    "ms": "ms msec millis milliseconds",
    "us": "us µs usec micros microseconds",
    "ns": "ns nsec nanos nanoseconds",
}
NAMES = {word: unit for unit, words in SPELLINGS.items() for word in words.split()}


def spaced(column: str) -> str:
    """A name with its words apart: `latencyMs` as `latency_Ms`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column)


def of_name(column: str) -> str | None:
    """The unit at the end of a column's name: `latency_ms`, `gap (us)`; null: none."""
    found = re.search(r"(?:^|[\W_])([^\W_]+)\W*$", spaced(column).lower())
    return NAMES.get(found[1]) if found else None


def of_gap(median: float) -> str | None:
    """The unit in which the time of a token is 1 ms to 1 s. Units are a factor of a thousand apart, so that
    exactly one fits; None: none."""
    return next((unit for unit, ms in MS.items() if 1 <= median * ms < 1e3), None)


def of_latencies(given: str | None, column: str, median: float) -> tuple[str, str | None]:
    """The unit of a column of latencies, and a note on it. Raises OptionError: the unit is not plausible."""
    if given:
        return given, f"{column} is in {given}, as given"
    named = of_name(column)
    unit = named or "ms"
    ms = median * MS[unit]
    if not LEAST_MS <= ms <= (MOST_NAMED_MS if named else MOST_ASSUMED_MS):
        raise OptionError(_question(column, unit, named is not None, median))
    return unit, None if named else f"{column} is assumed to be in ms; use --unit for another unit"


def of_times(given: str | None, column: str, median_gap: float, latest: float) -> tuple[str, str]:
    """The unit of a column of timestamps, and a note with the reason."""
    if given:
        return given, _timestamps(column, given, "as given", median_gap)
    named = of_name(column)
    if named and LEAST_MS <= median_gap * MS[named] <= MOST_NAMED_MS:
        return named, _timestamps(column, named, "by its name", median_gap)
    for unit, ms in MS.items():
        if EPOCH_S[0] <= latest * ms / 1e3 <= EPOCH_S[1]:
            return unit, _timestamps(column, unit, "inferred from its size as a date", median_gap)
    if inferred := of_gap(median_gap):
        return inferred, _timestamps(column, inferred, "inferred from its gaps", median_gap)
    raise OptionError(
        f"the gaps of {column} (median {median_gap:g}) fit no unit; give --unit s, ms, us or ns"
    )


def _timestamps(column: str, unit: str, why: str, median_gap: float) -> str:
    gap = f"the median gap is {median_gap * MS[unit]:.4g} ms"
    return f"timestamps of {column} are in {unit}, {why}: {gap}"


def _question(column: str, unit: str, named: bool, median: float) -> str:
    if any(EPOCH_S[0] <= median * ms / 1e3 <= EPOCH_S[1] for ms in MS.values()):
        return f"the median of {column} is {median:.4g}, like a date: give --time-column {column}, or --unit"
    ms = median * MS[unit]
    rate = 1e3 / ms
    speed = f"{rate:,.0f} tokens/s" if rate >= 1 else f"{ms / 1e3:,.0f} s a token"
    reading = "named" if named else "assumed to be"
    likely = of_gap(median)
    is_other = likely is not None and likely != unit
    other = f"; in {WORDS[likely]} it would be {median * MS[likely]:.3g} ms" if likely and is_other else ""
    options = " or ".join(f"--unit {u}" for u in dict.fromkeys((likely or unit, unit)))
    return (
        f"which unit is {column} in? Its median is {median:.3g}; in {unit}, as it is {reading}, "
        f"that is {speed}{other}; give {options}"
    )

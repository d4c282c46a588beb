"""Keys of a record for the machine's sensors and for cooling down."""

from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.records.values import (
    Above0,
    Count,
    From0,
    Number,
    Positive,
    Switch,
    Text,
)


class Timed(TypedDict):
    lowest: Number
    median: Number
    highest: Number


class Throttled(TypedDict):
    """A fact of the timed part: of bits `samples` of `of_samples` with it, of counters `ms` and `events`."""

    source: Text
    what: Text
    from_n: Positive
    to_n: Positive
    samples: Count | None
    of_samples: Count | None
    ms: Count | None
    events: Count | None


class OthersOnGpu(TypedDict):
    """What other processes used of the GPU's time in the timed part."""

    mean_percent: From0
    readings: Positive


class Domain(TypedDict):
    name: Text
    joules: From0 | None
    failed_reads: Count
    set_back: Count


class Energy(TypedDict):
    """Counters of energy between the first and the last sample of the decode."""

    timed_s: From0
    window_s: From0
    tokens: From0
    """in the window"""
    longest_gap_s: From0
    domains: dict[str, Domain]
    """by column"""


class Sensors(TypedDict):
    sources: NotRequired[Any]
    """the source of each column of `sensors.parquet`"""
    missing: dict[str, Text]
    """unavailable readings, and why"""
    samples: NotRequired[Any]
    interval_ms: Positive
    cost_ns: NotRequired[Any]
    """CPU time of the sampling thread"""
    timed: dict[str, Timed]
    """by column, over the timed part"""
    throttled: list[Throttled]
    others_on_gpu: NotRequired[OthersOnGpu | None]
    """null where it could not be read, and on a CPU; missing in older records"""
    energy: Energy | None
    """null without a counter"""


class IdlePower(TypedDict):
    """Of the device's counters, before the first repeat of the campaign."""

    watts: From0
    window_s: Above0


class Cooled(TypedDict):
    missing: NotRequired[Text]
    """why there is no temperature"""
    reached: NotRequired[Switch]
    from_c: NotRequired[Number]
    to_c: NotRequired[Number]
    waited_s: NotRequired[Number]

"""What a record holds of the machine's sensors, and of cooling down."""

from typing import Any

from pydantic import with_config
from typing_extensions import NotRequired, TypedDict

from harness.results.kinds.parts import DESCRIBED
from harness.results.kinds.values import Count, From0, Number, Positive, Switch, Text


@with_config(DESCRIBED)
class Timed(TypedDict):
    lowest: Number
    median: Number
    highest: Number


@with_config(DESCRIBED)
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


@with_config(DESCRIBED)
class Domain(TypedDict):
    name: Text
    joules: From0 | None
    failed_reads: Count
    set_back: Count


@with_config(DESCRIBED)
class Energy(TypedDict):
    """Counters of energy between the first and the last sample of the decode."""

    timed_s: From0
    window_s: From0
    tokens: From0
    """in the window"""
    longest_gap_s: From0
    domains: dict[str, Domain]
    """by column"""


@with_config(DESCRIBED)
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
    energy: Energy | None
    """null without a counter"""


@with_config(DESCRIBED)
class Cooled(TypedDict):
    missing: NotRequired[Text]
    """why there is no temperature"""
    reached: NotRequired[Switch]
    from_c: NotRequired[Number]
    to_c: NotRequired[Number]
    waited_s: NotRequired[Number]

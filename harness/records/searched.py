"""`kind: searched`: one search for the longest context."""

from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.records.checked import Check
from harness.records.common import Begun, Common, Ended, Own, OwnBegun, OwnEnded
from harness.records.measured import Attempt, Timing
from harness.records.scored import Quality
from harness.records.values import Count, From0, Number, Positive, Switch, Text


class Probe(TypedDict):
    n_ctx: Positive
    limit_bytes: Positive
    filled: Switch
    """whether filling was requested"""
    fits: Switch | None
    allocates: Switch
    decodes: NotRequired[Any]
    outcome: NotRequired[Any]
    reason: Text | None
    phase: NotRequired[Any]
    """the last one"""
    held: NotRequired[Any]
    """tokens"""
    decode: NotRequired[Any]
    """[tokens of context, ms of the fastest of 8 steps]"""
    peak_bytes: Count | None
    """counted as the limit counts"""
    seconds: Number
    fill_s: Number | None
    estimate_s: NotRequired[Any]
    speed_ratio: Number | None
    """the last step over the line through the others"""
    left_out: Text | None
    free_before_bytes: NotRequired[Any]
    waited_s: NotRequired[Any]
    """for memory to be freed"""
    pressure: NotRequired[Any]
    """pages read again while it was filled"""
    cpu_wait_share: NotRequired[Any]
    memory: NotRequired[Any]
    """as of `loaded`, at the end"""
    allocator: NotRequired[Any]


class Search(TypedDict):
    probes: list[Probe]
    granule: NotRequired[Positive | None]
    """contexts are multiples of it, in tokens, from `lowest` to `highest`"""
    lowest: NotRequired[Any]
    highest: NotRequired[Any]
    limit_bytes: NotRequired[Positive | None]
    """the memory limit"""
    limit_stated: NotRequired[Any]
    """whether the config states it, else the free memory"""
    held_by_others_bytes: NotRequired[Any]
    """memory of a GPU in use before the search began"""
    predicted_n_ctx: NotRequired[Positive | None]
    """predicted from the stack's job `account`, to be filled; without `account` from the first probe"""
    predicted_allocated_n_ctx: NotRequired[Positive | None]
    """predicted, only to be allocated; null without `account`"""
    predicted_from: NotRequired[Text | None]
    """`account`, or `first probe`"""
    need: NotRequired[dict[str, From0] | None]
    """bytes by part at `predicted_n_ctx` (of the shortest context, if none fits); null without `account`"""
    account_s: NotRequired[Number]
    """seconds of the job `account`"""
    verified_n_ctx: NotRequired[Positive | None]
    """the longest verified"""
    verified_by: NotRequired[Text | None]
    """`decode` at its end, or `allocation`"""
    allocated_n_ctx: NotRequired[Positive | None]
    """the longest that was allocated"""
    limit_reason: NotRequired[Text | None]
    """why the next longer one failed, or was not tried"""
    limited_by: NotRequired[Text | None]
    """`memory`, `trained context`, or `stack`: it allows no longer one; missing in older records"""
    not_filled: NotRequired[Text | None]
    """why contexts were not filled although requested"""


class OnlySearched(TypedDict):
    """Keys that no other kind has."""

    search: Search


class Searched(Common, Own, OnlySearched):
    """A search: no series, `search` instead of `done`, and `loaded` of the last probe."""

    timing: Timing


class UntimedEnd(Ended, OwnEnded):
    """How a check, a score or a search ended."""

    timing: Timing
    check: NotRequired[Check]
    quality: NotRequired[Quality]
    search: NotRequired[Search]


class Draft(Begun, OwnBegun, Attempt):
    """A record whose measurement has begun; its results are added to it later, or replace it."""

    check: NotRequired[Check]
    quality: NotRequired[Quality]
    search: NotRequired[Search]

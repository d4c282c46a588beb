"""The order of campaigns, also where a clock was wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

from harness.base.text import list_named, plural
from harness.records.kinds import Record

SKEW = timedelta(hours=1)  # between the clocks of two machines; more is a clock that is wrong
_COUNTED = re.compile(r"(.*)#(\d{6,9})", re.DOTALL)


def place(record: Record) -> str:
    """Sorts campaigns as they began: by their ids, which are times, but after all that were there before."""
    campaign = record["campaign"]
    return campaign["order"] if "order" in campaign else campaign["id"]


def next_place(campaign_id: str, before: Iterable[Record]) -> str | None:
    """The place of a new campaign; None where its id is later than all before, as with a clock that is right.
    Else the latest place with a counter."""
    latest = max(map(place, before), default="")
    if latest < campaign_id:
        return None
    counted = _COUNTED.fullmatch(latest)
    return f"{counted[1]}#{int(counted[2]) + 1:06}" if counted else f"{latest}#000001"


def from_the_future(campaign_id: str) -> bool:
    """Whether the start is later than now, so that one of the clocks is wrong."""
    try:
        began = datetime.fromisoformat(campaign_id)
    except ValueError:  # of published figures
        return False
    return began.replace(tzinfo=began.tzinfo or timezone.utc) > datetime.now(timezone.utc) + SKEW


def left_out(ids: Iterable[str]) -> str:
    """A note that campaigns from the future are left out."""
    dates = sorted({id_[:16] for id_ in ids})
    clock = "correct the clock of this machine, or move the records away if theirs was wrong"
    return f"{plural(len(dates), 'campaign')} from the future left out ({list_named(dates, 3)}): {clock}"

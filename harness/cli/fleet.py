"""A fleet's progress, as lines or as events in JSON (`harness run --on`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from harness.base.text import printable
from harness.campaign import fleet as campaign_fleet
from harness.campaign.fleet import Event
from harness.campaign.opening import RunOptions
from harness.config import Experiment
from harness.config.plan import Cell
from harness.records import Stored

_REASONS = 2  # shown of a repeat that is not ok


def run(
    experiment: Experiment, cells: Sequence[Cell], request: RunOptions, arguments: argparse.Namespace
) -> list[Stored]:
    """The records that count. Raises as harness.campaign.fleet.run does."""
    place = campaign_fleet.place_of(arguments.on)
    watcher = _Events() if arguments.json else _Lines()
    with campaign_fleet.connected(place, arguments.allow_unauthenticated) as cluster:
        return campaign_fleet.run(experiment, cells, request, place, cluster, watcher)


class _Events:
    """One JSON object per line on standard output."""

    def happened(self, event: Event) -> None:
        print(json.dumps(event, allow_nan=False), flush=True)


class _Lines:
    """A line per repeat and per change of the fleet on standard error."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def happened(self, event: Event) -> None:
        if (line := text_of(event)) and self._is_new(event, line):
            print(printable(line), file=sys.stderr, flush=True)

    def _is_new(self, event: Event, line: str) -> bool:
        """Lines about a machine come once, though each campaign on a node repeats them."""
        if event["event"] not in ("message", "warning"):
            return True
        topic = ":".join(line.split(":")[:2])
        new = topic not in self._topics
        self._topics.add(topic)
        return new


def text_of(event: Event) -> str | None:
    """Describe an event on one line; None for events that a log does not need."""
    kind, device = event["event"], event.get("device", "")
    if kind in ("begins", "ended"):
        return None
    if kind == "record":
        reasons = "; ".join(list(event["reasons"])[:_REASONS])
        done = f" ({event['repeats_done']}/{event['repeats']})" if "repeats" in event else ""
        ended = f"{event['status']}{done}" + (f": {reasons}" if reasons else "")
        return f"{device}: {event['cell']} #{event['repeat']}  {ended}"
    where = " ".join(word for word in (device, event.get("node", "")) if word)
    subject = f"{where}: " if where else ""
    cell = f"{event['cell']} left out: " if kind == "left_out" else ""
    return f"{subject}{cell}{event.get('text', kind)}"

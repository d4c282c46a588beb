"""A fleet's progress: live on a terminal, as lines elsewhere, or as events in JSON (`harness run --on`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from harness.base.text import duration, list_named, printable, shortened, unfiltered
from harness.campaign import fleet as campaign_fleet
from harness.campaign.fleet import DeviceProgress, Event, FleetWatcher
from harness.campaign.rounds import RunOptions
from harness.config import Experiment
from harness.config.plan import Cell
from harness.records import Stored

_REASONS = 2  # shown of a repeat that is not ok


def run(
    experiment: Experiment, cells: Sequence[Cell], request: RunOptions, arguments: argparse.Namespace
) -> list[Stored]:
    """The records that count. Raises as harness.campaign.fleet.run does."""
    place = campaign_fleet.place_of(arguments.on)
    connected = campaign_fleet.connected(place, arguments.allow_unauthenticated)
    with _watcher(arguments.json) as watcher, connected as cluster:
        return campaign_fleet.run(experiment, cells, request, place, cluster, watcher)


@contextlib.contextmanager
def _watcher(as_json: bool) -> Iterator[FleetWatcher]:
    if as_json:
        yield _Events()
        return
    if not sys.stderr.isatty():
        yield _Lines()
        return
    console = Console(file=unfiltered(sys.stderr), highlight=False)
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        yield _View(live)


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
            self.show(line)

    def _is_new(self, event: Event, line: str) -> bool:
        """Lines about a machine come once, though each campaign on a node repeats them."""
        if event["event"] not in ("message", "warning"):
            return True
        topic = ":".join(line.split(":")[:2])
        new = topic not in self._topics
        self._topics.add(topic)
        return new

    def show(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _View(_Lines):
    """Lines that stay, above a table that is drawn again as it changes."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    def happened(self, event: Event) -> None:
        if event["event"] == "progress":
            self._live.update(table(event["devices"]))
        else:
            super().happened(event)

    def show(self, line: str) -> None:
        self._live.console.print(printable(line), markup=False, soft_wrap=True)


def text_of(event: Event) -> str | None:
    """Describe an event on one line; null for events that a table shows, or a log does not need."""
    kind, device = event["event"], event.get("device", "")
    where = " ".join(word for word in (device, event.get("node", "")) if word)
    if kind == "record":
        repeat = f"{event['cell']} #{event['repeat']}" if "repeat" in event else event["cell"]
        reasons = "; ".join(list(event.get("reasons", ()))[:_REASONS])
        return f"{device}: {repeat}  {event['status']}" + (f": {reasons}" if reasons else "")
    if kind in ("begins", "progress", "ended"):
        return None
    subject = f"{where}: " if where else ""
    cell = f"{event['cell']} left out: " if kind == "left_out" else ""
    return f"{subject}{cell}{event.get('text', kind)}"


def table(devices: Sequence[DeviceProgress]) -> Table:
    """A line per device: nodes, repeats done, time left, and the current measurement."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("device", "nodes", "repeats", "left", "now"):
        shown.add_column(heading, no_wrap=True)
    for each in devices:
        left = "-" if each["eta_s"] is None else duration(each["eta_s"])
        now = list_named([shortened(printable(cell), 50) for cell in each["now"]], 2) or "-"
        done = f"{each['repeats_done']}/{each['repeats']}"
        shown.add_row(printable(each["device"]), str(each["nodes"]), done, left, now)
    return shown

"""What the driver of a fleet tells its watcher: events, and progress where it has changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness.fleet.cluster import Node
from harness.fleet.device import Campaign, Device
from harness.fleet.events import DeviceProgress, Event, FleetWatcher
from harness.fleet.nodes import Nodes
from harness.results import Stored


class Messages:
    def __init__(self, watcher: FleetWatcher) -> None:
        self._watcher = watcher
        self._shown: list[DeviceProgress] = []

    def say(self, event: Any, node: Node | None, **values: Any) -> None:
        place: Event = {"event": event}
        if node is not None:
            place["node"] = node.address
        self._watcher.happened({**place, **values})  # type: ignore[typeddict-item]

    def warn(self, text: str) -> None:
        self.say("warning", None, text=text)

    def record(self, stored: Stored, status: str, reasons: Sequence[str]) -> None:
        """A record was stored."""
        record = stored.record
        fleet = record["campaign"].get("fleet")
        event: Event = {
            "event": "record",
            "cell": record["cell"],
            "repeat": record["repeat"],
            "status": status,
            "reasons": list(reasons),
            "folder": str(stored.folder),
        }
        self._watcher.happened({**event, "device": fleet["device"]} if fleet else event)

    def progress(self, devices: Iterable[Device], campaigns: Iterable[Campaign], nodes: Nodes) -> None:
        """Of each device, where anything but the time left has changed."""
        running = [each for each in campaigns if each.begun]
        shown = []
        for device in devices:
            mine = [each.begun for each in running if each.begun and each.device == device.name]
            now = [f"{begun['cell']} #{begun['repeat']}" for begun in mine]
            shown.append(device.progress(len(nodes.able(device.name)), now))
        if [_steady(each) for each in shown] != [_steady(each) for each in self._shown]:
            self._shown = shown
            self._watcher.happened({"event": "progress", "devices": shown})


def _steady(progress: DeviceProgress) -> object:
    return {**progress, "eta_s": None}

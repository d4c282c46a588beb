"""Before the first campaign: one node after the other makes or downloads weights, and the others copy them.

Nothing is copied while a campaign runs: sending disturbs the node that sends. A node that joins then, and
everything that cannot be copied, has its weights made by its campaign, as without `share_weights`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

from harness.fleet.cluster import Cluster, Node, Outcome
from harness.fleet.copies import Copy
from harness.fleet.device import Device
from harness.fleet.jobs import Jobs

NOT_SHARED = "weights are not shared"


class Stock:
    """`jobs`: those under way, by name. `say`: takes the kind of an event, a node, and a text."""

    def __init__(self, cluster: Cluster, jobs: Jobs, say: Callable[..., None]) -> None:
        self._cluster, self._jobs, self._say = cluster, jobs, say
        self._numbers = itertools.count(1)
        self._offered: dict[tuple[str, str], set[str]] = {}  # to a node with a device: targets of copies
        self._lack: set[tuple[str, str]] = set()  # nodes with a device that could not have all
        self._copies: dict[str, Copy] = {}
        self.jobs: dict[str, tuple[Node, str]] = {}

    def begin(
        self, devices: Iterable[tuple[Device, Collection[Node]]], lacking: Callable[[Device], list[str]]
    ) -> bool:
        """Give the next nodes their weights; false if nothing is left to do. First one node of each device
        in turn, as the next may copy what it has; then all others; then those that lack what another has
        since. `lacking`: the cells of a device without a record."""
        if self.jobs:
            return True
        left = []
        for device, nodes in devices:
            new = [node for node in nodes if (node.id, device.name) not in self._offered]
            if new and len(new) == len(nodes):
                left = [(device, new[0])]
                break
            left += [
                (device, node) for node in nodes if node in new or self._can_have_more(node, device.name)
            ]
        for device, node in left:
            self._give(device, node, lacking(device))
        return bool(left)

    def _can_have_more(self, node: Node, device: str) -> bool:
        known = self._offered[node.id, device]
        return (node.id, device) in self._lack and any(key not in known for key in self._from_others(node))

    def _from_others(self, node: Node) -> dict[str, Copy]:
        return {key: each for key, each in self._copies.items() if each["node"] != node.id}

    def _give(self, device: Device, node: Node, cells: list[str]) -> None:
        name = f"weights {next(self._numbers)}"
        offered = self._from_others(node)
        self._offered.setdefault((node.id, device.name), set()).update(offered)
        self.jobs[name] = node, device.name
        job = self._jobs.stock(device.name, cells, list(offered.values()))
        self._cluster.submit(name, job, node=node.id)

    def hear(self, name: str, line: dict[str, Any]) -> None:
        """A line of one of its jobs."""
        node, device = self.jobs[name]
        if line["event"] == "stocked":
            for each in line["copies"]:
                self._copies.setdefault(each["target"], each)
            (self._lack.add if line["lacks"] else self._lack.discard)((node.id, device))
        elif line["event"] in ("message", "warning"):
            self._say(line["event"], node, text=line["line"])
        elif line["event"] == "failed":
            self._say("warning", node, text=f"{NOT_SHARED}: {line['reason']}")

    def end(self, name: str, outcome: Outcome) -> None:
        """One of its jobs has ended."""
        node, _ = self.jobs.pop(name)
        if outcome.lost is not None or outcome.error:
            self._say("warning", node, text=f"{NOT_SHARED}: {outcome.lost or outcome.error}")
        if outcome.lost is not None:
            self._copies = self._from_others(node)

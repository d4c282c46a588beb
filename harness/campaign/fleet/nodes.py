"""The nodes of a fleet: who has joined with which devices, who is refused, and who is gone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import harness
from harness.base.text import list_named
from harness.campaign import provenance
from harness.campaign.fleet import portions
from harness.campaign.fleet.access import FleetError
from harness.campaign.fleet.cluster import Cluster, Node
from harness.campaign.fleet.place import Place
from harness.config.plan import Cell
from harness.records.parts import Machine

CLOCK_NOTED_S = 2.0  # a clock that is ahead or behind by more is mentioned


@dataclass
class Member:
    """A node with this harness. `devices`: those of the fleet, by name, with their number. `machine`: as
    which it has introduced itself. `able`: it may get campaigns. `honest`: it has sent what nodes send."""

    node: Node
    devices: dict[str, int]
    clock_ahead_s: float
    machine: Machine | None = None
    able: bool = True
    honest: bool = True


class Nodes:
    """`members`: those that are there, by Ray's id."""

    def __init__(
        self, cluster: Cluster, place: Place, cells: Sequence[Cell], say: Callable[..., None]
    ) -> None:
        """`say`: takes the kind of an event, a node, and a text."""
        self._cluster, self._place, self._cells, self._say = cluster, place, cells, say
        self._version = [harness.__version__, *filter(None, [provenance.git_commit()])]
        self._seen: set[str] = set()
        self._began = False
        self.members: dict[str, Member] = {}

    def meet(self) -> list[Member]:
        """Look who is there; returns the nodes that have joined since and are accepted.

        Raises FleetError, the first time alone, if one is refused or a device is missing; and HeadLost.
        """
        there = {node.id: node for node in self._cluster.nodes()}
        for key in self.members.keys() - there.keys():
            self._say("lost", self.members.pop(key).node, text="left the cluster")
        if not self._began:
            self._check_devices(there.values())
        new = [node for key, node in there.items() if key not in self._seen and self._devices_of(node)]
        self._seen |= there.keys()
        with ThreadPoolExecutor(8) as several:
            versions = list(several.map(self._cluster.version, new))
        joined = []
        for node, (version, lacks, ahead_s) in zip(new, versions, strict=True):
            problem = self._problem(node, version, lacks)
            if problem and not self._began:
                raise FleetError(problem)
            if problem:
                self._say("refused", node, text=problem)
            else:
                joined.append(self._joins(node, ahead_s))
        self._began = True
        return joined

    def able(self, device: str) -> list[Member]:
        """The nodes with a device that may have a campaign."""
        return [member for member in self.members.values() if device in member.devices and member.able]

    def _devices_of(self, node: Node) -> dict[str, int]:
        named = self._place.devices
        return {name: count for name, count in node.devices.items() if not named or name in named}

    def _joins(self, node: Node, ahead_s: float) -> Member:
        member = self.members[node.id] = Member(node, self._devices_of(node), round(ahead_s, 3))
        self._say("joined", node, text=f"has {', '.join(member.devices)}")
        if abs(ahead_s) > CLOCK_NOTED_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            self._say("warning", node, text=f"its clock is {abs(ahead_s):.0f} s {side} this machine's")
        return member

    def _problem(self, node: Node, version: list[str], lacks: str) -> str | None:
        if not version:
            return f"the node at {node.address} cannot run the harness: {lacks}"
        # A commit that one of both does not know is not compared.
        if not lacks and all(theirs == ours for theirs, ours in zip(version, self._version, strict=False)):
            return None
        theirs, ours = " ".join(version), " ".join(self._version)
        return f"harness {theirs} on the node at {node.address}, {ours} here: install the same on both"

    def _check_devices(self, nodes: Collection[Node]) -> None:
        """Raises FleetError: the fleet lacks a device that the fleet's file or a cell names."""
        there = list(dict.fromkeys(name for node in nodes for name in node.devices))
        if not there:
            hint = "start its nodes with ray start --resources='{\"NAME\": 1}'"
            raise FleetError(f"{self._place.words}: no node has a device; {hint}")
        has = f"there are {list_named(there, 8)}"
        for name in self._place.devices:
            if name not in there:
                raise FleetError(f"devices.{name}: no node of {self._place.words} has this device; {has}")
        mine = [name for name in there if not self._place.devices or name in self._place.devices]
        for glob in portions.unknown_devices(self._cells, mine):
            raise FleetError(f"where: no device of the fleet matches {glob}; there are {list_named(mine, 8)}")
        for cell in self._cells:
            if not any(portions.goes_to(cell, name) for name in mine):
                raise FleetError(f"{cell.id}: no device is in `where` of its model and of its variant")

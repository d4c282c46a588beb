"""The nodes of a fleet: who has joined with which devices, who is refused, and who is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
from harness.campaign import facts
from harness.fleet import share
from harness.fleet.cluster import Cluster, Node
from harness.fleet.place import FleetError, Place
from harness.plan import Cell
from harness.system.wording import named

CLOCK_NOTED_S = 2.0  # a clock that is ahead or behind by more is mentioned


class Nodes:
    """`clocks`: how far each accepted node's clock is ahead of this machine's, in seconds, by its id.
    `avoided`: ids of nodes that get no campaign: refused, unable to run one, or gone. `gone`: those that were
    there at the look before the last."""

    def __init__(
        self, cluster: Cluster, place: Place, cells: Sequence[Cell], say: Callable[..., None]
    ) -> None:
        """`say`: takes the kind of an event, a node, and a text."""
        self._cluster, self._place, self._cells, self._say = cluster, place, cells, say
        self._version = harness.__version__, facts.git_commit() or ""
        self._there: dict[str, Node] = {}
        self._began = False
        self.clocks: dict[str, float] = {}
        self.avoided: set[str] = set()
        self.gone: list[Node] = []

    def meet(self) -> list[Node]:
        """Look who is there; returns the nodes that have joined since and are accepted.

        Raises FleetError, the first time alone, if one is refused or a device is missing; and HeadLost.
        """
        there = {node.id: node for node in self._cluster.nodes()}
        self.gone = [node for key, node in self._there.items() if key not in there and self.mine(node)]
        self.avoided.update(node.id for node in self.gone)
        for node in self.gone:
            self._say("lost", node, text="left the cluster")
        new = [node for node in there.values() if node.id not in self._there and self.mine(node)]
        self._there = there
        if not self._began:
            self._check_devices()
        with ThreadPoolExecutor(8) as several:
            greeted = list(several.map(self._cluster.version, new))
        accepted = [
            node
            for node, (found, ahead_s) in zip(new, greeted, strict=True)
            if self._accepts(node, found, ahead_s)
        ]
        self._began = True
        return accepted

    def mine(self, node: Node) -> list[str]:
        """The devices of a node that belong to the fleet."""
        return [name for name in node.devices if not self._place.devices or name in self._place.devices]

    def devices(self) -> set[str]:
        """Those of the accepted nodes."""
        return {name for node in self.accepted() for name in self.mine(node)}

    def able(self, device: str) -> list[Node]:
        """The nodes with a device that may have a campaign."""
        return [node for node in self.accepted() if device in node.devices and node.id not in self.avoided]

    def accepted(self) -> list[Node]:
        return [node for node in self._there.values() if node.id in self.clocks]

    def named(self, key: str | None) -> Node | None:
        """The node with an id, while it is there."""
        return self._there.get(key or "")

    def _accepts(self, node: Node, found: dict[str, Any], ahead_s: float) -> bool:
        if problem := self._problem(node, found):
            if not self._began:
                raise FleetError(problem)
            self.avoided.add(node.id)
            self._say("refused", node, text=problem)
            return False
        self.clocks[node.id] = round(ahead_s, 3)
        self._say("joined", node, text=f"has {', '.join(self.mine(node))}")
        if abs(ahead_s) > CLOCK_NOTED_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            self._say("warning", node, text=f"its clock is {abs(ahead_s):.0f} s {side} this machine's")
        return True

    def _problem(self, node: Node, found: dict[str, Any]) -> str | None:
        version, commit = self._version
        if found["version"] is None:
            return f"the node at {node.address} cannot run the harness: {found['lacks']}"
        if found["version"] == version and (found["commit"] == commit or not (found["commit"] and commit)):
            return None
        theirs, ours = f"{found['version']} {found['commit']}".strip(), f"{version} {commit}".strip()
        return f"harness {theirs} on the node at {node.address}, {ours} here: install the same on both"

    def _check_devices(self) -> None:
        """The fleet has the devices that are named."""
        there = list(dict.fromkeys(name for node in self._there.values() for name in node.devices))
        if not there:
            hint = "start its nodes with ray start --resources='{\"NAME\": 1}'"
            raise FleetError(f"{self._place.words}: no node has a device; {hint}")
        has = f"there are {named(there, 8)}"
        for name in self._place.devices:
            if name not in there:
                raise FleetError(f"devices.{name}: no node of {self._place.words} has this device; {has}")
        mine = [name for name in there if not self._place.devices or name in self._place.devices]
        for glob in share.unknown_devices(self._cells, mine):
            raise FleetError(f"where: no device of the fleet matches {glob}; there are {named(mine, 8)}")
        for cell in self._cells:
            if not any(share.goes_to(cell, name) for name in mine):
                raise FleetError(f"{cell.id}: no device is in `where` of its model and of its variant")

"""What the nodes of a fleet know of cells before these run: each is asked once, for each of its devices."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from harness.config import Experiment
from harness.fleet import share
from harness.fleet.cluster import Cluster, Node, Outcome
from harness.fleet.device import Device
from harness.fleet.jobs import Job, Jobs
from harness.fleet.messages import Messages
from harness.fleet.nodes import Nodes
from harness.plan import Cell
from harness.results import Draft

NICE = "start Ray there with RAY_worker_niceness=0: its processes give way to all others"


class Surveys:
    """`jobs`: those under way, by name. `devices`: as the first node with each has surveyed it. `unusable`:
    why the last node that could not be surveyed could not."""

    def __init__(
        self,
        experiment: Experiment,
        cells: Sequence[Cell],
        cluster: Cluster,
        jobs: Jobs,
        nodes: Nodes,
        messages: Messages,
    ) -> None:
        self._experiment, self._cells, self._cluster = experiment, cells, cluster
        self._jobs, self._nodes, self._messages = jobs, nodes, messages
        self._numbers = itertools.count(1)
        self._answers: dict[str, dict[str, Any]] = {}  # by device: the line of its first node
        self._left_out: dict[str, dict[str, str]] = {}  # by cell and device: why it is not measured there
        self.jobs: dict[str, Node] = {}
        self.devices: dict[str, Device] = {}
        self.unusable = ""

    def begin(self, node: Node, known: Collection[str]) -> None:
        """`known`: digests of the records that are here; the node sends the others."""
        for device in self._nodes.mine(node):
            wanted = [cell.id for cell in self._cells if share.goes_to(cell, device)]
            self._submit("survey", node, self._jobs.survey(device, wanted, known))

    def tidy(self, node: Node, known: Collection[str]) -> None:
        """Have a node remove what is stored here, and send what is not; `known`: as of begin."""
        self._submit("tidy", node, self._jobs.tidy(known))

    def _submit(self, kind: str, node: Node, job: Job) -> None:
        name = f"{kind} {next(self._numbers)}"
        self.jobs[name] = node
        self._cluster.submit(name, job, node=node.id)

    def hear(self, name: str, line: dict[str, Any]) -> None:
        """A line of one of its jobs."""
        if line["event"] == "failed":
            self.unusable = line["reason"]
        elif line["event"] == "surveyed":
            device = str(line["shared"]["campaign"]["fleet"]["device"])
            if line["niceness"] > 0:
                self._messages.say("warning", self.jobs[name], text=NICE)
            if device not in self.devices:
                self._first(device, line)

    def _first(self, device: str, line: dict[str, Any]) -> None:
        mine = [cell for cell in self._cells if cell.id in line["cells"]]
        fitting = [cell for cell in mine if not line["cells"][cell.id]["no_room"]]
        for cell in mine:
            if no_room := line["cells"][cell.id]["no_room"]:
                self._left_out.setdefault(cell.id, {})[device] = no_room
                self._messages.say("left_out", None, device=device, cell=cell.id, text=no_room)
        self.devices[device] = Device.of(device, fitting, self._experiment, line)
        self._answers[device] = line

    def end(self, name: str, outcome: Outcome) -> None:
        """One of its jobs has ended."""
        node = self.jobs.pop(name)
        if outcome.lost is not None or outcome.code:
            self.unusable = outcome.lost or outcome.error or self.unusable
            self._nodes.avoided.add(node.id)
            self._messages.say("warning", node, text=f"cannot be used: {self.unusable}")

    def misfits(self) -> Iterator[tuple[Device, Draft, str]]:
        """Cells that fit on no device of the fleet: a device, a record that was not measured, and why."""
        for cell, why in self._left_out.items():
            if not any(cell in device.cells for device in self.devices.values()):
                first, line = next(iter(self._answers.items()))
                begun = {**line["shared"], **line["cells"][cell]["facts"], "attempt": 1}
                reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items())
                yield self.devices[first], begun, f"fits on no device: {reasons}"

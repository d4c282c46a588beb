"""The devices of a fleet, their jobs and their messages."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from typing_extensions import NotRequired, TypedDict

from harness.base import data
from harness.campaign.fleet import files, incoming
from harness.campaign.fleet.cluster import Cluster, Node, Nodes, Outcome, Place
from harness.campaign.fleet.files import Job, Json, Parcel
from harness.campaign.rounds import RunOptions
from harness.config import Experiment, Quality
from harness.config.plan import Cell
from harness.records import Draft, Stored
from harness.records.parts import Fleet, Machine, plain
from harness.records.write import begun_by

# What happens in a fleet, as plain data: for the view of a terminal, and for lines of JSON.


Kind = Literal[
    "joined",
    "refused",
    "lost",
    "left_out",
    "begins",
    "record",
    "moved",
    "message",
    "warning",
    "progress",
    "ended",
]


class Event(TypedDict):
    """`event`: what happened. `device`: name; `node`: its address."""

    event: Kind
    device: NotRequired[str]
    node: NotRequired[str]
    cell: NotRequired[str]
    repeat: NotRequired[int]
    status: NotRequired[str]
    reasons: NotRequired[Sequence[str]]
    text: NotRequired[str]
    folder: NotRequired[str]
    devices: NotRequired[list[DeviceProgress]]


class DeviceProgress(TypedDict):
    """`nodes`: that are alive and have the device. `repeats_done`, `repeats`: with those kept from before.
    `eta_s`: seconds until its cells are done, at the rate so far; null: not known."""

    device: str
    nodes: int
    now: list[str]
    repeats_done: int
    repeats: int
    eta_s: float | None


class FleetWatcher(Protocol):
    """Receives what happens in a fleet and shows it to the user."""

    def happened(self, event: Event) -> None: ...


# One device of a fleet, that is all equal ones of this name: its cells, what is done, and what waits.


MOST_MOVES = 3  # of a cell whose campaigns are lost: it may be what kills the nodes


def repeats_of(cell: Cell, experiment: Experiment) -> int:
    return 1 if cell.searches else cell.workload.repeated(experiment.protocol.repeats)


@dataclass
class Campaign:
    """A portion of a device's cells, given to Ray. `node`: where it runs; null: nowhere yet. `begun`: the
    repeat that is being measured. `failed`: why it ended early. `because`: why its cells lost a campaign
    before; empty: they did not."""

    name: str
    device: str
    cells: list[Cell]
    because: str = ""
    node: str | None = None
    begun: Draft | None = None
    failed: str | None = None
    ended: bool = False


@dataclass
class Device:
    """`shared`, `facts`: parts of a record that was not measured, by cell. `work`: the estimated time of each
    cell's repeats, in any unit. `waiting`: cells without a campaign, with the reason; empty: none was given
    yet. `given_up`: cells that lost too many campaigns. `finished`: repeats of cells, by number."""

    name: str
    cells: dict[str, Cell]
    repeats: dict[str, int]
    shared: Draft
    facts: Mapping[str, Draft]
    work: dict[str, float]
    waiting: dict[str, str] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    finished: dict[str, set[int]] = field(default_factory=dict)
    measured: float = 0.0
    began_s: float | None = None

    @classmethod
    def of(cls, name: str, cells: Iterable[Cell], experiment: Experiment, line: Json) -> Device:
        """A device from the survey of a node."""
        mine = {cell.id: cell for cell in cells}
        repeats = {cell.id: repeats_of(cell, experiment) for cell in mine.values()}
        known = line["cells"]
        return cls(
            name=name,
            cells=mine,
            repeats=repeats,
            shared=line["shared"],
            facts={key: known[key]["facts"] for key in mine},
            work=files.share_weights({key: known[key]["seconds"] for key in mine}, repeats),
            waiting=dict.fromkeys(mine, ""),
        )

    @property
    def slug(self) -> str:
        return str(self.shared["machine"]["slug"])

    def begins(self) -> None:
        self.began_s = self.began_s or time.monotonic()

    def finishes(self, cell: str, repeat: int) -> None:
        """A repeat was measured, and will not be again."""
        if cell in self.cells and repeat not in self.finished.setdefault(cell, set()):
            self.finished[cell].add(repeat)
            self.measured += self.work[cell] / self.repeats[cell]

    def is_done(self, cell: str) -> bool:
        return len(self.finished.get(cell, ())) >= self.repeats[cell]

    def ends(self, campaign: Campaign) -> None:
        """All cells of a campaign are done, those kept from earlier runs included."""
        for cell in campaign.cells:
            self.finished[cell.id] = set(range(1, self.repeats[cell.id] + 1))

    def loses(self, campaign: Campaign, reason: str) -> list[str]:
        """A campaign did not end: its cells that are not done wait for another one. Returns them."""
        left = [cell.id for cell in campaign.cells if not self.is_done(cell.id)]
        if campaign.node is not None:
            self.lost.update(left)
        for cell in left:
            if self.lost[cell] > MOST_MOVES:
                self.given_up[cell] = f"lost with {self.lost[cell]} campaigns, the last time because {reason}"
            else:
                self.waiting[cell] = reason
        return [cell for cell in left if cell in self.waiting]

    def facts_of(self, cell: str) -> Draft:
        """A record that was not measured, without its outcome."""
        return {**self.shared, **self.facts[cell], "attempt": 1}

    def progress(self, nodes: int, now: list[str]) -> DeviceProgress:
        done = sum(self.work[c] * len(found) / self.repeats[c] for c, found in self.finished.items())
        left = sum(self.work.values()) - done
        eta = None
        if self.measured and self.began_s is not None:
            eta = (time.monotonic() - self.began_s) * left / self.measured
        return {
            "device": self.name,
            "nodes": nodes,
            "now": now,
            "repeats_done": sum(len(found) for found in self.finished.values()),
            "repeats": sum(self.repeats.values()),
            "eta_s": eta,
        }


# The jobs that a fleet gives to its nodes, as harness/campaign/fleet/node.py reads them.


class Jobs:
    """The jobs of one run. `clocks`: as in Nodes, by the node's id. `authenticated`: as of Cluster."""

    def __init__(
        self,
        experiment: Experiment,
        options: RunOptions,
        place: Place,
        clocks: Mapping[str, float],
        authenticated: bool,
    ) -> None:
        self._config = portable(experiment, options.config_path.parent)
        self._options, self._place, self._clocks = options, place, clocks
        self._authenticated = authenticated
        # Names the results folder, and neither a machine nor a user.
        self._tag = hashlib.sha256(f"{begun_by()} {options.root}".encode()).hexdigest()[:16]

    def survey(self, device: str, cells: Sequence[str], known: Collection[str]) -> Job:
        """`known`: digests of the records that are here."""
        return {**self._of(device, cells), "do": "survey", "known": sorted(known)}

    def measure(self, device: str, cells: Sequence[str], earlier: Iterable[Parcel], again: bool) -> Job:
        """`again`: a campaign of these cells was lost, so what this run measured of them is not done anew."""
        return {
            **self._of(device, cells),
            "do": "measure",
            "fresh": self._options.fresh and not again,
            "retry_failed": self._options.retry_failed and not again,
            "wait": self._waits,
            "earlier": list(earlier),
        }

    @property
    def _waits(self) -> bool:
        """The nodes of a local cluster are one machine, on which real stacks take turns."""
        return self._options.wait or self._place.local > 0

    def tidy(self, known: Collection[str]) -> Job:
        """`known`: as of survey."""
        return {"do": "tidy", "tag": self._tag, "known": sorted(known), "clocks": {}}

    def _of(self, device: str, cells: Sequence[str]) -> Job:
        fleet: Fleet = {"device": device}
        if not self._authenticated:
            fleet["unauthenticated"] = True
        return {
            "tag": self._tag,
            "config": self._place.config_of(self._config, device),
            "cells": list(cells),
            "config_path": str(self._options.config_path.absolute()),
            "command_line": list(self._options.command_line),
            "fleet": fleet,
            "clocks": dict(self._clocks),
        }


def portable(experiment: Experiment, folder: Path) -> Json:
    """The config as plain data that means the same on any machine: with its name, and absolute paths, but
    shipped weights by name. `folder`: where its relative paths begin."""
    rows = []
    for row, model in zip(experiment.source["models"], experiment.models, strict=True):
        given = row.get("weights")
        if model.of_format:
            written: Any = {
                form: {"path": weights.path} if weights.path else given[form]
                for form, weights in model.of_format.items()
            }
        elif model.weights.path and data.weights_name(model.weights.path) is None:
            written = {"path": model.weights.path}
        else:
            written = given
        is_in_a_file = model.described and model.described.config
        if is_in_a_file and (described := folder.absolute() / Path(row["shape"]).expanduser()).exists():
            row = {**row, "shape": str(described)}
        rows.append({**row, **({} if given is None else {"weights": written})})
    whole = {**experiment.source, "name": experiment.name, "models": rows}
    if "workloads" in experiment.source:
        pairs = zip(experiment.source["workloads"], experiment.workloads, strict=True)
        whole["workloads"] = [
            {**row, "text": workload.text} if isinstance(workload, Quality) else row
            for row, workload in pairs
        ]
    return whole


# Messages from the driver of a fleet to its watcher: events, and changes of progress.


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
        """Report all devices, if more than the time left has changed."""
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


# Surveys: each node of a fleet reports once, for each of its devices, on cells before these run.


NICE = "start Ray there with RAY_worker_niceness=0: its processes give way to all others"


class Surveys:
    """`jobs`: those under way, by name. `devices`: as the first node with each has surveyed it. `machines`:
    as nodes have introduced them, by the node's id. `unusable`: by device, why the last of its nodes that
    could not be surveyed could not."""

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
        self._answers: dict[str, Json] = {}  # by device: the line of its first node
        self._left_out: dict[str, dict[str, str]] = {}  # by cell and device: why it is not measured there
        self.jobs: dict[str, Node] = {}
        self.devices: dict[str, Device] = {}
        self.machines: dict[str, Machine] = {}
        self._failed: dict[str, str] = {}  # by job, why
        self.unusable: dict[str, str] = {}

    def begin(self, node: Node, known: Collection[str]) -> None:
        """`known`: digests of the records that are here; the node sends the others."""
        for device in self._nodes.mine(node):
            wanted = [cell.id for cell in self._cells if files.goes_to(cell, device)]
            self._submit("survey", node, self._jobs.survey(device, wanted, known))

    def tidy(self, node: Node, known: Collection[str]) -> None:
        """Have a node remove records that are stored here, and send the others; `known`: as of begin."""
        self._submit("tidy", node, self._jobs.tidy(known))

    def _submit(self, kind: str, node: Node, job: Job) -> None:
        name = f"{kind} {next(self._numbers)}"
        self.jobs[name] = node
        self._cluster.submit(name, job, node=node.id)

    def hear(self, name: str, line: Json) -> None:
        """A line of one of its jobs. Raises Damaged."""
        if line["event"] == "failed":
            self._failed[name] = line["reason"]
        elif line["event"] == "surveyed":
            node, machine = self.jobs[name], line["shared"]["machine"]
            device = incoming.surveyed_device(line, self._nodes.mine(node), self._cells)
            incoming.check_machine(machine, self.machines.setdefault(node.id, machine))
            if line["niceness"] > 0:
                self._messages.say("warning", node, text=NICE)
            if device not in self.devices:
                self._first(device, line)

    def _first(self, device: str, line: Json) -> None:
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
            why = outcome.lost or outcome.error or self._failed.get(name, "")
            self.unusable |= dict.fromkeys(self._nodes.mine(node), why)
            self._nodes.avoided.add(node.id)
            self._messages.say("warning", node, text=f"cannot be used: {why}")

    def misfits(self) -> Iterator[tuple[Device, Draft, str]]:
        """Cells that fit on no device of the fleet: a device, a record that was not measured, and why."""
        for cell, why in self._left_out.items():
            if not any(cell in device.cells for device in self.devices.values()):
                first, line = next(iter(self._answers.items()))
                begun: Draft = plain({**line["shared"], **line["cells"][cell]["facts"], "attempt": 1})
                reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items())
                yield self.devices[first], begun, f"fits on no device: {reasons}"

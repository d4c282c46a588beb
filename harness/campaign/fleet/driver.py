"""Run a fleet to its end: survey its nodes, give their devices campaigns, store what arrives, and move the
cells of a node that is lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from harness import records
from harness.base.text import plural
from harness.campaign.fleet import incoming, portions
from harness.campaign.fleet.access import FleetError
from harness.campaign.fleet.cluster import NODE_LEFT, Cluster, HeadLost, Node, Outcome
from harness.campaign.fleet.devices import Device
from harness.campaign.fleet.events import Event, FleetWatcher, Kind
from harness.campaign.fleet.jobs import Job, Jobs
from harness.campaign.fleet.nodes import Member, Nodes
from harness.campaign.fleet.parcels import Damaged
from harness.campaign.fleet.place import Place
from harness.campaign.fleet.results import Results, identity, just_before
from harness.campaign.opening import RunOptions, Stopped
from harness.config import Experiment
from harness.config.plan import Cell
from harness.records import Draft, Record, ResultsError, Stored

WAIT_S = 0.25  # for the next line
STOP_S = 90.0  # until campaigns that are stopped have written their last record
TIDY_S = 20.0
STAYS = "what the nodes measured stays in their caches, and comes with the next run"
HEAD = "the head of the Ray cluster was lost"
NICE = "start Ray there with RAY_worker_niceness=0: its processes give way to all others"


def run(
    experiment: Experiment,
    cells: Sequence[Cell],
    options: RunOptions,
    place: Place,
    cluster: Cluster,
    watcher: FleetWatcher,
) -> list[Stored]:
    """Measure every cell on every device of the fleet that it is for and fits on; equal devices share cells.
    Returns the records that count, kept ones included.

    Raises FleetError and ResultsError (nothing was started), Stopped (the results folder cannot be written),
    HeadLost, and KeyboardInterrupt after the repeats of the moment are recorded.
    """
    driver = _Driver(experiment, cells, options, place, cluster, watcher)
    try:
        driver.run()
    except KeyboardInterrupt:
        driver.stop()
        raise
    except HeadLost:
        driver.lose_all()
        raise
    except ResultsError as full:
        driver.stop()
        raise Stopped(f"stopped: {full}; {STAYS}") from full
    return driver.stored()


TaskKind = Literal["survey", "measure", "tidy"]


@dataclass
class Task:
    """A job that a node does. `begun`: the repeat that it measures now. `failed`: why it said that it ends
    early. `ended`: all its cells are measured."""

    name: str
    kind: TaskKind
    member: Member
    device: str = ""
    cells: Sequence[str] = ()
    begun: Draft | None = None
    failed: str | None = None
    ended: bool = False


class _Driver:
    def __init__(
        self,
        experiment: Experiment,
        cells: Sequence[Cell],
        options: RunOptions,
        place: Place,
        cluster: Cluster,
        watcher: FleetWatcher,
    ) -> None:
        records.check_writable(options.root)
        self._experiment, self._cells, self._options = experiment, cells, options
        self._cluster, self._watcher = cluster, watcher
        self._results = Results(
            options.root, lambda damage: self._say("warning", text=f"passed over: {damage}")
        )
        self._nodes = Nodes(cluster, place, cells, self._say)
        self._jobs = Jobs(experiment, options, place, cluster.authenticated)
        self._numbers = itertools.count(1)
        self._devices: dict[str, Device] = {}
        self._tasks: dict[str, Task] = {}
        self._unusable: dict[str, str] = {}  # by device: why a node with it could not be surveyed
        self._began = self._stopping = False

    def run(self) -> None:
        while True:
            for member in self._nodes.meet():
                for device in member.devices:
                    self._survey(member, device)
            self._hear(WAIT_S)
            self._end_tasks()
            if self._began or not self._tasks:
                self._distribute()
            if not self._tasks:
                break
        self._finish()

    # Tasks

    def _survey(self, member: Member, device: str) -> None:
        cells = [cell.id for cell in self._cells if portions.goes_to(cell, device)]
        job = self._jobs.survey(device, cells, member.clock_ahead_s, self._results.digests)
        self._start("survey", member, job, device, cells)

    def _distribute(self) -> None:
        """Give each free device the next of the cells that wait for it."""
        missing = {name for each in self._nodes.members.values() for name in each.devices} - {*self._devices}
        if missing and not self._began:
            why = self._unusable.get(min(missing), "")
            raise FleetError(f"{min(missing)}: none of its nodes can be used: {why}")
        self._began = True
        for device in self._devices.values():
            able = self._nodes.able(device.name)
            free = [member for member in able for _ in range(self._free(member, device.name))]
            for member in free:
                if device.waiting:
                    self._measure(member, device, sum(each.devices[device.name] for each in able))

    def _free(self, member: Member, device: str) -> int:
        """How many devices of this name have no task on a node, which has been surveyed."""
        busy = [task for task in self._tasks.values() if task.member is member and task.device == device]
        return 0 if member.machine is None else member.devices[device] - len(busy)

    def _measure(self, member: Member, device: Device, equal: int) -> None:
        cells, again = device.take(equal)
        earlier = self._results.earlier(device.slug, set(cells), only_new=self._options.fresh)
        job = self._jobs.measure(device.name, cells, member.clock_ahead_s, earlier, again)
        self._start("measure", member, job, device.name, cells)

    def _start(
        self, kind: TaskKind, member: Member, job: Job, device: str = "", cells: Sequence[str] = ()
    ) -> None:
        task = Task(f"{kind} {next(self._numbers)}", kind, member, device, cells)
        self._tasks[task.name] = task
        self._cluster.submit(task.name, job, member.node.id, device if kind == "measure" else None)

    def _hear(self, wait_s: float) -> None:
        for name, text in self._cluster.lines(wait_s):
            task = self._tasks.get(name)
            if task is None:  # it was refused, or its node had left: its records come with the next run
                continue
            try:
                self._line(task, incoming.parsed(text, task.kind))
            except Damaged as damage:
                self._refuse(task, str(damage))

    def _line(self, task: Task, line: Mapping[str, Any]) -> None:
        """Raises Damaged."""
        event, node = line["event"], task.member.node
        if event == "surveyed":
            self._surveyed(task, line)
        elif event == "begins":
            begun: Draft = line["begun"]
            self._check(task, begun, None)
            task.begun = begun
            self._say("begins", device=task.device, cell=begun["cell"], repeat=begun["repeat"])
        elif event == "record":
            self._record(task, line)
        elif event == "failed":
            task.failed = line["reason"]
        elif event == "ended":
            task.ended = True
            self._results.count((key, repeat, start) for key, repeat, start in line["records"])
        else:
            self._say(event, node, device=task.device, text=line["line"])

    def _surveyed(self, task: Task, line: Mapping[str, Any]) -> None:
        """Raises Damaged."""
        member, machine = task.member, line["shared"]["machine"]
        incoming.check_survey(line, task.device, task.cells)
        incoming.check_machine(machine, member.machine or machine)
        member.machine = machine
        if line["niceness"] > 0:
            self._say("warning", member.node, text=NICE)
        if task.device not in self._devices:
            device = Device.of(task.device, self._cells, self._experiment, line)
            self._devices[task.device] = device
            for cell, reason in device.no_room.items():
                self._say("left_out", device=device.name, cell=cell, text=reason)

    def _record(self, task: Task, line: Mapping[str, Any]) -> None:
        """Store a record that arrived, from a campaign or from one of an earlier run. Raises Damaged, of a
        campaign."""
        is_new = task.kind == "measure"
        try:
            record = incoming.checked_record(line["parcel"])
            if is_new:
                self._check(task, record, task.begun)
            else:
                incoming.check_machine(record["machine"], task.member.machine)
            stored = self._results.receive(line["parcel"], record)
        except Damaged as damage:
            if is_new:
                raise
            text = f"{damage}; it stays on its node, and comes with the next run"
            self._say("warning", task.member.node, text=text)
            return
        if stored is None:
            return
        if is_new:
            task.begun = None
            self._results.count([identity(record)])
            if "status" in line and not line["again"]:
                self._devices[task.device].finishes(record["cell"], record["repeat"])
        self._say_stored(stored, line.get("status", record["outcome"]), line.get("reasons", []))

    def _check(self, task: Task, found: Draft | Record, begun: Draft | None) -> None:
        """Raises Damaged."""
        incoming.check_repeat(found, begun, task.device, task.cells, task.member.machine)

    def _refuse(self, task: Task, why: str) -> None:
        """Believe no more of a task, and give its node no other."""
        self._cluster.cancel([task.name])
        del self._tasks[task.name]
        task.member.honest = task.member.able = False
        task.failed, task.ended = why, False
        if task.kind == "measure":
            self._say("warning", task.member.node, device=task.device, text=f"cannot be used: {why}")
        self._end(task, Outcome(lost=why))

    def _end_tasks(self) -> None:
        there = self._nodes.members
        # Where a link drops all, Ray ends the tasks of its node minutes after the node has left.
        left = [name for name, task in self._tasks.items() if task.member.node.id not in there]
        for name, outcome in [*self._cluster.ended(), *((name, Outcome(lost=NODE_LEFT)) for name in left)]:
            self._hear(0)  # lines from before it ended
            if task := self._tasks.pop(name, None):
                self._end(task, outcome)

    def _end(self, task: Task, outcome: Outcome) -> None:
        why = task.failed or outcome.lost or f"the harness on its node failed: {outcome.error}"
        if task.kind == "survey" and (outcome.lost is not None or outcome.code):
            task.member.able = False
            self._unusable |= dict.fromkeys(task.member.devices, why)
            self._say("warning", task.member.node, text=f"cannot be used: {why}")
        elif task.kind == "measure" and task.ended:
            self._devices[task.device].ends(task.cells)
        elif task.kind == "measure":
            task.member.able = False  # until it joins anew: it is gone, or cannot run a campaign
            self._move(task, why)

    def _move(self, task: Task, reason: str) -> None:
        """A campaign did not end: record the repeat of the moment, and have its cells measured again."""
        device, measured = self._devices[task.device], None
        if task.begun is not None:
            measured = task.begun["cell"]
            self._lose(task.begun, reason)
        moved = device.loses(task.cells, measured, reason)
        if moved and not self._stopping:
            verbs = ("goes", "waits") if len(moved) == 1 else ("go", "wait")
            able = self._nodes.able(device.name)
            where = f"{verbs[0]} to an equal device" if able else f"{verbs[1]} for such a device"
            self._say("moved", device=device.name, text=f"{plural(len(moved), 'cell')} {where}: {reason}")

    def _lose(self, begun: Draft, reason: str) -> None:
        self._write({**begun, "started_utc": just_before(begun["started_utc"])}, "interrupted", reason)

    def _write(self, begun: Draft, outcome: str, reason: str) -> None:
        cell = next(cell for cell in self._cells if cell.id == begun["cell"])
        self._say_stored(self._results.write(cell, begun, outcome, reason), outcome, [reason])

    # Events

    def _say(self, event: Kind, node: Node | None = None, **values: Any) -> None:
        where: Event = {"event": event}
        if node is not None:
            where["node"] = node.address
        self._watcher.happened({**where, **values})  # type: ignore[typeddict-item]

    def _say_stored(self, stored: Stored, status: str, reasons: Sequence[str]) -> None:
        record = stored.record
        values: dict[str, Any] = {"cell": record["cell"], "repeat": record["repeat"], "status": status}
        if fleet := record["campaign"].get("fleet"):
            values["device"] = fleet["device"]
            if device := self._devices.get(fleet["device"]):
                values["repeats_done"] = sum(map(len, device.done.values()))
                values["repeats"] = sum(device.repeats.values())
        self._say("record", **values, reasons=list(reasons), folder=str(stored.folder))

    # The end

    def _finish(self) -> None:
        """Record the cells that no device could measure, and have the nodes remove what is stored here."""
        for device in self._devices.values():
            for name, reason in {**device.waiting, **device.given_up}.items():
                why = reason or self._unusable.get(device.name, f"no node with {device.name} is left")
                self._write(device.facts_of(name), "unavailable", why)
        for cell in self._cells:
            without = [device for device in self._devices.values() if cell.id in device.no_room]
            if without and not any(cell.id in device.cells for device in self._devices.values()):
                why = "; ".join(f"{device.name}: {device.no_room[cell.id]}" for device in without)
                self._write(without[0].facts_of(cell.id), "unavailable", f"fits on no device: {why}")
        for member in self._nodes.members.values():
            if member.honest:  # another would send the same again
                self._start("tidy", member, self._jobs.tidy(self._results.digests))
        with suppress(HeadLost):  # all is here
            self._wait_for_tasks(TIDY_S)
        self._say("ended")

    def _wait_for_tasks(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._tasks and time.monotonic() < until:
            self._hear(WAIT_S)
            self._end_tasks()

    def lose_all(self) -> None:
        """Record the repeats of the moment as interrupted: the head is gone."""
        for task in self._tasks.values():
            if task.begun is not None:
                self._lose(task.begun, HEAD)

    def stop(self) -> None:
        """End all campaigns; each writes the record of its repeat, which is stored where that is possible."""
        self._stopping = True
        with suppress(HeadLost, ResultsError):  # the nodes keep it
            self._cluster.cancel(self._tasks)
            self._wait_for_tasks(STOP_S)

    def stored(self) -> list[Stored]:
        """The records that count, in the order of their cells."""
        number = {cell.id: place for place, cell in enumerate(self._cells)}

        def order(stored: Stored) -> tuple[int, str, int, str]:
            record = stored.record
            slug = record["machine"]["slug"]
            return number[record["cell"]], slug, record["repeat"], record["started_utc"]

        return sorted(self._results.counted(), key=order)

"""Run a fleet to its end: survey its nodes, give their devices campaigns, store what arrives, and move the
cells of a node that is lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import suppress

from harness import records
from harness.base.text import plural
from harness.campaign import repeat
from harness.campaign.fleet import files, incoming
from harness.campaign.fleet.access import FleetError
from harness.campaign.fleet.cluster import NODE_LEFT, Cluster, HeadLost, Nodes, Outcome, Place
from harness.campaign.fleet.devices import Campaign, Device, FleetWatcher, Jobs, Messages, Surveys
from harness.campaign.fleet.files import Damaged, Json, Known, Parcel, identity, just_before
from harness.campaign.rounds import RunOptions, Stopped
from harness.config import Experiment
from harness.config.plan import Cell
from harness.records import Draft, Record, ResultsError, Stored
from harness.records.parts import Machine

WAIT_S = 0.25  # for the next line
STOP_S = 90.0  # until campaigns that are stopped have written their last record
TIDY_S = 20.0
STAYS = "what the nodes measured stays in their caches, and comes with the next run"
HEAD = "the head of the Ray cluster was lost"


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
        self._cells, self._options = cells, options
        self._cluster, self._messages = cluster, Messages(watcher)
        self._known = Known(options.root, lambda damage: self._messages.warn(f"passed over: {damage}"))
        self._numbers = itertools.count(1)
        self._nodes = Nodes(cluster, place, cells, self._messages.say)
        self._jobs = Jobs(experiment, options, place, self._nodes.clocks, cluster.authenticated)
        self._surveys = Surveys(experiment, cells, cluster, self._jobs, self._nodes, self._messages)
        self._devices = self._surveys.devices
        self._campaigns: dict[str, Campaign] = {}
        self._ran_on: dict[str, str] = {}  # the id of its node, by job
        self._refused: set[str] = set()  # jobs that have sent what no honest node sends
        self._began = self._stopping = False

    def run(self) -> None:
        while True:
            for node in self._nodes.meet():
                self._surveys.begin(node, self._known.digests)
            self._leave_gone()
            self._hear(WAIT_S)
            self._end_jobs()
            if not self._surveys.jobs:
                self._distribute()
            self._messages.progress(self._devices.values(), self._campaigns.values(), self._nodes)
            if not self._under_way():
                break
        self._finish()

    # Jobs

    def _distribute(self) -> None:
        """Give the devices campaigns of the cells that wait."""
        missing = self._nodes.devices() - self._devices.keys()
        if missing and not self._began:
            why = self._surveys.unusable.get(min(missing), "")
            raise FleetError(f"{min(missing)}: none of its nodes can be used: {why}")
        self._began = True
        for device in self._devices.values():
            nodes = self._nodes.able(device.name)
            stranded = [each for each in self._campaigns.values() if each.device == device.name]
            if not nodes:
                self._cluster.cancel([each.name for each in stranded if each.node is None])
            if not nodes or not device.waiting:
                continue
            because = next(filter(None, device.waiting.values()), "")
            work = {cell: device.work[cell] for cell in device.cells if cell in device.waiting}
            for portion in files.portions(work, sum(node.devices[device.name] for node in nodes)):
                self._give(device, portion, because)
            device.waiting.clear()

    def _give(self, device: Device, cells: Sequence[str], because: str) -> None:
        """`because`: why a campaign of these cells was lost; empty: this is their first."""
        mine = [device.cells[cell] for cell in cells]
        campaign = Campaign(f"campaign {next(self._numbers)}", device.name, mine, because)
        earlier = self._known.earlier(device.slug, set(cells), only_new=self._options.fresh)
        job = self._jobs.measure(device.name, cells, earlier, again=bool(because))
        self._campaigns[campaign.name] = campaign
        self._cluster.submit(campaign.name, job, device=device.name, avoid=self._nodes.avoided)

    def _hear(self, wait_s: float) -> None:
        for name, line in self._cluster.lines(wait_s):
            if name in self._refused:
                continue
            try:
                self._line(name, incoming.parsed(line))
            except Damaged as damage:
                self._refuse(name, str(damage))

    def _line(self, name: str, line: Json) -> None:
        """Raises Damaged."""
        if line["event"] == "started":
            if name in self._ran_on:  # the first is of this harness: the node has not begun its own yet
                raise Damaged("its node said twice that it began")
            self._ran_on[name] = line["node"]
        if line["event"] == "record":
            self._record(name, line)
        elif name in self._surveys.jobs:
            self._surveys.hear(name, line)
        elif campaign := self._campaigns.get(name):
            self._campaign(campaign, line)

    def _refuse(self, name: str, why: str) -> None:
        """Believe no more of a job, and give its node no other."""
        self._refused.add(name)
        self._cluster.cancel([name])
        node = self._nodes.named(self._ran_on.get(name))
        if node is not None:
            self._nodes.avoided.add(node.id)
        if name in self._surveys.jobs:
            self._surveys.end(name, Outcome(lost=why))
        elif (campaign := self._campaigns.pop(name, None)) is not None:
            self._messages.say("warning", node, device=campaign.device, text=f"cannot be used: {why}")
            campaign.failed, campaign.ended = why, False
            self._end(campaign, Outcome(lost=why))

    def _campaign(self, campaign: Campaign, line: Json) -> None:
        device = self._devices[campaign.device]
        if line["event"] == "started":
            campaign.node = line["node"]
        elif line["event"] == "begins":
            begun: Draft = line["begun"]
            self._check(campaign, begun, None)
            campaign.begun = begun
            device.begins()
            self._messages.say("begins", None, device=device.name, cell=begun["cell"], repeat=begun["repeat"])
        elif line["event"] == "failed":
            campaign.failed = line["reason"]
        elif line["event"] == "ended":
            campaign.ended = True
            self._known.count((key, repeat, start) for key, repeat, start in line["records"])
        elif line["event"] in ("message", "warning"):
            node = self._nodes.named(campaign.node)
            self._messages.say(line["event"], node, device=device.name, text=line["line"])

    def _record(self, name: str, line: Json) -> None:
        """Store a record that arrived, from a campaign or from one that ended before. Raises Damaged, of a
        campaign."""
        parcel: Parcel = line["parcel"]
        campaign = self._campaigns.get(name)
        try:
            record = incoming.checked_record(parcel)
            if campaign is None:
                incoming.check_machine(record["machine"], self._machine(name))
            else:
                self._check(campaign, record, campaign.begun)
            stored = self._known.receive(parcel)
        except Damaged as damage:
            if campaign is not None:
                raise
            self._messages.warn(f"{damage}; it stays on its node, and comes with the next run")
            return
        if stored is None:
            return
        if campaign is not None:
            campaign.begun = None
            self._known.count([identity(record)])
            if "status" in line and not line["again"]:
                self._devices[campaign.device].finishes(record["cell"], record["repeat"])
        self._messages.record(stored, line.get("status", record["outcome"]), line.get("reasons", []))

    def _machine(self, job: str) -> Machine | None:
        """As which the node of a job has introduced itself."""
        return self._surveys.machines.get(self._ran_on.get(job, ""))

    def _check(self, campaign: Campaign, found: Draft | Record, begun: Draft | None) -> None:
        """Raises Damaged."""
        cells = {cell.id for cell in campaign.cells}
        incoming.check_repeat(found, begun, campaign.device, cells, self._machine(campaign.name))

    def _end_jobs(self) -> None:
        for name, outcome in [*self._cluster.ended(), *self._cut_off()]:
            self._hear(0)  # lines from before the job ended
            if name in self._surveys.jobs:
                self._surveys.end(name, outcome)
            elif (campaign := self._campaigns.pop(name, None)) is not None:
                self._end(campaign, outcome)

    def _cut_off(self) -> list[tuple[str, Outcome]]:
        """Jobs whose node has left the cluster: where a link drops all, Ray ends them minutes later."""
        where = {name: campaign.node for name, campaign in self._campaigns.items()}
        where |= {name: node.id for name, node in self._surveys.jobs.items()}
        gone = [name for name, node in where.items() if node and self._nodes.named(node) is None]
        return [(name, Outcome(lost=NODE_LEFT)) for name in gone]

    def _leave_gone(self) -> None:
        """Ray lets its requests to a lost node count for what waits with the same options, until they time
        out: a campaign that waits for such a device is given anew, with other options."""
        devices = {name for node in self._nodes.gone for name in node.devices}
        waits = [each for each in self._campaigns.values() if each.node is None and each.device in devices]
        self._cluster.cancel([each.name for each in waits])

    def _under_way(self) -> list[str]:
        """The names of all jobs that have not ended."""
        return [*self._campaigns, *self._surveys.jobs]

    def _end(self, campaign: Campaign, outcome: Outcome) -> None:
        device = self._devices[campaign.device]
        if campaign.ended:
            device.ends(campaign)
            return
        reason = campaign.failed or outcome.lost or f"the harness on its node failed: {outcome.error}"
        if campaign.node is None:
            reason = campaign.because
            if not reason and not self._nodes.able(device.name):
                reason = f"no node with the device {device.name} is left"
        if campaign.begun is not None:
            self._lose(device, campaign.begun, reason)
        if outcome.lost is None and campaign.node is not None:
            self._nodes.avoided.add(campaign.node)  # it cannot run a campaign, whatever the cells
        if (moved := device.loses(campaign, reason)) and reason and not self._stopping:
            verbs = ("goes", "waits") if len(moved) == 1 else ("go", "wait")
            able = self._nodes.able(device.name)
            where = f"{verbs[0]} to an equal device" if able else f"{verbs[1]} for such a device"
            text = f"{plural(len(moved), 'cell')} {where}: {reason}"
            self._messages.say("moved", None, device=device.name, text=text)

    def _lose(self, device: Device, begun: Draft, reason: str) -> None:
        """Record the repeat that was being measured when its node was lost."""
        begun = begun | {"started_utc": just_before(begun["started_utc"])}
        self._write(device, begun, "interrupted", reason)

    def _write(self, device: Device, begun: Draft, outcome: str, reason: str) -> None:
        cell = next(cell for cell in self._cells if cell.id == begun["cell"])
        stored = self._known.write(cell, begun, outcome, reason)
        self._messages.record(stored, outcome, [reason])

    # The end

    def _finish(self) -> None:
        """Record the cells that no device could measure, and have the nodes remove what is stored here."""
        for device in self._devices.values():
            for cell, reason in {**device.waiting, **device.given_up}.items():
                begun = device.facts_of(cell) | {"started_utc": repeat.utc_now()}
                why = reason or self._surveys.unusable.get(device.name, f"no node with {device.name} is left")
                self._write(device, begun, "unavailable", why)
        for device, begun, reason in self._surveys.misfits():
            self._write(device, begun | {"started_utc": repeat.utc_now()}, "unavailable", reason)
        refused = {self._ran_on.get(job) for job in self._refused}  # they would send the same again
        for node in self._nodes.accepted():
            if node.id not in refused:
                self._surveys.tidy(node, self._known.digests)
        with suppress(HeadLost):  # all is here
            self._wait_for_jobs(TIDY_S)
        self._messages.say("ended", None)

    def _wait_for_jobs(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._under_way() and time.monotonic() < until:
            self._hear(WAIT_S)
            self._end_jobs()

    def lose_all(self) -> None:
        """Record the repeats of the moment as interrupted: the head is gone."""
        for campaign in self._campaigns.values():
            if campaign.begun is not None:
                self._lose(self._devices[campaign.device], campaign.begun, HEAD)

    def stop(self) -> None:
        """End all campaigns; each writes the record of its repeat, which is stored where that is possible."""
        self._stopping = True
        with suppress(HeadLost, ResultsError):  # the nodes keep it
            self._cluster.cancel(self._under_way())
            self._wait_for_jobs(STOP_S)

    def stored(self) -> list[Stored]:
        place = {cell.id: number for number, cell in enumerate(self._cells)}
        return sorted(self._known.counted(), key=lambda each: _order(each.record, place))


def _order(record: Record, place: dict[str, int]) -> tuple[int, str, int, str]:
    return place[record["cell"]], record["machine"]["slug"], record["repeat"], record["started_utc"]

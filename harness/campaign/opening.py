"""Open a campaign: lock the device, recover interrupted repeats, load earlier records, run the doctor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from harness import machine, records
from harness.analysis.attempts import BusyProcess
from harness.analysis.verdicts import Verdict
from harness.base.files import NotFinished
from harness.campaign import inputs, provenance
from harness.campaign.device_lock import device_lock
from harness.campaign.forecast import Device, Forecast, device_of
from harness.campaign.prepare import Preparation
from harness.campaign.provenance import Shared
from harness.campaign.repeat import Inputs, NotReady
from harness.config import Experiment
from harness.config.plan import Cell
from harness.dataset import campaign_order
from harness.machine import doctor
from harness.records import Draft, ResultsError, Stored
from harness.records.parts import Fleet
from harness.records.values import plain
from harness.stacks import build
from runners.protocol import Rows

RecordsByRepeat = Mapping[tuple[str, int], Sequence[Stored]]
"""Earlier records by content key and repeat, oldest first."""


class Stopped(NotFinished):
    """The campaign had to stop; finished repeats are kept."""


class Watcher(Protocol):
    """Receives a campaign's progress and shows it to the user."""

    def say(self, line: str) -> None: ...
    def warn(self, line: str) -> None: ...
    def repeat_begins(self, number: int, of: int, cell: Cell, begun: Draft) -> None: ...
    def tokens(self, count: int, latency_ns: int) -> None: ...
    def rows(self, rows: Rows) -> None: ...
    def repeat_ends(self, stored: Stored, verdict: Verdict) -> None: ...
    def disturbed_by(self, process: BusyProcess) -> None: ...
    def search_ends(self, stored: Stored) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """Options of one run that are not in the config. `root`: the results folder, absolute. `reference`: a
    file with the reference of quality, in place of computing it. `fleet`: the place in a fleet that its
    records name; None without one. `forecasts`: those of its cells that are known already."""

    root: Path
    config_path: Path
    command_line: Sequence[str]
    fresh: bool = False
    retry_failed: bool = False
    wait: bool = False
    reference: Path | None = None
    fleet: Fleet | None = None
    forecasts: Sequence[Forecast] = ()


@dataclass(frozen=True)
class Campaign:
    """One campaign while it holds the device. `device`: its known properties; `keys`: content key by cell;
    `folder`: results of this machine; `shared`: the part that all its records have in common; `attempts`,
    `checks`, `searches`, `scores`: earlier records."""

    experiment: Experiment
    cells: Sequence[Cell]
    options: RunOptions
    watcher: Watcher
    preparation: Preparation
    device: Device
    mechanism: str | None
    keys: dict[str, str]
    folder: Path
    shared: Shared
    attempts: RecordsByRepeat
    checks: list[Stored]
    searches: dict[str, Stored]
    scores: list[Stored]

    def begun(self, cell: Cell, repeat: int = 1, kind: str = "measured") -> Draft:
        """What is known of a record of a cell before its inputs are."""
        device, gpu = self.experiment.device, self.experiment.gpu
        requested = provenance.repeat_fields(cell, repeat, self.keys[cell.id], device, gpu)
        begun: Draft = plain({**self.shared, **requested, "kind": kind})
        return begun

    def inputs(self, cell: Cell) -> Inputs | NotReady:
        return inputs.inputs_or_refusal(cell, self.experiment, self.preparation, self.device)


@contextmanager
def opened(
    experiment: Experiment, cells: Sequence[Cell], options: RunOptions, watcher: Watcher
) -> Iterator[Campaign]:
    """Lock the device, recover interrupted repeats, and load earlier records. Raises as run()."""
    preparation = preparation_of(experiment, watcher)
    preparation.know_forecasts(options.forecasts)
    # The fake's time is virtual: without a probe of the machine it neither measures nor disturbs.
    protocol = experiment.protocol
    probes = protocol.measure_bandwidth or protocol.measure_matrix_rate
    measures = probes or not all(cell.header.simulated for cell in cells)
    with locked(preparation, options, watcher, measures):
        yield prepared(experiment, cells, options, watcher, preparation)


@contextmanager
def locked(
    preparation: Preparation, options: RunOptions, watcher: Watcher, measures: bool = True
) -> Iterator[None]:
    """Lock the device, and finish the records of interrupted repeats. `measures`: see device_lock."""
    records.check_writable(options.root)
    with device_lock(preparation.device_id, options.wait, watcher.say, measures):
        for stored in records.recover(options.root, _passed_over(watcher)):
            watcher.say(f"recovered an interrupted repeat: {stored.folder}")
        yield


@contextmanager
def stopping(where: str) -> Iterator[None]:
    """Turn a ResultsError, mostly of a full disk, into Stopped."""
    try:
        yield
    except ResultsError as full:
        raise Stopped(f"stopped {where}: {full}") from full


def preparation_of(experiment: Experiment, watcher: Watcher, packages: Sequence[str] = ()) -> Preparation:
    """`packages`: requirements of the environments in place of the pinned ones."""
    threads = experiment.protocol.threads
    return Preparation(experiment.device, experiment.gpu, threads, watcher.say, packages)


def prepared(
    experiment: Experiment,
    cells: Sequence[Cell],
    options: RunOptions,
    watcher: Watcher,
    preparation: Preparation,
) -> Campaign:
    """A campaign whose device is locked already."""
    slug, device = machine.facts()["slug"], device_of(experiment)
    mechanism, timeout_s = inputs.mechanism(cells, preparation), experiment.protocol.timeout_s
    known_by = (preparation, device, slug, mechanism, timeout_s)
    keys = {cell.id: inputs.content_key(cell, *known_by) for cell in cells}
    folder = options.root / slug
    shared = provenance.campaign_fields(experiment, options.config_path, options.command_line)
    attempts, checks, searches, scores = before = _before(folder, watcher)
    earlier = itertools.chain(*attempts.values(), checks, searches.values(), scores)
    if place := campaign_order.next_place(shared["campaign"]["id"], (each.record for each in earlier)):
        shared["campaign"]["order"] = place
    if options.fleet is not None:
        shared["campaign"]["fleet"] = options.fleet
    return Campaign(
        experiment, cells, options, watcher, preparation, device, mechanism, keys, folder, shared, *before
    )


def examined(campaign: Campaign) -> Campaign:
    """The campaign after the doctor has checked the machine. Shows its warnings and adds the findings to
    every record. Does nothing if the device is not on this machine."""
    if campaign.device.absent:
        return campaign
    headers = {cell.header.stack: cell.header for cell in campaign.cells}.values()
    environments = [header.environment_for(campaign.device.family) for header in headers]
    # Every environment that can be built is built by now; refused cells need none.
    interpreters = [built for each in environments if each and (built := build.find(each))]
    found = doctor.run_findings(campaign.preparation.device_id, interpreters)
    for finding in found:
        if finding.level == "warn":
            campaign.watcher.warn(finding.line)
    doctor_findings = plain([each.record() for each in found])
    return replace(campaign, shared=campaign.shared | {"doctor": doctor_findings})


def _before(
    folder: Path, watcher: Watcher
) -> tuple[dict[tuple[str, int], list[Stored]], list[Stored], dict[str, Stored], list[Stored]]:
    """Earlier records of this machine: repeats by content key and number, oldest first; weight checks; the
    latest search of each content key; and scores."""
    kinds: dict[str, list[Stored]] = {"measured": [], "checked": [], "searched": [], "scored": []}
    for stored in records.records(folder, _passed_over(watcher)):
        kinds.setdefault(stored.record["kind"], []).append(stored)
    by_time = {
        kind: sorted(of_kind, key=lambda stored: str(stored.record["started_utc"]))
        for kind, of_kind in kinds.items()
    }
    attempts: dict[tuple[str, int], list[Stored]] = {}
    for stored in by_time["measured"]:
        attempts.setdefault((stored.record["content_key"], stored.record["repeat"]), []).append(stored)
    searches = {stored.record["content_key"]: stored for stored in by_time["searched"]}
    return attempts, kinds["checked"], searches, kinds["scored"]


def _passed_over(watcher: Watcher) -> Callable[[records.ResultsError], None]:
    return lambda damage: watcher.say(f"passed over: {damage}")

"""Open a campaign: lock the device, recover interrupted repeats, load earlier records, run the doctor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from harness import machine, results
from harness.analysis.records.disturbances import BusyProcess
from harness.analysis.records.verdicts import Verdict
from harness.campaign import facts, readiness, rounds
from harness.campaign.device_lock import device_lock
from harness.campaign.forecast import Device, device_of
from harness.campaign.prepare import Preparation
from harness.config import Experiment
from harness.dataset import order
from harness.machine import doctor
from harness.plan import Cell
from harness.results import Draft, Stored
from harness.results.kinds.parts import Fleet
from harness.stacks import build
from harness.system.endings import NotFinished
from runners.protocol import Rows


class Stopped(NotFinished):
    """The campaign had to stop; finished repeats are kept."""


class Watcher(Protocol):
    """Receives a campaign's progress and shows it to the user."""

    def say(self, line: str) -> None: ...
    def warn(self, line: str) -> None: ...
    def repeat_begins(self, number: int, of: int, cell: Cell, begun: Draft) -> None: ...
    def tokens(self, count: int, latency_ns: int) -> None: ...
    def rows(self, rows: Rows) -> None: ...
    def repeat_ends(self, stored: Stored, found: Verdict) -> None: ...
    def disturbed_by(self, process: BusyProcess) -> None: ...
    def search_ends(self, stored: Stored) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """Options of one run that are not in the config. `root`: the results folder, absolute. `reference`: a
    file with the reference of quality, in place of computing it. `fleet`: the place in a fleet that its
    records name; null without one."""

    root: Path
    config_path: Path
    command_line: Sequence[str]
    fresh: bool = False
    retry_failed: bool = False
    wait: bool = False
    reference: Path | None = None
    fleet: Fleet | None = None


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
    shared: Draft
    attempts: rounds.Attempts
    checks: list[Stored]
    searches: dict[str, Stored]
    scores: list[Stored]


@contextmanager
def opened(
    experiment: Experiment, cells: Sequence[Cell], options: RunOptions, watcher: Watcher
) -> Iterator[Campaign]:
    """Lock the device, recover interrupted repeats, and load earlier records. Raises as run()."""
    results.check_writable(options.root)
    preparation = preparation_of(experiment, watcher)
    # The fake's time is virtual: without a probe of the machine it neither measures nor disturbs.
    protocol = experiment.protocol
    probes = protocol.measure_bandwidth or protocol.measure_matrix_rate
    measures = probes or any(cell.weights_format != "none" for cell in cells)
    with device_lock(preparation.device_id, options.wait, watcher.say, measures):
        recover(options, watcher)
        yield prepared(experiment, cells, options, watcher, preparation)


def preparation_of(experiment: Experiment, watcher: Watcher, packages: Sequence[str] = ()) -> Preparation:
    """`packages`: requirements of the environments in place of the pinned ones."""
    threads = experiment.protocol.threads
    return Preparation(experiment.device, experiment.gpu, threads, watcher.say, packages)


def recover(options: RunOptions, watcher: Watcher) -> None:
    """Finish the records of interrupted repeats."""
    for stored in results.recover(options.root, _passed_over(watcher)):
        watcher.say(f"recovered an interrupted repeat: {stored.folder}")


def prepared(
    experiment: Experiment,
    cells: Sequence[Cell],
    options: RunOptions,
    watcher: Watcher,
    preparation: Preparation,
) -> Campaign:
    """A campaign whose device is locked already."""
    slug, device = machine.facts()["slug"], device_of(experiment)
    mechanism, timeout_s = readiness.mechanism(cells, preparation), experiment.protocol.timeout_s
    known_by = (preparation, device, slug, mechanism, timeout_s)
    keys = {cell.id: readiness.content_key(cell, *known_by) for cell in cells}
    folder = options.root / slug
    shared = facts.of_campaign(experiment, options.config_path, options.command_line)
    attempts, checks, searches, scores = before = _before(folder, watcher)
    earlier = itertools.chain(*attempts.values(), checks, searches.values(), scores)
    if place := order.next_place(shared["campaign"]["id"], (each.record for each in earlier)):
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
    return replace(campaign, shared=campaign.shared | {"doctor": [each.record() for each in found]})


def _before(
    folder: Path, watcher: Watcher
) -> tuple[dict[tuple[str, int], list[Stored]], list[Stored], dict[str, Stored], list[Stored]]:
    """Earlier records of this machine: repeats by content key and number, oldest first; weight checks; the
    latest search of each content key; and scores."""
    kinds: dict[str, list[Stored]] = {"measured": [], "checked": [], "searched": [], "scored": []}
    for each in results.records(folder, _passed_over(watcher)):
        kinds.setdefault(each.record["kind"], []).append(each)
    by_time = {
        kind: sorted(found, key=lambda each: str(each.record["started_utc"])) for kind, found in kinds.items()
    }
    attempts: dict[tuple[str, int], list[Stored]] = {}
    for each in by_time["measured"]:
        attempts.setdefault((each.record["content_key"], each.record["repeat"]), []).append(each)
    searches = {each.record["content_key"]: each for each in by_time["searched"]}
    return attempts, kinds["checked"], searches, kinds["scored"]


def _passed_over(watcher: Watcher) -> Callable[[results.ResultsError], None]:
    return lambda damage: watcher.say(f"passed over: {damage}")

"""The rounds of a campaign: open it, attempt what is due, judge, attempt again."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Protocol

import psutil

from harness import machine, records
from harness.analysis import device_energy
from harness.analysis.attempts import BusyProcess, counting
from harness.analysis.verdicts import USABLE, Verdict, attempts_left, verdict
from harness.base.files import NotFinished
from harness.base.text import plural
from harness.campaign import other_processes, prepare
from harness.campaign import repeat as campaign_repeat
from harness.campaign.forecast import Device, Forecast, device_of
from harness.campaign.other_processes import device_lock
from harness.campaign.prepare import Preparation
from harness.campaign.repeat import Inputs, NotReady, Probes, Shared, measure, not_measured
from harness.config import Experiment, plan
from harness.config.plan import Cell
from harness.dataset import table
from harness.machine import doctor
from harness.machine.doctor.cpu import BUSY_SHARE, Times, busy_share
from harness.machine.sensors import ROOT, Cooling, find
from harness.records import Draft, ResultsError, Stored, sensed
from harness.records.kinds import done_of
from harness.records.measured import WaitedForQuiet
from harness.records.parts import Campaign as CampaignFacts
from harness.records.parts import Fleet
from harness.records.values import plain
from harness.stacks import build
from runners.protocol import Rows

# Select the repeats to measure and run them round by round; disturbed ones are retried at the end of their
# round.


RecordsByRepeat = Mapping[tuple[str, int], Sequence[Stored]]
"""Earlier records by content key and repeat, oldest first."""


@dataclass(frozen=True)
class Due:
    """An attempt to measure. `attempt`: counted from 1; earlier attempts were disturbed. `quiet`: the result
    of waiting until the CPUs were idle; null if there was no wait. `side`: A or B of a campaign of two
    sides."""

    cell: Cell
    repeat: int
    attempt: int = 1
    quiet: WaitedForQuiet | None = None
    side: str = ""


def judge(stored: Stored) -> Verdict:
    """The verdict on a repeat's record. Reads its series only if it has times by the device's clock."""
    counters, whole = done_of(stored.record).get("counters", {}), stored.has_series
    times = table = None
    if whole:
        try:
            times = stored.times if "device_tokens" in counters else None
            table = records.table(stored)
        except ResultsError:
            whole = False
    return verdict(stored.record, has_series=whole, times=times, table=table)


def due(
    order: Iterable[tuple[Cell, int]],
    keys: Mapping[str, str],
    attempts: RecordsByRepeat,
    retries: int,
    fresh: bool,
    retry_failed: bool,
) -> tuple[list[Stored], list[Due]]:
    """The records to keep (one per repeat, with the disturbed attempts before it) and the repeats to measure.
    If an interrupted campaign left retries undone, the repeat continues with the next attempt."""
    kept: list[Stored] = []
    todo: list[Due] = []
    for cell, repeat in order:
        judged = [(each, judge(each)) for each in attempts.get((keys[cell.id], repeat), ())]
        if fresh or not judged:
            todo.append(Due(cell, repeat))
            continue
        counts, found = counting(
            judged, lambda each: each[1].status in USABLE, lambda each: each[1].disturbed
        )
        attempt = counts.record.get("attempt", 1)
        if attempt <= retries and attempts_left(counts.record, found):
            todo.append(Due(cell, repeat, attempt + 1))
        elif plan.is_done(found.status, fresh, retry_failed):
            kept += [each for each, other in judged if each is counts or other.disturbed]
        else:
            todo.append(Due(cell, repeat, attempt if found.status in plan.RETRIED_ALWAYS else 1))
    return kept, todo


def measure_round(
    todo: Sequence[Due],
    attempt: Callable[[Due, int, int], Stored],
    watcher: Watcher,
    watched: bool = True,
    done: int = 0,
) -> list[Stored]:
    """Measure all. Retries disturbed attempts at the end of their round, as often as the protocol allows. All
    repeats of a campaign of two sides are one round.

    `attempt`: measures one, given its position and the current total. `watched`: read the CPU time of other
    processes around each attempt, and show the one that used most in disturbed attempts. `done`: attempts of
    earlier rounds.
    """
    found: list[Stored] = []
    disturbers, of = other_processes.Disturbers(), done + len(todo)
    for _, members in groupby(todo, key=lambda each: None if each.side else each.repeat):
        waiting = deque(members)
        while waiting:
            each = waiting.popleft()
            if each.attempt > 1:
                each = replace(
                    each, quiet=other_processes.wait_until_quiet(watcher.say, other_processes.AT_MOST_S)
                )
            before = other_processes.look() if watched else None
            stored = attempt(each, done + len(found) + 1, of)
            found.append(stored)
            judged = judge(stored)
            watcher.repeat_ends(stored, judged)
            if before and judged.disturbed:
                disturbers.add(before, other_processes.look())
            if attempts_left(stored.record, judged):
                waiting.append(replace(each, attempt=each.attempt + 1, quiet=None))
                of += 1
    if (busiest := disturbers.busiest()) is not None:
        watcher.disturbed_by(busiest)
    return found


# Open a campaign: lock the device, recover interrupted repeats, load earlier records, run the doctor.


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
    records name; null without one. `forecasts`: those of its cells that are known already."""

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
        requested = campaign_repeat.repeat_fields(cell, repeat, self.keys[cell.id], device, gpu)
        begun: Draft = plain({**self.shared, **requested, "kind": kind})
        return begun

    def inputs(self, cell: Cell) -> Inputs | NotReady:
        return prepare.inputs_or_refusal(cell, self.experiment, self.preparation, self.device)


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
    mechanism, timeout_s = prepare.mechanism(cells, preparation), experiment.protocol.timeout_s
    known_by = (preparation, device, slug, mechanism, timeout_s)
    keys = {cell.id: prepare.content_key(cell, *known_by) for cell in cells}
    folder = options.root / slug
    shared = campaign_repeat.campaign_fields(experiment, options.config_path, options.command_line)
    attempts, checks, searches, scores = before = _before(folder, watcher)
    earlier = itertools.chain(*attempts.values(), checks, searches.values(), scores)
    if place := table.next_place(shared["campaign"]["id"], (each.record for each in earlier)):
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
    for each in records.records(folder, _passed_over(watcher)):
        kinds.setdefault(each.record["kind"], []).append(each)
    by_time = {
        kind: sorted(found, key=lambda each: str(each.record["started_utc"])) for kind, found in kinds.items()
    }
    attempts: dict[tuple[str, int], list[Stored]] = {}
    for each in by_time["measured"]:
        attempts.setdefault((each.record["content_key"], each.record["repeat"]), []).append(each)
    searches = {each.record["content_key"]: each for each in by_time["searched"]}
    return attempts, kinds["checked"], searches, kinds["scored"]


def _passed_over(watcher: Watcher) -> Callable[[records.ResultsError], None]:
    return lambda damage: watcher.say(f"passed over: {damage}")


# Measure the power of the idle device, for energy above it.


IDLE_INTERVAL_S = 0.5  # between readings: of a power, each counts


def idle_power(
    device_id: str,
    say: Callable[[str], None],
    root: Path = ROOT,
    sleep: Callable[[float], None] = time.sleep,
    cpu_times: Callable[[], Times] = lambda: psutil.cpu_times()._asdict(),
) -> sensed.IdlePower | None:
    """The device's power over some seconds, as long as its counter needs; null, at once, without a counter,
    and of a CPU that was not idle. `root`: the folder that contains sys."""
    on_cpu = device_id == "cpu"
    with ExitStack() as opened:
        sources = [each for each in find(device_id, root, opened, {}) if each.energy]
        domains = {column: counter for each in sources for column, counter in each.energy.items()}
        if (span_s := device_energy.idle_span_s(domains, on_cpu)) is None:
            return None
        columns: dict[str, list[int | None]] = {name: [] for name in ("t_ns", *domains)}
        before = cpu_times()
        for number in range(round(span_s / IDLE_INTERVAL_S) + 1):
            if number:
                sleep(IDLE_INTERVAL_S)
            values: dict[str, int | None] = {"t_ns": time.perf_counter_ns()}
            for each in sources:
                values |= each.read()
            for name, column in columns.items():
                column.append(values.get(name))
    busy = busy_share(before, cpu_times()) if on_cpu else None
    if busy is not None and busy > BUSY_SHARE:
        say(f"no J/token above idle: other processes use {busy:.0%} of the CPUs, which are not idle")
        return None
    return device_energy.idle_power(columns, domains, on_cpu)


_idle_power_once = cache(idle_power)  # of a command: one that tunes has many campaigns


# Measure attempts of a campaign's cells: a cell is prepared once, an attempt is a worker and a record.


class AttemptRunner:
    """The cells of a campaign, ready to be measured, or with the reason why not."""

    def __init__(self, campaign: Campaign, cells: Iterable[Cell]) -> None:
        self._campaign, protocol = campaign, campaign.experiment.protocol
        self._ready = {cell.id: campaign.inputs(cell) for cell in cells}
        say, cool = campaign.watcher.say, protocol.cool_down
        probed = protocol.measure_bandwidth, protocol.measure_matrix_rate
        self._probes = Probes(self._ready.values(), say, *probed)
        self._cooling = Cooling(cool.to_c, cool.at_most_s, say) if cool else None

    def measure(self, due: Due, number: int, of: int, within: CampaignFacts | None = None) -> Stored:
        """Measure once and write the record. `number`: the place among `of` attempts; `within`: the
        campaign, with its place in the rounds. Raises Stopped if the record cannot be written."""
        campaign, cell, inputs = self._campaign, due.cell, self._ready[due.cell.id]
        begun = campaign.begun(cell, due.repeat)
        begun |= {"attempt": due.attempt, "place_in_order": [number, of]}
        if isinstance(inputs, Inputs) and not cell.header.simulated:
            # before the probes warm the device
            idle = _idle_power_once(inputs.device_id, campaign.watcher.say)
            begun |= {"idle_power": idle} if idle else {}
        begun["bandwidth_probes"], begun["matrix_probe"] = self._probes.so_far(due.repeat)
        if within is not None:
            begun["campaign"] = within
        if due.quiet is not None:
            begun["waited_for_quiet"] = due.quiet
        campaign.watcher.repeat_begins(number, of, cell, begun)
        try:
            if isinstance(inputs, NotReady):
                return not_measured(campaign.folder, cell, begun, inputs.outcome, str(inputs))
            campaign_repeat.add_inputs(begun, cell, inputs)
            if inputs.forecast and inputs.forecast.failures:
                begun["known_failure"] = inputs.forecast.failures
            if self._cooling is not None:
                begun["cooled"] = self._cooling.wait(inputs.device_id)
            return measure(campaign.folder, cell, begun, inputs, campaign.watcher)
        except records.ResultsError as full:
            finished = f"{plural(number - 1, 'repeat')} finished and kept; the same command continues"
            raise Stopped(f"stopped at {cell.id}: {full}; {finished}") from full

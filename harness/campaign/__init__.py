"""Run a campaign: plan, prepare, measure each repeat, save. A failure is recorded; the campaign continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from harness import machine, plan, results
from harness.analysis.records import agreement
from harness.analysis.records.disturbances import BusyProcess
from harness.analysis.records.verdicts import USABLE, Verdict, status
from harness.campaign import facts, max_context, readiness, rounds, weights_check
from harness.campaign.device_lock import DeviceBusy, device_lock
from harness.campaign.forecast import Device, device_of, forecast_cell
from harness.campaign.prepare import NotReady, Preparation
from harness.campaign.probes import Probes
from harness.campaign.repeat import Inputs, measure, not_measured
from harness.config import Experiment
from harness.machine import doctor
from harness.machine.sensors.cooling import Cooling
from harness.plan import Cell
from harness.results import Draft, Stored
from harness.stacks import build
from harness.system.endings import NotFinished
from harness.system.wording import plural

__all__ = ["CHECK_SECONDS", "DeviceBusy", "RunOptions", "Stopped", "Watcher", "check_weights", "run"]

CHECK_SECONDS = weights_check.SECONDS


class Stopped(NotFinished):
    """The campaign had to stop; finished repeats are kept."""


class Watcher(Protocol):
    """Receives a campaign's progress and shows it to the user."""

    def say(self, line: str) -> None: ...
    def warn(self, line: str) -> None: ...
    def repeat_begins(self, number: int, of: int, cell: Cell, repeat: int, attempt: int) -> None: ...
    def tokens(self, count: int, latency_ns: int) -> None: ...
    def repeat_ends(self, stored: Stored, found: Verdict) -> None: ...
    def disturbed_by(self, process: BusyProcess) -> None: ...
    def search_ends(self, stored: Stored) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """Options of one run that are not in the config. `root`: the results folder, absolute."""

    root: Path
    config_path: Path
    command_line: Sequence[str]
    fresh: bool = False
    retry_failed: bool = False
    wait: bool = False


def run(experiment: Experiment, cells: Sequence[Cell], options: RunOptions, watcher: Watcher) -> list[Stored]:
    """Measure every repeat that has no result yet, then search the longest contexts (last, because a search
    takes all free memory). Returns all records, kept ones included: repeats, searches, and weight checks if
    the protocol has them.

    Raises ResultsError and CacheError (nothing was started), DeviceBusy, Stopped, and KeyboardInterrupt
    (after the record of the current repeat is written).
    """
    protocol = experiment.protocol
    with _opened(experiment, cells, options, watcher) as campaign:
        keys, preparation, folder = campaign.keys, campaign.preparation, campaign.folder
        device = campaign.device
        timed = [cell for cell in cells if not cell.searches]
        order = plan.order(timed, protocol.repeats, protocol.order_seed)
        wanted = (protocol.retry_disturbed, options.fresh, options.retry_failed)
        kept, todo = rounds.due(order, keys, campaign.attempts, *wanted)
        if todo or any(cell.searches and _kept(campaign, cell) is None for cell in cells):
            campaign = _examined(campaign)
        checks = _checked(campaign, CHECK_SECONDS) if protocol.check_weights else []
        if kept:
            count = len({(each.record["cell"], each.record["repeat"]) for each in kept})
            watcher.say(f"{plural(count, 'repeat')} measured already and kept; use --fresh to measure again")
            preparation.know_prompts(each.record for each in kept)
        pending = {each.cell.id: each.cell for each in todo}
        ready = {
            key: readiness.inputs(cell, experiment, preparation, device) for key, cell in pending.items()
        }
        known = {
            key: forecast_cell(pending[key], inputs.weights, device, preparation.threads).failures
            for key, inputs in ready.items()
            if isinstance(inputs, Inputs)
        }
        probes = Probes(ready.values(), watcher.say, protocol.measure_bandwidth, protocol.measure_matrix_rate)
        cool = protocol.cool_down
        cooling = Cooling(cool.to_c, cool.at_most_s, watcher.say) if cool else None

        def attempt(due: rounds.Due, number: int, of: int) -> Stored:
            cell, inputs = due.cell, ready[due.cell.id]
            repeat_facts = facts.of_repeat(cell, due.repeat, keys[cell.id], experiment.device, experiment.gpu)
            begun = campaign.shared | repeat_facts | {"attempt": due.attempt, "place_in_order": [number, of]}
            begun |= probes.so_far(due.repeat)
            if due.quiet is not None:
                begun["waited_for_quiet"] = due.quiet
            watcher.repeat_begins(number, of, cell, due.repeat, due.attempt)
            try:
                if isinstance(inputs, NotReady):
                    stored = not_measured(folder, cell, begun, inputs.outcome, str(inputs))
                else:
                    begun |= facts.of_inputs(cell, inputs, begun)
                    if known[cell.id]:
                        begun["known_failure"] = known[cell.id]
                    if cooling is not None:
                        begun["cooled"] = cooling.wait(inputs.device_id)
                    stored = measure(folder, cell, begun, inputs, watcher.tokens)
            except results.ResultsError as full:
                finished = f"{plural(number - 1, 'repeat')} finished and kept"
                raise Stopped(f"stopped at {cell.id}: {full}; {finished}") from full
            return stored

        measured, busiest = rounds.measure(
            todo, attempt, protocol.retry_disturbed > 0, watcher.say, watcher.repeat_ends
        )
        if busiest is not None:
            watcher.disturbed_by(busiest)
        found = kept + measured
        searches = [_searched(campaign, cell) for cell in cells if cell.searches]
    place = {cell.id: number for number, cell in enumerate(cells)}
    found.sort(key=lambda s: (place[s.record["cell"]], s.record["repeat"], s.record["started_utc"]))
    return found + searches + checks


def _searched(campaign: _Campaign, cell: Cell) -> Stored:
    """The longest context of a cell: from an earlier search, or from a new one."""
    experiment, watcher = campaign.experiment, campaign.watcher
    key = campaign.keys[cell.id]
    before = campaign.searches.get(key)
    was = status(before.record)[0] if before else None
    if kept := _kept(campaign, cell):
        answer = f"{kept.record['search'].get('verified_n_ctx')} tokens" if was in USABLE else was
        again = "" if was in USABLE else "; use --retry-failed to search again"
        watcher.say(f"{cell.id} has already been searched: {answer}{again}")
        return kept
    preparation, refused = campaign.preparation, max_context.refusal(cell, campaign.preparation.threads)
    if preparation.device_id == "cpu" and campaign.mechanism is None:  # the machine itself would run out
        refused = refused or NotReady("refused", "this machine has no way to limit the memory of a worker")
    inputs = refused or readiness.inputs(cell, experiment, preparation, campaign.device)
    begun = campaign.shared | facts.of_repeat(cell, 1, key, experiment.device, experiment.gpu)
    if isinstance(inputs, Inputs):
        begun |= facts.of_inputs(cell, inputs, begun)
    searching = max_context.Searching(
        folder=campaign.folder,
        device_family=experiment.device.partition(":")[0],
        budget_bytes=experiment.protocol.memory_budget_bytes,
        mechanism=campaign.mechanism,
        say=watcher.say,
    )
    try:
        stored = max_context.find(cell, inputs, begun, searching, before if was == "interrupted" else None)
    except results.ResultsError as full:
        raise Stopped(f"stopped at {cell.id}: {full}") from full
    watcher.search_ends(stored)
    return stored


def _kept(campaign: _Campaign, cell: Cell) -> Stored | None:
    """The earlier search, if it is still valid; null: search the cell now."""
    options, before = campaign.options, campaign.searches.get(campaign.keys[cell.id])
    was = status(before.record)[0] if before else None
    return before if before and plan.is_done(was, options.fresh, options.retry_failed) else None


def _examined(campaign: _Campaign) -> _Campaign:
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


def check_weights(
    experiment: Experiment, cells: Sequence[Cell], options: RunOptions, watcher: Watcher, seconds: float
) -> list[Stored]:
    """Compare the logits of every model and variant with the 16-bit reference, without timing anything.
    Returns one record per variant, kept ones included. `seconds`: compute time per variant.

    Raises as run() does.
    """
    with _opened(experiment, cells, options, watcher) as campaign:
        return _checked(campaign, seconds)


@dataclass(frozen=True)
class _Campaign:
    """One campaign while it holds the device. `device`: its known properties; `keys`: content key by cell;
    `folder`: results of this machine; `shared`: the part that all its records have in common; `attempts`,
    `checks`, `searches`: earlier records."""

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


@contextmanager
def _opened(
    experiment: Experiment, cells: Sequence[Cell], options: RunOptions, watcher: Watcher
) -> Iterator[_Campaign]:
    """Lock the device, recover interrupted repeats, and load earlier records. Raises as run()."""
    results.check_writable(options.root)
    preparation = Preparation(experiment.device, experiment.gpu, experiment.protocol.threads, watcher.say)
    with device_lock(preparation.device_id, options.wait, watcher.say):
        for stored in results.recover(options.root, _passed_over(watcher)):
            watcher.say(f"recovered an interrupted repeat: {stored.folder}")
        slug, device = machine.facts()["slug"], device_of(experiment)
        mechanism, timeout_s = readiness.mechanism(cells, preparation), experiment.protocol.timeout_s
        known_by = (preparation, device, slug, mechanism, timeout_s)
        keys = {cell.id: readiness.content_key(cell, *known_by) for cell in cells}
        folder = options.root / slug
        shared = facts.of_campaign(experiment, options.config_path, options.command_line)
        before = _before(folder, watcher)
        yield _Campaign(
            experiment, cells, options, watcher, preparation, device, mechanism, keys, folder, shared, *before
        )


def _checked(campaign: _Campaign, seconds: float) -> list[Stored]:
    """Check the weights, and report every verdict other than "agrees"."""
    experiment, preparation, watcher = campaign.experiment, campaign.preparation, campaign.watcher
    checking = weights_check.Checking(
        experiment=experiment,
        preparation=preparation,
        inputs=lambda cell: readiness.inputs(cell, experiment, preparation, campaign.device),
        keys=campaign.keys,
        folder=campaign.folder,
        shared=campaign.shared,
        seconds=seconds,
        fresh=campaign.options.fresh,
        retry_failed=campaign.options.retry_failed,
    )
    try:
        found = weights_check.check(campaign.cells, checking, campaign.checks)
    except results.ResultsError as full:
        raise Stopped(f"stopped while checking weights: {full}") from full
    for row in map(agreement.row, (stored.record for stored in found)):
        if row["verdict"] != "agrees":
            watcher.say(f"weights of {row['cell']}: {row['verdict']}: {row['reason']}")
    return found


def _before(
    folder: Path, watcher: Watcher
) -> tuple[dict[tuple[str, int], list[Stored]], list[Stored], dict[str, Stored]]:
    """Earlier records of this machine: repeats by content key and number, oldest first; weight checks; and
    the latest search of each content key."""
    kinds: dict[str, list[Stored]] = {"measured": [], "checked": [], "searched": []}
    for each in results.records(folder, _passed_over(watcher)):
        kinds.setdefault(each.record["kind"], []).append(each)
    by_time = {
        kind: sorted(found, key=lambda each: str(each.record["started_utc"])) for kind, found in kinds.items()
    }
    attempts: dict[tuple[str, int], list[Stored]] = {}
    for each in by_time["measured"]:
        attempts.setdefault((each.record["content_key"], each.record["repeat"]), []).append(each)
    searches = {each.record["content_key"]: each for each in by_time["searched"]}
    return attempts, kinds["checked"], searches


def _passed_over(watcher: Watcher) -> Callable[[results.ResultsError], None]:
    return lambda damage: watcher.say(f"passed over: {damage}")

"""The campaign: plan, prepare, measure each repeat in its turn, save. A failure is a result, never the end of
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from harness import machine, plan, results
from harness.analysis.records import agreement
from harness.analysis.records.disturbances import BusyProcess
from harness.analysis.records.verdicts import USABLE, status
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
from harness.results import Record, Stored
from harness.stacks import build
from harness.system.wording import plural

__all__ = ["CHECK_SECONDS", "Asked", "DeviceBusy", "Stopped", "Watcher", "check_weights", "run"]

CHECK_SECONDS = weights_check.SECONDS


class Stopped(RuntimeError):
    """The campaign could not go on; what was finished is kept."""


class Watcher(Protocol):
    """Who shows a campaign's progress."""

    def say(self, line: str) -> None: ...
    def warn(self, line: str) -> None: ...
    def repeat_begins(self, number: int, of: int, cell: Cell, repeat: int, attempt: int) -> None: ...
    def tokens(self, count: int, latency_ns: int) -> None: ...
    def repeat_ends(self, stored: Stored) -> None: ...
    def disturbed_by(self, process: BusyProcess) -> None: ...
    def search_ends(self, stored: Stored) -> None: ...


@dataclass(frozen=True)
class Asked:
    """How a campaign is run, beside its config. `root`: the results folder, absolute."""

    root: Path
    config_path: Path
    command_line: Sequence[str]
    fresh: bool = False
    retry_failed: bool = False
    wait: bool = False


def run(experiment: Experiment, cells: Sequence[Cell], asked: Asked, watcher: Watcher) -> list[Stored]:
    """Measure what is not measured yet, then search the longest contexts, which takes all memory there is.
    Returns every record, those kept from before included: of repeats, of searches, and of the checks of
    weights, if the protocol has them.

    Raises ResultsError and CacheError (nothing was started), DeviceBusy, Stopped, KeyboardInterrupt (the
    record of the repeat in hand is written first).
    """
    protocol = experiment.protocol
    with _opened(experiment, cells, asked, watcher) as campaign:
        keys, preparation, folder = campaign.keys, campaign.preparation, campaign.folder
        device = campaign.device
        timed = [cell for cell in cells if not cell.searches]
        order = plan.order(timed, protocol.repeats, protocol.order_seed)
        wanted = (protocol.retry_disturbed, asked.fresh, asked.retry_failed)
        kept, todo = rounds.due(order, keys, campaign.attempts, *wanted)
        if todo or any(cell.searches and _kept(campaign, cell) is None for cell in cells):
            campaign = _examined(campaign)
        checks = _checked(campaign, CHECK_SECONDS) if protocol.check_weights else []
        if kept:
            count = len({(each.record["cell"], each.record["repeat"]) for each in kept})
            watcher.say(f"{plural(count, 'repeat')} measured already and kept; --fresh measures anew")
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
            asked_of = facts.of_repeat(cell, due.repeat, keys[cell.id], experiment.device, experiment.gpu)
            begun = campaign.shared | asked_of | {"attempt": due.attempt, "place_in_order": [number, of]}
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
            watcher.repeat_ends(stored)
            return stored

        measured, busiest = rounds.measure(todo, attempt, protocol.retry_disturbed > 0, watcher.say)
        if busiest is not None:
            watcher.disturbed_by(busiest)
        found = kept + measured
        searches = [_searched(campaign, cell) for cell in cells if cell.searches]
    place = {cell.id: number for number, cell in enumerate(cells)}
    found.sort(key=lambda s: (place[s.record["cell"]], s.record["repeat"], s.record["started_utc"]))
    return found + searches + checks


def _searched(campaign: _Campaign, cell: Cell) -> Stored:
    """The longest context of a cell: as found before, or searched now."""
    experiment, watcher = campaign.experiment, campaign.watcher
    key = campaign.keys[cell.id]
    before = campaign.searches.get(key)
    was = status(before.record)[0] if before else None
    if kept := _kept(campaign, cell):
        answer = f"{kept.record['search'].get('verified_n_ctx')} tokens" if was in USABLE else was
        again = "" if was in USABLE else "; --retry-failed searches again"
        watcher.say(f"{cell.id} is searched already: {answer}{again}")
        return kept
    preparation, refused = campaign.preparation, max_context.refusal(cell, campaign.preparation.threads)
    if preparation.device_id == "cpu" and campaign.mechanism is None:  # the machine itself would run out
        refused = refused or NotReady("refused", "memory of a worker cannot be bounded on this machine")
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
    """The search of before that stands; null: the cell is to be searched."""
    asked, before = campaign.asked, campaign.searches.get(campaign.keys[cell.id])
    was = status(before.record)[0] if before else None
    return before if before and plan.is_done(was, asked.fresh, asked.retry_failed) else None


def _examined(campaign: _Campaign) -> _Campaign:
    """The campaign once what may spoil it was looked for, and said; its records keep it. Where its device is
    not here nothing is."""
    if campaign.device.absent:
        return campaign
    headers = {cell.header.stack: cell.header for cell in campaign.cells}.values()
    environments = [header.environment_for(campaign.device.family) for header in headers]
    # Of those that could be built all are by now, and for cells that are refused none is.
    interpreters = [built for each in environments if each and (built := build.find(each))]
    found = doctor.spoilers(campaign.preparation.device_id, interpreters)
    for finding in found:
        if finding.level == "warn":
            campaign.watcher.warn(finding.line)
    return replace(campaign, shared=campaign.shared | {"doctor": [each.record() for each in found]})


def check_weights(
    experiment: Experiment, cells: Sequence[Cell], asked: Asked, watcher: Watcher, seconds: float
) -> list[Stored]:
    """Hold the logits of every model and variant against the 16-bit reference, and measure nothing. Returns
    a record each, those kept from before included. `seconds`: of computing a variant.

    Raises as run() does.
    """
    with _opened(experiment, cells, asked, watcher) as campaign:
        return _checked(campaign, seconds)


@dataclass(frozen=True)
class _Campaign:
    """One campaign while it has the device. `device`: as far as it is known; `keys`: content key by cell;
    `folder`: results of this machine; `shared`: what each of its records says; `attempts`, `checks`,
    `searches`: what was measured, checked and searched before."""

    experiment: Experiment
    cells: Sequence[Cell]
    asked: Asked
    watcher: Watcher
    preparation: Preparation
    device: Device
    mechanism: str | None
    keys: dict[str, str]
    folder: Path
    shared: Record
    attempts: rounds.Attempts
    checks: list[Stored]
    searches: dict[str, Stored]


@contextmanager
def _opened(
    experiment: Experiment, cells: Sequence[Cell], asked: Asked, watcher: Watcher
) -> Iterator[_Campaign]:
    """Take the device, keep what an interrupted campaign left, and see what is there. Raises as run()."""
    results.check_writable(asked.root)
    preparation = Preparation(experiment.device, experiment.gpu, experiment.protocol.threads, watcher.say)
    with device_lock(preparation.device_id, asked.wait, watcher.say):
        for stored in results.recover(asked.root, _passed_over(watcher)):
            watcher.say(f"kept what an interrupted repeat had measured: {stored.folder}")
        slug, device = machine.facts()["slug"], device_of(experiment)
        mechanism, timeout_s = readiness.mechanism(cells, preparation), experiment.protocol.timeout_s
        known_by = (preparation, device, slug, mechanism, timeout_s)
        keys = {cell.id: readiness.content_key(cell, *known_by) for cell in cells}
        folder = asked.root / slug
        shared = facts.of_campaign(experiment, asked.config_path, asked.command_line)
        before = _before(folder, watcher)
        yield _Campaign(
            experiment, cells, asked, watcher, preparation, device, mechanism, keys, folder, shared, *before
        )


def _checked(campaign: _Campaign, seconds: float) -> list[Stored]:
    """Check, and say what is not as it should be."""
    experiment, preparation, watcher = campaign.experiment, campaign.preparation, campaign.watcher
    checking = weights_check.Checking(
        experiment=experiment,
        preparation=preparation,
        inputs=lambda cell: readiness.inputs(cell, experiment, preparation, campaign.device),
        keys=campaign.keys,
        folder=campaign.folder,
        shared=campaign.shared,
        seconds=seconds,
        fresh=campaign.asked.fresh,
        retry_failed=campaign.asked.retry_failed,
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
    """What this machine measured before, by content key and repeat, oldest first; its checks; and the latest
    search of each content key."""
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

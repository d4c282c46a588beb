"""The campaign: plan, prepare, measure each repeat in its turn, save. A failure is a result, never the end of
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness import machine, plan, results
from harness.analysis import agreement
from harness.analysis.verdicts import status
from harness.campaign import check, facts
from harness.campaign.device_lock import DeviceBusy, device_lock
from harness.campaign.prepare import NotReady, Preparation
from harness.campaign.probes import Probes
from harness.campaign.repeat import Inputs, measure, not_measured
from harness.config import Experiment
from harness.plan import Cell
from harness.results import Record, Stored

__all__ = ["CHECK_SECONDS", "Asked", "DeviceBusy", "Stopped", "Watcher", "check_weights", "run"]

CHECK_SECONDS = check.SECONDS


class Stopped(RuntimeError):
    """The campaign could not go on; what was finished is kept."""


class Watcher(Protocol):
    """Who shows a campaign's progress."""

    def say(self, line: str) -> None: ...
    def repeat_begins(self, number: int, of: int, cell: Cell, repeat: int) -> None: ...
    def tokens(self, count: int, latency_ns: int) -> None: ...
    def repeat_ends(self, stored: Stored) -> None: ...


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
    """Measure what is not measured yet. Returns every repeat's record, those kept from before included, and
    after them those of the checks of weights, if the protocol has them.

    Raises ResultsError and CacheError (nothing was started), DeviceBusy, Stopped, KeyboardInterrupt (the
    record of the repeat in hand is written first).
    """
    results.check_writable(asked.root)
    protocol = experiment.protocol
    order = plan.order(cells, protocol.repeats, protocol.order_seed)
    preparation = Preparation(experiment.device, experiment.gpu, protocol.threads, watcher.say)
    with device_lock(preparation.device_id, asked.wait, watcher.say):
        _recover(asked, watcher)
        slug = machine.facts()["slug"]
        keys = {cell.id: _content_key(cell, preparation, slug) for cell in cells}
        latest, checked = _before(asked.root / slug, watcher)
        shared = facts.of_campaign(experiment, asked.config_path, asked.command_line)
        checks: list[Stored] = []
        if protocol.check_weights:
            checking = _checking(experiment, preparation, keys, asked, shared, CHECK_SECONDS)
            checks = _checked(cells, checking, checked, watcher)
        found, todo = [], []
        for cell, repeat in order:
            before = latest.get((keys[cell.id], repeat))
            was = _status(before) if before else None
            if before and plan.is_done(was, asked.fresh, asked.retry_failed):
                found.append(before)
            else:
                todo.append((cell, repeat))
        if found:
            watcher.say(f"{len(found)} repeats are measured already and kept; --fresh measures anew")
            preparation.know_prompts(each.record for each in found)
        pending = {cell.id: cell for cell, _ in todo}
        ready = {key: _inputs(cell, experiment, preparation) for key, cell in pending.items()}
        probes = Probes(ready.values(), watcher.say, protocol.measure_bandwidth, protocol.measure_matrix_rate)
        for number, (cell, repeat) in enumerate(todo, 1):
            begun = shared | facts.of_repeat(cell, repeat, keys[cell.id], experiment.device, experiment.gpu)
            begun |= {"place_in_order": [number, len(todo)]}
            begun |= probes.so_far(repeat)
            watcher.repeat_begins(number, len(todo), cell, repeat)
            inputs = ready[cell.id]
            try:
                if isinstance(inputs, NotReady):
                    stored = not_measured(asked.root / slug, cell, begun, inputs.outcome, str(inputs))
                else:
                    begun |= facts.of_inputs(cell, inputs, begun)
                    stored = measure(asked.root / slug, cell, begun, inputs, watcher.tokens)
            except results.ResultsError as full:
                kept = f"{number - 1} repeats were finished and kept"
                raise Stopped(f"stopped at {cell.id}: {full}; {kept}") from full
            found.append(stored)
            watcher.repeat_ends(stored)
    place = {cell.id: number for number, cell in enumerate(cells)}
    found.sort(key=lambda s: (place[s.record["cell"]], s.record["repeat"]))
    return found + checks


def check_weights(
    experiment: Experiment, cells: Sequence[Cell], asked: Asked, watcher: Watcher, seconds: float
) -> list[Stored]:
    """Hold the logits of every model and variant against the 16-bit reference, and measure nothing. Returns
    a record each, those kept from before included. `seconds`: of computing a variant.

    Raises as run() does.
    """
    results.check_writable(asked.root)
    preparation = Preparation(experiment.device, experiment.gpu, experiment.protocol.threads, watcher.say)
    with device_lock(preparation.device_id, asked.wait, watcher.say):
        _recover(asked, watcher)
        slug = machine.facts()["slug"]
        keys = {cell.id: _content_key(cell, preparation, slug) for cell in cells}
        _, checked = _before(asked.root / slug, watcher)
        shared = facts.of_campaign(experiment, asked.config_path, asked.command_line)
        checking = _checking(experiment, preparation, keys, asked, shared, seconds)
        return _checked(cells, checking, checked, watcher)


def _checking(
    experiment: Experiment,
    preparation: Preparation,
    keys: dict[str, str],
    asked: Asked,
    shared: Record,
    seconds: float,
) -> check.Checking:
    return check.Checking(
        experiment=experiment,
        preparation=preparation,
        inputs=lambda cell: _inputs(cell, experiment, preparation),
        keys=keys,
        folder=asked.root / machine.facts()["slug"],
        shared=shared,
        seconds=seconds,
        fresh=asked.fresh,
        retry_failed=asked.retry_failed,
    )


def _checked(
    cells: Sequence[Cell], checking: check.Checking, before: Sequence[Stored], watcher: Watcher
) -> list[Stored]:
    """Check, and say what is not as it should be."""
    try:
        found = check.check(cells, checking, before)
    except results.ResultsError as full:
        raise Stopped(f"stopped while checking weights: {full}") from full
    for row in map(agreement.row, (stored.record for stored in found)):
        if row["verdict"] != "agrees":
            watcher.say(f"weights of {row['cell']}: {row['verdict']}: {row['reason']}")
    return found


def _status(before: Stored) -> str:
    """What a repeat's record is worth; its series is opened only where a device's clock stands in it."""
    counters = (before.record.get("done") or {}).get("counters", {})
    columns = results.series(before) if "device_tokens" in counters and before.has_series else None
    return status(before.record, has_series=before.has_series, series=columns)[0]


def _inputs(cell: Cell, experiment: Experiment, preparation: Preparation) -> Inputs | NotReady:
    """Everything the cell needs, or why it cannot be had."""
    protocol = experiment.protocol
    try:
        interpreter = preparation.interpreter(cell.header)
        ready = preparation.weights(cell)
        prompt, source = preparation.prompt(cell, ready)
    except NotReady as reason:
        return reason
    options = cell.options(preparation.threads)
    return Inputs(
        interpreter=interpreter,
        device_id=preparation.device_id,
        weights=ready,
        prompt=prompt,
        prompt_source=source,
        options=options,
        threads=int(options.get("threads") or preparation.threads),
        timeout_s=protocol.timeout_s,
        sample_interval_ms=protocol.sample_interval_ms,
        warmup=protocol.warmup.model_dump(),
    )


def _content_key(cell: Cell, preparation: Preparation, slug: str) -> str:
    options, device = cell.options(preparation.threads), preparation.device_id
    try:
        interpreter = preparation.interpreter(cell.header)
    except NotReady:
        return plan.content_key(cell, options, ("unavailable",), None, slug, device)
    built = [f"{name}={value}" for name, value in interpreter.environment.variables.items()]
    stack = [interpreter.environment.name, *built, *interpreter.lock]
    return plan.content_key(cell, options, stack, preparation.fingerprint(cell), slug, device)


def _recover(asked: Asked, watcher: Watcher) -> None:
    for stored in results.recover(asked.root, _passed_over(watcher)):
        watcher.say(f"kept what an interrupted repeat had measured: {stored.folder}")


def _before(folder: Path, watcher: Watcher) -> tuple[dict[tuple[str, int], Stored], list[Stored]]:
    """What this machine measured before, the latest record of each content key and repeat; and its checks."""
    kinds: dict[str, list[Stored]] = {"measured": [], "checked": []}
    for each in results.records(folder, _passed_over(watcher)):
        kinds.setdefault(each.record["kind"], []).append(each)
    measured = sorted(kinds["measured"], key=lambda each: str(each.record["started_utc"]))
    latest = {(each.record["content_key"], each.record["repeat"]): each for each in measured}
    return latest, kinds["checked"]


def _passed_over(watcher: Watcher) -> Callable[[results.ResultsError], None]:
    return lambda damage: watcher.say(f"passed over: {damage}")

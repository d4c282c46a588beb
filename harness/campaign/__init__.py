"""The campaign: plan, prepare, measure each repeat in its turn, save. A failure is a result, never the end of
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness import machine, plan, results
from harness.analysis.verdicts import status
from harness.campaign import facts
from harness.campaign.device_lock import DeviceBusy, device_lock
from harness.campaign.prepare import NotReady, Preparation
from harness.campaign.repeat import Inputs, measure, not_measured
from harness.config import Experiment
from harness.plan import Cell
from harness.results import Record, Stored

__all__ = ["Asked", "Campaign", "DeviceBusy", "Stopped", "Watcher", "run"]


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
    """How a campaign is run, beside its config."""

    root: Path
    config_path: Path
    command_line: Sequence[str]
    only: Sequence[str] = ()
    fresh: bool = False
    retry_failed: bool = False
    wait: bool = False


@dataclass
class Campaign:
    """Every selected repeat's record, those kept from before included."""

    stored: list[Stored] = field(default_factory=list)

    @property
    def all_ok(self) -> bool:
        return all(status(s.record)[0] == "ok" for s in self.stored)


def run(experiment: Experiment, asked: Asked, watcher: Watcher) -> Campaign:
    """Measure what is not measured yet.

    Raises ResultsError (results cannot be written, nothing was started), DeviceBusy, Stopped,
    KeyboardInterrupt (the record of the repeat in hand is written first).
    """
    results.check_writable(asked.root)
    protocol = experiment.protocol
    cells = plan.select(plan.cells(experiment), asked.only)
    order = plan.order(cells, protocol.repeats, protocol.order_seed)
    preparation = Preparation(experiment.device, experiment.gpu, protocol.threads, watcher.say)
    with device_lock(preparation.device_id, asked.wait, watcher.say):
        for stored in results.recover(asked.root):
            watcher.say(f"kept what an interrupted repeat had measured: {stored.folder}")
        slug = machine.facts()["slug"]
        keys = {cell.id: _content_key(cell, preparation, slug) for cell in cells}
        earlier = _earlier(asked.root / slug, watcher.say)
        campaign, todo = Campaign(), []
        for cell, repeat in order:
            before = earlier.get((keys[cell.id], repeat), [])
            if plan.is_done([status(s.record)[0] for s in before], asked.fresh, asked.retry_failed):
                campaign.stored.append(before[-1])
            else:
                todo.append((cell, repeat))
        if campaign.stored:
            watcher.say(
                f"{len(campaign.stored)} repeats are measured already and kept; --fresh measures anew"
            )
        shared = facts.of_campaign(experiment, asked.config_path, asked.command_line)
        pending = {cell.id: cell for cell, _ in todo}
        ready = {key: _inputs(cell, experiment, preparation) for key, cell in pending.items()}
        probes: list[Record] = []
        for number, (cell, repeat) in enumerate(todo, 1):
            # A round has every cell once: a probe before each interleaves them with the cells.
            if protocol.measure_bandwidth and (number == 1 or repeat != todo[number - 2][1]):
                probes.append(machine.read_bandwidth(preparation.threads))
            begun = shared | facts.of_repeat(cell, repeat, keys[cell.id], experiment.device, experiment.gpu)
            begun |= {"place_in_order": [number, len(todo)], "bandwidth_probes": list(probes)}
            watcher.repeat_begins(number, len(todo), cell, repeat)
            inputs = ready[cell.id]
            try:
                if isinstance(inputs, NotReady):
                    stored = not_measured(asked.root / slug, cell, begun, inputs.outcome, str(inputs))
                else:
                    begun |= facts.of_inputs(cell, inputs, begun)
                    stored = measure(asked.root / slug, cell, begun, inputs, watcher.tokens)
            except results.ResultsError as full:
                raise Stopped(
                    f"stopped at {cell.id}: {full}; {number - 1} repeats were finished and kept"
                ) from full
            campaign.stored.append(stored)
            watcher.repeat_ends(stored)
    place = {cell.id: number for number, cell in enumerate(cells)}
    campaign.stored.sort(key=lambda s: (place[s.record["cell"]], s.record["repeat"]))
    return campaign


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
    try:
        lock = preparation.interpreter(cell.header).lock
    except NotReady:
        return plan.content_key(cell, ("unavailable",), None, slug)
    return plan.content_key(cell, lock, preparation.fingerprint(cell), slug)


def _earlier(folder: Path, say: Callable[[str], None]) -> dict[tuple[str, int], list[Stored]]:
    """What this machine measured before, by content key and repeat."""
    earlier: dict[tuple[str, int], list[Stored]] = {}
    for stored in results.records(folder, lambda damage: say(f"passed over: {damage}")):
        if stored.record["kind"] == "measured":
            earlier.setdefault((stored.record["content_key"], stored.record["repeat"]), []).append(stored)
    return earlier

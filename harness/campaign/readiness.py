"""Collect the inputs of a cell, or the reason why it cannot run, and compute its content key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness import plan
from harness.campaign import contexts
from harness.campaign.forecast import Device, expected, forecast_cell
from harness.campaign.placed import placement_of
from harness.campaign.prepare import NotReady, Preparation
from harness.campaign.repeat import Inputs
from harness.config import Experiment
from harness.plan import Cell
from harness.worker.memory_limit import mechanism_here


def inputs(cell: Cell, experiment: Experiment, preparation: Preparation, device: Device) -> Inputs | NotReady:
    """Everything the cell needs to run, or the reason why it cannot or must not run."""
    protocol = experiment.protocol
    try:
        if uncut := cell.uncut(preparation.threads):
            raise NotReady("unavailable", uncut)
        if refusal := _refusal(cell, preparation, device):
            raise NotReady("refused", refusal)
        interpreter = preparation.interpreter(cell.header)
        ready = preparation.weights(cell)
        if refusal := forecast_cell(cell, ready, device, preparation.threads).refusal:  # weights are read now
            raise NotReady("refused", refusal)
        prompt, source = preparation.prompt(cell, ready)
    except NotReady as reason:
        return reason
    options = cell.options(preparation.threads)
    found = Inputs(
        interpreter=interpreter,
        device_id=preparation.device_id,
        weights=ready,
        prompt=prompt,
        prompt_source=source,
        options=options,
        threads=int(options.get("threads") or preparation.threads),
        timeout_s=protocol.timeout_s,
        sample_interval_ms=protocol.sample_interval_ms,
        warmup=protocol.warmup.on(preparation.device_id),
    )
    return replace(found, context_file=contexts.file_of(cell, found))


def _refusal(cell: Cell, preparation: Preparation, device: Device) -> str | None:
    """Why a cell must not be started, checked before anything is built or downloaded for it."""
    may_refuse = any(limit.refuses for limit in cell.header.limits) or cell.workload.timed == "rows"
    may_refuse = may_refuse or placement_of(cell.options(preparation.threads)) is not None
    if device.free_bytes is None and not may_refuse:
        return None
    return expected(cell, device, preparation.threads).refusal


def mechanism(cells: Sequence[Cell], preparation: Preparation) -> str | None:
    """How this machine limits a worker's memory; null if it cannot, or if no cell on a CPU has a limit."""
    if preparation.device_id != "cpu" or not any(cell.bounded for cell in cells):
        return None
    try:
        return mechanism_here()
    except OSError:
        return None


def _bounds(cell: Cell, mechanism: str | None, timeout_s: float) -> list[str]:
    """The parts of a content key that concern memory: the mechanism that limits it, and for a search the
    timeout of a probe, because a probe that times out counts as not fitting."""
    counted = [str(mechanism)] if cell.bounded else []
    return counted + ([f"{timeout_s:g} s a probe"] if cell.searches else [])


def content_key(
    cell: Cell,
    preparation: Preparation,
    device: Device,
    slug: str,
    mechanism: str | None,
    timeout_s: float,
) -> str:
    """The content key of a cell's records on the machine with this slug. Free memory is not part of it,
    because it changes all the time."""
    options, device_id = cell.options(preparation.threads), preparation.device_id
    if _refusal(cell, preparation, replace(device, free_bytes=None)):
        return plan.content_key(cell, options, ("refused",), None, slug, device_id)
    if cell.uncut(preparation.threads):
        return plan.content_key(cell, options, ("unavailable",), None, slug, device_id)
    try:
        interpreter = preparation.interpreter(cell.header)
    except NotReady:
        return plan.content_key(cell, options, ("unavailable",), None, slug, device_id)
    built = [f"{name}={value}" for name, value in interpreter.environment.variables.items()]
    if adopted := interpreter.adopted:
        built.append(f"adopted, Python {adopted.python_version}")
    stack = [interpreter.environment.name, *built, *interpreter.lock]
    stack += _bounds(cell, mechanism, timeout_s)
    made = cell.model.described
    if made and made.decoder.experts and cell.model.weights.kind == "synthetic":
        stack.append("fed fixed ids")  # see runners/routing.py
    return plan.content_key(cell, options, stack, preparation.fingerprint(cell), slug, device_id)

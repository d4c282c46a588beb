"""What a cell runs with, or why it does not, and what its records are known by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness import plan
from harness.campaign.forecast import Device, expected, forecast_cell
from harness.campaign.prepare import NotReady, Preparation
from harness.campaign.repeat import Inputs
from harness.config import Experiment
from harness.plan import Cell
from harness.worker.memory_limit import mechanism_here


def inputs(cell: Cell, experiment: Experiment, preparation: Preparation, device: Device) -> Inputs | NotReady:
    """Everything the cell needs, or why it cannot be had or is not to be started."""
    protocol = experiment.protocol
    try:
        if refusal := _refusal(cell, preparation, device):
            raise NotReady("refused", refusal)
        interpreter = preparation.interpreter(cell.header)
        ready = preparation.weights(cell)
        if refusal := forecast_cell(cell, ready, device, preparation.threads).refusal:  # now they are read
            raise NotReady("refused", refusal)
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


def _refusal(cell: Cell, preparation: Preparation, device: Device) -> str | None:
    """Why a cell is not to be started, before anything is built, made or downloaded for it."""
    if device.free_bytes is None and not any(limit.refuses for limit in cell.header.limits):
        return None
    return expected(cell, device, preparation.threads).refusal


def mechanism(cells: Sequence[Cell], preparation: Preparation) -> str | None:
    """How memory is bounded here, on a CPU; null where it cannot be, or is of none of the cells."""
    if preparation.device_id != "cpu" or not any(cell.bounded for cell in cells):
        return None
    try:
        return mechanism_here()
    except OSError:
        return None


def _bounds(cell: Cell, mechanism: str | None, timeout_s: float) -> list[str]:
    """What a cell's memory is held to is counted by, which is part of what it is; and of a search the time
    that a probe is given, for one that does not come to its end does not fit."""
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
    """What a cell's records are known by, on the machine of this slug. What is free now is in no key: it is
    another in a moment."""
    options, device_id = cell.options(preparation.threads), preparation.device_id
    if _refusal(cell, preparation, replace(device, free_bytes=None)):
        return plan.content_key(cell, options, ("refused",), None, slug, device_id)
    try:
        interpreter = preparation.interpreter(cell.header)
    except NotReady:
        return plan.content_key(cell, options, ("unavailable",), None, slug, device_id)
    built = [f"{name}={value}" for name, value in interpreter.environment.variables.items()]
    stack = [interpreter.environment.name, *built, *interpreter.lock]
    stack += _bounds(cell, mechanism, timeout_s)
    return plan.content_key(cell, options, stack, preparation.fingerprint(cell), slug, device_id)

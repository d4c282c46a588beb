"""Collect the inputs of a cell, or the reason why it cannot run, and compute its content key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.campaign.context_files import context_file_of
from harness.campaign.forecast import Device, forecast_cell
from harness.campaign.memory_limit import mechanism_here
from harness.campaign.prepare import Preparation
from harness.campaign.repeat import Inputs, NotReady
from harness.config import Experiment, MaxCtx, plan
from harness.config.plan import Cell


def inputs_or_refusal(
    cell: Cell, experiment: Experiment, preparation: Preparation, device: Device
) -> Inputs | NotReady:
    """Everything the cell needs to run, or the reason why it cannot or must not run."""
    protocol = experiment.protocol
    try:
        if reason := cell.impossible(preparation.threads):
            raise NotReady("unavailable", reason)
        forecast = preparation.forecast(cell, device)
        if forecast.refusal:
            raise NotReady("refused", forecast.refusal)
        interpreter = preparation.interpreter(cell.header)
        ready = preparation.weights(cell)
        if forecast.weights != ready:  # they are made or downloaded now
            forecast = forecast_cell(cell, ready, device, preparation.threads)
            if forecast.refusal:
                raise NotReady("refused", forecast.refusal)
        if ready and ready.tokenizer is None and (why := cell.header.cannot.get("ids")):
            raise NotReady("unavailable", f"{ready.path}: has no vocabulary, and {why}")
        converted = preparation.engine_files(cell, ready)
        prompt, source = preparation.prompts.ids(cell, ready)
    except NotReady as reason:
        return reason
    options = cell.options(preparation.threads)
    inputs = Inputs(
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
        forecast=forecast,
        engine_files=converted,
    )
    return replace(inputs, context_file=context_file_of(cell, inputs))


def mechanism(cells: Sequence[Cell], preparation: Preparation) -> str | None:
    """How this machine limits a worker's memory; None if it cannot, or if no cell on a CPU has a limit."""
    if preparation.device_id != "cpu" or not any(cell.bounded for cell in cells):
        return None
    try:
        return mechanism_here()
    except OSError:
        return None


def _bounds(cell: Cell, mechanism: str | None, timeout_s: float) -> list[str]:
    """The parts of a content key that concern memory: the mechanism that limits it, and for a search the
    timeout of a probe, because a probe that times out counts as not fitting, and that it ends at the trained
    context."""
    counted = [str(mechanism)] if cell.bounded else []
    if isinstance(cell.workload, MaxCtx):
        counted.append(f"{timeout_s:g} s a probe")
        if not cell.workload.past_trained:
            counted.append("up to the trained context")
    return counted


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
    if replace(preparation.forecast(cell, device), over_budget=None).refusal:
        return plan.content_key(cell, options, ("refused",), None, slug, device_id)
    if cell.impossible(preparation.threads):
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
        stack.append("fed fixed ids")  # see runners/workloads/scoring.py
    return plan.content_key(cell, options, stack, preparation.fingerprint(cell), slug, device_id)

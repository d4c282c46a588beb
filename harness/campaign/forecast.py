"""Forecast a cell's memory, time and known failures from its config and local weights. Starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import machine, plan
from harness.campaign import placed, work
from harness.campaign.held import dense, engine_of, held_model, made_of, packing_of, step_bytes
from harness.config import Decode, Experiment, Quality
from harness.machine.limits import free_memory_bytes
from harness.models import packed, synthetic, weights
from harness.models.hub_weights import in_hub_cache
from harness.models.weights import Ready, WeightsError
from harness.plan import Cell
from harness.stacks.limits import Broken
from harness.theory import footprint, machine_names
from harness.theory.estimate import seconds
from harness.theory.machine import (
    DISPLAY_RESERVE_BYTES,
    DRIVER_RESERVE_BYTES,
    SYSTEM_RESERVE_BYTES,
    drives_display,
)
from harness.theory.machines import MACHINES
from harness.theory.names import NotUnderstood
from harness.theory.placement import Split

LOGITS_HELD = 2 * 4  # bytes a logit: a window's, float32, as the stack has them and as they are handed over


@dataclass(frozen=True)
class Device:
    """The device of a config. `family`: cpu, cuda, ...; `name`: as messages name it. Null: not known.
    `absent`: why it is not on this machine. `free_bytes`: free memory, where `memory_bytes` is a budget.
    `reserve_bytes`: memory that a model cannot use. `bytes_per_s`, `flops`: a known GPU's bandwidth, and the
    rate of its data sheet for products of 16 bits."""

    family: str
    name: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None = None
    absent: str | None = None
    free_bytes: int | None = None
    reserve_bytes: float = 0
    bytes_per_s: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Forecast:
    """Estimated memory and time of one repeat. `broken`: limits of the stack that the cell exceeds.
    `no_room`: why it does not fit; `lacks`: why there are no usable weights; `over_budget`: why the memory
    budget is unavailable or too small for the weights; `too_deep`: why a workload of timed rows is refused
    for its depth; one sentence each. `fill_s`: of `seconds`, to fill its context. `sides`: of weights on a
    GPU, whose memory this is, and on the CPU beside it. Null: not known; `no_room` is also null if it
    `fits`."""

    memory_bytes: int | None
    seconds: float | None
    broken: tuple[Broken, ...]
    fits: bool | None
    no_room: str | None
    lacks: str | None = None
    over_budget: str | None = None
    too_deep: str | None = None
    fill_s: float | None = None
    sides: Split | None = None

    @property
    def failures(self) -> list[str]:
        """All reasons why the cell cannot work."""
        reasons = [*(each.reason for each in self.broken), self.over_budget, self.too_deep]
        reasons += [None if self.too_deep else self.no_room, self.lacks]
        return list(dict.fromkeys(reason for reason in reasons if reason))

    @property
    def refusal(self) -> str | None:
        """Why the cell must not be started, with the error of its library; null if it may be."""
        refusing = [each for each in self.broken if each.refuses]
        reasons = [b.reason if b.reason == b.says else f"{b.reason} ({b.says})" for b in refusing]
        return "; ".join([*reasons, *(each for each in (self.over_budget, self.too_deep) if each)]) or None


def device_of(experiment: Experiment) -> Device:
    """The device on this machine; if its GPU is absent, the known properties of the one the config names."""
    family = experiment.device.partition(":")[0]
    facts = machine.facts()
    try:
        device_id = machine.device_id(experiment.device, experiment.gpu)
    except machine.DeviceError as absent:
        named = _named(experiment.gpu) if family == "cuda" else Device(family, "the GPU", None)
        return replace(named, absent=str(absent))
    if family == "cpu":
        if (budget := experiment.protocol.memory_budget_bytes) is not None:
            return Device(family, "the budget", budget, free_bytes=free_memory_bytes())
        return Device(family, "this machine", facts["memory_bytes"], reserve_bytes=SYSTEM_RESERVE_BYTES)
    for gpu in facts["gpus"]:
        if gpu["uuid"] == device_id:
            major, _, minor = (gpu["compute_capability"] or "").partition(".")
            capability = (int(major), int(minor)) if major else None
            reserve = DISPLAY_RESERVE_BYTES if drives_display(gpu["name"] or "") else DRIVER_RESERVE_BYTES
            name = f"the {gpu['name'] or 'GPU'}"
            known = machine_names.of_gpu(gpu["name"], gpu["memory_bytes"])
            bytes_per_s = known.bandwidth_bytes_per_s if known else None
            return Device(
                family,
                name,
                gpu["memory_bytes"],
                capability,
                reserve_bytes=reserve,
                bytes_per_s=bytes_per_s,
                flops=known.kernel_flops(quantized=False) if known else None,
            )
    return Device(family, "the GPU", None)


def _named(gpu: str | None) -> Device:
    """The known NVIDIA GPU of this name, or else whose name contains it. Of several, the one with the least
    memory: a cell must not be forecast to fit where it may not."""
    if gpu is None:
        return Device("cuda", "the GPU", None)
    try:
        known = [m for m in machine_names.machines(gpu).values() if m.compute_capability]
    except NotUnderstood:
        part = gpu.lower().removeprefix("nvidia ")
        known = [m for m in MACHINES.values() if m.compute_capability and part in m.name.lower()]
    if not known:
        return Device("cuda", f"the {gpu}", None)
    least = min(known, key=lambda found: found.memory_bytes)
    capability, reserve = least.compute_capability, least.reserve.value
    return Device(
        "cuda",
        f"the {gpu}",
        least.memory_bytes,
        capability,
        reserve_bytes=reserve,
        bytes_per_s=least.bandwidth_bytes_per_s,
        flops=least.kernel_flops(quantized=False),
    )


def local_weights(cell: Cell) -> Ready | None:
    """The cell's weights if they are on this machine; null if they must be made or downloaded.

    Raises WeightsError: no weights are given, or the stack can neither load nor convert them.
    """
    source = cell.source
    if cell.weights_format == "none":
        return None
    if source is None:
        raise weights.not_named(cell.model.name, cell.weights_format)
    if source.kind == "synthetic":
        if cell.packing and cell.model.shape:
            packed.grouped(cell.packing, cell.model.shape)
        if cell.model.described:
            synthetic.check_synthetic(cell.model.described, cell.weights_format)
        return None
    ready = weights.local(Path(str(source.path))) if source.kind == "path" else in_hub_cache(source)
    if ready is not None:
        _check(cell, ready)
    return ready


def _check(cell: Cell, ready: Ready) -> None:
    if cell.weights_format != "gguf":
        packed.check_loadable(ready, cell.packing, cell.header, cell.options(threads=1))
    elif ready.format == "hf":
        weights.check_convertible(ready, cell.header.converts)
    elif cell.quant not in (None, ready.quant):
        weights.check_quantizable(ready, str(cell.quant))


def expected(cell: Cell, device: Device, threads: int) -> Forecast:
    """Forecast a cell before its weights are made or downloaded."""
    try:
        return forecast_cell(cell, local_weights(cell), device, threads)
    except WeightsError as lack:
        return replace(forecast_cell(cell, None, device, threads), lacks=str(lack))


def known_failures(experiment: Experiment, cells: Sequence[Cell]) -> dict[str, list[str]]:
    """The reasons, by cell id, why a cell cannot work on this machine; an empty list if none is known."""
    device = device_of(experiment)
    threads = experiment.protocol.threads or machine.physical_cores()
    return {cell.id: expected(cell, device, threads).failures for cell in cells}


def forecast_cell(
    cell: Cell,
    ready: Ready | None,
    device: Device,
    threads: int,
    bandwidth: float | None = None,
    flops: float | None = None,
) -> Forecast:
    """Forecast a cell. `ready`: its weights, if they are on this machine. `bandwidth`: bytes/s the device
    reads, to estimate the time; `flops`: FLOP/s that it computes, for a workload of timed rows or a score."""
    capability, shape = device.compute_capability, dense(made_of(cell, ready))
    packing = packing_of(cell, shape, ready)
    shards = ready.shards if ready and ready.packing == packing else None
    broken = plan.known_failures(cell, threads, device.family, capability, shape, packing, shards)
    if uncut := cell.uncut(threads):
        broken.append(Broken(uncut, uncut, refuses=False))
    options = cell.options(threads)
    if wrong := placed.mistake(cell, ready, options):
        broken.append(Broken(wrong, wrong, refuses=True))
        return Forecast(None, None, tuple(broken), None, None)
    held = held_model(cell, ready, options)
    over = _over_budget(device, held.weight_bytes if held else None)
    if held is None:
        return Forecast(None, None, tuple(broken), None, None, over_budget=over)
    prompt, new = int(cell.workload.prompt_tokens or 0), int(cell.workload.new_tokens or 0)
    if not (to_the_end := isinstance(cell.workload, Decode)):
        new = 0  # its length is the result, so this forecasts the minimum
    context = cell.header.context_of(options)  # null: the cache grows with its tokens
    holds = cell.tokens if cell.workload.timed == "rows" or cell.scores else prompt + new
    n_ctx = int(options[context.option] or holds) if context else holds
    sides = placed.sides(cell, ready, options) if device.family != "cpu" else None
    if sides:
        held = replace(held, weight_bytes=sides.gpu_bytes + held.embedding_bytes)
    memory = round(footprint.total(engine_of(cell, options, device.family != "cpu", held.shape), held, n_ctx))
    if isinstance(cell.workload, Quality):
        memory += LOGITS_HELD * (cell.workload.positions + 1) * held.made.vocab_size
    has = device.memory_bytes
    if device.family != "cpu" and options.get("gpu_layers", -1) != -1:
        has = None  # the offloaded part is not counted separately
    fits = None if has is None else memory <= has - device.reserve_bytes
    takes = fill_s = None
    # Where the stack is only functional, bandwidth does not bound the time.
    functional = device.family in cell.header.functional or machine.facts()["emulated"]
    timed = bandwidth is not None and not functional
    if bandwidth is not None and timed and to_the_end:
        static = n_ctx if options.get("cache") == "static" else None
        takes = seconds(step_bytes(held, ready), held.kv_bytes_per_token, prompt, new, static, bandwidth)
    if bandwidth is not None and timed and flops and cell.workload.timed == "rows":
        takes, fill_s = work.seconds(cell.workload, held, bandwidth, flops) or (None, None)
    if bandwidth is not None and timed and flops and isinstance(cell.workload, Quality):
        takes = work.scoring_seconds(cell.workload, held, bandwidth, flops)
    no_room = None if has is None or fits else _no_room(device, has)
    too_deep = None
    if no_room and cell.workload.timed == "rows":
        too_deep = f"{cell.tokens:,} tokens need {memory / 1e9:.1f} GB: {no_room}"
    return Forecast(
        memory,
        takes,
        tuple(broken),
        fits,
        no_room,
        over_budget=over,
        too_deep=too_deep,
        fill_s=fill_s,
        sides=sides,
    )


def _no_room(device: Device, memory_bytes: int) -> str:
    has = f"{memory_bytes / 1e9:.1f} GB {'on' if device.free_bytes is None else 'in'} {device.name}"
    reserved = f", {device.reserve_bytes / 1e9:.1f} GB of them reserved" if device.reserve_bytes else ""
    return f"will not fit: {has}{reserved}"


def _over_budget(device: Device, weights_bytes: float | None) -> str | None:
    """Why the memory budget is unavailable on this machine or too small for the weights; null otherwise."""
    budget, free = device.memory_bytes, device.free_bytes
    if budget is None or free is None:
        return None
    if budget > free:
        return f"the memory budget is {budget / 1e6:.1f} MB and {free / 1e6:.1f} MB is free on this machine"
    if weights_bytes is not None and weights_bytes > budget:
        return f"the weights take {weights_bytes / 1e6:.1f} MB and the memory budget is {budget / 1e6:.1f} MB"
    return None

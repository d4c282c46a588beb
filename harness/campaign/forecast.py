"""Forecast a cell's memory, time and known failures from its config and local weights. Starts nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import machine
from harness.campaign.durations import CPU_SHARE, demand_of_held, time_s
from harness.campaign.loaded_model import (
    _loaded_model,
    _tensors,
    engine_of,
    kv_element_bytes,
    made_of,
    packing_of,
    placement_of,
)
from harness.config import (
    Decode,
    Experiment,
    Quality,
    Warmup,
    plan,
)
from harness.config.plan import Cell
from harness.machine.cgroups import free_memory_bytes
from harness.models import check, locate, make
from harness.models.hub import in_hub_cache
from harness.models.locate import Ready, WeightsError
from harness.stacks.limits import Broken
from harness.theory import machine_names, split_weights
from harness.theory import memory as theory_memory
from harness.theory.decoder import (
    parameters,
)
from harness.theory.floors import Pass, cost
from harness.theory.machines import (
    DISPLAY,
    DISPLAY_RESERVE_BYTES,
    DRIVER_RESERVE_BYTES,
    MACHINES,
    SYSTEM,
    SYSTEM_RESERVE_BYTES,
    Figure,
    changed_reserve,
    drives_display,
    reserved_words,
)
from harness.theory.memory import Model
from harness.theory.names import NotUnderstood
from harness.theory.split_weights import PlacementError, Split

# Prompt tokens that take as long as a decode step, rounded down: 2.4 and 8 (135M and 270M, 2 cores, 2026).
PROMPT_PER_STEP = 2
LOGITS_HELD = 2 * 4  # bytes a logit: a window's, float32, as the stack has them and as they are handed over


@dataclass(frozen=True)
class Device:
    """The device of a config. `family`: cpu, cuda, ...; `name`: as messages name it. None: not known.
    `absent`: why it is not on this machine. `free_bytes`: free memory, where `memory_bytes` is a budget.
    `reserve_bytes`: memory that a model cannot use, `reserve_for`: for what. `bytes_per_s`, `flops`: a known
    GPU's bandwidth, and the rate of its data sheet for products of 16 bits."""

    family: str
    name: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None = None
    absent: str | None = None
    free_bytes: int | None = None
    reserve_bytes: float = 0
    reserve_for: str = ""
    bytes_per_s: float | None = None
    flops: float | None = None

    @property
    def reserve(self) -> Figure:
        return Figure(self.reserve_bytes, self.reserve_for)

    def reserving(self, wanted: float | str | None) -> Device:
        """The device with the reserve that a user wants; None: the usual one."""
        bytes_of, source = changed_reserve(self.reserve, wanted)
        return replace(self, reserve_bytes=bytes_of, reserve_for=source)


@dataclass(frozen=True)
class Forecast:
    """Estimated memory and time of one repeat of a cell on a device. `broken`: limits of the stack that the
    cell exceeds. `no_room`: why it does not fit; `lacks`: why there are no usable weights; `over_budget`: why
    the memory budget is unavailable or too small for the weights; `too_deep`: why a workload of timed rows is
    refused for its depth; one sentence each. `sides`: of weights on a GPU, whose memory this is, and on its
    host CPU, which needs `host_bytes`. `held`: weights and KV cache on both; `static_n_ctx`: length of a
    static cache, which every step reads whole. None: not known; `no_room` is also None if it `fits`.
    `weights`: the weights on this machine that the estimate is for."""

    cell: Cell
    device: Device
    broken: tuple[Broken, ...]
    memory_bytes: int | None = None
    fits: bool | None = None
    no_room: str | None = None
    lacks: WeightsError | None = None
    over_budget: str | None = None
    too_deep: str | None = None
    sides: Split | None = None
    host_bytes: int | None = None
    weights: Ready | None = None
    held: Model | None = None
    static_n_ctx: int | None = None

    def duration(
        self, bytes_per_s: float | None, flops: float | None = None
    ) -> tuple[float | None, float | None]:
        """Seconds of one repeat, and those of them that fill its context, where the device reads and computes
        at these rates; only a decode needs no `flops`. None: not known."""
        held, workload = self.held, self.cell.workload
        # Where the stack is only functional, bandwidth does not bound the time.
        functional = self.device.family in self.cell.header.functional or machine.facts()["emulated"]
        if bytes_per_s is None or held is None or functional:
            return None, None
        if isinstance(workload, Decode):
            return time_s(workload, held, bytes_per_s, math.inf, self.static_n_ctx)[0], None
        if not flops or not parameters(held.made) or not (workload.timed == "rows" or self.cell.scores):
            return None, None
        total, filling = time_s(workload, held, bytes_per_s, flops)
        return total, filling if workload.timed == "rows" else None

    def longest_warm_up_s(self, warmup: Warmup, bytes_per_s: float) -> float:
        """Of one repeat, where the device reads at this rate; 0: without a warm-up, or not known."""
        held, workload = self.held, self.cell.workload
        if held is None or self.cell.scores or self.cell.searches:
            return 0.0
        steps = min(warmup.window_tokens, int(workload.new_tokens or warmup.window_tokens))
        steps += int(workload.prompt_tokens or 0) // PROMPT_PER_STEP
        window_s = steps * cost(demand_of_held(held), Pass()).bytes / (CPU_SHARE * bytes_per_s)
        # One window begins within the shortest time, and ends after it.
        return warmup.shortest_s(self.device.family) + (1 + warmup.max_windows) * window_s

    @property
    def failures(self) -> list[str]:
        """All reasons why the cell cannot work."""
        reasons = [*(limit.reason for limit in self.broken), self.over_budget, self.too_deep]
        reasons += [None if self.too_deep else self.no_room, str(self.lacks) if self.lacks else None]
        return list(dict.fromkeys(reason for reason in reasons if reason))

    @property
    def refusal(self) -> str | None:
        """Why the cell must not be started, with the error of its library; None if it may be."""
        refusing = [limit for limit in self.broken if limit.refuses]
        reasons = [b.reason if b.reason == b.message else f"{b.reason} ({b.message})" for b in refusing]
        return (
            "; ".join([*reasons, *(reason for reason in (self.over_budget, self.too_deep) if reason)]) or None
        )


def device_of(experiment: Experiment) -> Device:
    """The device on this machine; if its GPU is absent, the known properties of the one the config names."""
    device = _device(experiment)
    return device if device.free_bytes is not None else device.reserving(experiment.protocol.reserved)


def host() -> Device:
    """The CPU of this machine, with its main memory."""
    memory = machine.facts()["memory_bytes"]
    return Device("cpu", "this machine", memory, reserve_bytes=SYSTEM_RESERVE_BYTES, reserve_for=SYSTEM)


def _device(experiment: Experiment) -> Device:
    family = experiment.device.partition(":")[0]
    try:
        device_id = machine.device_id(experiment.device, experiment.gpu)
    except machine.DeviceError as absent:
        return replace(_named(family, experiment.gpu), absent=str(absent))
    if family == "cpu":
        if (budget := experiment.protocol.memory_budget_bytes) is not None:
            return Device(family, "the budget", budget, free_bytes=free_memory_bytes())
        return host()
    gpu = next((each for each in machine.facts()["gpus"] if each["uuid"] == device_id), None)
    if gpu is None:
        return Device(family, "the GPU", None)
    major, _, minor = (gpu["compute_capability"] or "").partition(".")
    on_display = drives_display(gpu["name"] or "")
    known = machine_names.of_gpu(gpu["name"], gpu["memory_bytes"])
    return Device(
        family,
        f"the {gpu['name'] or 'GPU'}",
        gpu["memory_bytes"],
        (int(major), int(minor)) if major else None,
        reserve_bytes=DISPLAY_RESERVE_BYTES if on_display else DRIVER_RESERVE_BYTES,
        reserve_for=DISPLAY if on_display else "the driver",
        bytes_per_s=known.bandwidth_bytes_per_s if known else None,
        flops=known.kernel_flops(quantized=False) if known else None,
    )


def _named(family: str, gpu: str | None) -> Device:
    """The known NVIDIA GPU of this name, or else whose name contains it. Of several, the one with the least
    memory: a cell must not be forecast to fit where it may not."""
    if gpu is None or family != "cuda":
        return Device(family, "the GPU", None)
    try:
        gpus = [m for m in machine_names.machines(gpu).values() if m.compute_capability]
    except NotUnderstood:
        part = gpu.lower().removeprefix("nvidia ")
        gpus = [m for m in MACHINES.values() if m.compute_capability and part in m.name.lower()]
    if not gpus:
        return Device(family, f"the {gpu}", None)
    least = min(gpus, key=lambda known_gpu: known_gpu.memory_bytes)
    return Device(
        family,
        f"the {gpu}",
        least.memory_bytes,
        least.compute_capability,
        reserve_bytes=least.reserve.value,
        reserve_for=least.reserve.source,
        bytes_per_s=least.bandwidth_bytes_per_s,
        flops=least.kernel_flops(quantized=False),
    )


def local_weights(cell: Cell) -> Ready | None:
    """The cell's weights if they are on this machine; None if they must be made or downloaded.

    Raises WeightsError: no weights are given, or the stack can neither load nor convert them.
    """
    source = cell.source
    if not cell.header.formats:
        at = source.path if source and cell.weights_format == "served" else None
        return locate.local(Path(at)) if at else None
    if source is None or source.kind == "served":
        raise locate.not_named(cell.model.name, cell.weights_format)
    if source.kind == "synthetic":
        if model := cell.model.described:
            check.check_synthetic(model, cell.weights_format, cell.header)
            if cell.packing:
                make.grouped_layers(cell.packing, model.decoder)
        return None
    ready = locate.local(Path(str(source.path))) if source.kind == "path" else in_hub_cache(source)
    if ready is not None:
        _check(cell, ready)
    return ready


def _check(cell: Cell, ready: Ready) -> None:
    if cell.weights_format != "gguf":
        check.check_loadable(ready, cell.packing, cell.header, cell.options(threads=1))
    elif ready.format == "hf":
        check.check_convertible(ready)
    else:
        check.check_types(ready, cell.header)
        if cell.quant not in (None, ready.quant):
            check.check_quantizable(ready, str(cell.quant))


def forecasts(experiment: Experiment, cells: Sequence[Cell]) -> list[Forecast]:
    """The forecasts of these cells on this machine, before anything is made for them."""
    device = device_of(experiment)
    threads = experiment.protocol.threads or machine.default_threads()
    return [expected(cell, device, threads) for cell in cells]


def expected(cell: Cell, device: Device, threads: int) -> Forecast:
    """Forecast a cell before its weights are made or downloaded."""
    try:
        return forecast_cell(cell, local_weights(cell), device, threads)
    except WeightsError as lack:
        return replace(forecast_cell(cell, None, device, threads), lacks=lack)


def forecast_cell(cell: Cell, ready: Ready | None, device: Device, threads: int) -> Forecast:
    """Forecast a cell. `ready`: its weights, if they are on this machine."""
    made, options = made_of(cell, ready), cell.options(threads)
    packing = packing_of(cell, made, ready)
    shards = ready.shards if ready and ready.packing == packing else None
    broken = plan.known_failures(
        cell, threads, device.family, device.compute_capability, made, packing, shards
    )
    if reason := cell.impossible(threads):
        broken.append(Broken(reason, reason, refuses=False))
    placement = placement_of(options)
    tensors = _tensors(cell, ready) if placement else ()
    if placement:
        try:
            placement.check(made, [tensor.name for tensor in tensors] if tensors else None)
        except PlacementError as wrong:
            broken.append(Broken(str(wrong), str(wrong), refuses=True))
            return Forecast(cell, device, tuple(broken), weights=ready)
    held = _loaded_model(cell, ready, options)
    over = _over_budget(device, held.weight_bytes if held else None)
    plain = Forecast(cell, device, tuple(broken), over_budget=over, weights=ready, held=held)
    if held is None or cell.header.memory is None:
        return plain
    tokens = int(cell.workload.prompt_tokens or 0)
    if isinstance(cell.workload, Decode):  # the length of a search is its result: this is the least
        tokens += int(cell.workload.new_tokens or 0)
    context = cell.header.context_of(options)  # None: the cache grows with its tokens
    tokens = cell.tokens if cell.workload.timed == "rows" or cell.scores else tokens
    n_ctx = int(options[context.option] or tokens) if context else tokens

    def needs(model: Model, on_gpu: bool) -> int:
        engine = engine_of(cell, options, on_gpu, held.made)
        return round(theory_memory.total_bytes(engine, model, n_ctx))

    on_gpu, sides, on_cpu = device.family != "cpu", None, None
    on_device = held
    if on_gpu and placement and made:
        sides = split_weights.split_layers(placement, made, tensors)
        element = kv_element_bytes(options)
        on_device, on_cpu = split_weights.side_models(placement, made, tensors, element)
    memory = needs(on_device, on_gpu)
    if isinstance(cell.workload, Quality):
        memory += LOGITS_HELD * (cell.workload.positions + 1) * held.made.vocab_size
    host_bytes = needs(on_cpu, False) if on_cpu else None
    places = [(device, memory), *([(host(), host_bytes)] if host_bytes is not None else [])]
    if on_gpu and sides is None and options.get("gpu_layers", -1) != -1:
        places = []  # the layers of an unknown model cannot be divided
    lacking = [
        _no_room(each, size if each is not device else None)
        for each, size in places
        if each.memory_bytes is not None and size > each.memory_bytes - each.reserve_bytes
    ]
    is_known = places and all(each.memory_bytes is not None for each, _ in places)
    no_room = f"will not fit: {'; '.join(lacking)}" if lacking else None
    too_deep = None
    if no_room and cell.workload.timed == "rows":
        too_deep = f"{cell.tokens:,} tokens need {memory / 1e9:.1f} GB: {no_room}"
    return replace(
        plain,
        memory_bytes=memory,
        fits=False if lacking else True if is_known else None,
        no_room=no_room,
        too_deep=too_deep,
        sides=sides,
        host_bytes=host_bytes,
        static_n_ctx=n_ctx if options.get("cache") == "static" else None,
    )


def _no_room(device: Device, host_needs: int | None) -> str:
    """What a device has; of a GPU's host, whose part no line shows, what it needs, too."""
    place = f"{'on' if device.free_bytes is None else 'in'} {device.name}"
    has = f"{(device.memory_bytes or 0) / 1e9:.1f} GB {place}"
    if host_needs is not None:
        reserved = f"{device.reserve_bytes / 1e9:.1f} GB of them reserved for {device.reserve_for}"
        return f"the CPU's side needs {host_needs / 1e9:.1f} GB: {has}, {reserved}"
    return f"{has}, {reserved_words(device.reserve, 'of them ')}" if device.reserve_bytes else has


def _over_budget(device: Device, weights_bytes: float | None) -> str | None:
    """Why the memory budget is unavailable on this machine or too small for the weights; None otherwise."""
    budget, free = device.memory_bytes, device.free_bytes
    if budget is None or free is None:
        return None
    if budget > free:
        return f"the memory budget is {budget / 1e6:.1f} MB and {free / 1e6:.1f} MB is free on this machine"
    if weights_bytes is not None and weights_bytes > budget:
        return f"the weights take {weights_bytes / 1e6:.1f} MB and the memory budget is {budget / 1e6:.1f} MB"
    return None

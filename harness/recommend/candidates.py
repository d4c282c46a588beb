"""Every way to run a model on a device: the variants that stacks offer, which fit, and how much context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness import plan
from harness.analysis.records import traffic
from harness.campaign import forecast
from harness.campaign.forecast import Device
from harness.campaign.held import engine_of, held_model
from harness.config import Decode, Experiment, Model, Protocol
from harness.config.mistakes import Mistakes
from harness.config.variants import expanded
from harness.plan import Cell
from harness.predict.traits import Traits
from harness.recommend import kinds
from harness.stacks.header import Header, stacks
from harness.theory import footprint
from harness.theory.demand import pair_flops
from harness.theory.machine import Machine
from harness.theory.rows import is_quantized
from harness.theory.shapes import Shape, active_params, parameters

PROMPT = 25  # tokens, as in the study
WHOLE_BITS = 16  # per weight: the reference of quality


@dataclass(frozen=True)
class Place:
    """Where a model would run. `bytes_per_s`: read bandwidth, `rates`: FLOP/s by whether weights are
    quantized; null: unknown. `here`: it is this machine."""

    device: Device
    name: str
    bytes_per_s: float
    rates: dict[bool, float | None]
    threads: int
    here: bool = False


@dataclass(frozen=True)
class Candidate:
    """A variant that can run. `memory_bytes`: at the context asked for; `longest`: the longest context that
    fits, at most the `trained` one or the one asked for; null: none fits. `bits`: per weight, of all
    tensors of a GGUF, else of the linear layers."""

    cell: Cell
    traits: Traits
    memory_bytes: float
    available_bytes: float
    weight_bytes: float
    bits: float
    longest: int | None
    trained: int

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.available_bytes


def place_of(machine: Machine, name: str, threads: int) -> Place:
    """A machine from a data sheet."""
    device = Device(
        machine.family,
        name,
        machine.memory_bytes,
        machine.compute_capability,
        reserve_bytes=machine.reserve.value,
    )
    rates = {}
    for quantized in (False, True):
        rate = machine.kernel_rate(quantized)
        rates[quantized] = machine.rates[rate].value if rate else None
    return Place(device, machine.name, machine.bandwidth_bytes_per_s, rates, threads)


def candidates(
    model: Model, shape: Shape, place: Place, context: int, chosen: Sequence[str] = ()
) -> list[Candidate]:
    """All that can run; `chosen`: of these stacks alone. What exceeds a limit of its stack, or runs there
    only to be tried, is left out."""
    found = []
    for header in stacks().values():
        if (not chosen or header.stack in chosen) and _runs_on(header, place.device.family):
            for cell in _cells(model, header, context):
                if (candidate := _candidate(cell, shape, place, context)) is not None:
                    found.append(candidate)
    return found


def _runs_on(header: Header, family: str) -> bool:
    if family not in ("cpu", "cuda"):  # nothing was measured there, but llama.cpp runs on all of them
        return header.memory == footprint.LLAMA_CPP
    return family not in header.functional and header.environment_for(family) is not None


def _cells(model: Model, header: Header, context: int) -> Iterator[Cell]:
    workload = Decode(prompt_tokens=min(PROMPT, context - 1), new_tokens=context - min(PROMPT, context - 1))
    mistakes = Mistakes(lambda loc: f"runners/{header.stack}.py: offers")
    rows = [{"stack": header.stack, **row} for row in header.offers or ({},)]
    variants = [variant for row in rows for variant in expanded(row, (), [], mistakes)]
    mistakes.stop_if_any()
    experiment = Experiment(
        name="recommended",
        protocol=Protocol(),
        models=(model,),
        variants=tuple(variants),
        workloads=(workload,),
    )
    yield from plan.cells(experiment)


def _candidate(cell: Cell, shape: Shape, place: Place, context: int) -> Candidate | None:
    """Null if it cannot run."""
    device = place.device
    expected = forecast.forecast_cell(cell, None, device, place.threads)
    options = cell.options(place.threads)
    held = held_model(cell, None, options)
    if expected.broken or held is None:
        return None
    engine = engine_of(cell, options, device.family != "cpu", shape)
    available = float(device.memory_bytes or 0) - device.reserve_bytes
    uncapped = footprint.longest(engine, held, available)
    group = kinds.group(cell.header, cell.variant.name, options)
    bits = held.weight_bytes * 8 / parameters(shape)
    traits = Traits(
        group=group,
        engine=kinds.engine(cell.header, group),
        type=str(cell.quant) if cell.weights_format == "gguf" else "",
        model=cell.model.name,
        device=place.name,
        family=device.family,
        layers=shape.layers,
        heads=shape.heads,
        read_bytes=held.weight_bytes - held.embedding_bytes,
        kv_bytes=held.kv_bytes_per_token,
        bytes_per_s=place.bytes_per_s,
        pass_flops=2.0 * active_params(shape),
        pair_flops=pair_flops(shape),
        packed=is_quantized(bits),
        flops=place.rates[is_quantized(bits)],
    )
    memory = footprint.total(engine, held, context)
    return Candidate(
        cell=cell,
        traits=traits,
        memory_bytes=memory,
        available_bytes=available,
        weight_bytes=held.weight_bytes,
        bits=bits if cell.weights_format == "gguf" else _linear_bits(cell),
        longest=uncapped and min(uncapped, max(shape.context, context)),
        trained=shape.context,
    )


def _linear_bits(cell: Cell) -> float:
    if cell.packing:
        return float(cell.packing.bits)
    return float((traffic.nominal_bits(cell.quant) if cell.quant else None) or WHOLE_BITS)

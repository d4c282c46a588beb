"""What could run on a machine."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from harness.base.data import RECOMMENDED
from harness.campaign import forecast
from harness.campaign.forecast import Device, engine_of, held_model, kv_element_bytes
from harness.config import Decode, Experiment, Model, Protocol, plan
from harness.config.experiment import Scalar
from harness.config.plan import Cell
from harness.config.variants import expanded, varied
from harness.config.yaml_text import Mistakes
from harness.recommend.traits import DENSE, EXPERTS, FUSED, GGML, STATES, TORCH, Traits
from harness.stacks.header import Header, Options, stacks
from harness.theory import decoder, floors
from harness.theory import memory as theory_memory
from harness.theory.decoder import Decoder, lm_head_params
from harness.theory.floors import MOVED_STATE, Demand, Reach
from harness.theory.machines import Machine
from harness.theory.memory import BITSANDBYTES, LLAMA_CPP, OF_MIXTURES, Engine, Placement, released_in
from harness.theory.public_speeds import maker
from harness.theory.rows import is_quantized
from harness.theory.tensors import (
    FORMATS,
    Packing,
    Tensor,
    is_of_experts,
    loaded_bytes,
    of_shape,
    packed_bytes,
    quantized,
    streamed_bytes,
)

# Traits for predictions: the costs of a model in a variant, and which variants share costs.


NOT_REPACKED = "not repacked"
_PLAIN = "f16"
_BYTES_16 = 2
_HEAD_ELEMENTS = 128  # where a record does not say; most models' heads have as many


class OfModel(TypedDict):
    """The traits that all variants of a model share, except the bytes of its weights."""

    layers: int
    reaches: tuple[Reach, ...]
    head_elements: int
    pass_flops: float
    kind: str


def kind_of_model(made: Decoder, kv_bytes_per_token: float) -> OfModel:
    """The shared traits of a model with so many bytes of cache a token."""
    found = kind_of_demand(floors.with_kv(floors.demand_of_bits(made, 16), kv_bytes_per_token), made.count)
    return found | {"head_elements": made.head_dim} if made.is_dense else found


def kind_of_demand(needs: Demand, layers: int) -> OfModel:
    """The shared traits of a model whose record has the demand alone."""
    return {
        "layers": layers,
        "reaches": needs.reaches,
        "head_elements": _HEAD_ELEMENTS,
        "pass_flops": needs.flops_per_token,
        "kind": STATES if needs.state_bytes else EXPERTS if needs.experts else DENSE,
    }


def kind_of_types(made: Decoder, tensors: Sequence[Tensor]) -> tuple[tuple[str, float], ...]:
    """Bytes that a step reads by the type of the tensors."""
    found: dict[str, float] = {}
    for each in tensors:
        streamed = streamed_bytes(each, made.tied, made.expert_share)
        found[each.type] = found.get(each.type, 0.0) + streamed
    return tuple((name, size) for name, size in found.items() if size)


def cost_group(header: Header, variant: str, options: Options) -> str:
    """The stack, and the options that decide its kernels. `options`: of llama.cpp, resolved; empty for the
    defaults. Names of the published study count as the variants of today."""
    if header.memory != LLAMA_CPP:
        return f"{header.stack} {header.published.get(variant, variant)}"
    cache = [str(options.get(name, _PLAIN)) for name in ("type_k", "type_v")]
    parts = [header.stack, *(["flash"] if options.get("flash_attn") else [])]
    parts += [each for each in dict.fromkeys(cache) if each != _PLAIN]
    return " ".join([*parts, *([NOT_REPACKED] if options.get("repack") is False else [])])


def engine(header: Header, of_group: str) -> str:
    """The kind of engine that runs a group."""
    if header.memory == LLAMA_CPP:
        return GGML
    return FUSED if any(part in of_group for part in header.fused) else TORCH


def waits(header: Header, of_group: str) -> bool:
    """Whether a matrix product waits for the device in a group."""
    return any(part in of_group for part in header.waits)


def generation(machine: Machine) -> str:
    """The generation of a machine's GPU; empty: unknown. NVIDIA's with HBM have a minor version of 0."""
    if machine.family == "metal":
        return next((word[:2] for word in machine.name.split() if re.match(r"M\d", word)), "")
    if other := re.match(r"Arc|Radeon RX \d", machine.name):
        return other[0]
    major, minor = machine.compute_capability or (0, 0)
    if "GTX 10" in machine.name or 0 < major < 7:
        return "before 7.0"
    return "HBM" if major in (7, 8, 9, 10) and not minor else f"{major}.{minor}" if major else ""


def prompt_flops(machine: Machine, family: str, packed: bool) -> float | None:
    """The rate that prompts reach a share of. `family`: what runs the model; Vulkan unpacks all weights to 16
    bits."""
    return machine.kernel_flops(packed and family != "vulkan")


def read_bytes(header: Header, made: Decoder, quant: str | None, bits: float | None) -> float | None:
    """Bytes of weights that a decode step reads, in the format that a PyTorch stack loads; null for others.
    `quant`: of bitsandbytes; `bits`: of a packed checkpoint. All stay 16 bits wide but the linear layers."""
    tensors = of_shape(made)
    if header.memory == BITSANDBYTES:
        whole = float(loaded_bytes(tensors, "bf16", quant))
    elif form := next((each for each in header.formats if each in FORMATS), None):
        whole = float(sum(packed_bytes(tensors, Packing(form, int(bits or 4))).values()))
    elif header.memory != LLAMA_CPP and header.formats:
        whole = float(loaded_bytes(tensors, "bf16"))
    else:
        return None
    return whole - (0 if made.tied else lm_head_params(made) * _BYTES_16)


# Split a model's layers between a GPU and its host CPU: how many go where, and the bytes of each. Pure.


OPTION, ALL, EXPERTS_OPTION = "gpu_layers", -1, "n_cpu_moe"


@dataclass(frozen=True)
class Memory:
    """`engine`: how the stack uses it."""

    engine: Engine
    available_bytes: float


@dataclass(frozen=True)
class Side:
    """The layers of one memory. `model`: as the stack holds it there; `types`: bytes that a step reads, by
    type."""

    model: theory_memory.Model
    types: tuple[tuple[str, float], ...]
    expert_bytes: float
    memory: Memory

    def bytes_at(self, context: int) -> float:
        return theory_memory.total_bytes(self.memory.engine, self.model, context)

    def fits(self, context: int) -> bool:
        return self.bytes_at(context) <= self.memory.available_bytes

    @property
    def longest(self) -> int | None:
        return theory_memory.longest_context(self.memory.engine, self.model, self.memory.available_bytes)

    def of(self, whole: Traits) -> Traits:
        """This side's part of a model's traits. A prompt's products are not known of either."""
        model = kind_of_model(self.model.made, self.model.kv_bytes_per_token)
        return replace(
            whole,
            layers=model["layers"],
            reaches=model["reaches"],
            read_bytes=sum(size for _, size in self.types),
            of_types=self.types,
            expert_bytes=self.expert_bytes,
            flops=None,
        )


@dataclass(frozen=True)
class Split:
    """`gpu_layers`: as llama.cpp counts them, the output among them; null: all, with the experts of
    `n_cpu_moe` layers on the CPU. `traits`: of the CPU's part."""

    gpu_layers: int | None
    traits: Traits
    memory_bytes: float
    available_bytes: float
    n_cpu_moe: int = 0

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.available_bytes


@dataclass(frozen=True)
class Divided:
    """A model that is to be in two memories."""

    made: Decoder
    tensors: Sequence[Tensor]
    kv_element_bytes: float
    gpu: Memory
    host: Memory

    def sides(self, placement: Placement) -> tuple[Side, Side]:
        """The GPU's and the CPU's."""
        on_gpu, on_cpu = _held_by_sides(placement, self.made, tuple(self.tensors), self.kv_element_bytes)
        return Side(*on_gpu, self.gpu), Side(*on_cpu, self.host)

    def fits_gpu(self, placement: Placement, context: int) -> bool:
        return self.sides(placement)[0].fits(context)

    def by_layers(self, context: int) -> Placement | None:
        """As many of the last layers on the GPU as fit with the context, and the output; null: none fits."""
        placed = [Placement(gpu_layers=count + 1) for count in range(self.made.count - 1, 0, -1)]
        return self._first_that_fits(placed, context)

    def by_experts(self, context: int) -> Placement | None:
        """The experts of the fewest layers on the CPU with which the rest fits; null: of a model without
        experts, or whose rest does not fit either."""
        placed = [Placement(count) for count in range(1, self.made.count + 1) if self.made.experts]
        return self._first_that_fits(placed, context)

    def _first_that_fits(self, placed: Sequence[Placement], context: int) -> Placement | None:
        """Of placements that need ever less of the GPU; null: none fits."""
        first = bisect_left(placed, True, key=lambda each: self.fits_gpu(each, context))
        return placed[first] if first < len(placed) else None


Held = tuple[theory_memory.Model, tuple[tuple[str, float], ...], int]
"""The first fields of a Side."""


@lru_cache(maxsize=1024)  # of many machines, the same divisions are tried
def _held_by_sides(
    placement: Placement, made: Decoder, tensors: tuple[Tensor, ...], kv_element_bytes: float
) -> tuple[Held, Held]:
    models = theory_memory.side_models(placement, made, tensors, kv_element_bytes)
    gpu, cpu, computed = theory_memory.on_sides(placement, made, tensors)
    return (
        (models[0], kind_of_types(made, gpu), _expert_bytes(gpu)),
        (models[1], kind_of_types(made, computed), _expert_bytes(cpu)),
    )


def _expert_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.bytes for each in tensors if is_of_experts(each.name))


# How fast a CPU multiplies each type of weights: measured by a probe of ggml, kept, and given to traits.


NAME = "types.jsonl"  # in the folder RECOMMENDED of the results
Rates = Mapping[str, float]
"""Bytes of weights per second by ggml's type, in the layout that llama.cpp uses."""


def keep_rates(
    results: Path, device: str, threads: int, measured: Mapping[str, Mapping[str, float | None]]
) -> None:
    """Append the rates that a probe measured on a device. Raises OSError."""
    (results / RECOMMENDED).mkdir(parents=True, exist_ok=True)
    with (results / RECOMMENDED / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"device": device, "threads": threads, "rates": measured}) + "\n")


def kept_rates(results: Path, device: str, threads: int) -> Rates:
    """The best of those measured on a device with so many threads, by type: other processes only slow them.
    Empty without any. A damaged line does not count."""
    try:
        lines = (results / RECOMMENDED / NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    found: dict[str, float] = {}
    for line in lines:
        try:
            each = json.loads(line)
            if (each["device"], each["threads"]) == (device, threads):
                for name, rate in each["rates"].items():
                    found[name] = max(found.get(name, 0.0), _used(rate))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def _used(rate: Mapping[str, Any]) -> float:
    """The rate of the layout that llama.cpp uses: repacked, if there is such a layout. Raises ValueError."""
    used = float(rate["repacked_bytes_per_s"] or rate["bytes_per_s"])
    if not 0 < used < 1e15:
        raise ValueError(used)
    return used


def given_rates(traits: Traits, rates: Rates) -> Traits:
    """Add the time of a step's weights by these rates, if all types have one."""
    on_cpu = traits.engine == GGML and traits.family == "cpu" and not traits.group.endswith(NOT_REPACKED)
    if not on_cpu or not traits.of_types or any(name not in rates for name, _ in traits.of_types):
        return traits
    weights_s = sum(size / rates[name] for name, size in traits.of_types)
    others = traits.read_bytes - sum(size for _, size in traits.of_types)
    return replace(traits, multiply_s=weights_s + others / traits.bytes_per_s)


# Where a model would run: a device, its bandwidth and rates, and a GPU's host CPU.


@dataclass(frozen=True)
class Place:
    """Where a model would run. `bytes_per_s`: read bandwidth, `rates`: FLOP/s by whether weights are
    quantized; None: unknown. `here`: the place is this machine. `host`: a GPU's host CPU and main memory,
    which may hold layers; None: unknown. `generation`: of its chips; `maker`: of these; empty: unknown.
    `unified`: a GPU and its CPU share the memory."""

    device: Device
    name: str
    bytes_per_s: float
    rates: dict[bool, float | None]
    threads: int
    here: bool = False
    host: Place | None = None
    generation: str = ""
    maker: str = ""
    unified: bool = False

    @property
    def devices(self) -> list[Place]:
        """This place, and its host if known."""
        return [self, *([self.host] if self.host else [])]

    @property
    def takes_host(self) -> bool:
        """Whether it is a GPU next to the memory of a CPU."""
        return self.device.family != "cpu" and not self.unified

    @property
    def available_bytes(self) -> float:
        """Memory that a model can use."""
        return float(self.device.memory_bytes or 0) - self.device.reserve_bytes


def place_of(machine: Machine, name: str, threads: int) -> Place:
    """A machine from a data sheet."""
    device = Device(
        machine.family,
        name,
        machine.memory_bytes,
        machine.compute_capability,
        reserve_bytes=machine.reserve.value,
        reserve_for=machine.reserve.source.partition(",")[0],
    )
    rates = {quantized: prompt_flops(machine, machine.family, quantized) for quantized in (False, True)}
    bandwidth = machine.bandwidth_bytes_per_s
    return Place(
        *(device, machine.name, bandwidth, rates, threads),
        generation=generation(machine),
        maker=maker(machine),
        unified=machine.unified,
    )


# Every way to run a model on a device: the variants that stacks offer, which fit, and how much context.


PROMPT = 25  # tokens, as in the study
WHOLE_BITS = 16  # per weight: the reference of quality
_NOT_LINEAR = ("embedding", "lm_head", "router", "norm")


@dataclass(frozen=True)
class Subject:
    """The model that is to run. `stored`: the type of a quantized GGUF, which is not converted, with its
    `tensors`."""

    model: Model
    made: Decoder
    stored: str | None = None
    tensors: tuple[Tensor, ...] = ()

    def stored_as(self, quant: str) -> Sequence[Tensor]:
        """The model's tensors in a GGUF of this type."""
        return self.tensors or quantized(self.made, quant, as_published=self.made.is_dense)

    def in_type(self, quant: str) -> InType:
        """The same, counted."""
        return _counted(self.made, self.tensors) if self.tensors else in_type(self.made, quant)


@dataclass(frozen=True)
class InType:
    """A model in a GGUF of one type. `needs`: with a 16-bit cache. `types`: bytes that a step reads, by type
    of the tensors. `bits`: per weight of the linear layers."""

    needs: Demand
    types: tuple[tuple[str, float], ...]
    bits: float


@lru_cache(maxsize=512)
def in_type(made: Decoder, quant: str) -> InType:
    """A model as llama.cpp quantizes it, a dense one as the published study's."""
    return _counted(made, quantized(made, quant, as_published=made.is_dense))


def _counted(made: Decoder, tensors: Sequence[Tensor]) -> InType:
    linear = [each for each in tensors if _is_linear(each)]
    bits = 8 * sum(each.bytes for each in linear) / sum(each.elements for each in linear)
    return InType(floors.demand_of_tensors(made, tensors), kind_of_types(made, tensors), bits)


@dataclass(frozen=True)
class Candidate:
    """A variant that can run. `memory_bytes`: at the requested context; `longest`: the longest context that
    fits, at most the `trained` or the requested one; null: none fits. `bits`: per weight of the linear
    layers, scales included. `split`: layers on the CPU besides, whose bytes do not count
    in `memory_bytes`. `type`: of the weights in a GGUF; empty for others."""

    cell: Cell
    type: str
    traits: Traits
    memory_bytes: float
    available_bytes: float
    weight_bytes: float
    bits: float
    longest: int | None
    trained: int
    split: Split | None = None

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.available_bytes and (self.split is None or self.split.fits)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is quantized."""
        return self.bits >= WHOLE_BITS and self.keeps_cache

    @property
    def keeps_cache(self) -> bool:
        """Whether keys and values have the 16 bits in which they are computed."""
        return kv_element_bytes(self.cell.options(1)) * 8 >= WHOLE_BITS

    @property
    def parts(self) -> list[Traits]:
        """The parts of a step, which take turns."""
        return [self.traits, self.split.traits] if self.split else [self.traits]

    def given(self, device: str, rates: Rates) -> Candidate:
        """Add a device's rates by type."""
        traits = given_rates(self.traits, rates) if self.traits.device == device else self.traits
        split = self.split
        if split and split.traits.device == device:
            split = replace(split, traits=given_rates(split.traits, rates))
        return replace(self, traits=traits, split=split)


def candidates(subject: Subject, place: Place, context: int, chosen: Sequence[str] = ()) -> list[Candidate]:
    """All that can run; `chosen`: on these stacks alone. Variants beyond their stack's limits, or there only
    for trials, are left out, and so are PyTorch's stacks for models that are not dense: their memory is
    unknown."""
    found, able = [], _having(subject.stored, bool(chosen))
    for header in stacks().values():
        if (chosen and header.stack not in chosen) or not _runs_on(header, place.device.family):
            continue
        if header.weights == "gguf" and header.stack not in able:
            continue
        if not subject.made.is_dense and header.memory != LLAMA_CPP:
            continue
        runnable: list[Cell] = []
        for cell in cells_of(subject, header, context):
            if any(_differ_in_dtype_alone(cell, each) for each in runnable):
                continue
            if (candidate := candidate_of(subject, cell, place, context)) is not None:
                runnable.append(cell)
                found.append(candidate)
                if not candidate.fits:
                    found += _splits(subject, candidate, place, context)
    return found


def _having(stored: str | None, asked: bool) -> list[str]:
    """The stacks that load a GGUF of a type: those that have it, or all where none has. Unless it is asked
    for, one that offers nothing counts only where no other has the type."""
    of_gguf = [header for header in stacks().values() if header.weights == "gguf"]
    having = [each for each in of_gguf if stored in each.options["quant"].choices] or of_gguf
    offered = [each.stack for each in having if each.offers and not asked]
    return offered or [each.stack for each in having]


def _differ_in_dtype_alone(one: Cell, other: Cell) -> bool:
    first, second = ({**cell.variant.options, "dtype": None} for cell in (one, other))
    return first == second


def _runs_on(header: Header, family: str) -> bool:
    if family not in ("cpu", "cuda"):  # nothing was measured there, but llama.cpp runs on all of them
        return header.memory == LLAMA_CPP
    return family not in header.functional and header.environment_for(family) is not None


def cells_of(subject: Subject, header: Header, context: int) -> Iterator[Cell]:
    workload = Decode(prompt_tokens=min(PROMPT, context - 1), new_tokens=context - min(PROMPT, context - 1))
    mistakes = Mistakes(lambda loc: f"runners/{header.stack}.py: offers")
    offers = [each for row in header.offers or ({},) for each in _offered(row, subject, header)]
    rows = [{"stack": header.stack, **row} for row in offers]
    variants = [variant for row in rows for variant in expanded(row, (), [], Path(), mistakes)]
    mistakes.stop_if_any()
    experiment = Experiment(
        name="recommended",
        protocol=Protocol(),
        models=(subject.model,),
        variants=tuple(variants),
        workloads=(workload,),
    )
    yield from plan.cells(experiment)


def _offered(row: dict[str, Any], subject: Subject, header: Header) -> Iterator[dict[str, Any]]:
    """Yield a row with the types of weights that this model may have. A type that llama.cpp does not make
    here gets a separate row, which takes the file unchanged."""
    made = subject.made
    if header.memory != LLAMA_CPP or "quant" not in row:
        yield row
        return
    released = released_in(made)
    types: list[str] = [released] if released else row["quant"]
    if subject.stored is not None:
        types = [subject.stored]
    others = {key: value for key, value in row.items() if key != "quant"}
    made_here = [each for each in types if each in header.options["quant"].choices]
    if made_here:
        yield {**others, "quant": made_here}
    for each in types:
        if each not in made_here:
            yield {**others, "name": each}


def candidate_of(subject: Subject, cell: Cell, place: Place, context: int) -> Candidate | None:
    """Make a candidate of a cell; null if the cell cannot run."""
    device = place.device
    expected = forecast.forecast_cell(cell, None, device, place.threads)
    options = cell.options(place.threads)
    held = _held(subject, cell, options)
    if expected.broken or held is None:
        return None
    engine = engine_of(cell, options, device.family != "cpu", held.made)
    uncapped = theory_memory.longest_context(engine, held, place.available_bytes)
    bits = held.weight_bytes * 8 / decoder.parameters(held.made)
    trained = held.made.context
    return Candidate(
        cell=cell,
        type=type_of(subject, cell) if cell.weights_format == "gguf" else "",
        traits=_traits(subject, cell, held, options, place, bits),
        memory_bytes=theory_memory.total_bytes(engine, held, context),
        available_bytes=place.available_bytes,
        weight_bytes=held.weight_bytes,
        bits=_linear_bits(subject, cell, held),
        longest=uncapped and min(uncapped, max(trained, context)),
        trained=trained,
    )


def _held(subject: Subject, cell: Cell, options: Options) -> theory_memory.Model | None:
    """The model as the cell's stack holds it; null: unknown."""
    if cell.weights_format != "gguf":
        return held_model(cell, None, options)
    needs = subject.in_type(type_of(subject, cell)).needs
    kv_bytes = needs.kv_bytes_per_token * kv_element_bytes(options) / _BYTES_16
    return theory_memory.Model(subject.made, needs.resident_bytes, needs.embedding_bytes, kv_bytes)


def type_of(subject: Subject, cell: Cell) -> str:
    return cell.quant or subject.stored or OF_MIXTURES


def _traits(
    subject: Subject, cell: Cell, held: theory_memory.Model, options: Options, place: Place, bits: float
) -> Traits:
    group, made = cost_group(cell.header, cell.variant.name, options), held.made
    read, needs = held.weight_bytes - held.embedding_bytes, None
    types: tuple[tuple[str, float], ...] = ()
    if cell.weights_format == "gguf":
        stored = subject.in_type(type_of(subject, cell))
        needs, types = stored.needs, stored.types
        read = needs.weight_bytes_per_token
    return Traits(
        group=group,
        engine=engine(cell.header, group),
        type=type_of(subject, cell) if cell.weights_format == "gguf" else "",
        model=cell.model.name,
        device=place.name,
        family=place.device.family,
        read_bytes=read + (MOVED_STATE * needs.state_bytes if needs else 0.0),
        bytes_per_s=place.bytes_per_s,
        packed=is_quantized(bits),
        flops=place.rates[is_quantized(bits)],
        expert_bytes=needs.expert_bytes if needs else 0.0,
        expert_share=made.expert_share,
        of_types=types,
        waits=waits(cell.header, group),
        generation=place.generation,
        maker=place.maker,
        **kind_of_model(made, held.kv_bytes_per_token),
    )


def _splits(subject: Subject, whole: Candidate, place: Place, context: int) -> Iterator[Candidate]:
    """The candidate in two memories: as many layers on the GPU as fit, or of a mixture the experts of as few
    layers as need be on the CPU. None without a known host, or if nothing fits the GPU."""
    if place.host is None or whole.cell.weights_format != "gguf":
        return
    divided = _divided(subject, whole.cell, place, place.host)
    if by_layers := divided.by_layers(context):
        changes: dict[str, Scalar] = {OPTION: by_layers.gpu_layers}
        yield _in_two(whole, divided.sides(by_layers), by_layers, changes, place.host, context)
    yield from experts_on_cpu(subject, whole, place, context)


def experts_on_cpu(subject: Subject, whole: Candidate, place: Place, context: int) -> Iterator[Candidate]:
    """The candidate of a mixture with the experts of as few layers on the CPU as need be. None without a
    known host, or if the rest does not fit the GPU."""
    if place.host is None:
        return
    divided = _divided(subject, whole.cell, place, place.host)
    if by_experts := divided.by_experts(context):
        changes: dict[str, Scalar] = {EXPERTS_OPTION: by_experts.n_cpu_moe}
        yield _in_two(whole, divided.sides(by_experts), by_experts, changes, place.host, context)


def _divided(subject: Subject, cell: Cell, place: Place, host: Place) -> Divided:
    options = cell.options(place.threads)
    gpu, cpu = (
        Memory(engine_of(cell, options, each is place, subject.made), each.available_bytes)
        for each in (place, host)
    )
    tensors = subject.stored_as(type_of(subject, cell))
    return Divided(subject.made, tensors, kv_element_bytes(options), gpu, cpu)


def _in_two(
    whole: Candidate,
    sides: tuple[Side, Side],
    placement: Placement,
    changes: Mapping[str, Scalar],
    host: Place,
    context: int,
) -> Candidate:
    on_gpu, on_cpu = sides
    longest = min(on_gpu.longest or 0, on_cpu.longest or 0)
    on_host = replace(
        on_cpu.of(whole.traits),
        device=host.name,
        family=host.device.family,
        maker=host.maker,
        bytes_per_s=host.bytes_per_s,
    )
    if placement.n_cpu_moe:  # layers whose experts alone are there, and no cache
        on_host = replace(on_host, layers=placement.n_cpu_moe)
    layers = None if placement.gpu_layers < 0 else placement.gpu_layers
    held = on_cpu.bytes_at(context), host.available_bytes
    return replace(
        whole,
        cell=replace(whole.cell, variant=varied(whole.cell.variant, changes)),
        traits=on_gpu.of(whole.traits),
        memory_bytes=on_gpu.bytes_at(context),
        longest=min(longest, max(whole.trained, context)) or None,
        split=Split(layers, on_host, *held, n_cpu_moe=placement.n_cpu_moe),
    )


def _linear_bits(subject: Subject, cell: Cell, held: theory_memory.Model) -> float:
    """Per weight of the linear layers: embedding and lm_head have more, by other rules in each stack."""
    if cell.weights_format == "gguf":
        return subject.in_type(type_of(subject, cell)).bits
    tensors = of_shape(held.made)
    elements = sum(t.elements for t in tensors if _is_linear(t))
    others = sum(t.elements for t in tensors) - elements
    return (8 * held.weight_bytes - WHOLE_BITS * others) / elements


def _is_linear(tensor: Tensor) -> bool:
    return tensor.part not in _NOT_LINEAR and len(tensor.dims) > 1

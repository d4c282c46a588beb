"""What could run on a machine."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from harness.campaign.forecast import Device
from harness.campaign.loaded_model import bytes_of_shape, engine_of, held_model, kv_element_bytes
from harness.config import Decode, Model, Variant
from harness.config.experiment import Scalar
from harness.config.mistakes import Mistakes
from harness.config.plan import Cell, known_failures
from harness.config.variants import expanded, varied
from harness.recommend.traits import (
    BEFORE_TENSOR_CORES,
    BOARD,
    DENSE,
    EXPERTS,
    FUSED,
    GGML,
    STATES,
    TORCH,
    Traits,
)
from harness.stacks.header import Header, Options, stacks
from harness.theory import decoder, floors
from harness.theory import memory as theory_memory
from harness.theory.decoder import Decoder, lm_head_params
from harness.theory.floors import MOVED_STATE, Demand, Reach
from harness.theory.machines import Machine
from harness.theory.memory import BITSANDBYTES, LLAMA_CPP, OF_MIXTURES, Placement, released_in
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
# Of a CPU, in the time of a byte: of 8 cores at 4 GHz with AVX2, 32 operations a cycle, beside two channels
# of DDR4-3200.
_CPU_OPERATIONS = 20.0


class OfModel(TypedDict):
    """The traits that all variants of a model share, except the bytes of its weights."""

    layers: int
    reaches: tuple[Reach, ...]
    pass_flops: float
    kind: str


def kind_of_model(made: Decoder, kv_bytes_per_token: float) -> OfModel:
    """The shared traits of a model with so many bytes of cache a token."""
    return kind_of_demand(floors.with_kv(floors.demand_of_bits(made, 16), kv_bytes_per_token), made.count)


def kind_of_demand(needs: Demand, layers: int) -> OfModel:
    """The shared traits of a model by what it demands."""
    return {
        "layers": layers,
        "reaches": needs.reaches,
        "pass_flops": needs.flops_per_token,
        "kind": STATES if needs.state_bytes else EXPERTS if needs.experts else DENSE,
    }


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


def maker_of(machine: Machine) -> str:
    """Whose GPU it is, or the kind of CPU; empty: unknown. Boards that were measured have Arm CPUs."""
    is_arm_board = machine.family == "cpu" and machine.board and machine.cpu_kind in ("", "Arm")
    return BOARD if is_arm_board else maker(machine)


def generation(machine: Machine) -> str:
    """The generation of a machine's GPU; empty: unknown. NVIDIA's with HBM have a minor version of 0."""
    if machine.family == "metal":
        return next((word[:2] for word in machine.name.split() if re.match(r"M\d", word)), "")
    if other := re.match(r"Arc|Radeon RX \d", machine.name):
        return other[0]
    major, minor = machine.compute_capability or (0, 0)
    if "GTX 10" in machine.name or 0 < major < 7:
        return BEFORE_TENSOR_CORES
    return "HBM" if major in (7, 8, 9, 10) and not minor else f"{major}.{minor}" if major else ""


def prompt_flops(machine: Machine, family: str, packed: bool) -> float | None:
    """The rate that prompts reach a share of. `family`: what runs the model; Vulkan unpacks all weights to 16
    bits. A CPU's is not in its data sheet, and is taken for so many operations in the time of a byte."""
    known = machine.kernel_flops(packed and family != "vulkan")
    return cpu_flops(machine.bandwidth_bytes_per_s) if known is None and family == "cpu" else known


def cpu_flops(bytes_per_s: float) -> float:
    return bytes_per_s * _CPU_OPERATIONS


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


# A model in two memories: how many layers go where, and the bytes of each. Pure.


OPTION, ALL, EXPERTS_OPTION = "gpu_layers", -1, "n_cpu_moe"


@dataclass(frozen=True)
class Side:
    """The layers of one memory. `model`: as the stack holds it there; `read_bytes`: of a step."""

    model: theory_memory.Model
    read_bytes: float
    expert_bytes: float


@lru_cache(maxsize=1024)  # of many machines, the same divisions are tried
def sides_of(
    placement: Placement, made: Decoder, tensors: tuple[Tensor, ...], kv_element_bytes: float
) -> tuple[Side, Side]:
    """The GPU's and the CPU's."""
    on_gpu, on_cpu = theory_memory.side_models(placement, made, tensors, kv_element_bytes)
    gpu, cpu, computed = theory_memory.on_sides(placement, made, tensors)

    def side(model: theory_memory.Model, held: Sequence[Tensor], read: Sequence[Tensor]) -> Side:
        streamed = sum(streamed_bytes(each, made.tied, made.expert_share) for each in read)
        return Side(model, streamed, sum(each.bytes for each in held if is_of_experts(each.name)))

    return side(on_gpu, gpu, gpu), side(on_cpu, cpu, computed)


def first_that_fits(placed: Sequence[Placement], fits: Callable[[Placement], bool]) -> Placement | None:
    """Of placements that need ever less of the GPU; null: none fits."""
    first = bisect_left(placed, True, key=fits)
    return placed[first] if first < len(placed) else None


def by_layers(made: Decoder) -> list[Placement]:
    """The last layers on the GPU, ever fewer, and the output."""
    return [Placement(gpu_layers=count + 1) for count in range(made.count - 1, 0, -1)]


def by_experts(made: Decoder) -> list[Placement]:
    """The experts of ever more layers on the CPU; none of a model without experts."""
    return [Placement(count) for count in range(1, made.count + 1) if made.experts]


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
        maker=maker_of(machine),
        unified=machine.unified,
    )


# Every way to run a model on a device: the variants that stacks offer, which fit, and how much context.


PROMPT = 25  # tokens, as in the study
WHOLE_BITS = 16  # per weight: the reference of quality
_NOT_LINEAR = ("embedding", "lm_head", "router", "norm")
_UNMEASURED = ("mlx", "torchao", "vllm")
# The type of llama.cpp whose bits are nearest to a format of a stack that nobody measured.
_NEAREST = {"int4": "q4_0", "int8": "q8_0", "gptq": "q4_0", "awq": "q4_0"}


@dataclass(frozen=True)
class Subject:
    """The model that is to run. `stored`: the type of a quantized GGUF, which is not converted, with its
    `tensors`."""

    model: Model
    made: Decoder
    stored: str | None = None
    tensors: tuple[Tensor, ...] = ()

    def stored_as(self, quant: str) -> tuple[Tensor, ...]:
        """The model's tensors in a GGUF of this type; a dense model's as in the published study."""
        return self.tensors or quantized(self.made, quant, as_published=self.made.is_dense)

    def in_type(self, quant: str) -> InType:
        """The same, counted."""
        return _counted(self.made, self.tensors) if self.tensors else in_type(self.made, quant)


@dataclass(frozen=True)
class InType:
    """A model in a GGUF of one type. `needs`: with a 16-bit cache. `bits`: per weight of the linear
    layers."""

    needs: Demand
    bits: float


@lru_cache(maxsize=512)
def in_type(made: Decoder, quant: str) -> InType:
    """A model as llama.cpp quantizes it, a dense one as the published study's."""
    return _counted(made, quantized(made, quant, as_published=made.is_dense))


def _counted(made: Decoder, tensors: Sequence[Tensor]) -> InType:
    linear = [each for each in tensors if _is_linear(each)]
    bits = 8 * sum(each.bytes for each in linear) / sum(each.elements for each in linear)
    return InType(floors.demand_of_tensors(made, tensors), bits)


def _is_linear(tensor: Tensor) -> bool:
    return len(tensor.dims) > 1 and tensor.part not in _NOT_LINEAR


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


def candidates(subject: Subject, place: Place, context: int, chosen: Sequence[str] = ()) -> list[Candidate]:
    """All that can run; `chosen`: on these stacks alone. Variants beyond their stack's limits, or there only
    for trials, are left out, and so are PyTorch's stacks for models that are not dense: their memory is
    unknown."""
    found, able = [], _having(subject.stored, bool(chosen))
    for header in stacks().values():
        if (chosen and header.stack not in chosen) or not _runs_on(header, place.device.family, bool(chosen)):
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
                if not candidate.fits and place.host and cell.weights_format == "gguf":
                    found += in_two(subject, candidate, place, context, by_layers(subject.made))
                    found += in_two(subject, candidate, place, context, by_experts(subject.made))
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


def is_unmeasured(header: Header) -> bool:
    """Whether nobody measured the stack's speed, and it is taken for llama.cpp."""
    return header.stack in _UNMEASURED


def _runs_on(header: Header, family: str, is_asked: bool) -> bool:
    if is_unmeasured(header):
        return is_asked and family != "cpu" and header.environment_for(family) is not None
    if family not in ("cpu", "cuda"):  # nothing else was measured there
        return header.memory == LLAMA_CPP
    return family not in header.functional and header.environment_for(family) is not None


def cells_of(subject: Subject, header: Header, context: int) -> Iterator[Cell]:
    prompt = min(PROMPT, context - 1)
    workload = Decode(prompt_tokens=prompt, new_tokens=context - prompt)
    for row in header.offers or ({},):
        for offered in _offered(row, subject, header):
            for variant in _variants(header.stack, json.dumps(offered)):
                yield Cell("", subject.model, variant, workload)


@lru_cache(maxsize=256)
def _variants(stack: str, row: str) -> list[Variant]:
    mistakes = Mistakes(lambda loc: f"runners/{stack}.py: offers")
    found = expanded({"stack": stack, **json.loads(row)}, (), [], Path(), mistakes)
    mistakes.stop_if_any()
    return found


def _offered(row: dict[str, Any], subject: Subject, header: Header) -> Iterator[dict[str, Any]]:
    """Yield a row with the types of weights that this model may have. A type that llama.cpp does not make
    here gets a separate row, which takes the file unchanged."""
    if header.memory != LLAMA_CPP or "quant" not in row:
        yield row
        return
    released = released_in(subject.made)
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
    device, options = place.device, cell.options(place.threads)
    held = _held(subject, cell, options)
    if held is None or known_failures(
        cell, place.threads, device.family, device.compute_capability, cell.model.made
    ):
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
    made = subject.made
    if is_unmeasured(cell.header):
        quant = {"int4": "nf4", "int8": "int8"}.get(cell.quant or "")
        loaded = float(loaded_bytes(of_shape(made), "bf16", quant)) if quant else bytes_of_shape(cell, made)
        embedding = 0.0 if made.tied else loaded * lm_head_params(made) / decoder.parameters(made)
        kv_bytes = decoder.kv_elements_per_token(made) * kv_element_bytes(options)
        return theory_memory.Model(made, loaded, embedding, kv_bytes)
    if cell.weights_format != "gguf":
        return held_model(cell, None, options)
    needs = subject.in_type(type_of(subject, cell)).needs
    kv_bytes = needs.kv_bytes_per_token * kv_element_bytes(options) / _BYTES_16
    return theory_memory.Model(made, needs.resident_bytes, needs.embedding_bytes, kv_bytes)


def type_of(subject: Subject, cell: Cell) -> str:
    return cell.quant or subject.stored or OF_MIXTURES


def _traits(
    subject: Subject, cell: Cell, held: theory_memory.Model, options: Options, place: Place, bits: float
) -> Traits:
    group, made = cost_group(cell.header, cell.variant.name, options), held.made
    read, needs, kind = held.weight_bytes - held.embedding_bytes, None, ""
    if cell.weights_format == "gguf":
        kind = type_of(subject, cell)
        needs = subject.in_type(kind).needs
        read = needs.weight_bytes_per_token
    unmeasured = cell.header.stack if is_unmeasured(cell.header) else ""
    if unmeasured:
        form = "int8" if cell.packing and cell.packing.bits == 8 else cell.weights_format
        kind = _NEAREST.get(cell.quant or form, "f16")
    return Traits(
        group=group,
        engine=GGML if unmeasured else engine(cell.header, group),
        type=kind,
        model=cell.model.name,
        device=place.name,
        family=place.device.family,
        read_bytes=read + (MOVED_STATE * needs.state_bytes if needs else 0.0),
        bytes_per_s=place.bytes_per_s,
        packed=is_quantized(bits),
        flops=place.rates[is_quantized(bits)],
        expert_bytes=needs.expert_bytes if needs else 0.0,
        expert_share=made.expert_share,
        generation=place.generation,
        maker=place.maker,
        unmeasured=unmeasured,
        **kind_of_model(made, held.kv_bytes_per_token),
    )


def in_two(
    subject: Subject, whole: Candidate, place: Place, context: int, placed: Sequence[Placement]
) -> list[Candidate]:
    """The candidate in two memories, as the first of these placements that fits the GPU; empty where none
    does, or without a known host."""
    host, options = place.host, whole.cell.options(place.threads)
    if host is None:
        return []
    made, tensors = subject.made, subject.stored_as(type_of(subject, whole.cell))
    gpu, cpu = (engine_of(whole.cell, options, on_gpu, made) for on_gpu in (True, False))

    def sides(placement: Placement) -> tuple[Side, Side]:
        return sides_of(placement, made, tensors, kv_element_bytes(options))

    def fits(placement: Placement) -> bool:
        return theory_memory.total_bytes(gpu, sides(placement)[0].model, context) <= place.available_bytes

    if (placement := first_that_fits(placed, fits)) is None:
        return []
    on_gpu, on_cpu = sides(placement)
    of_memories = ((gpu, on_gpu, place), (cpu, on_cpu, host))
    longest = min(
        theory_memory.longest_context(engine, side.model, of.available_bytes) or 0
        for engine, side, of in of_memories
    )
    of_gpu, of_cpu = (_traits_of_side(whole.traits, side, of) for _, side, of in of_memories)
    if moved := placement.n_cpu_moe:  # layers whose experts alone are there, and no cache
        of_cpu = replace(of_cpu, layers=moved)
    changes: dict[str, Scalar] = {EXPERTS_OPTION: moved} if moved else {OPTION: placement.gpu_layers}
    split = Split(
        gpu_layers=None if moved else placement.gpu_layers,
        traits=of_cpu,
        memory_bytes=theory_memory.total_bytes(cpu, on_cpu.model, context),
        available_bytes=host.available_bytes,
        n_cpu_moe=moved,
    )
    return [
        replace(
            whole,
            cell=replace(whole.cell, variant=varied(whole.cell.variant, changes)),
            traits=of_gpu,
            memory_bytes=theory_memory.total_bytes(gpu, on_gpu.model, context),
            longest=min(longest, max(whole.trained, context)) or None,
            split=split,
        )
    ]


def _traits_of_side(whole: Traits, side: Side, place: Place) -> Traits:
    """A side's part of a model's traits. A prompt's products are not known of either."""
    return replace(
        whole,
        device=place.name,
        family=place.device.family,
        maker=place.maker,
        bytes_per_s=place.bytes_per_s,
        read_bytes=side.read_bytes,
        expert_bytes=side.expert_bytes,
        flops=None,
        **kind_of_model(side.model.made, side.model.kv_bytes_per_token),
    )


def _linear_bits(subject: Subject, cell: Cell, held: theory_memory.Model) -> float:
    """Per weight of the linear layers: embedding and lm_head have more, by other rules in each stack."""
    if cell.weights_format == "gguf":
        return subject.in_type(type_of(subject, cell)).bits
    tensors = of_shape(held.made)
    elements = sum(t.elements for t in tensors if _is_linear(t))
    others = sum(t.elements for t in tensors) - elements
    return (8 * held.weight_bytes - WHOLE_BITS * others) / elements

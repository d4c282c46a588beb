"""Every way to run a model on a device: the variants that stacks offer, which fit, and how much context."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.campaign.loaded_model import bytes_of_shape, engine_of, held_model, kv_element_bytes
from harness.config import Decode, Model, Variant
from harness.config.experiment import Scalar
from harness.config.mistakes import Mistakes
from harness.config.plan import Cell, known_failures
from harness.config.variants import expanded, varied
from harness.recommend.places import Place
from harness.recommend.sides import (
    EXPERTS_OPTION,
    OPTION,
    Side,
    Split,
    by_experts,
    by_layers,
    first_that_fits,
    sides_of,
)
from harness.recommend.traits import (
    GGML,
    Traits,
)
from harness.recommend.variant_costs import _BYTES_16, cost_group, engine, kind_of_model
from harness.stacks.header import Header, Options, stacks
from harness.theory import decoder, floors
from harness.theory import memory as theory_memory
from harness.theory.decoder import Decoder, lm_head_params
from harness.theory.floors import MOVED_STATE, Demand
from harness.theory.ggml_quants import quantized
from harness.theory.loaded_sizes import loaded_bytes
from harness.theory.memory import LLAMA_CPP
from harness.theory.memory_choices import OF_MIXTURES, released_in
from harness.theory.rows import is_quantized
from harness.theory.split_weights import Placement
from harness.theory.tensors import Tensor, of_shape

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
def in_type(model: Decoder, quant: str) -> InType:
    """A model as llama.cpp quantizes it, a dense one as the published study's."""
    return _counted(model, quantized(model, quant, as_published=model.is_dense))


def _counted(model: Decoder, tensors: Sequence[Tensor]) -> InType:
    linear = [tensor for tensor in tensors if _is_linear(tensor)]
    bits = 8 * sum(tensor.bytes for tensor in linear) / sum(tensor.elements for tensor in linear)
    return InType(floors.demand_of_tensors(model, tensors), bits)


def _is_linear(tensor: Tensor) -> bool:
    return len(tensor.dims) > 1 and tensor.part not in _NOT_LINEAR


@dataclass(frozen=True)
class Candidate:
    """A variant that can run. `memory_bytes`: at the requested context; `longest`: the longest context that
    fits, at most the `trained` or the requested one; None: none fits. `bits`: per weight of the linear
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
    offered, able = [], _having(subject.stored, bool(chosen))
    for header in stacks().values():
        if (chosen and header.stack not in chosen) or not _runs_on(header, place.device.family, bool(chosen)):
            continue
        if header.weights == "gguf" and header.stack not in able:
            continue
        if not subject.made.is_dense and header.memory != LLAMA_CPP:
            continue
        runnable: list[Cell] = []
        for cell in cells_of(subject, header, context):
            if any(_differ_in_dtype_alone(cell, other) for other in runnable):
                continue
            if (candidate := candidate_of(subject, cell, place, context)) is not None:
                runnable.append(cell)
                offered.append(candidate)
                if not candidate.fits and place.host and cell.weights_format == "gguf":
                    offered += in_two(subject, candidate, place, context, by_layers(subject.made))
                    offered += in_two(subject, candidate, place, context, by_experts(subject.made))
    return offered


def _having(stored: str | None, asked: bool) -> list[str]:
    """The stacks that load a GGUF of a type: those that have it, or all where none has. Unless it is asked
    for, one that offers nothing counts only where no other has the type."""
    of_gguf = [header for header in stacks().values() if header.weights == "gguf"]
    having = [header for header in of_gguf if stored in header.options["quant"].choices] or of_gguf
    offered = [header.stack for header in having if header.offers and not asked]
    return offered or [header.stack for header in having]


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
    variants = expanded({"stack": stack, **json.loads(row)}, (), [], Path(), mistakes)
    mistakes.stop_if_any()
    return variants


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
    made_here = [kind_name for kind_name in types if kind_name in header.options["quant"].choices]
    if made_here:
        yield {**others, "quant": made_here}
    for kind_name in types:
        if kind_name not in made_here:
            yield {**others, "name": kind_name}


def candidate_of(subject: Subject, cell: Cell, place: Place, context: int) -> Candidate | None:
    """Make a candidate of a cell; None if the cell cannot run."""
    device, options = place.device, cell.options(place.threads)
    model = _held(subject, cell, options)
    if model is None or known_failures(
        cell, place.threads, device.family, device.compute_capability, cell.model.made
    ):
        return None
    engine = engine_of(cell, options, device.family != "cpu", model.made)
    uncapped = theory_memory.longest_context(engine, model, place.available_bytes)
    bits = model.weight_bytes * 8 / decoder.parameters(model.made)
    trained = model.made.context
    return Candidate(
        cell=cell,
        type=type_of(subject, cell) if cell.weights_format == "gguf" else "",
        traits=_traits(subject, cell, model, options, place, bits),
        memory_bytes=theory_memory.total_bytes(engine, model, context),
        available_bytes=place.available_bytes,
        weight_bytes=model.weight_bytes,
        bits=_linear_bits(subject, cell, model),
        longest=uncapped and min(uncapped, max(trained, context)),
        trained=trained,
    )


def _held(subject: Subject, cell: Cell, options: Options) -> theory_memory.Model | None:
    """The model as the cell's stack holds it; None: unknown."""
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
    subject: Subject, cell: Cell, model: theory_memory.Model, options: Options, place: Place, bits: float
) -> Traits:
    group, decoder = cost_group(cell.header, cell.variant.name, options), model.made
    read, needs, kind = model.weight_bytes - model.embedding_bytes, None, ""
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
        expert_share=decoder.expert_share,
        generation=place.generation,
        maker=place.maker,
        unmeasured=unmeasured,
        **kind_of_model(decoder, model.kv_bytes_per_token),
    )


def in_two(
    subject: Subject, whole: Candidate, place: Place, context: int, placed: Sequence[Placement]
) -> list[Candidate]:
    """The candidate in two memories, as the first of these placements that fits the GPU; empty where none
    does, or without a known host."""
    host, options = place.host, whole.cell.options(place.threads)
    if host is None:
        return []
    decoder, tensors = subject.made, subject.stored_as(type_of(subject, whole.cell))
    gpu, cpu = (engine_of(whole.cell, options, on_gpu, decoder) for on_gpu in (True, False))

    def sides(placement: Placement) -> tuple[Side, Side]:
        return sides_of(placement, decoder, tensors, kv_element_bytes(options))

    def fits(placement: Placement) -> bool:
        return theory_memory.total_bytes(gpu, sides(placement)[0].model, context) <= place.available_bytes

    if (placement := first_that_fits(placed, fits)) is None:
        return []
    on_gpu, on_cpu = sides(placement)
    of_memories = ((gpu, on_gpu, place), (cpu, on_cpu, host))
    longest = min(
        theory_memory.longest_context(engine, side.model, split_side.available_bytes) or 0
        for engine, side, split_side in of_memories
    )
    of_gpu, of_cpu = (_traits_of_side(whole.traits, side, split_side) for _, side, split_side in of_memories)
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


def _linear_bits(subject: Subject, cell: Cell, model: theory_memory.Model) -> float:
    """Per weight of the linear layers: embedding and lm_head have more, by other rules in each stack."""
    if cell.weights_format == "gguf":
        return subject.in_type(type_of(subject, cell)).bits
    tensors = of_shape(model.made)
    elements = sum(t.elements for t in tensors if _is_linear(t))
    others = sum(t.elements for t in tensors) - elements
    return (8 * model.weight_bytes - WHOLE_BITS * others) / elements

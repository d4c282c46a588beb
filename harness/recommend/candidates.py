"""Every way to run a model on a device: the variants that stacks offer, which fit, and how much context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from harness import plan
from harness.campaign import forecast
from harness.campaign.held import engine_of, held_model, kv_element_bytes
from harness.config import Decode, Experiment, Model, Protocol
from harness.config.mistakes import Mistakes
from harness.config.variants import expanded
from harness.plan import Cell
from harness.predict.traits import Traits
from harness.recommend import kinds, splits, type_rates
from harness.recommend.places import Place
from harness.recommend.splits import Memory, Split
from harness.recommend.type_rates import Rates
from harness.stacks.header import Header, stacks
from harness.stacks.rules import Options
from harness.theory import decoder, demand, footprint
from harness.theory.choices import OF_MIXTURES, released_in
from harness.theory.decoder import Decoder
from harness.theory.floors import MOVED_STATE
from harness.theory.footprint import LLAMA_CPP
from harness.theory.gguf_types import quantized
from harness.theory.rows import is_quantized
from harness.theory.shapes import Shape
from harness.theory.tensors import Tensor, of_shape

PROMPT = 25  # tokens, as in the study
WHOLE_BITS = 16  # per weight: the reference of quality
_NOT_LINEAR = ("embedding", "lm_head", "router", "norm")


@dataclass(frozen=True)
class Subject:
    """The model that is to run. `stored`: the type of a quantized GGUF, which stays what it is, with its
    `tensors`."""

    model: Model
    made: Shape | Decoder
    stored: str | None = None
    tensors: tuple[Tensor, ...] = ()

    @property
    def shape(self) -> Shape | None:
        """Of a dense Llama-like model; null for others."""
        return decoder.made(self.made).shape

    def stored_as(self, quant: str) -> Sequence[Tensor]:
        """Its tensors in a GGUF of this type."""
        return self.tensors or _quantized(self.made, quant)


@dataclass(frozen=True)
class Candidate:
    """A variant that can run. `memory_bytes`: at the context asked for; `longest`: the longest context that
    fits, at most the `trained` one or the one asked for; null: none fits. `bits`: per weight of the linear
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
        """What a step takes one after the other."""
        return [self.traits, self.split.traits] if self.split else [self.traits]

    def given(self, device: str, rates: Rates) -> Candidate:
        """With the rates by type of a device."""
        traits = type_rates.given(self.traits, rates) if self.traits.device == device else self.traits
        split = self.split
        if split and split.traits.device == device:
            split = replace(split, traits=type_rates.given(split.traits, rates))
        return replace(self, traits=traits, split=split)


@lru_cache(maxsize=64)
def _quantized(made: Shape | Decoder, quant: str) -> tuple[Tensor, ...]:
    return tuple(quantized(made, quant, as_published=decoder.made(made).shape is not None))


def candidates(subject: Subject, place: Place, context: int, chosen: Sequence[str] = ()) -> list[Candidate]:
    """All that can run; `chosen`: of these stacks alone. What exceeds a limit of its stack, or runs there
    only to be tried, is left out, and so are PyTorch's stacks for models that are not dense: no memory of
    theirs is known."""
    found = []
    for header in stacks().values():
        if (chosen and header.stack not in chosen) or not _runs_on(header, place.device.family):
            continue
        if subject.shape is None and header.memory != LLAMA_CPP:
            continue
        for cell in _cells(subject, header, context):
            if (candidate := _candidate(subject, cell, place, context)) is not None:
                found.append(candidate)
                if not candidate.fits and (split := _split(subject, candidate, place, context)):
                    found.append(split)
    return found


def _runs_on(header: Header, family: str) -> bool:
    if family not in ("cpu", "cuda"):  # nothing was measured there, but llama.cpp runs on all of them
        return header.memory == LLAMA_CPP
    return family not in header.functional and header.environment_for(family) is not None


def _cells(subject: Subject, header: Header, context: int) -> Iterator[Cell]:
    workload = Decode(prompt_tokens=min(PROMPT, context - 1), new_tokens=context - min(PROMPT, context - 1))
    mistakes = Mistakes(lambda loc: f"runners/{header.stack}.py: offers")
    offers = [each for row in header.offers or ({},) for each in _offered(row, subject, header)]
    rows = [{"stack": header.stack, **row} for row in offers]
    variants = [variant for row in rows for variant in expanded(row, (), [], mistakes)]
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
    """A row with the types of weights that this model may have. A type that llama.cpp does not make here is a
    row of its own, which takes the file as it is."""
    made = decoder.made(subject.made)
    if header.memory != LLAMA_CPP or "quant" not in row:
        yield row
        return
    types: list[str] = [] if released_in(made) else row["quant"]
    types = [*types, OF_MIXTURES] if made.experts else types
    if subject.stored is not None:
        types = [subject.stored]
    others = {key: value for key, value in row.items() if key != "quant"}
    made_here = [each for each in types if each in header.options["quant"].choices]
    if made_here:
        yield {**others, "quant": made_here}
    for each in types:
        if each not in made_here:
            yield {**others, "name": each}


def _candidate(subject: Subject, cell: Cell, place: Place, context: int) -> Candidate | None:
    """Null if it cannot run."""
    device = place.device
    expected = forecast.forecast_cell(cell, None, device, place.threads)
    options = cell.options(place.threads)
    held = _held(subject, cell, options)
    if expected.broken or held is None:
        return None
    engine = engine_of(cell, options, device.family != "cpu", held.shape)
    uncapped = footprint.longest(engine, held, place.available_bytes)
    bits = held.weight_bytes * 8 / decoder.parameters(held.shape)
    trained = held.shape.context
    return Candidate(
        cell=cell,
        type=_type(subject, cell) if cell.weights_format == "gguf" else "",
        traits=_traits(subject, cell, held, options, place, bits),
        memory_bytes=footprint.total(engine, held, context),
        available_bytes=place.available_bytes,
        weight_bytes=held.weight_bytes,
        bits=_linear_bits(subject, cell, held),
        longest=uncapped and min(uncapped, max(trained, context)),
        trained=trained,
    )


def _held(subject: Subject, cell: Cell, options: Options) -> footprint.Model | None:
    """As the stack of the cell holds it; null: not known."""
    if cell.weights_format != "gguf":
        return held_model(cell, None, options)
    tensors = subject.stored_as(_type(subject, cell))
    needs = demand.of_tensors(subject.made, tensors, 8 * kv_element_bytes(options))
    return footprint.Model(
        subject.made, needs.resident_bytes, needs.embedding_bytes, needs.kv_bytes_per_token
    )


def _type(subject: Subject, cell: Cell) -> str:
    return cell.quant or subject.stored or OF_MIXTURES


def _traits(
    subject: Subject, cell: Cell, held: footprint.Model, options: Options, place: Place, bits: float
) -> Traits:
    group, made = kinds.group(cell.header, cell.variant.name, options), held.made
    read, needs = held.weight_bytes - held.embedding_bytes, None
    types: tuple[tuple[str, float], ...] = ()
    if cell.weights_format == "gguf":
        tensors = subject.stored_as(_type(subject, cell))
        needs = demand.of_tensors(made, tensors)
        read, types = needs.weight_bytes_per_token, kinds.of_types(made, tensors)
    return Traits(
        group=group,
        engine=kinds.engine(cell.header, group),
        type=_type(subject, cell) if cell.weights_format == "gguf" else "",
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
        waits=kinds.waits(cell.header, group),
        **kinds.of_model(made, held.kv_bytes_per_token),
    )


def _split(subject: Subject, whole: Candidate, place: Place, context: int) -> Candidate | None:
    """The same with as many layers on the GPU as fit, and the others on the CPU; null: not one fits, or there
    is no memory beside the GPU's."""
    host, cell = place.host, whole.cell
    if host is None or cell.weights_format != "gguf":
        return None
    options = cell.options(place.threads)
    gpu, cpu = (
        Memory(engine_of(cell, options, each is place, subject.made), each.available_bytes)
        for each in (place, host)
    )
    tensors = subject.stored_as(_type(subject, cell))
    sides = splits.divided(decoder.made(subject.made), tensors, kv_element_bytes(options), gpu, cpu, context)
    if sides is None:
        return None
    on_gpu, on_cpu = sides
    layers = on_gpu.model.made.count + 1
    longest = min(on_gpu.longest or 0, on_cpu.longest or 0)
    beside = replace(
        on_cpu.of(whole.traits), device=host.name, family=host.device.family, bytes_per_s=host.bytes_per_s
    )
    return replace(
        whole,
        cell=splits.with_layers(cell, layers),
        traits=on_gpu.of(whole.traits),
        memory_bytes=on_gpu.bytes_at(context),
        longest=min(longest, max(whole.trained, context)) or None,
        split=Split(layers, beside, on_cpu.bytes_at(context), host.available_bytes),
    )


def _linear_bits(subject: Subject, cell: Cell, held: footprint.Model) -> float:
    """Per weight of the linear layers: embedding and lm_head have more, by other rules in each stack."""
    if cell.weights_format == "gguf":
        linear = [t for t in subject.stored_as(_type(subject, cell)) if _is_linear(t)]
        return 8 * sum(t.bytes for t in linear) / sum(t.elements for t in linear)
    tensors = of_shape(held.shape)
    elements = sum(t.elements for t in tensors if _is_linear(t))
    others = sum(t.elements for t in tensors) - elements
    return (8 * held.weight_bytes - WHOLE_BITS * others) / elements


def _is_linear(tensor: Tensor) -> bool:
    return tensor.part not in _NOT_LINEAR and len(tensor.dims) > 1

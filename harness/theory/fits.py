"""Whether a model fits a machine: at the lower bound of any stack, in llama.cpp (with and without flash
attention), in transformers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import TypedDict

from harness.theory import decoder, footprint
from harness.theory.decoder import Decoder
from harness.theory.floors import Demand
from harness.theory.footprint import (
    IDEAL,
    LLAMA_CPP,
    LLAMA_CPP_FLASH,
    TRANSFORMERS,
    Engine,
    Ideal,
    LlamaCpp,
    Model,
    Torch,
)
from harness.theory.gguf_types import ALL_QUANTS
from harness.theory.loaded import loaded_bytes
from harness.theory.machine import Machine
from harness.theory.shapes import Shape
from harness.theory.tensors import Tensor, of_shape

FLOATS = ("f32", "f16", "bf16")
_HALVES = ("f16", "bf16")  # types of GGUF that transformers holds as they are
# How transformers holds weights of these widths: in 16 bits, or by bitsandbytes.
_BITSANDBYTES = {16.0: None, 8.0: "int8", 4.0: "nf4"}


@dataclass(frozen=True)
class Form:
    """The form that weights take: all at `bits`, or exactly these `tensors` (with `parameters`, if the file
    has them). `label` names it in a table."""

    label: str
    bits: float | None = None
    tensors: tuple[Tensor, ...] = ()
    parameters: int | None = None


class Fit(TypedDict):
    """`spare_bytes`: negative if short. `longest`: context, at most the trained one."""

    need_bytes: float
    spare_bytes: float
    longest: int | None
    longest_uncapped: int | None


def by_stack(
    shape: Shape | Decoder,
    form: Form,
    needs: Demand,
    machine: Machine,
    context: int,
    kv_bits: float,
    gpu_bytes: int | None = None,
) -> dict[str, Fit | None]:
    """By stack, whether `context` tokens fit; null where the stack cannot load the form.

    The ideal uses all of the memory; the others subtract the machine's reserve. `gpu_bytes`: of the weights,
    where llama.cpp holds the others on the CPU; null: all but the input embedding.
    """
    kv = decoder.kv_elements_per_token(shape) * kv_bits / 8
    held = needs.resident_bytes if gpu_bytes is None else gpu_bytes + needs.embedding_bytes
    ideal = Model(shape, held, needs.embedding_bytes, kv)
    on_gpu = machine.family != "cpu"
    stacks: dict[str, tuple[Engine, Model] | None] = dict.fromkeys((LLAMA_CPP, LLAMA_CPP_FLASH, TRANSFORMERS))
    if _in_gguf(form):
        if kv_bits >= 16:  # it quantizes V with flash attention alone
            stacks[LLAMA_CPP] = LlamaCpp(on_gpu), ideal
        stacks[LLAMA_CPP_FLASH] = LlamaCpp(on_gpu, flash_attn=True), ideal
    if gpu_bytes is None and (weights := _in_torch(shape, form)) is not None:
        engine = Torch(machine.family in ("cuda", "hip"))
        stacks[TRANSFORMERS] = engine, Model(shape, weights, 0.0, kv)
    found: dict[str, Fit | None] = {IDEAL: _fit(Ideal(), ideal, float(machine.memory_bytes), context)}
    available = machine.memory_bytes - machine.reserve.value
    return found | {name: each and _fit(*each, available, context) for name, each in stacks.items()}


def _fit(engine: Engine, model: Model, available: float, context: int) -> Fit:
    need, uncapped = footprint.total(engine, model, context), footprint.longest(engine, model, available)
    return {
        "need_bytes": need,
        "spare_bytes": available - need,
        "longest": uncapped and min(uncapped, model.shape.context),
        "longest_uncapped": uncapped,
    }


def _is_gguf(tensors: tuple[Tensor, ...]) -> bool:
    return any(tensor.name.startswith("blk.") for tensor in tensors)


def _in_gguf(form: Form) -> bool:
    """Whether llama.cpp loads the form, or a GGUF as large."""
    return form.bits is not None or _is_gguf(form.tensors) or all(t.type in FLOATS for t in form.tensors)


def _in_torch(shape: Shape | Decoder, form: Form) -> float | None:
    """Bytes of the weights once transformers has loaded them; null if it cannot load this form."""
    bits = 16.0 if form.label in _HALVES else form.bits
    if bits in _BITSANDBYTES:
        return float(loaded_bytes(of_shape(shape), "bf16", _BITSANDBYTES[bits]))
    if form.bits is not None or form.label in ALL_QUANTS or _is_gguf(form.tensors):
        return None
    return float(sum(tensor.bytes for tensor in form.tensors))

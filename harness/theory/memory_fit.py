"""Whether a model fits a machine, in any stack, in llama.cpp and in transformers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import TypedDict

from harness.theory import decoder
from harness.theory.decoder import Decoder
from harness.theory.floors import Demand
from harness.theory.ggml_quants import ALL_QUANTS
from harness.theory.loaded_sizes import loaded_bytes
from harness.theory.machines import Machine
from harness.theory.memory import (
    BITSANDBYTES,
    IDEAL,
    LLAMA_CPP,
    LLAMA_CPP_FLASH,
    TRANSFORMERS,
    Engine,
    Ideal,
    LlamaCpp,
    Model,
    Torch,
    longest_context,
    total_bytes,
)
from harness.theory.tensors import Tensor, of_shape

FLOATS = ("f32", "f16", "bf16")
_HALVES = ("f16", "bf16")  # types of GGUF that transformers holds as they are
# How transformers holds weights of these widths: in 16 bits, or by bitsandbytes.
_BITSANDBYTES = {16.0: None, 8.0: "int8", 4.0: "nf4"}


@dataclass(frozen=True)
class Form:
    """The form that weights take: all at `bits`, or exactly these `tensors` (with `parameters`, if the file
    has them). `label` names it in a table. `loaded_by`: of a quantized checkpoint, the memory models of the
    stacks that load it; None: another form."""

    label: str
    bits: float | None = None
    tensors: tuple[Tensor, ...] = ()
    parameters: int | None = None
    loaded_by: frozenset[str] | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether they are quantized in their files, or a GGUF's: in another form they are other files."""
        return self.loaded_by is not None or _is_gguf(self.tensors)


class Fit(TypedDict):
    """`spare_bytes`: negative if short. `longest`: context, at most the trained one."""

    need_bytes: float
    spare_bytes: float
    longest: int | None
    longest_uncapped: int | None


def by_stack(
    model: Decoder,
    form: Form,
    needs: Demand,
    machine: Machine,
    context: int,
    kv_bits: float,
    gpu_bytes: int | None = None,
) -> dict[str, Fit | None]:
    """Whether `context` tokens fit, by stack; None where the stack cannot load the form.

    The ideal uses all of the memory; the others subtract the machine's reserve. `gpu_bytes`: of the weights,
    where llama.cpp holds the others on the CPU; None: all but the input embedding.
    """
    kv = decoder.kv_elements_per_token(model) * kv_bits / 8
    gpu_side = needs.resident_bytes if gpu_bytes is None else gpu_bytes + needs.embedding_bytes
    ideal = Model(model, gpu_side, needs.embedding_bytes, kv)
    on_gpu = machine.family != "cpu"
    stacks: dict[str, tuple[Engine, Model] | None] = dict.fromkeys((LLAMA_CPP, LLAMA_CPP_FLASH, TRANSFORMERS))
    if _in_gguf(form):
        if kv_bits >= 16:  # it quantizes V with flash attention alone
            stacks[LLAMA_CPP] = LlamaCpp(on_gpu), ideal
        stacks[LLAMA_CPP_FLASH] = LlamaCpp(on_gpu, flash_attn=True), ideal
    if gpu_bytes is None and kv_bits >= 16 and (weights := _in_torch(model, form)) is not None:
        engine = Torch(machine.family in ("cuda", "hip"))
        stacks[TRANSFORMERS] = engine, Model(model, weights, 0.0, kv)
    fits: dict[str, Fit | None] = {IDEAL: fit_of(Ideal(), ideal, float(machine.memory_bytes), context)}
    available = machine.memory_bytes - machine.reserve.value
    return fits | {
        name: engine_and_model and fit_of(*engine_and_model, available, context)
        for name, engine_and_model in stacks.items()
    }


def fit_of(engine: Engine, model: Model, available: float, context: int) -> Fit:
    need, uncapped = total_bytes(engine, model, context), longest_context(engine, model, available)
    return {
        "need_bytes": need,
        "spare_bytes": available - need,
        "longest": uncapped and min(uncapped, model.made.context),
        "longest_uncapped": uncapped,
    }


def _is_gguf(tensors: tuple[Tensor, ...]) -> bool:
    return any(tensor.name.startswith("blk.") for tensor in tensors)


def _in_gguf(form: Form) -> bool:
    """Whether llama.cpp loads the form, or a GGUF as large."""
    if form.loaded_by is not None:
        return LLAMA_CPP in form.loaded_by
    return form.bits is not None or _is_gguf(form.tensors) or all(t.type in FLOATS for t in form.tensors)


def _in_torch(model: Decoder, form: Form) -> float | None:
    """Bytes of the weights once transformers has loaded them; None if it cannot load this form."""
    if form.loaded_by is not None and form.loaded_by.isdisjoint((TRANSFORMERS, BITSANDBYTES)):
        return None
    bits = 16.0 if form.label in _HALVES else form.bits
    if bits in _BITSANDBYTES:
        return float(loaded_bytes(of_shape(model), "bf16", _BITSANDBYTES[bits]))
    if form.loaded_by is None and (
        form.bits is not None or form.label in ALL_QUANTS or _is_gguf(form.tensors)
    ):
        return None
    return float(sum(tensor.bytes for tensor in form.tensors))

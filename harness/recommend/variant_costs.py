"""Traits for predictions: the costs of a model in a variant, and which variants share costs."""

from __future__ import annotations

import re

from typing_extensions import TypedDict

from harness.recommend.traits import (
    BEFORE_TENSOR_CORES,
    BOARD,
    DENSE,
    EXPERTS,
    FUSED,
    GGML,
    STATES,
    TORCH,
)
from harness.stacks.header import Header, Options
from harness.theory import floors
from harness.theory.decoder import Decoder, lm_head_params
from harness.theory.floors import Demand, Reach
from harness.theory.loaded_sizes import loaded_bytes
from harness.theory.machines import Machine
from harness.theory.memory import BITSANDBYTES, LLAMA_CPP
from harness.theory.packed_sizes import FORMATS, Packing, packed_bytes
from harness.theory.public_speeds import maker
from harness.theory.tensors import of_shape

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


def kind_of_model(decoder: Decoder, kv_bytes_per_token: float) -> OfModel:
    """The shared traits of a model with so many bytes of cache a token."""
    return kind_of_demand(
        floors.with_kv(floors.demand_of_bits(decoder, 16), kv_bytes_per_token), decoder.count
    )


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
    parts += [kv_type for kv_type in dict.fromkeys(cache) if kv_type != _PLAIN]
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
    flops = machine.kernel_flops(packed and family != "vulkan")
    return cpu_flops(machine.bandwidth_bytes_per_s) if flops is None and family == "cpu" else flops


def cpu_flops(bytes_per_s: float) -> float:
    return bytes_per_s * _CPU_OPERATIONS


def read_bytes(header: Header, decoder: Decoder, quant: str | None, bits: float | None) -> float | None:
    """Bytes of weights that a decode step reads, in the format that a PyTorch stack loads; None for others.
    `quant`: of bitsandbytes; `bits`: of a packed checkpoint. All stay 16 bits wide but the linear layers."""
    tensors = of_shape(decoder)
    if header.memory == BITSANDBYTES:
        whole = float(loaded_bytes(tensors, "bf16", quant))
    elif form := next((format for format in header.formats if format in FORMATS), None):
        whole = float(sum(packed_bytes(tensors, Packing(form, int(bits or 4))).values()))
    elif header.memory != LLAMA_CPP and header.formats:
        whole = float(loaded_bytes(tensors, "bf16"))
    else:
        return None
    return whole - (0 if decoder.tied else lm_head_params(decoder) * _BYTES_16)

"""Weights of a model on a GPU and on the CPU beside it: which tensor lies where, the bytes that a decode step
reads of each side, and the bound on its speed. Pure.

As llama.cpp's `--n-cpu-moe` and `--override-tensor` have it (common/arg.cpp): each is a pattern that a
tensor's name contains, and the first that matches decides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.system.wording import plural
from harness.theory import decoder
from harness.theory.decoder import Decoder
from harness.theory.shapes import Shape
from harness.theory.tensors import Tensor, streamed_bytes

CPU = "CPU"
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # LLM_FFN_EXPS_REGEX in llama.cpp's common.h


class PlacementError(ValueError):
    """A placement that cannot be meant; the message is a sentence."""


@dataclass(frozen=True)
class Placement:
    """`n_cpu_moe`: layers, from the first on, whose experts are on the CPU. `override_tensor`: text such as
    `ffn_down=CPU,attn=CUDA0`, patterns with the buffer type of the tensors that they match."""

    n_cpu_moe: int = 0
    override_tensor: str = ""

    @cached_property
    def overrides(self) -> list[tuple[re.Pattern[str], str]]:
        """Patterns and buffer types, in order. Raises PlacementError."""
        found = [(re.compile(rf"blk\.{layer}{EXPERTS}"), CPU) for layer in range(self.n_cpu_moe)]
        for each in self.override_tensor.split(",") if self.override_tensor else ():
            pattern, equals, buffer = each.partition("=")
            if not (pattern and equals and buffer):
                raise PlacementError(f"override_tensor: {each!r} is not PATTERN=BUFFER, such as ffn_down=CPU")
            try:
                found.append((re.compile(pattern), buffer))
            except re.error as wrong:
                raise PlacementError(
                    f"override_tensor: {pattern!r} is not a regular expression: {wrong}"
                ) from wrong
        return found

    def buffer_of(self, name: str) -> str | None:
        """The buffer type that a tensor is given; null: none, it stays where its layer is."""
        return next((buffer for pattern, buffer in self.overrides if pattern.search(name)), None)

    def check(self, model: Shape | Decoder | None, names: Sequence[str] | None) -> None:
        """Raises PlacementError for what a model with tensors of these names has no use for. Null: not
        known."""
        if self.n_cpu_moe and model is not None:
            made = decoder.made(model)
            if not made.experts:
                raise PlacementError(f"n_cpu_moe {self.n_cpu_moe}: the model has no experts")
            if self.n_cpu_moe > made.count:
                raise PlacementError(
                    f"n_cpu_moe {self.n_cpu_moe}: the model has {plural(made.count, 'layer')}"
                )
        for pattern, buffer in self.overrides[self.n_cpu_moe :]:
            if names is not None and not any(map(pattern.search, names)):
                raise PlacementError(
                    f"override_tensor: {f'{pattern.pattern}={buffer}'!r} matches no tensor of the model"
                )


def is_host(buffer: str) -> bool:
    """Whether a buffer type of llama.cpp is main memory: CPU, CPU_Mapped, CPU_REPACK, CUDA_Host, ..."""
    return buffer.startswith(CPU) or buffer.endswith("_Host")


@dataclass(frozen=True)
class Split:
    """Bytes of the weights by side, and of them those that a decode step reads. The input embedding is on the
    CPU's side, which reads a row of it; a tied one is on both."""

    cpu_bytes: int
    gpu_bytes: int
    cpu_read: int
    gpu_read: int


def split(placement: Placement, model: Shape | Decoder, tensors: Sequence[Tensor]) -> Split:
    """All other tensors are on the GPU."""
    made = decoder.made(model)
    cpu, gpu, cpu_read, gpu_read = 0, 0, 0, 0
    for tensor in tensors:
        read = streamed_bytes(tensor, made.tied, made.expert_share)
        overridden = placement.buffer_of(tensor.name)
        table = decoder.is_table(tensor.name)
        if overridden is not None and is_host(overridden):
            cpu, cpu_read = cpu + tensor.bytes, cpu_read + read
            continue
        cpu += tensor.bytes if table else 0
        if not table or (made.tied and tensor.part == "embedding"):
            gpu, gpu_read = gpu + tensor.bytes, gpu_read + read
    return Split(cpu, gpu, cpu_read, gpu_read)


def step_s(split: Split, cpu_bytes_per_s: float, gpu_bytes_per_s: float = math.inf) -> float:
    """Least seconds of a decode step for the weights: the sides take turns, layer by layer, so their times
    add. What crosses the bus is a token's activations, a few KB a layer, and does not count."""
    return split.cpu_read / cpu_bytes_per_s + split.gpu_read / gpu_bytes_per_s

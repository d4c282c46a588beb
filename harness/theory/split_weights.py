"""Weights split between a GPU and its host CPU, and the bound on a decode step's speed. Pure.

As llama.cpp's `--n-cpu-moe` and `--override-tensor` have it (common/arg.cpp): each is a pattern that a
tensor's name contains, and the first that matches decides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.theory import decoder
from harness.theory.decoder import Decoder
from harness.theory.memory import Model
from harness.theory.tensors import Tensor, streamed_bytes

CPU = "CPU"
# With LLM_FFN_EXPS_REGEX of llama.cpp's common.h.
_EXPERTS_OF = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_(?:ch|)exps")
_LAYER = re.compile(r"blk\.(\d+)\.")


class PlacementError(ValueError):
    """An invalid placement; the message is a sentence."""


@dataclass(frozen=True)
class Placement:
    """`n_cpu_moe`: layers, from the first on, whose experts are on the CPU; more than there are: all.
    `override_tensor`: text such as `ffn_down=CPU,attn=CUDA0`, patterns with the buffer type of the tensors
    that they match. `gpu_layers`: on the GPU, the last ones, the output counts as one; -1: all."""

    n_cpu_moe: int = 0
    override_tensor: str = ""
    gpu_layers: int = -1

    def first_on_gpu(self, layers: int) -> int:
        """The first of so many layers that is on the GPU, as llama.cpp divides them (`i_gpu_start` in
        llama-model.cpp); `layers`: only the output is, one more: nothing is."""
        return 0 if self.gpu_layers < 0 else max(layers + 1 - self.gpu_layers, 0)

    @cached_property
    def overrides(self) -> list[tuple[re.Pattern[str], str]]:
        """Patterns and buffer types, in order. Raises PlacementError."""
        patterns: list[tuple[re.Pattern[str], str]] = []
        for override in self.override_tensor.split(",") if self.override_tensor else ():
            pattern, equals, buffer = override.partition("=")
            if not (pattern and equals and buffer):
                raise PlacementError(
                    f"override_tensor: {override!r} is not PATTERN=BUFFER, such as ffn_down=CPU"
                )
            try:
                patterns.append((re.compile(pattern), buffer))
            except re.error as wrong:
                raise PlacementError(
                    f"override_tensor: {pattern!r} is not a regular expression: {wrong}"
                ) from wrong
        return patterns

    def buffer_of(self, name: str) -> str | None:
        """The buffer type that a tensor is given; None: none, it stays where its layer is."""
        if (experts := _EXPERTS_OF.search(name)) and int(experts[1]) < self.n_cpu_moe:
            return CPU
        return next((buffer for pattern, buffer in self.overrides if pattern.search(name)), None)

    def check(self, model: Decoder | None, names: Sequence[str] | None) -> None:
        """Raises PlacementError for a placement that matches nothing in a model with tensors of these names.
        None: not known."""
        if self.n_cpu_moe and model is not None and not model.experts:
            raise PlacementError(f"n_cpu_moe {self.n_cpu_moe}: the model has no experts")
        for pattern, buffer in self.overrides:
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


def split_layers(placement: Placement, model: Decoder, tensors: Sequence[Tensor]) -> Split:
    """The bytes of both sides."""
    gpu, cpu, cpu_computed = on_sides(placement, model, tensors)
    stored = (sum(tensor.bytes for tensor in side) for side in (cpu, gpu))
    read = (
        sum(streamed_bytes(tensor, model.tied, model.expert_share) for tensor in side)
        for side in (cpu_computed, gpu)
    )
    return Split(*stored, *read)


def on_sides(
    placement: Placement, model: Decoder, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The tensors on the GPU, those on the CPU, and of these the ones that the CPU computes with. A tied
    embedding is on both: rows are looked up on the CPU, and the output is computed where its layer is."""
    first = placement.first_on_gpu(model.count)
    gpu: list[Tensor] = []
    cpu: list[Tensor] = []
    computed: list[Tensor] = []
    for tensor in tensors:
        layer = _LAYER.match(tensor.name)
        on_gpu = (int(layer[1]) if layer else model.count) >= first
        if buffer := placement.buffer_of(tensor.name):
            on_gpu = not is_host(buffer)
        elif decoder.is_table(tensor.name):
            cpu.append(tensor)
            if not (model.tied and tensor.part == "embedding"):
                continue
            if not on_gpu:
                computed.append(tensor)
                continue
        if on_gpu:
            gpu.append(tensor)
        else:
            cpu.append(tensor)
            computed.append(tensor)
    return gpu, cpu, computed


def side_models(
    placement: Placement, model: Decoder, tensors: Sequence[Tensor], kv_element_bytes: float
) -> tuple[Model, Model]:
    """What the GPU and the CPU hold: each its layers with their part of the cache, and its weights."""
    layers, first = list(model.layers()), placement.first_on_gpu(model.count)
    gpu, cpu, _ = on_sides(placement, model, tensors)
    models = []
    for part, stored in ((layers[first:], gpu), (layers[:first], cpu)):
        of_side = replace(model, runs=decoder.in_runs(part))
        kv = decoder.kv_elements_per_token(of_side) * kv_element_bytes
        models.append(Model(of_side, sum(tensor.bytes for tensor in stored), 0.0, kv))
    return models[0], models[1]


def step_s(split: Split, cpu_bytes_per_s: float, gpu_bytes_per_s: float = math.inf) -> float:
    """Least seconds of a decode step for the weights: the sides take turns, layer by layer, so their times
    add. What crosses the bus is a token's activations, a few KB a layer, and does not count."""
    return split.cpu_read / cpu_bytes_per_s + split.gpu_read / gpu_bytes_per_s

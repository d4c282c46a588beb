"""A user's own shapes and machines for `harness theory`, from YAML; every mistake is one sentence."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from harness.config import yaml_text
from harness.config.experiment import Frozen
from harness.config.forms import Count, InlineShape
from harness.config.mistakes import Loc, Mistakes, expected, shown, suggestion
from harness.theory.families import SHAPES
from harness.theory.machines import Figure, Machine
from harness.theory.shapes import Shape

Positive = Annotated[float, Field(ge=1e-6, le=1e9)]


class OwnFile(Frozen):
    """The whole file."""

    shapes: dict[str, Any] = Field(default={})
    machines: dict[str, Any] = Field(default={})


class OwnShape(InlineShape):
    """A shape spelled out, with what newer families have; `qk_norm` by default as the arch has it."""

    arch: Literal["qwen2", "llama", "qwen3"]  # type: ignore[assignment]
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | None = None
    window: Count | None = None

    def shape(self) -> Shape:
        norm = self.arch == "qwen3" if self.qk_norm is None else self.qk_norm
        return replace(super().shape(), qk_norm=norm)


class OwnMachine(Frozen):
    """A machine. Bandwidth as read, rate of the arithmetic that decode uses; both SI."""

    memory_gib: Positive
    bandwidth_gb_per_s: Positive
    tflops: Positive


def load(path: Path) -> tuple[dict[str, Shape], dict[str, Machine]]:
    """Shapes and machines by name. A shape may start from a known one: `{like: qwen1.5-0.5b, tied: true}`.

    Raises ConfigError.
    """
    document = yaml_text.read(path)
    mistakes = Mistakes(document.place)
    file = mistakes.checked(OwnFile, document.data, ())
    shapes: dict[str, Shape] = {}
    machines: dict[str, Machine] = {}
    for name, given in (file.shapes if file else {}).items():
        if shape := _shape(given, ("shapes", name), mistakes):
            shapes[name] = shape
    for name, given in (file.machines if file else {}).items():
        if machine := mistakes.checked(OwnMachine, given, ("machines", name)):
            machines[name] = _machine(name, machine, path)
    mistakes.stop_if_any()
    return shapes, machines


def _shape(given: Any, loc: Loc, mistakes: Mistakes) -> Shape | None:
    if not isinstance(given, dict):
        mistakes.add(loc, expected("a mapping (key: value)", given))
        return None
    asked = dict(given)
    if (like := asked.pop("like", None)) is not None:
        if like not in list(SHAPES):
            mistakes.add((*loc, "like"), f"unknown shape {shown(like)}" + suggestion(like, SHAPES))
            return None
        base = asdict(SHAPES[like])
        if (
            base["head_dim"] * base["heads"] == base["hidden_size"]
            and {"hidden_size", "heads"} & asked.keys()
        ):
            del base["head_dim"]  # it followed from them
        if asked.get("arch", base["arch"]) != base["arch"]:
            del base["qkv_bias"], base["qk_norm"]
        asked = base | asked
    row = mistakes.checked(OwnShape, asked, loc)
    return row.shape() if row else None


def _machine(name: str, given: OwnMachine, path: Path) -> Machine:
    source = f"{path}"
    return Machine(
        name=name,
        memory=Figure(round(given.memory_gib * 2**30), source),
        bandwidth=Figure(given.bandwidth_gb_per_s * 1e9, source),
        rates={"own": Figure(given.tflops * 1e12, source)},
        rate="own",
    )

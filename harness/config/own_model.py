"""A user's own shapes and machines for `harness theory`, from YAML; every mistake is one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from harness.config import own_machines, yaml_text
from harness.config.base import Frozen, Plain, Tokens
from harness.config.form import InlineShape
from harness.config.mistakes import Loc, Mistakes, expected, shown
from harness.config.model_rows import named_shape
from harness.theory import machine_names
from harness.theory.decoder import Decoder, dense, dense_fields
from harness.theory.machines import Figure, Machine
from harness.theory.names import NotUnderstood

Positive = Annotated[float, Field(ge=1e-6, le=1e9)]


class OwnFile(Frozen):
    """The whole file."""

    shapes: Plain = Field(default={})
    machines: Plain = Field(default={})


class OwnShape(InlineShape):
    """A shape spelled out, with the features of newer families. `qk_norm`: by default that of the arch."""

    arch: Literal["qwen2", "llama", "qwen3"]  # type: ignore[assignment]
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | None = None
    window: Tokens | None = None

    def spelled_out(self) -> dict[str, Any]:
        norm = self.arch == "qwen3" if self.qk_norm is None else self.qk_norm
        return super().spelled_out() | {"qk_norm": norm}


class OwnMachine(Frozen):
    """A machine, or its differences from a known one. Read bandwidth, and the rate of the arithmetic that
    decode uses; both SI."""

    like: str | None = None
    memory_gib: Positive | None = None
    bandwidth_gb_per_s: Positive | None = None
    tflops: Positive | None = None


def load_own_model(path: Path) -> tuple[dict[str, Decoder], dict[str, Machine]]:
    """Shapes and machines by name. Both may start from a known one: `{like: qwen1.5-0.5b, tied: true}`.

    Raises ConfigError.
    """
    document = yaml_text.read(path)
    mistakes = Mistakes(document.place)
    file = mistakes.checked(OwnFile, document.data, ())
    shapes: dict[str, Decoder] = {}
    machines: dict[str, Machine] = {}
    for name, given in (file.shapes if file else {}).items():
        if shape := _shape(given, ("shapes", name), mistakes):
            shapes[name] = shape
    for name, given in (file.machines if file else {}).items():
        if machine := _machine(name, given, path, mistakes):
            machines[name] = machine
    mistakes.stop_if_any()
    return shapes, machines


def _shape(given: Any, loc: Loc, mistakes: Mistakes) -> Decoder | None:
    if not isinstance(given, dict):
        mistakes.add(loc, expected("a mapping (key: value)", given))
        return None
    fields = dict(given)
    if (like := fields.pop("like", None)) is not None:
        if not isinstance(like, str):
            mistakes.add((*loc, "like"), expected("a shape's name", like))
            return None
        if (known := named_shape(like, (*loc, "like"), mistakes)) is None:
            return None
        base = dense_fields(known.made) or {}
        if (
            base["head_dim"] * base["heads"] == base["hidden_size"]
            and {"hidden_size", "heads"} & fields.keys()
        ):
            del base["head_dim"]  # it followed from them
        if fields.get("arch", base["arch"]) != base["arch"]:
            del base["qkv_bias"], base["qk_norm"]
        fields = base | fields
    row = mistakes.checked(OwnShape, fields, loc)
    return dense(**row.spelled_out()) if row else None


def _machine(name: str, given: Any, path: Path, mistakes: Mistakes) -> Machine | None:
    loc = ("machines", name)
    row = mistakes.checked(OwnMachine, given, loc)
    if row is None:
        return None
    source = str(path)
    memory = Figure(round(row.memory_gib * 2**30), source) if row.memory_gib else None
    bandwidth = Figure(row.bandwidth_gb_per_s * 1e9, source) if row.bandwidth_gb_per_s else None
    rates = {"own": Figure(row.tflops * 1e12, source)} if row.tflops else None
    if row.like is None:
        for key in ("memory_gib", "bandwidth_gb_per_s", "tflops"):
            if getattr(row, key) is None:
                mistakes.add((*loc, key), "is missing")
        if not (memory and bandwidth and rates):
            return None
        return Machine(name, memory, bandwidth, rates, rate="own")
    try:
        base = machine_names.one_machine(row.like, row.memory_gib, known=own_machines.known())
    except NotUnderstood as why:
        mistakes.add((*loc, "like"), why.sentence("machine", shown(row.like)))
        return None
    return replace(
        base,
        name=name,
        memory=memory or base.memory,
        bandwidth=bandwidth or base.bandwidth,
        peak_bandwidth=None if bandwidth else base.peak_bandwidth,
        rates=rates or base.rates,
        rate="own" if rates else base.rate,
    )

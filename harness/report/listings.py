"""Terminal output of `harness theory --list-models` and `--list-machines`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from typing_extensions import TypedDict

from harness.report.table import NONE, formatted
from harness.report.theory import Columns
from harness.theory.machine import Machine
from harness.theory.shapes import Shape, active_params, kv_elements_per_token, parameters


class ModelRow(TypedDict):
    """A shape as --list-models shows it."""

    model: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    window: int | None
    total_params: int
    active_params: int
    kv_elements_per_token: int


class MachineRow(TypedDict):
    """A machine as --list-machines shows it, with the source of each figure."""

    machine: str
    memory_bytes: int
    bytes_per_s: float
    rate: str | None
    flops: float
    other_rates: dict[str, float]
    sources: dict[str, str]


MODELS: Columns[ModelRow] = (
    *(
        (key, itemgetter(key))
        for key in ("model", "layers", "hidden_size", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    ),
    ("tied", lambda row: "tied" if row["tied"] else ""),
    ("window", lambda row: row["window"] or ""),
    ("parameters", lambda row: formatted(row["total_params"])),
    ("read/token", lambda row: formatted(row["active_params"])),
    ("KV elements/token", lambda row: formatted(row["kv_elements_per_token"])),
)
MACHINES: Columns[MachineRow] = (
    ("machine", lambda row: row["machine"]),
    ("GiB", lambda row: formatted(row["memory_bytes"], unit=2**30)),
    ("GB/s", lambda row: formatted(row["bytes_per_s"], "{:,.1f}", 1e9)),
    ("TFLOP/s", lambda row: f"{row['flops'] / 1e12:g} {row['rate']}"),
    (
        "other rates",
        lambda row: ", ".join(f"{k} {v / 1e12:g}" for k, v in row["other_rates"].items()) or NONE,
    ),
)


def model(name: str, shape: Shape) -> ModelRow:
    return {
        "model": name,
        "layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "ffn": shape.intermediate_size,
        "vocab": shape.vocab_size,
        "tied": shape.tied,
        "window": shape.window,
        "total_params": parameters(shape),
        "active_params": active_params(shape),
        "kv_elements_per_token": kv_elements_per_token(shape),
    }


def machine(name: str, known: Machine) -> MachineRow:
    figures = {"memory": known.memory, "bandwidth": known.bandwidth, **known.rates}
    return {
        "machine": name,
        "memory_bytes": known.memory_bytes,
        "bytes_per_s": known.bandwidth_bytes_per_s,
        "rate": known.rate,
        "flops": known.flops,
        "other_rates": {name: rate.value for name, rate in known.rates.items() if name != known.rate},
        "sources": {what: figure.source for what, figure in figures.items()},
    }


def sources(machines: Sequence[MachineRow]) -> None:
    """Print the sources of the figures of each machine, grouped by source."""
    for row in machines:
        of_source: dict[str, list[str]] = {}
        for what, source in row["sources"].items():
            of_source.setdefault(source, []).append(what)
        print(f"\n{row['machine']}")
        for source, figures in of_source.items():
            print(f"  {', '.join(figures)}: {source}")

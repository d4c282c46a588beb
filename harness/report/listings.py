"""Terminal output of `harness theory --list-models` and `--list-machines`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from typing_extensions import TypedDict

from harness.report.table import NONE, formatted
from harness.report.theory import Columns
from harness.theory import decoder
from harness.theory.decoder import Decoder
from harness.theory.machine import Machine
from harness.theory.shapes import Shape


class ModelRow(TypedDict):
    """A model as --list-models shows it; `kv_heads` and `head_dim`: of dense Llama-like models."""

    model: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int | None
    head_dim: int | None
    ffn: int
    experts: int
    experts_used: int
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
    flops: float | None
    other_rates: dict[str, float]
    sources: dict[str, str]


MODELS: Columns[ModelRow] = (
    *((key, itemgetter(key)) for key in ("model", "layers", "hidden_size", "heads")),
    *((key, lambda row, key=key: row[key] or "") for key in ("kv_heads", "head_dim")),
    *((key, itemgetter(key)) for key in ("ffn", "vocab")),
    ("experts", lambda row: f"{row['experts_used']} of {row['experts']}" if row["experts"] else ""),
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
    ("TFLOP/s", lambda row: f"{row['flops'] / 1e12:.4g} {row['rate']}" if row["flops"] else NONE),
    (
        "other rates",
        lambda row: ", ".join(f"{k} {v / 1e12:.4g}" for k, v in row["other_rates"].items()) or NONE,
    ),
)


def model(name: str, given: Shape | Decoder) -> ModelRow:
    made = decoder.made(given)
    return {
        "model": name,
        "layers": made.count,
        "hidden_size": made.hidden_size,
        "heads": made.heads,
        "kv_heads": made.shape.kv_heads if made.shape else None,
        "head_dim": made.shape.head_dim if made.shape else None,
        "ffn": made.ffn,
        "experts": made.experts,
        "experts_used": made.experts_used,
        "vocab": made.vocab_size,
        "tied": made.tied,
        "window": made.window,
        "total_params": decoder.parameters(made),
        "active_params": decoder.active_params(made),
        "kv_elements_per_token": decoder.kv_elements_per_token(made),
    }


def machine(name: str, known: Machine) -> MachineRow:
    figures = {"memory": known.memory, "bandwidth": known.bandwidth, **known.rates}
    return {
        "machine": name,
        "memory_bytes": known.memory_bytes,
        "bytes_per_s": known.bandwidth_bytes_per_s,
        "rate": known.rate or None,
        "flops": known.flops if known.rate else None,
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

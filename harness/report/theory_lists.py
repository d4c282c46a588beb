"""Terminal output of `harness theory --list-models` and `--list-machines`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.report.text_table import NONE, Table
from harness.theory import decoder
from harness.theory.decoder import Decoder
from harness.theory.machines import (
    Machine,
)


def model_row(name: str, decoder_of: Decoder) -> dict[str, object]:
    """A model as --list-models shows it; `kv_heads` and `head_dim`: of dense Llama-like models."""
    return {
        "model": name,
        "total_params": decoder.parameters(decoder_of),
        "active_params": decoder.active_params(decoder_of),
        "kv_elements_per_token": decoder.kv_elements_per_token(decoder_of),
        "layers": decoder_of.count,
        "hidden_size": decoder_of.hidden_size,
        "heads": decoder_of.heads,
        "kv_heads": decoder_of.kv_heads or None,
        "head_dim": decoder_of.head_dim or None,
        "ffn": decoder_of.ffn,
        "experts": decoder_of.experts,
        "experts_used": decoder_of.experts_used,
        "vocab": decoder_of.vocab_size,
        "tied": decoder_of.tied,
        "window": decoder_of.window,
    }


def machine_row(name: str, machine: Machine) -> dict[str, object]:
    """A machine as --list-machines shows it, with the source of each figure."""
    return {
        "machine": name,
        "memory_bytes": machine.memory_bytes,
        "bytes_per_s": machine.bandwidth_bytes_per_s,
        "rate": machine.rate or None,
        "flops": machine.flops if machine.rate else None,
        "other_rates": {name: rate.value for name, rate in machine.rates.items() if name != machine.rate},
        "sources": _sources(machine),
    }


def _sources(machine: Machine) -> dict[str, str]:
    figures = {"memory": machine.memory, "bandwidth": machine.bandwidth, **machine.rates}
    return {name: figure.source for name, figure in figures.items()}


def show_models(rows: Sequence[Mapping[str, object]], wide: bool) -> None:
    """A column for each key."""

    def text(value: object) -> str:
        if value is True:
            return "yes"
        return f"{value:,}" if value and isinstance(value, int) else str(value or "")

    headings = [key.replace("_", " ") for key in rows[0]]
    Table(headings, [list(map(text, row.values())) for row in rows]).show(wide, turns=True)


def show_machines(machines: Mapping[str, Machine], wide: bool) -> None:
    """Their memory, bandwidth and compute rates, and the sources of each."""
    lines = []
    for name, machine in machines.items():
        rates = [f"{rate} {figure.value / 1e12:.4g}" for rate, figure in machine.rates.items()]
        memory, bandwidth = machine.memory_bytes / 1e9, machine.bandwidth_bytes_per_s / 1e9
        lines.append([name, f"{memory:,.1f}", f"{bandwidth:,.1f}", ", ".join(rates) or NONE])
    Table(["machine", "GB", "GB/s", "TFLOP/s"], lines, [False, True, True, False]).show(wide, turns=True)
    for name, machine in machines.items():
        of_source: dict[str, list[str]] = {}
        for figure, source in _sources(machine).items():
            of_source.setdefault(source, []).append(figure)
        print(
            "\n".join(
                [f"\n{name}", *(f"  {', '.join(figures)}: {source}" for source, figures in of_source.items())]
            )
        )

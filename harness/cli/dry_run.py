"""What a run would take: one line per cell, from the config alone. Needs no environment and no weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import machine
from harness.cli import OK
from harness.config import Experiment
from harness.envs import build
from harness.models import weights
from harness.plan import Cell
from harness.theory.estimate import NOMINAL_BPW, estimate


def show(experiment: Experiment, cells: Sequence[Cell], as_json: bool) -> int:
    """Print the lines, or one array."""
    threads = experiment.protocol.threads or machine.physical_cores()
    on_cpu = experiment.device == "cpu"
    bandwidth = machine.read_bandwidth(threads)["read_bytes_per_s"] if on_cpu else None
    try:
        machine.device_id(experiment.device, experiment.gpu)
        unavailable = None
    except machine.DeviceError as absent:
        unavailable = str(absent)
    lines = [_line(cell, experiment, threads, bandwidth, unavailable) for cell in cells]
    if as_json:
        print(json.dumps(lines, indent=1))
        return OK
    for line in lines:
        disk, memory, seconds = line["disk_bytes"], line["memory_bytes"], line["seconds"]
        parts = [
            line["cell"],
            line["weights"],
            "disk ?" if disk is None else f"disk {disk / 1e9:.1f} GB",
            "memory ?" if memory is None else f"memory {memory / 1e9:.1f} GB",
            "time ?" if seconds is None else f"about {_duration(seconds)} x {experiment.protocol.repeats}",
        ]
        print("  ".join(parts + ([f"({line['note']})"] if line["note"] else [])))
    return OK


def _line(
    cell: Cell, experiment: Experiment, threads: int, bandwidth: float | None, unavailable: str | None
) -> dict[str, Any]:
    source, missing_bytes = _weights(cell, experiment.device)
    line: dict[str, Any] = {
        "cell": cell.id,
        "weights": source,
        "disk_bytes": missing_bytes,
        "memory_bytes": None,
        "seconds": None,
        "note": unavailable,
    }
    shape = cell.model.shape
    if shape is None or cell.header.weights == "none":
        return line
    prompt, new = int(cell.workload.prompt_tokens or 0), int(cell.workload.new_tokens or 0)
    n_ctx = int(cell.options(threads).get("n_ctx") or prompt + new)
    bpw = NOMINAL_BPW.get(cell.quant or "f16", 16.0)
    guess = estimate(shape, bpw, prompt, new, n_ctx, bandwidth)
    line |= {"memory_bytes": round(guess.memory_bytes), "seconds": guess.seconds}
    available = machine.facts()["memory_bytes"]
    if unavailable is None and experiment.device == "cpu" and guess.memory_bytes > available:
        line["note"] = f"will not fit: this machine has {available / 1e9:.1f} GB of memory"
    return line


def _weights(cell: Cell, device: str) -> tuple[str, float | None]:
    """Where weights come from, in words, and the bytes still to be written to disk (null: unknown)."""
    kind, model = cell.model.weights.kind, cell.model
    if cell.header.weights == "none":
        return "no weights", 0
    if kind == "path":
        path = Path(weights.named_path(model, cell.quant))
        return f"{path}{'' if path.exists() else ' (missing)'}", 0
    if kind == "hub":
        return f"hub {model.weights.repo}/{weights.named_path(model, cell.quant)}", None
    assert model.shape is not None  # the config refuses synthetic weights without a shape
    quant = cell.quant or weights.SOURCE_QUANT
    environment = cell.header.environment_for(device.partition(":")[0])
    built = build.find(environment) if environment else None
    wanted = {weights.SOURCE_QUANT, quant}
    if built is not None:
        lock = " ".join(built.lock)
        if weights.synthetic_path(model.shape, model.weights.seed, quant, lock).exists():
            return "synthetic, in the cache", 0
        wanted = {
            q for q in wanted if not weights.synthetic_path(model.shape, model.weights.seed, q, lock).exists()
        }
    bytes_each = [estimate(model.shape, NOMINAL_BPW[q], 1, 1, 1, None).weight_bytes for q in wanted]
    steps = [f"synthesize {weights.SOURCE_QUANT}"] if weights.SOURCE_QUANT in wanted else []
    steps += [f"quantize {quant}"] if quant != weights.SOURCE_QUANT else []
    return ", ".join(steps), sum(bytes_each)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )

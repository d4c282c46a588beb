"""What a run would take: one line per cell, from the config alone. Needs no environment and no weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import machine
from harness.campaign.device_lock import is_busy
from harness.cli import OK
from harness.config import Experiment
from harness.envs import build
from harness.models import weights
from harness.plan import Cell
from harness.theory.estimate import estimate
from harness.theory.ggml import element_bytes
from harness.theory.shapes import Shape, kv_bytes_per_token


def show(experiment: Experiment, cells: Sequence[Cell], as_json: bool) -> int:
    """Print the lines, or one array."""
    here = Here(experiment)
    lines = [here.line(cell) for cell in cells]
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


class Here:
    """This machine as a plan meets it: its device, its bandwidth, and which files are made or planned
    already."""

    def __init__(self, experiment: Experiment) -> None:
        self._device = experiment.device
        self._threads = experiment.protocol.threads or machine.physical_cores()
        self._planned: set[tuple[str, str]] = set()
        self._unavailable: str | None = None
        self._bandwidth: float | None = None
        try:
            device_id = machine.device_id(experiment.device, experiment.gpu)
            # A probe would spoil what another campaign is measuring.
            if device_id == "cpu" and not is_busy(device_id):
                self._bandwidth = machine.read_bandwidth(self._threads)["read_bytes_per_s"]
        except machine.DeviceError as absent:
            self._unavailable = str(absent)
        except machine.ProbeError:
            pass  # then there is no estimate of the time

    def line(self, cell: Cell) -> dict[str, Any]:
        """One cell: `weights` in words, bytes still to be written to disk, memory, seconds a repeat, a
        note."""
        source, disk_bytes, weight_bytes, kv_bytes = self._weights(cell)
        line: dict[str, Any] = {
            "cell": cell.id,
            "weights": source,
            "disk_bytes": disk_bytes,
            "memory_bytes": None,
            "seconds": None,
            "note": self._unavailable,
        }
        if weight_bytes is None or kv_bytes is None:
            return line
        prompt, new = int(cell.workload.prompt_tokens or 0), int(cell.workload.new_tokens or 0)
        n_ctx = int(cell.options(self._threads).get("n_ctx") or prompt + new)
        guess = estimate(weight_bytes, kv_bytes, prompt, new, n_ctx, self._bandwidth)
        line |= {"memory_bytes": round(guess.memory_bytes), "seconds": guess.seconds}
        has = machine.facts()["memory_bytes"]
        if self._device == "cpu" and guess.memory_bytes > has:
            line["note"] = f"will not fit: this machine has {has / 1e9:.1f} GB of memory"
        return line

    def _weights(self, cell: Cell) -> tuple[str, float | None, float | None, float | None]:
        """Where weights come from, in words; bytes to be written; bytes of the weights; KV bytes a token.

        Null where it cannot be known yet.
        """
        model, options = cell.model, cell.options(self._threads)
        if cell.header.weights == "none":
            return "no weights", 0, None, None
        element = element_bytes(options.get("type_k", "f16")), element_bytes(options.get("type_v", "f16"))
        kv = kv_bytes_per_token(model.shape, *element) if model.shape else None
        if model.weights.kind == "synthetic" and model.shape:
            source, disk = self._synthetic(cell, model.shape)
            quant = cell.quant or weights.SOURCE_QUANT
            return source, disk, weights.synthetic_bytes(model.shape, quant), kv
        name = weights.named_path(model, cell.quant)
        if model.weights.kind == "hub":
            size = weights.synthetic_bytes(model.shape, cell.quant) if model.shape and cell.quant else None
            return f"hub {model.weights.repo}/{name}", size, size, kv
        try:
            ready = weights.local(Path(name))
            header = ready.header
            if cell.quant not in (None, header.quant):
                weights.check_quantizable(ready, str(cell.quant))
        except weights.WeightsError as missing:
            return str(missing), 0, None, None
        sizes, attention = header.weights(), header.attention()
        if attention:
            kv = attention["layers"] * attention["kv_heads"] * attention["head_dim"] * sum(element)
        if cell.quant in (None, header.quant):
            return name, 0, sizes["model_bytes"], kv
        size = weights.quantized_bytes(header, str(cell.quant))
        return f"{name}, quantize {cell.quant}", size, size, kv

    def _synthetic(self, cell: Cell, shape: Shape) -> tuple[str, float]:
        """What is still to be made for a cell, after the cells before it, and its bytes."""
        quant = cell.quant or weights.SOURCE_QUANT
        environment = cell.header.environment_for(self._device.partition(":")[0])
        built = build.find(environment) if environment else None
        lock = " ".join(built.lock) if built else ""

        def missing(name: str) -> bool:
            path = weights.synthetic_path(shape, cell.model.weights.seed, name, lock)
            return not path.exists() and (cell.model.name, name) not in self._planned

        if not missing(quant):
            return "synthetic, made already or above", 0
        wanted = [name for name in dict.fromkeys((weights.SOURCE_QUANT, quant)) if missing(name)]
        self._planned |= {(cell.model.name, name) for name in wanted}
        steps = [
            f"synthesize {name}" if name == weights.SOURCE_QUANT else f"quantize {name}" for name in wanted
        ]
        return ", ".join(steps), sum(weights.synthetic_bytes(shape, name) for name in wanted)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )

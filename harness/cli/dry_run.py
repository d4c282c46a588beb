"""What a run would take: one line per cell, from the config alone. Needs no environment and no weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import machine
from harness.campaign.device_lock import is_busy
from harness.cli import OK
from harness.config import Experiment
from harness.envs import build
from harness.models import checkpoint, weights
from harness.models.weights import Ready
from harness.plan import Cell
from harness.theory.estimate import estimate
from harness.theory.ggml import element_bytes
from harness.theory.loaded import ELEMENT_BYTES, loaded_bytes
from harness.theory.shapes import Shape, kv_elements_per_token, parameters
from harness.theory.tensors import Tensor, of_shape


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


@dataclass(frozen=True)
class Source:
    """Where weights come from, in words; bytes to be written; bytes once loaded; KV elements a token.

    Null where it cannot be known yet.
    """

    words: str
    disk_bytes: float | None = None
    loaded_bytes: float | None = None
    kv_elements: float | None = None


class Here:
    """This machine as a plan meets it: its device, its bandwidth, and which files are made or planned
    already."""

    def __init__(self, experiment: Experiment) -> None:
        self._device = experiment.device
        self._threads = experiment.protocol.threads or machine.physical_cores()
        self._planned: set[Path] = set()
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
        source = self._source(cell)
        line: dict[str, Any] = {
            "cell": cell.id,
            "weights": source.words,
            "disk_bytes": source.disk_bytes,
            "memory_bytes": None,
            "seconds": None,
            "note": self._unavailable,
        }
        if source.loaded_bytes is None or source.kv_elements is None:
            return line
        prompt, new = int(cell.workload.prompt_tokens or 0), int(cell.workload.new_tokens or 0)
        options = cell.options(self._threads)
        static = options.get("cache") == "static"
        has_n_ctx = static or "cache" not in options  # a dynamic cache is as long as what it holds
        n_ctx = int((has_n_ctx and options.get("n_ctx")) or prompt + new)
        kv_bytes = source.kv_elements * _kv_element_bytes(options)
        format = cell.header.weights
        guess = estimate(source.loaded_bytes, kv_bytes, prompt, new, n_ctx, self._bandwidth, format, static)
        line |= {"memory_bytes": round(guess.memory_bytes), "seconds": guess.seconds}
        has = machine.facts()["memory_bytes"]
        if self._device == "cpu" and guess.memory_bytes > has:
            line["note"] = f"will not fit: this machine has {has / 1e9:.1f} GB of memory"
        return line

    def _source(self, cell: Cell) -> Source:
        model, shape = cell.model, cell.model.shape
        if cell.header.weights == "none":
            return Source("no weights", 0)
        if model.weights.kind == "synthetic" and shape:
            words, disk = self._made(cell, weights.synthetic_name(shape, model.weights.seed), shape, False)
            size = _of_shape(cell, shape)
            return Source(
                words or "synthetic, made already or above", disk, size, kv_elements_per_token(shape)
            )
        name = weights.named_path(model, cell.quant) if model.weights.file or model.weights.path else ""
        try:
            if model.weights.kind == "path":
                return self._given(cell, name, weights.local(Path(name)))
            if (ready := weights.in_hub_cache(model, cell.quant)) is not None:
                return self._given(cell, f"hub {model.weights.repo}", ready)
        except weights.WeightsError as missing:
            return Source(str(missing), 0)
        place = f"hub {model.weights.repo}" + (f"/{name}" if name else "")
        if not shape or (name and not cell.quant):
            return Source(place)
        download = weights.synthetic_bytes(shape, str(cell.quant)) if name else 2 * parameters(shape)
        return Source(place, download, _of_shape(cell, shape), kv_elements_per_token(shape))

    def _given(self, cell: Cell, words: str, ready: Ready) -> Source:
        """Weights that are here. Raises WeightsError."""
        a, quant = ready.attention, cell.quant
        kv = 2 * a["layers"] * a["kv_heads"] * a["head_dim"] if a else None
        if cell.header.weights == "hf":
            weights.check_loadable(ready, cell.variant.stack)
            return Source(words, 0, _of_folder(cell, ready), kv)
        if ready.format == "hf":
            weights.check_convertible(ready)
            shape = checkpoint.read(ready.path).shape
            assert shape is not None  # else it is not convertible
            steps, disk = self._made(cell, ready.fingerprint, shape, has_checkpoint=True)
            return Source(f"{words}, {steps}" if steps else words, disk, _of_shape(cell, shape), kv)
        if quant in (None, ready.quant):
            return Source(words, 0, ready.sizes["model_bytes"], kv)
        weights.check_quantizable(ready, str(quant))
        assert ready.header is not None  # it is a GGUF
        size = weights.quantized_bytes(ready.header, str(quant))
        return Source(f"{words}, quantize {quant}", size, size, kv)

    def _made(self, cell: Cell, name: str, shape: Shape, has_checkpoint: bool) -> tuple[str, float]:
        """What is still to be made for a cell, after the cells before it, in words; its bytes.

        `name`: what tells the checkpoint from others.
        """
        steps: list[tuple[str, Path, float]] = []
        if not has_checkpoint:
            folder = weights.checkpoint_path(shape, cell.model.weights.seed)
            steps.append(
                ("synthesize checkpoint", folder, parameters(shape) * weights.CHECKPOINT_ELEMENT_BYTES)
            )
        if cell.header.weights == "gguf":
            environment = cell.header.environment_for(self._device.partition(":")[0])
            built = build.find(environment) if environment else None
            quantizer = " ".join(built.lock) if built else ""
            quant = cell.quant or weights.SOURCE_QUANT
            source = quant if quant in weights.FULL_TYPES else weights.SOURCE_QUANT
            for made in dict.fromkeys((source, quant)):
                path = weights.converted_path(name, made, quantizer)
                word = "convert" if made == source else "quantize"
                steps.append((f"{word} {made}", path, weights.synthetic_bytes(shape, made)))
        missing: list[tuple[str, Path, float]] = []
        for step in reversed(steps):  # what is there needs nothing before it
            if step[1].exists() or step[1] in self._planned:
                break
            missing.insert(0, step)
        self._planned |= {path for _, path, _ in missing}
        return ", ".join(words for words, _, _ in missing), sum(size for _, _, size in missing)


def _of_shape(cell: Cell, shape: Shape) -> float:
    """Bytes of the weights as the cell's stack holds them."""
    if cell.header.weights == "hf":
        return _as_loaded(cell, of_shape(shape))
    return weights.synthetic_bytes(shape, cell.quant or weights.SOURCE_QUANT)


def _of_folder(cell: Cell, ready: Ready) -> float:
    """As `_of_shape`, of a checkpoint that is here."""
    if ready.quant not in weights.FULL_TYPES:
        return float(ready.sizes["model_bytes"])
    return _as_loaded(cell, checkpoint.read(ready.path, needs_shape=False).loaded)


def _as_loaded(cell: Cell, tensors: Sequence[Tensor]) -> float:
    options = cell.options(1)
    return loaded_bytes(tensors, options["dtype"], cell.quant, bool(options.get("double_quant")))


def _kv_element_bytes(options: dict[str, Any]) -> float:
    """Bytes of a K or V element, their mean."""
    if "dtype" in options:
        return ELEMENT_BYTES[options["dtype"]]
    return (element_bytes(options.get("type_k", "f16")) + element_bytes(options.get("type_v", "f16"))) / 2


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )

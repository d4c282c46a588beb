"""The files of weights that cells still need, and whether the disk has space for them. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.base.files import cache_folder, free_disk, is_same_disk
from harness.campaign.forecast import Forecast
from harness.campaign.loaded_model import bytes_of_shape, packing_of
from harness.config.plan import Cell
from harness.models import engine_files, hub, locate, make
from harness.models.locate import Ready
from harness.models.make import SPARE_DISK_BYTES
from harness.stacks import build
from harness.theory.decoder import Decoder, parameters


@dataclass(frozen=True)
class Source:
    """`words`: where the weights come from. `disk_bytes`: still to write, to `folder`; None if unknown.
    `lacks`: why they are unavailable; `refused`: why they would be measured wrongly; `no_space`: why they
    cannot be written, empty if they can."""

    words: str
    disk_bytes: float | None = None
    lacks: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    no_space: str = ""
    folder: Path = field(default_factory=cache_folder)


Step = tuple[str, Path | str, float]
"""What makes a file, in words; the file, by its place on the hub if it is fetched; its bytes."""


class WeightFiles:
    """Files that exist or that an earlier cell makes, and the disk that they take. `is_here`: they are
    written on this machine; else its disk does not count."""

    def __init__(self, family: str, threads: int, is_here: bool) -> None:
        self._family, self._threads, self._is_here = family, threads, is_here
        self._planned: set[Path | str] = set()
        self._to_write: dict[Path, float] = {}  # bytes of the cells so far, by folder

    def of(self, forecast: Forecast) -> Source:
        """Where the weights of a cell come from; without space where the disk cannot hold what this cell and
        those before it write."""
        source = self._source(forecast)
        if not source.disk_bytes or source.lacks:
            return source
        folder = source.folder
        self._to_write[folder] = self._to_write.get(folder, 0.0) + source.disk_bytes
        on_same = sum(size for each, size in self._to_write.items() if is_same_disk(each, folder))
        free = free_disk(folder)
        if not self._is_here or on_same + SPARE_DISK_BYTES <= free:
            return source
        no_space = (
            f"{on_same / 1e9:.1f} GB of weights are to be written to {folder}, where {free / 1e9:.2f} GB is"
            f" free and {SPARE_DISK_BYTES / 1e9:.1f} GB must stay so: free some, or set"
            f" {'HARNESS_CACHE' if folder == cache_folder() else 'HF_HUB_CACHE'} to a folder on another disk"
        )
        return replace(source, no_space=no_space)

    def to_write(self) -> list[str]:
        """What the cells so far write to each folder, in words."""
        return [
            f"{size / 1e9:,.1f} GB of weights to make or fetch"
            + (f", in {folder} ({free_disk(folder) / 1e9:.2f} GB free)" if self._is_here else "")
            for folder, size in self._to_write.items()
        ]

    def _source(self, forecast: Forecast) -> Source:
        cell, ready = forecast.cell, forecast.weights
        source, made = cell.source, cell.model.made
        model = cell.model.described
        if isinstance(forecast.lacks, locate.WeightsRefused):
            return Source("none usable", 0, refused=[str(forecast.lacks)])
        if forecast.lacks:
            return Source("none available", 0, lacks=[str(forecast.lacks)])
        if not cell.header.formats or source is None:
            return Source("no weights", 0)
        if source.kind == "synthetic" and made and model:
            name = make.synthetic_name(model, source.seed)
            words, disk = self._made(cell, name, made, source.seed)
            return Source(words or "synthetic, nothing more to make", disk)
        name = source.path or source.file or ""
        if ready is not None:
            return self._given(cell, f"hub {source.repo}" if source.repo else name, ready)
        place = f"hub {source.repo}" + (f"/{name}" if name else "")
        if not made or (name and not cell.quant):
            return Source(place)
        stored = name or cell.packing  # else a checkpoint of 16 bits
        size = bytes_of_shape(cell, made) if stored else 2 * parameters(made)
        return Source(place, self._missing([("fetch", place, size)])[1], folder=hub.cache_of_hub())

    def _given(self, cell: Cell, words: str, ready: Ready) -> Source:
        """Existing weights, and the files that are made from them."""
        packs = cell.packing is not None and ready.packing is None
        converts = cell.header.made is not None or cell.weights_format == "gguf"
        if packs or (converts and ready.format == "hf"):
            if (made := ready.decoder) is None:  # the conversion will report it
                return Source(words)
            steps, disk = self._made(cell, ready.fingerprint, made, seed=None)
            return Source(f"{words}, {steps}" if steps else words, disk)
        if cell.weights_format != "gguf" or cell.quant in (None, ready.quant):
            return Source(f"{words} ({ready.quant})" if ready.quant else words, 0)
        assert ready.header is not None  # it is a GGUF
        quant = str(cell.quant)
        path = make.quantized_path(ready.fingerprint, quant, self._quantizer(cell))
        step = f"quantize {quant}", path, float(make.quantized_bytes(ready.header, quant))
        steps, disk = self._missing([step])
        return Source(f"{words}, {steps}" if steps else words, disk)

    def _quantizer(self, cell: Cell) -> str:
        """The packages of the environment that quantizes and converts for a stack; empty: not built yet."""
        environment = cell.header.worker.environment_for(self._family)
        built = build.find(environment) if environment else None
        return " ".join(built.lock) if built else ""

    def _made(self, cell: Cell, name: str, made: Decoder, seed: int | None) -> tuple[str, float]:
        """The files still to make for a cell, after the cells before it, in words; their bytes.

        `name`: identifies the checkpoint. `seed`: of a synthetic one; None: it exists.
        """
        steps: list[Step] = []
        if seed is not None:
            folder = make.checkpoint_folder(name)
            steps.append(("synthesize checkpoint", folder, parameters(made) * make.CHECKPOINT_ELEMENT_BYTES))
        if packing := packing_of(cell, made, None):
            path = make.packed_path(name, packing)
            steps.append((f"pack {packing.words}", path, bytes_of_shape(cell, made)))
        if cell.weights_format == "gguf":
            quantizer = self._quantizer(cell)
            quant = cell.quant or make.SOURCE_QUANT
            source = quant if quant in make.FULL_TYPES else make.SOURCE_QUANT
            for kind in dict.fromkeys((source, quant)):
                path = make.converted_path(name, kind, quantizer)
                word = "convert" if kind == source else "quantize"
                steps.append((f"{word} {kind}", path, make.synthetic_bytes(made, kind)))
        if cell.header.made is not None:
            path = engine_files.folder_of(
                name, cell.header, cell.options(self._threads), self._quantizer(cell)
            )
            steps.append((f"convert for {cell.variant.stack}", path, bytes_of_shape(cell, made)))
        return self._missing(steps)

    def _missing(self, steps: Sequence[Step]) -> tuple[str, float]:
        """The steps whose files neither exist nor are made for a cell before, in words; their bytes."""
        missing: list[Step] = []
        for step in reversed(steps):  # an existing file needs none of the steps before it
            where = step[1]
            if where in self._planned or (isinstance(where, Path) and where.exists()):
                break
            missing.insert(0, step)
        self._planned |= {path for _, path, _ in missing}
        return ", ".join(words for words, _, _ in missing), sum(size for _, _, size in missing)

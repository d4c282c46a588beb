"""Make weights with jobs of the cell's stack: synthesize, convert, quantize. Each result is cached."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.known import Described
from harness.models import checkpoint, gguf_shape, packed, synthetic, weights
from harness.models.checkpoint import CONFIG
from harness.models.layout import Layout
from harness.models.weights import Ready, WeightsError
from harness.models.weights_place import written
from harness.plan import Cell
from harness.stacks.header import Header
from harness.stacks.interpreter import Interpreter
from harness.system import json_file
from harness.theory.decoder import parameters
from harness.theory.ggml import element_bytes
from harness.theory.packed import Packing, packed_bytes
from harness.theory.shapes import Shape
from harness.theory.tensors import of_shape
from harness.worker import launch
from runners.protocol import Request

Say = Callable[[str], None]

JOB_TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True)
class Producer:
    """`interpreter`: returns a stack's interpreter, built if missing; its exceptions are not caught."""

    device_id: str
    threads: int
    say: Say
    interpreter: Callable[[Header], Interpreter]

    def checkpoint(self, cell: Cell) -> Ready:
        """The synthetic checkpoint of a cell's model. Raises WeightsError, CacheError."""
        model, seed = _described(cell), _seed(cell)
        target = synthetic.checkpoint_path(model, seed)
        if ready := weights.cached(target):
            return ready
        made = model.decoder if isinstance(model, Described) else model
        expected = parameters(made) * synthetic.CHECKPOINT_ELEMENT_BYTES
        options = {"seed": seed, "threads": self.threads}
        laid = synthetic.layout_of(model.config) if isinstance(model, Described) else None
        return self._make(cell, "synthesize", options, None, target, expected, layout=laid)

    def gguf(self, cell: Cell, given: Ready | None) -> Ready:
        """The GGUF that a cell loads, made from given weights or from its synthetic checkpoint.

        Raises WeightsError, CacheError.
        """
        if given is None:
            quant = cell.quant or weights.SOURCE_QUANT
            return self._converted(cell, synthetic_name(cell), self.checkpoint, quant)
        if given.format == "hf":
            weights.check_convertible(given, cell.header.converts)
            quant = cell.quant or weights.SOURCE_QUANT
            made = self._converted(cell, given.fingerprint, lambda cell: given, quant)
            return replace(made, tokenizer=given.tokenizer, revision=given.revision)
        if cell.quant in (None, given.quant):
            return given
        weights.check_quantizable(given, str(cell.quant))
        target = weights.quantized_path(given.fingerprint, str(cell.quant), self.quantizer(cell))
        return self._quantized(cell, given, target)

    def packed(self, cell: Cell, requested: Packing, given: Ready | None = None) -> Ready:
        """A checkpoint packed by rounding to nearest: the given one, or the synthetic one of the model.

        Raises WeightsError, CacheError.
        """
        shape, packing, target = self.packed_target(cell, requested, given)
        if ready := weights.cached(target):
            return ready
        source = given or self.checkpoint(cell)
        options = {"format": packing.method, "bits": packing.bits, "group_size": packing.group_size}
        expected = sum(packed_bytes(of_shape(shape), packing).values())
        return self._make(cell, "pack", options | {"threads": self.threads}, source.path, target, expected)

    def packed_target(
        self, cell: Cell, requested: Packing, given: Ready | None
    ) -> tuple[Shape, Packing, Path]:
        """The model's shape, the packing with its group size, and the folder that `packed` writes. Raises
        WeightsError."""
        if given is None:
            _described(cell)  # which refuses what is not dense
        shape = checkpoint.read(given.path).shape if given and given.attention else cell.model.shape
        if shape is None:
            kind = given.architecture if given else "without a shape"
            raise WeightsError(f"model {cell.model.name} is {kind}, which cannot be packed")
        packing = packed.grouped(requested, shape)
        name = given.fingerprint if given else synthetic_name(cell)
        return shape, packing, packed.packed_path(name, packing)

    def unpacked(self, cell: Cell, ready: Ready) -> Ready:
        """A packed checkpoint unpacked to 16 bits: the reference for the kernels of its stacks.

        Raises WeightsError, CacheError.
        """
        target = packed.unpacked_path(ready.fingerprint)
        made = weights.cached(target)
        if made is None:
            expected = ready.sizes["parameters"] * synthetic.CHECKPOINT_ELEMENT_BYTES
            options = {"threads": self.threads}
            made = self._make(cell, "unpack", options, ready.path, target, expected)
        return replace(made, tokenizer=ready.tokenizer, revision=ready.revision)

    def dequantized(self, cell: Cell, given: Ready, original: Ready | None) -> Ready:
        """`given`, which the cell's stack holds quantized, dequantized to 16 bits; for the caller to remove.

        `original`: the 16-bit weights, whose config.json or header describes the model. Raises WeightsError,
        CacheError.
        """
        described, options = original or given, cell.options(self.threads)
        files: dict[str, str] = {}
        shape: Shape | None = None
        laid: Layout | None = None
        if given.format == "gguf" and described.format == "hf" and described.decoder:
            laid = _gguf_layout(described)
        elif given.format == "gguf" and described.format == "hf":
            files["config"] = str(described.path / "config.json")
        elif given.format == "gguf":
            shape = gguf_shape.shape_of(described.header) if described.header else None
            if shape is None:
                raise WeightsError(f"{given.path}: is {given.architecture}, which is not dequantized here")
        target = weights.dequantized_path(given.fingerprint, {"stack": cell.variant.stack, **options})
        expected = given.sizes["parameters"] * synthetic.CHECKPOINT_ELEMENT_BYTES
        return self._make(cell, "dequantize", options, given.path, target, expected, files, shape, laid)

    def differences(self, cell: Cell, folder: Path, original: Path) -> dict[str, Any]:
        """Two checkpoints, tensor by tensor: see runners/differences.py. Raises WeightsError."""
        files = {"source": str(folder), "original": str(original)}
        return self.run(cell, self.request(cell, "differences", None, files=files))

    def quantizer(self, cell: Cell) -> str:
        """Identifies the program that quantizes a cell's weights: the exact package versions of its stack."""
        return " ".join(self.interpreter(cell.header).lock)

    def _converted(self, cell: Cell, name: str, source: Callable[[Cell], Ready], quant: str) -> Ready:
        """The GGUF of a checkpoint. Calls `source` only if the checkpoint has to be read."""
        target = weights.converted_path(name, quant, self.quantizer(cell))
        if ready := weights.cached(target):
            return ready
        if quant not in weights.FULL_TYPES:
            return self._quantized(cell, self._converted(cell, name, source, weights.SOURCE_QUANT), target)
        given = source(cell)
        expected = given.sizes["parameters"] * element_bytes(quant)
        laid = _gguf_layout(given) if given.decoder else None
        return self._make(cell, "convert", {"dtype": quant}, given.path, target, expected, layout=laid)

    def _quantized(self, cell: Cell, source: Ready, target: Path) -> Ready:
        if ready := weights.cached(target):
            return ready
        # Synthetic weights stand in for published files; a user's own are quantized as llama.cpp does it.
        # Of models that are not dense today's rules give the published sizes.
        dense = cell.model.shape is not None and cell.source is not None and cell.source.kind == "synthetic"
        options = {"quant": cell.quant, "threads": self.threads, "as_published": dense}
        assert source.header is not None  # it is a GGUF
        expected = weights.quantized_bytes(source.header, str(cell.quant))
        return self._make(cell, "quantize", options, source.path, target, expected)

    def _make(
        self,
        cell: Cell,
        job: str,
        options: dict[str, Any],
        source: Path | None,
        target: Path,
        expected_bytes: float,
        more: Mapping[str, str] | None = None,
        shape: Shape | None = None,
        layout: Layout | None = None,
    ) -> Ready:
        """Run a job that writes a large file or folder, if it is not there. `more`: files besides source and
        target; `shape`: null for that of the cell's model; `layout`: of one that is not dense."""
        with written(target, expected_bytes, f"{target.name} of {cell.model.name}") as partial:
            if partial is not None:
                files = {"target": str(partial)} | ({"source": str(source)} if source else {})
                files |= dict(more or {})
                request = self.request(cell, job, source, shape, layout, options=options, files=files)
                self.run(cell, request, f"{cell.model.name} {target.stem}")
        return weights.local(target)

    def request(
        self,
        cell: Cell,
        job: str,
        path: Path | None,
        shape: Shape | None = None,
        layout: Layout | None = None,
        **fields: Any,
    ) -> Request:
        """A job for the cell's stack and model. `path`: the weights that it loads or reads; `shape`: null for
        that of the model; `layout`: of one that is not dense, for jobs that make its files."""
        shape = shape or cell.model.shape
        described = asdict(shape) if shape else None
        model = {"name": cell.model.name, "path": str(path) if path else None, "shape": described}
        model |= {"layout": layout.plain()} if layout else {}
        return Request(job, cell.variant.stack, self.device_id, model, **fields)

    def run(self, cell: Cell, request: Request, what: str = "") -> dict[str, Any]:
        """Run one job in the cell's stack and return the facts of Done. With `what`, reports its phases.

        Raises WeightsError.
        """
        interpreter = self.interpreter(cell.header)

        def on_phase(phase: str) -> None:
            if what:
                self.say(f"{request.job} {what}: {phase}")

        with tempfile.TemporaryDirectory(prefix="harness-job-") as folder:
            events = launch.run_job(request, interpreter, Path(folder), JOB_TIMEOUT_S, self.threads)
            try:
                return launch.facts_of(events, on_phase)
            except launch.JobFailed as failure:
                raise WeightsError(f"{request.job} {what or cell.model.name}: {failure}") from failure


def synthetic_name(cell: Cell) -> str:
    """The name of the synthetic checkpoint of a cell's model, unique to it. Raises WeightsError."""
    return synthetic.synthetic_name(_described(cell), _seed(cell))


def _seed(cell: Cell) -> int:
    return cell.source.seed if cell.source else 0


def _described(cell: Cell) -> Shape | Described:
    model = cell.model.described or cell.model.shape
    if model is None:
        raise WeightsError(f"model {cell.model.name} has no shape to synthesize")
    if isinstance(model, Described):
        synthetic.check_synthetic(model, cell.weights_format)
    return model


def _gguf_layout(given: Ready) -> Layout:
    """Of a checkpoint. Raises WeightsUnavailable."""
    return synthetic.gguf_layout_of(json_file.object_of(given.path / CONFIG, json_file.CONFIG_JSON_BYTES))

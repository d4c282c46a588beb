"""Make weights with jobs of the cell's stack: synthesize, convert, quantize. Each result is cached."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.base import bounds, files
from harness.campaign import worker
from harness.campaign.worker import Facts
from harness.config.plan import Cell
from harness.models import check, engine_files, locate, make
from harness.models.config_json import CONFIG
from harness.models.engine_files import EngineFiles
from harness.models.layout import Layout
from harness.models.locate import NotDequantized, Ready, WeightsError, WeightsUnavailable
from harness.models.make import written
from harness.stacks.adopted import Interpreter
from harness.stacks.header import Header, Options, stacks
from harness.theory.decoder import Decoder, parameters
from harness.theory.ggml_types import element_bytes
from harness.theory.known_models import Described
from harness.theory.packed_sizes import Packing, packed_bytes
from harness.theory.tensors import of_shape
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
        target = make.checkpoint_folder(make.synthetic_name(model, seed))
        if ready := locate.cached(target):
            return ready
        expected = parameters(model.decoder) * make.CHECKPOINT_ELEMENT_BYTES
        options = {"seed": seed, "threads": self.threads}
        laid = make.layout_of(make.config_of(model))
        return self._make(cell, "synthesize", options, None, target, expected, laid)

    def gguf(self, cell: Cell, given: Ready | None) -> Ready:
        """The GGUF that a cell loads, made from given weights or from its synthetic checkpoint.

        Raises WeightsError, CacheError.
        """
        if given is None:
            quant = cell.quant or make.SOURCE_QUANT
            return self._converted(cell, synthetic_name(cell), self.checkpoint, quant)
        if given.format == "hf":
            check.check_convertible(given)
            quant = cell.quant or make.SOURCE_QUANT
            made = self._converted(cell, given.fingerprint, lambda cell: given, quant)
            return replace(made, tokenizer=given.tokenizer, revision=given.revision)
        check.check_types(given, cell.header)
        if cell.quant in (None, given.quant):
            return given
        check.check_quantizable(given, str(cell.quant))
        target = make.quantized_path(given.fingerprint, str(cell.quant), self.quantizer(cell))
        return self._quantized(cell, given, target)

    def engine_files(self, cell: Cell, given: Ready) -> EngineFiles:
        """The files of the cell's engine, made of a checkpoint. Raises WeightsError, CacheError."""
        options = cell.options(self.threads)
        is_made = cell.source is not None and cell.source.kind == "synthetic"
        name = synthetic_name(cell) if is_made else given.fingerprint
        target = engine_files.folder_of(name, cell.header, options, self.quantizer(cell))
        what = f"{cell.model.name} for {cell.variant.stack}"
        with written(target, given.sizes["model_bytes"], what, engine_files.found) as partial:
            if partial is not None:
                files = {"source": str(given.path), "target": str(partial)}
                request = self.request(cell, "convert", given.path, options=options, files=files)
                self.run(cell, request, what)
                engine_files.seal(partial)
        found = engine_files.found(target)
        assert found is not None  # it is whole
        return found

    def packed(self, cell: Cell, requested: Packing, given: Ready | None = None) -> Ready:
        """A checkpoint packed by rounding to nearest: the given one, or the synthetic one of the model.

        Raises WeightsError, CacheError.
        """
        made, packing, target = self.packed_target(cell, requested, given)
        if ready := locate.cached(target):
            return ready
        source = given or self.checkpoint(cell)
        options = {"format": packing.method, "bits": packing.bits, "group_size": packing.group_size}
        expected = sum(packed_bytes(of_shape(made), packing).values())
        return self._make(cell, "pack", options | {"threads": self.threads}, source.path, target, expected)

    def packed_target(
        self, cell: Cell, requested: Packing, given: Ready | None
    ) -> tuple[Decoder, Packing, Path]:
        """The model's layers, the packing with its group size, and the folder that `packed` writes. Raises
        WeightsError."""
        if given is None:
            _described(cell)  # refuses models that are not dense
        made = given.decoder if given and given.attention else cell.model.made
        if made is None or not made.is_dense:
            kind = given.architecture if given else "without a shape"
            raise WeightsError(f"model {cell.model.name} is {kind}, which cannot be packed")
        packing = make.grouped_layers(requested, made)
        name = given.fingerprint if given else synthetic_name(cell)
        return made, packing, make.packed_path(name, packing)

    def unpacked(self, cell: Cell, ready: Ready) -> Ready:
        """A packed checkpoint unpacked to 16 bits: the reference for the kernels of its stacks.

        Raises WeightsError, CacheError.
        """
        target = make.unpacked_path(ready.fingerprint)
        made = locate.cached(target)
        if made is None:
            expected = ready.sizes["parameters"] * make.CHECKPOINT_ELEMENT_BYTES
            options = {"threads": self.threads}
            made = self._make(cell, "unpack", options, ready.path, target, expected)
        return replace(made, tokenizer=ready.tokenizer, revision=ready.revision)

    def dequantized(self, cell: Cell, given: Ready, original: Ready | None) -> Ready:
        """`given`, which the cell's stack holds quantized, dequantized to 16 bits; for the caller to remove.

        A checkpoint; a GGUF of one that cannot be written as a checkpoint. `original`: the 16-bit weights,
        whose config.json or header describes the model. Raises WeightsError, CacheError.
        """
        try:
            return self._checkpoint_of(cell, given, original)
        except NotDequantized as failure:
            if given.format != "gguf":
                raise
            self.say(f"dequantized to a GGUF, not to a checkpoint: {failure}")
        options: Options = {"quant": make.SOURCE_QUANT, "threads": self.threads, "requantize": True}
        target = make.dequantized_path(given.fingerprint, options).with_suffix(".gguf")
        expected = given.sizes["parameters"] * make.CHECKPOINT_ELEMENT_BYTES
        return self._make(cell, "quantize", options, given.path, target, expected)

    def _checkpoint_of(self, cell: Cell, given: Ready, original: Ready | None) -> Ready:
        """`given` dequantized to a checkpoint. Raises WeightsError, CacheError."""
        options = cell.options(self.threads)
        laid: Layout | None = None
        if given.format == "gguf":
            try:
                laid = _gguf_layout(original or given)
            except WeightsUnavailable as why:
                raise NotDequantized(str(why)) from why
        target = make.dequantized_path(given.fingerprint, {"stack": cell.variant.stack, **options})
        expected = given.sizes["parameters"] * make.CHECKPOINT_ELEMENT_BYTES
        return self._make(cell, "dequantize", options, given.path, target, expected, laid)

    def differences(self, cell: Cell, folder: Path, original: Path) -> Facts:
        """Two checkpoints, tensor by tensor: see runners/weights/layout.py. Raises WeightsError."""
        files = {"source": str(folder), "original": str(original)}
        return self.run(cell, self.request(cell, "differences", None, files=files))

    def vocabulary_ids(self, cell: Cell, path: Path, text: str) -> Facts:
        """The ids of a text by a GGUF's own vocabulary, in the stack that loads the file: no other is built
        for it. Raises WeightsError."""
        request = self.request(cell, "tokenize", path, workloads=[{"text": text}])
        loads = cell.header if cell.header.formats else cell.header.worker
        return self.run(cell, replace(request, stack=loads.stack))

    def quantizer(self, cell: Cell) -> str:
        """Identifies the program that quantizes a cell's weights: the exact package versions of its stack."""
        return " ".join(self.interpreter(cell.header.worker).lock)

    def _converted(self, cell: Cell, name: str, source: Callable[[Cell], Ready], quant: str) -> Ready:
        """The GGUF of a checkpoint. Calls `source` only if the checkpoint has to be read."""
        target = make.converted_path(name, quant, self.quantizer(cell))
        if ready := locate.cached(target):
            return ready
        if quant not in make.FULL_TYPES:
            return self._quantized(cell, self._converted(cell, name, source, make.SOURCE_QUANT), target)
        given = source(cell)
        expected = given.sizes["parameters"] * element_bytes(quant)
        laid = _gguf_layout(given)
        return self._make(cell, "convert", {"dtype": quant}, given.path, target, expected, laid)

    def _quantized(self, cell: Cell, source: Ready, target: Path) -> Ready:
        if ready := locate.cached(target):
            return ready
        # Synthetic weights stand in for published files; a user's own are quantized as llama.cpp does it.
        # Of models that are not dense today's rules give the published sizes.
        is_dense = cell.model.made is not None and cell.model.made.is_dense
        as_published = is_dense and cell.source is not None and cell.source.kind == "synthetic"
        options = {"quant": cell.quant, "threads": self.threads, "as_published": as_published}
        assert source.header is not None  # it is a GGUF
        expected = make.quantized_bytes(source.header, str(cell.quant))
        return self._make(cell, "quantize", options, source.path, target, expected)

    def _make(
        self,
        cell: Cell,
        job: str,
        options: Mapping[str, Any],
        source: Path | None,
        target: Path,
        expected_bytes: float,
        layout: Layout | None = None,
    ) -> Ready:
        """Run a job that writes a large file or folder, if it is not there. `layout`: for a job that makes
        tensors of others, or of nothing."""
        with written(target, expected_bytes, f"{target.name} of {cell.model.name}") as partial:
            if partial is not None:
                files = {"target": str(partial)} | ({"source": str(source)} if source else {})
                request = self.request(cell, job, source, layout, options=dict(options), files=files)
                self.run(cell, request, f"{cell.model.name} {target.stem}")
        return locate.local(target)

    def request(
        self,
        cell: Cell,
        job: str,
        path: Path | None,
        layout: Layout | None = None,
        **fields: Any,
    ) -> Request:
        """A job for the cell's stack and model. `path`: the weights that it loads or reads; `layout`: for
        jobs that make its files."""
        model: dict[str, Any] = {"name": cell.model.name, "path": str(path) if path else None}
        model |= {"layout": layout.plain()} if layout else {}
        return Request(job, cell.header.worker.stack, self.device_id, model, **fields)

    def run(self, cell: Cell, request: Request, what: str = "") -> Facts:
        """Run one job in the request's stack and return the facts of Done. With `what`, reports its phases.

        Raises WeightsError.
        """
        interpreter = self.interpreter(stacks()[request.stack])

        def on_phase(phase: str) -> None:
            if what:
                self.say(f"{request.job} {what}: {phase}")

        with tempfile.TemporaryDirectory(prefix="harness-job-") as folder:
            events = worker.run_job(request, interpreter, Path(folder), JOB_TIMEOUT_S, self.threads)
            try:
                return worker.facts_of(events, on_phase)
            except worker.JobFailed as failure:
                refused = request.job == "dequantize" and failure.outcome == "refused"
                error = NotDequantized if refused else WeightsError
                raise error(f"{request.job} {what or cell.model.name}: {failure}") from failure


def synthetic_name(cell: Cell) -> str:
    """The name of the synthetic checkpoint of a cell's model, unique to it. Raises WeightsError."""
    return make.synthetic_name(_described(cell), _seed(cell))


def _seed(cell: Cell) -> int:
    return cell.source.seed if cell.source else 0


def _described(cell: Cell) -> Described:
    model = cell.model.described
    if model is None:
        raise WeightsError(f"model {cell.model.name} has no shape to synthesize")
    check.check_synthetic(model, cell.weights_format, cell.header)
    return model


def _gguf_layout(given: Ready) -> Layout:
    """The tensors of a checkpoint in a GGUF, or of a dense model's GGUF in a checkpoint. Raises
    WeightsUnavailable."""
    if given.header is None:
        return make.layout_of(files.object_of(given.path / CONFIG, bounds.CONFIG_JSON_BYTES), "gguf")
    if given.decoder is None or not given.decoder.is_dense:
        raise WeightsUnavailable(f"{given.path}: is {given.architecture}, which is not dequantized here")
    scaling = given.header.metadata.get(f"{given.architecture}.rope.scaling.type")
    if "rope_freqs.weight" in given.header.tensors or scaling not in (None, "none"):
        raise WeightsUnavailable(f"{given.path}: has rope scaling, which needs the model's config.json")
    return make.layout_of(make.config_of(Described(given.decoder)), "gguf")

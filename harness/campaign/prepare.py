"""Before a cell is measured: its weights and prompt on disk, and its content key."""

from __future__ import annotations

import hashlib
import json
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import machine
from harness.base import bounds, files
from harness.base.files import cache_folder, delete_oldest, drop, made
from harness.campaign import worker
from harness.campaign.forecast import Device, Forecast, expected, forecast_cell, local_weights
from harness.campaign.prompts import Prompts
from harness.campaign.repeat import Inputs, NotReady
from harness.campaign.worker import Facts
from harness.campaign.worker_memory import mechanism_here
from harness.config import Experiment, MaxCtx, Weights, Windows, plan
from harness.config.plan import Cell
from harness.models import check, engine_files, locate, make, served
from harness.models.config_json import CONFIG
from harness.models.engine_files import EngineFiles
from harness.models.fingerprints import TOKENIZER
from harness.models.hub import from_hub
from harness.models.layout import Layout
from harness.models.locate import NotDequantized, Ready, WeightsError, WeightsRefused, WeightsUnavailable
from harness.models.make import written
from harness.stacks import build
from harness.stacks.adopted import EnvironmentFailed, Interpreter
from harness.stacks.header import Header, Options, stacks
from harness.theory.decoder import Decoder, parameters
from harness.theory.ggml_types import element_bytes
from harness.theory.known_models import Described
from harness.theory.packed_sizes import Packing, packed_bytes
from harness.theory.tensors import of_shape
from runners.answers import api_key
from runners.protocol import Request

# Filled contexts in the cache folder, which spare further repeats the filling; the oldest make room.


MOST_BYTES = 6 << 30  # of the others; a worker keeps none above 2 GiB
# Options that keys and values do not depend on.
WITHOUT_EFFECT = ("n_ctx", "threads", "mmap")


def context_file_of(cell: Cell, inputs: Inputs) -> Path | None:
    """The file for a cell's filled context, which need not exist yet; null where none is kept. The worker
    adds a checksum to its name.

    Deletes the oldest others until they take at most MOST_BYTES.
    """
    if not isinstance(cell.workload, Windows) or not cell.workload.keep_context:
        return None
    made(folder := cache_folder() / "contexts")
    options = {name: value for name, value in inputs.options.items() if name not in WITHOUT_EFFECT}
    fingerprint = inputs.weights.fingerprint if inputs.weights else None
    known = [cell.variant.stack, list(inputs.interpreter.lock), fingerprint, options, inputs.prompt]
    deepest = max(cell.workload.depths)
    digest = hashlib.sha256(json.dumps([*known, deepest], sort_keys=True).encode()).hexdigest()[:20]
    wanted = folder / f"{digest}.context"
    others = [path for path in folder.iterdir() if not path.name.startswith(f"{digest}.")]
    delete_oldest(others, MOST_BYTES)
    return wanted


# Make weights with jobs of the cell's stack: synthesize, convert, quantize. Each result is cached.


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


# Prepare the interpreter, weights and prompt of a cell before it is timed. Makes missing weights.


@contextmanager
def _not_ready() -> Iterator[None]:
    """Turn a WeightsError into NotReady."""
    try:
        yield
    except WeightsError as failure:
        outcome = "refused" if isinstance(failure, WeightsRefused) else "error"
        outcome = "unavailable" if isinstance(failure, WeightsUnavailable) else outcome
        raise NotReady(outcome, str(failure)) from failure


class Preparation:
    """Prepares each thing once per campaign: caches what is ready, and what failed."""

    def __init__(
        self, device: str, gpu: str | None, threads: int | None, say: Say, packages: Sequence[str] = ()
    ) -> None:
        """`threads`: null for one per physical core. `packages`: requirements in place of the pinned ones."""
        self.device, self.say, self._packages = device, say, packages
        self.threads = threads or machine.default_threads()
        self._no_device: str | None = None
        try:
            self.device_id = machine.device_id(device, gpu)
        except machine.DeviceError as absent:
            self.device_id, self._no_device = device, str(absent)
        self._producer = Producer(self.device_id, self.threads, say, self.interpreter)
        self.prompts = Prompts(self._producer.vocabulary_ids)
        self._interpreters: dict[str, Interpreter | NotReady] = {}
        self._from_hub: dict[Weights, Ready | WeightsError] = {}
        self._servers: dict[tuple[str, str | None], str] = {}
        self._forecasts: dict[str, Forecast] = {}

    def interpreter(self, header: Header) -> Interpreter:
        """The stack's interpreter for the requested device, built if missing. Raises NotReady."""
        if header.stack not in self._interpreters:
            self._interpreters[header.stack] = self._interpreter(header)
        found = self._interpreters[header.stack]
        if isinstance(found, NotReady):
            raise found
        return found

    def _interpreter(self, header: Header) -> Interpreter | NotReady:
        if self._no_device is not None:
            return NotReady("unavailable", self._no_device)
        family = self.device.partition(":")[0]
        environment = header.environment_for(family)
        if environment is None:
            return NotReady("unavailable", f"stack {header.stack} has no environment for device {family}")
        environment = environment.with_packages(self._packages)
        try:
            return build.find(environment) or build.create(environment, self.say)
        except EnvironmentFailed as failure:
            return NotReady("unavailable", str(failure))

    def know_forecasts(self, forecasts: Iterable[Forecast]) -> None:
        """Use these where they are of the same cell and device."""
        self._forecasts |= {each.cell.id: each for each in forecasts}

    def forecast(self, cell: Cell, device: Device) -> Forecast:
        """The forecast before anything is built or downloaded for a cell."""
        found = self._forecasts.get(cell.id)
        if found is None or (found.cell, found.device) != (cell, device):
            found = self._forecasts[cell.id] = expected(cell, device, self.threads)
        return found

    def fingerprint(self, cell: Cell) -> str | None:
        """Identifies the cell's weights before they are made or converted, and the further files; null if
        they are unavailable."""
        try:
            further = [locate.local(path).fingerprint for path in cell.further_files]
            return "-".join([self._weights_fingerprint(cell), *further])
        except WeightsError:
            return None

    def _weights_fingerprint(self, cell: Cell) -> str:
        """Raises WeightsError."""
        if cell.weights_format == "served":
            return self._server(cell.options(self.threads))
        if not cell.header.formats:
            return cell.weights_format
        given = self._given(cell)
        name = given.fingerprint if given else synthetic_name(cell)
        if cell.packing and not (given and given.packing):
            _, packing, path = self._producer.packed_target(cell, cell.packing, given)
            return f"{name}-{path.parent.name}-{packing.words}"
        if given is not None:
            return f"{name}-{cell.quant}"
        if cell.weights_format == "hf":
            return name
        quant = cell.quant or make.SOURCE_QUANT
        path = make.converted_path(name, quant, self._producer.quantizer(cell))
        return f"{name}-{path.parent.name}-{quant}"

    def _server(self, options: Options) -> str:
        """Identifies a server and its model; one that does not identify itself counts as another in each
        campaign. Raises WeightsUnavailable."""
        url, model = str(options["url"]), str(options["model"]) if options["model"] else None
        if (url, model) not in self._servers:
            try:
                found = served.identity(url, model, api_key(str(options["key"])))
            except ValueError as why:  # the repeats have the reason
                raise WeightsUnavailable(str(why)) from why
            if found is None:
                self.say(
                    f"{url}: reports nothing that identifies its model, such as a digest or a file: it is"
                    " measured again in each run"
                )
            self._servers[url, model] = found or f"unidentified-{uuid.uuid4().hex}"
        return self._servers[url, model]

    def weights(self, cell: Cell) -> Ready | None:
        """The weights of a cell, made or downloaded if missing; null if its stack loads none. Of a server:
        its GGUF, if the config names one here. Further files that options name must be there.

        Weights without a tokenizer get that of the model's checkpoint: all stacks need the same ids. Raises
        NotReady.
        """
        if not cell.header.formats:
            with _not_ready():
                return local_weights(cell)
        with _not_ready():
            ready = self._loaded(cell, self._given(cell))
            for path in cell.further_files:
                locate.local(path)
        return ready if ready.tokenizer else replace(ready, tokenizer=_tokenizer_of(cell))

    def _loaded(self, cell: Cell, given: Ready | None) -> Ready:
        """Raises WeightsError."""
        if cell.weights_format == "gguf":
            return self._producer.gguf(cell, given)
        if cell.packing and not (given and given.packing):
            return self._producer.packed(cell, cell.packing, given)
        return given or self._producer.checkpoint(cell)

    def engine_files(self, cell: Cell, ready: Ready | None) -> EngineFiles | None:
        """The files of the cell's engine, made of its checkpoint; null if it loads that. Raises NotReady."""
        if cell.header.made is None or ready is None:
            return None
        with _not_ready():
            return self._producer.engine_files(cell, ready)

    def checkpoint(self, cell: Cell) -> Ready:
        """The synthetic checkpoint of a cell's model, for any stack. Raises NotReady."""
        with _not_ready():
            return self._producer.checkpoint(cell)

    def packed(self, cell: Cell, packing: Packing) -> Ready:
        """The synthetic checkpoint, packed (GPTQ or AWQ), for any stack. Raises NotReady."""
        with _not_ready():
            return self._producer.packed(cell, packing)

    def unpacked(self, cell: Cell) -> Ready:
        """The weights of a GPTQ or AWQ cell, unpacked to 16 bits. Raises NotReady."""
        ready = self.weights(cell)
        assert ready is not None  # these stacks load weights
        with _not_ready():
            return self._producer.unpacked(cell, ready)

    @contextmanager
    def dequantized(self, cell: Cell, given: Ready, original: Ready | None) -> Iterator[Ready]:
        """The weights of a quantized cell in 16 bits, removed after the block. `original`: the 16-bit weights
        that they were made of; null: not known. Raises NotReady."""
        with _not_ready():
            made = self._producer.dequantized(cell, given, original)
        try:
            yield made
        finally:
            drop(made.path)

    def differences(self, cell: Cell, folder: Path, original: Ready) -> Facts:
        """A checkpoint's tensors against those of the 16-bit weights. Raises NotReady."""
        with ExitStack() as stack:
            if original.format == "gguf":
                original = stack.enter_context(self.dequantized(cell, original, None))
            with _not_ready():
                return self._producer.differences(cell, folder, original.path)

    def _given(self, cell: Cell) -> Ready | None:
        """Weights from a local path or the hub, in a format the stack loads; null for synthetic weights.

        Raises WeightsError.
        """
        source, stack = cell.source, cell.variant.stack
        if source is None or source.kind == "served":
            raise locate.not_named(cell.model.name, cell.weights_format)
        if source.kind == "synthetic":
            return None
        if source.kind == "path":
            given = locate.local(Path(str(source.path)))
        elif source.file is not None and cell.weights_format != "gguf":  # known before the download
            name = f"{source.repo}/{source.file}"
            raise WeightsError(f"stack {stack} needs a Hugging Face checkpoint, but {name} is a GGUF")
        else:
            given = self._of_hub(cell, source)
        if cell.weights_format != "gguf":
            check.check_loadable(given, cell.packing, cell.header, cell.options(self.threads))
        if cell.model.made is not None:
            check.check_shape(given, cell.model.made)
        return given

    def _of_hub(self, cell: Cell, source: Weights) -> Ready:
        """Download once per campaign; a failure is not retried. Raises WeightsError."""
        if cell.variant.options.get("trust_remote_code"):
            raise WeightsError("trust_remote_code needs a local folder: Python files are not downloaded")
        if source not in self._from_hub:
            try:
                self._from_hub[source] = from_hub(source)
            except WeightsError as failure:
                self._from_hub[source] = failure
        found = self._from_hub[source]
        if isinstance(found, WeightsError):
            raise found
        return found


def _tokenizer_of(cell: Cell) -> Path | None:
    """The tokenizer of the local checkpoint that the config names besides the cell's own weights; null:
    none."""
    checkpoint = cell.model.of_format.get("hf")
    path = checkpoint and checkpoint.path and Path(checkpoint.path) / TOKENIZER
    return path if path and path.is_file() else None


# Collect the inputs of a cell, or the reason why it cannot run, and compute its content key.


def inputs_or_refusal(
    cell: Cell, experiment: Experiment, preparation: Preparation, device: Device
) -> Inputs | NotReady:
    """Everything the cell needs to run, or the reason why it cannot or must not run."""
    protocol = experiment.protocol
    try:
        if reason := cell.impossible(preparation.threads):
            raise NotReady("unavailable", reason)
        found = preparation.forecast(cell, device)
        if found.refusal:
            raise NotReady("refused", found.refusal)
        interpreter = preparation.interpreter(cell.header)
        ready = preparation.weights(cell)
        if found.weights != ready:  # they are made or downloaded now
            found = forecast_cell(cell, ready, device, preparation.threads)
            if found.refusal:
                raise NotReady("refused", found.refusal)
        if ready and ready.tokenizer is None and (why := cell.header.cannot.get("ids")):
            raise NotReady("unavailable", f"{ready.path}: has no vocabulary, and {why}")
        converted = preparation.engine_files(cell, ready)
        prompt, source = preparation.prompts.ids(cell, ready)
    except NotReady as reason:
        return reason
    options = cell.options(preparation.threads)
    inputs = Inputs(
        interpreter=interpreter,
        device_id=preparation.device_id,
        weights=ready,
        prompt=prompt,
        prompt_source=source,
        options=options,
        threads=int(options.get("threads") or preparation.threads),
        timeout_s=protocol.timeout_s,
        sample_interval_ms=protocol.sample_interval_ms,
        warmup=protocol.warmup.on(preparation.device_id),
        forecast=found,
        engine_files=converted,
    )
    return replace(inputs, context_file=context_file_of(cell, inputs))


def mechanism(cells: Sequence[Cell], preparation: Preparation) -> str | None:
    """How this machine limits a worker's memory; null if it cannot, or if no cell on a CPU has a limit."""
    if preparation.device_id != "cpu" or not any(cell.bounded for cell in cells):
        return None
    try:
        return mechanism_here()
    except OSError:
        return None


def _bounds(cell: Cell, mechanism: str | None, timeout_s: float) -> list[str]:
    """The parts of a content key that concern memory: the mechanism that limits it, and for a search the
    timeout of a probe, because a probe that times out counts as not fitting, and that it ends at the trained
    context."""
    counted = [str(mechanism)] if cell.bounded else []
    if isinstance(cell.workload, MaxCtx):
        counted.append(f"{timeout_s:g} s a probe")
        if not cell.workload.past_trained:
            counted.append("up to the trained context")
    return counted


def content_key(
    cell: Cell,
    preparation: Preparation,
    device: Device,
    slug: str,
    mechanism: str | None,
    timeout_s: float,
) -> str:
    """The content key of a cell's records on the machine with this slug. Free memory is not part of it,
    because it changes all the time."""
    options, device_id = cell.options(preparation.threads), preparation.device_id
    if replace(preparation.forecast(cell, device), over_budget=None).refusal:
        return plan.content_key(cell, options, ("refused",), None, slug, device_id)
    if cell.impossible(preparation.threads):
        return plan.content_key(cell, options, ("unavailable",), None, slug, device_id)
    try:
        interpreter = preparation.interpreter(cell.header)
    except NotReady:
        return plan.content_key(cell, options, ("unavailable",), None, slug, device_id)
    built = [f"{name}={value}" for name, value in interpreter.environment.variables.items()]
    if adopted := interpreter.adopted:
        built.append(f"adopted, Python {adopted.python_version}")
    stack = [interpreter.environment.name, *built, *interpreter.lock]
    stack += _bounds(cell, mechanism, timeout_s)
    made = cell.model.described
    if made and made.decoder.experts and cell.model.weights.kind == "synthetic":
        stack.append("fed fixed ids")  # see runners/workloads/scoring.py
    return plan.content_key(cell, options, stack, preparation.fingerprint(cell), slug, device_id)

"""Prepare the interpreter, weights and prompt of a cell before it is timed. Makes missing weights."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from harness import machine
from harness.base.files import drop
from harness.campaign.forecast import Device, Forecast, expected, local_weights
from harness.campaign.producer import Producer, Say, synthetic_name
from harness.campaign.prompts import Prompts
from harness.campaign.repeat import NotReady
from harness.campaign.worker import Facts
from harness.config import Weights
from harness.config.plan import Cell
from harness.models import check, locate, make, served
from harness.models.engine_files import EngineFiles
from harness.models.fingerprints import TOKENIZER
from harness.models.hub import from_hub
from harness.models.locate import Ready, WeightsError, WeightsRefused, WeightsUnavailable
from harness.stacks import build
from harness.stacks.adopted import EnvironmentFailed, Interpreter
from harness.stacks.header import Header, Options
from harness.theory.packed_sizes import Packing
from runners.answers import api_key


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
        """`threads`: None for one per physical core. `packages`: requirements in place of the pinned ones."""
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
        interpreter = self._interpreters[header.stack]
        if isinstance(interpreter, NotReady):
            raise interpreter
        return interpreter

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
        self._forecasts |= {forecast.cell.id: forecast for forecast in forecasts}

    def forecast(self, cell: Cell, device: Device) -> Forecast:
        """The forecast before anything is built or downloaded for a cell."""
        forecast = self._forecasts.get(cell.id)
        if forecast is None or (forecast.cell, forecast.device) != (cell, device):
            forecast = self._forecasts[cell.id] = expected(cell, device, self.threads)
        return forecast

    def fingerprint(self, cell: Cell) -> str | None:
        """Identifies the cell's weights before they are made or converted, and the further files; None if
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
                identity = served.identity(url, model, api_key(str(options["key"])))
            except ValueError as why:  # the repeats have the reason
                raise WeightsUnavailable(str(why)) from why
            if identity is None:
                self.say(
                    f"{url}: reports nothing that identifies its model, such as a digest or a file: it is"
                    " measured again in each run"
                )
            self._servers[url, model] = identity or f"unidentified-{uuid.uuid4().hex}"
        return self._servers[url, model]

    def weights(self, cell: Cell) -> Ready | None:
        """The weights of a cell, made or downloaded if missing; None if its stack loads none. Of a server:
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
        """The files of the cell's engine, made of its checkpoint; None if it loads that. Raises NotReady."""
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
        that they were made of; None: not known. Raises NotReady."""
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
        """Weights from a local path or the hub, in a format the stack loads; None for synthetic weights.

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
        ready = self._from_hub[source]
        if isinstance(ready, WeightsError):
            raise ready
        return ready


def _tokenizer_of(cell: Cell) -> Path | None:
    """The tokenizer of the local checkpoint that the config names besides the cell's own weights; None:
    none."""
    checkpoint = cell.model.of_format.get("hf")
    path = checkpoint and checkpoint.path and Path(checkpoint.path) / TOKENIZER
    return path if path and path.is_file() else None

"""Have everything a cell needs before its clock starts: interpreter, weights, prompt. Makes what is
missing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness import launch, machine
from harness.cache import exclusive
from harness.config import Model
from harness.envs import build
from harness.envs.build import Interpreter
from harness.envs.header import Header
from harness.models import weights
from harness.models.weights import Ready, WeightsError
from harness.plan import Cell
from harness.results import Record
from harness.theory.shapes import Shape
from runners.protocol import Request

Say = Callable[[str], None]

# Words of no meaning to measure by; repeated until there are tokens enough.
PROMPT_TEXT = (
    "A harness compares what several stacks make of one model on one machine: it sends the same words to "
    "each, waits for every token, and writes down when it came. "
)
TOKENIZED = "the harness's fixed text, by the model's own tokenizer"  # where a prompt is from
FAKE_VOCABULARY = 512  # of a stack that loads no weights
JOB_TIMEOUT_S = 6 * 3600.0
SPARE_DISK_BYTES = 1 << 30


class NotReady(RuntimeError):
    """A cell cannot be measured: `outcome` (error or unavailable) and a reason, one sentence."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class Preparation:
    """Remembers what is ready, and what failed, so that each thing is tried once in a campaign."""

    def __init__(self, device: str, gpu: str | None, threads: int | None, say: Say) -> None:
        """`threads` null: one per physical core."""
        self.device, self.say = device, say
        self.threads = threads or machine.physical_cores()
        self._no_device: str | None = None
        try:
            self.device_id = machine.device_id(device, gpu)
        except machine.DeviceError as absent:
            self.device_id, self._no_device = device, str(absent)
        self._interpreters: dict[str, Interpreter | NotReady] = {}
        self._tokenized: dict[tuple[str, int], list[int]] = {}
        self._prompts: dict[tuple[str, int], tuple[str, list[int]]] = {}

    def interpreter(self, header: Header) -> Interpreter:
        """The stack's interpreter for the device asked for, built if need be. Raises NotReady."""
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
        try:
            return build.find(environment) or build.create(environment, self.say)
        except build.EnvironmentFailed as failure:
            return NotReady("unavailable", str(failure))

    def fingerprint(self, cell: Cell) -> str | None:
        """What tells this cell's weights from any other, before any are synthesized or quantized; null where
        they cannot be had."""
        if cell.header.weights == "none":
            return "none"
        try:
            if cell.model.weights.kind == "synthetic":
                path = self._synthetic_path(cell, cell.quant or weights.SOURCE_QUANT)
                return f"synthetic-{path.parent.name}-{path.stem}"
            return f"{self._given(cell.model, cell.quant).fingerprint}-{cell.quant}"
        except WeightsError:
            return None

    def weights(self, cell: Cell) -> Ready | None:
        """The weights of a cell, synthesized, downloaded or quantized as need be; null if its stack loads
        none.

        Raises NotReady.
        """
        if cell.header.weights == "none":
            return None
        try:
            if cell.model.weights.kind == "synthetic":
                return self._synthetic(cell)
            given = self._given(cell.model, cell.quant)
            if cell.quant in (None, given.header.quant):
                return given
            weights.check_quantizable(given, str(cell.quant))
            target = weights.quantized_path(given, str(cell.quant), self._quantizer(cell))
            expected = weights.quantized_bytes(given.header, str(cell.quant))
            return self._quantized(cell, given.path, target, expected)
        except WeightsError as failure:
            raise NotReady("error", str(failure)) from failure

    def know_prompts(self, records: Iterable[Record]) -> None:
        """Prompts of records kept from before: a source tried now must tokenize as they did."""
        for record in records:
            workload = record["workload"]
            if workload.get("prompt_source") == TOKENIZED:
                known = (str(record["model"]["weights"]["file"]), workload["prompt"])
                self._prompts.setdefault((record["model"]["name"], workload["prompt_tokens"]), known)

    def prompt(self, cell: Cell, ready: Ready | None) -> tuple[list[int], str]:
        """The prompt's ids, the same for every stack and variant of the model, and where they are from.

        Raises NotReady: the tokenizer gives too few, or two sources of the model tokenize differently.
        """
        count = int(cell.workload.prompt_tokens or 0)
        if ready is None or not ready.header.has_vocabulary:
            vocabulary = ready.header.vocab_size if ready else FAKE_VOCABULARY
            if not vocabulary:
                raise NotReady("error", f"{ready and ready.path}: has no input embedding to take ids from")
            return [(1013 + 7919 * i) % vocabulary for i in range(count)], "fixed ids (no tokenizer)"
        ids = self._tokenize(cell, ready, count)
        first_source, first_ids = self._prompts.setdefault((cell.model.name, count), (str(ready.path), ids))
        if ids != first_ids:
            raise NotReady("error", f"{ready.path} and {first_source} tokenize the same text differently")
        return ids, TOKENIZED

    def _tokenize(self, cell: Cell, ready: Ready, count: int) -> list[int]:
        key = (ready.fingerprint, count)
        if key not in self._tokenized:
            text = PROMPT_TEXT * (1 + count // 20)
            try:
                said = self._job(
                    cell, Request("tokenize", *self._who(cell, ready.path), {}, [{"text": text}])
                )
            except WeightsError as failure:
                raise NotReady("error", f"{ready.path}: cannot tokenize: {failure}") from failure
            if len(said["ids"] or []) < count:
                raise NotReady(
                    "error", f"{ready.path}: its tokenizer gives fewer than {count} tokens for the prompt"
                )
            self._tokenized[key] = said["ids"][:count]
        return self._tokenized[key]

    def _who(self, cell: Cell, path: Path | None) -> tuple[str, str, dict[str, Any]]:
        shape = asdict(cell.model.shape) if cell.model.shape else None
        model = {"name": cell.model.name, "path": str(path) if path else None, "shape": shape}
        return cell.variant.stack, self.device_id, model

    def _given(self, model: Model, quant: str | None) -> Ready:
        """Weights the user has or the hub has. Raises WeightsError."""
        name = weights.named_path(model, quant)
        if model.weights.kind == "path":
            return weights.local(Path(name))
        return weights.local(
            weights.from_hub(str(model.weights.repo), name, model.weights.revision or "main")
        )

    def _quantizer(self, cell: Cell) -> str:
        return " ".join(self.interpreter(cell.header).lock)

    def _synthetic_path(self, cell: Cell, quant: str) -> Path:
        return weights.synthetic_path(
            self._shape(cell), cell.model.weights.seed, quant, self._quantizer(cell)
        )

    def _shape(self, cell: Cell) -> Shape:
        if cell.model.shape is None:
            raise WeightsError(f"model {cell.model.name} has no shape to synthesize")
        return cell.model.shape

    def _synthetic(self, cell: Cell) -> Ready:
        quant = cell.quant or weights.SOURCE_QUANT
        target = self._synthetic_path(cell, quant)
        if ready := weights.cached(target):
            return ready
        shape = self._shape(cell)
        source = self._synthetic_path(cell, weights.SOURCE_QUANT)
        if not weights.cached(source):
            who, options = self._who(cell, None), {"seed": cell.model.weights.seed}
            expected = weights.synthetic_bytes(shape, weights.SOURCE_QUANT)
            self._make(cell, Request("synthesize", *who, options), source, expected)
        if quant == weights.SOURCE_QUANT:
            return weights.local(source)
        return self._quantized(cell, source, target, weights.synthetic_bytes(shape, quant))

    def _quantized(self, cell: Cell, source: Path, target: Path, expected_bytes: int) -> Ready:
        if ready := weights.cached(target):
            return ready
        # Synthetic weights stand in for the files people have; a user's own follow llama.cpp as it is.
        synthetic = cell.model.weights.kind == "synthetic"
        options = {"quant": cell.quant, "threads": self.threads, "as_published": synthetic}
        request = Request("quantize", *self._who(cell, source), options, files={"source": str(source)})
        self._make(cell, request, target, expected_bytes)
        return weights.local(target)

    def _make(self, cell: Cell, request: Request, target: Path, expected_bytes: int) -> None:
        """Run a job that writes a large file: disk checked first, written beside, renamed when whole.

        Raises WeightsError, CacheError.
        """
        with exclusive(target.with_suffix(".lock")):
            if weights.cached(target):  # another campaign made it while this one waited
                return
            for leftover in target.parent.glob(f"{target.name}.partial-*"):
                leftover.unlink(missing_ok=True)
            free = shutil.disk_usage(target.parent).free
            needed = expected_bytes + SPARE_DISK_BYTES
            if free < needed:
                raise WeightsError(
                    f"{target.name} of {cell.model.name} needs {needed / 1e9:.1f} GB of disk and "
                    f"{free / 1e9:.1f} GB is free in {target.parent}"
                )
            partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
            request = replace(request, files={**request.files, "target": str(partial)})
            try:
                self._job(cell, request, f"{cell.model.name} {target.stem}")
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)

    def _job(self, cell: Cell, request: Request, what: str = "") -> dict[str, Any]:
        """Run one job in the cell's stack and return what Done says. Raises WeightsError, NotReady."""
        interpreter = self.interpreter(cell.header)

        def told(phase: str) -> None:
            if what:
                self.say(f"{request.job} {what}: {phase}")

        with tempfile.TemporaryDirectory(prefix="harness-job-") as folder:
            events = launch.run_job(request, interpreter, Path(folder), JOB_TIMEOUT_S, self.threads)
            try:
                return launch.facts_of(events, told)
            except launch.JobFailed as failure:
                raise WeightsError(f"{request.job} {what or cell.model.name}: {failure}") from failure

"""Prepare the interpreter, weights and prompt of a cell before it is timed. Makes missing weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import machine
from harness.campaign.prepare.produce import Producer, synthetic_name
from harness.config import Weights
from harness.models import packed, tokenizer, weights
from harness.models.hub_weights import from_hub
from harness.models.tokenizer import Tokenized
from harness.models.weights import Ready, WeightsError, WeightsRefused, WeightsUnavailable
from harness.plan import Cell
from harness.results import Record
from harness.stacks import build
from harness.stacks.header import Header
from harness.stacks.interpreter import EnvironmentFailed, Interpreter
from harness.system.wording import plural
from harness.theory.packed import Packing

Say = Callable[[str], None]

# Filler text for prompts, repeated until there are enough tokens.
PROMPT_TEXT = (
    "A harness compares what several stacks make of one model on one machine: it sends the same words to "
    "each, waits for every token, and writes down when it came. "
)
# The sources of a prompt.
NO_PROMPT = "no prompt"
TOKENIZED = "the harness's fixed text, by the model's own tokenizer"
FIXED = "fixed ids (no tokenizer)"
FAKE_VOCABULARY = 512  # for a stack that loads no weights


class NotReady(RuntimeError):
    """A cell cannot be measured: `outcome` (error, unavailable or refused) and a reason, one sentence."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class NoVocabulary(NotReady):
    """A text has no token ids: llama.cpp does not read the vocabulary of a GGUF."""


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
        self.threads = threads or machine.physical_cores()
        self._no_device: str | None = None
        try:
            self.device_id = machine.device_id(device, gpu)
        except machine.DeviceError as absent:
            self.device_id, self._no_device = device, str(absent)
        self._producer = Producer(self.device_id, self.threads, say, self.interpreter)
        self._interpreters: dict[str, Interpreter | NotReady] = {}
        self._from_hub: dict[Weights, Ready | WeightsError] = {}
        self._tokenized: dict[tuple[Path, int], list[int]] = {}
        self._prompts: dict[tuple[str, int], tuple[str, list[int], str]] = {}

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

    def fingerprint(self, cell: Cell) -> str | None:
        """Identifies the cell's weights before they are made or converted; null if they are unavailable."""
        if cell.weights_format == "none":
            return "none"
        try:
            given = self._given(cell)
            name = given.fingerprint if given else synthetic_name(cell)
            if cell.packing and not (given and given.packing):
                _, packing, path = self._producer.packed_target(cell, cell.packing, given)
                return f"{name}-{path.parent.name}-{packing.words}"
            if given is not None:
                return f"{name}-{cell.quant}"
            if cell.weights_format == "hf":
                return name
            quant = cell.quant or weights.SOURCE_QUANT
            path = weights.converted_path(name, quant, self._producer.quantizer(cell))
            return f"{name}-{path.parent.name}-{quant}"
        except WeightsError:
            return None

    def weights(self, cell: Cell) -> Ready | None:
        """The weights of a cell, made or downloaded if missing; null if its stack loads none.

        Those without a tokenizer get that of the model's checkpoint: all stacks need the same ids. Raises
        NotReady.
        """
        if cell.weights_format == "none":
            return None
        with _not_ready():
            ready = self._loaded(cell, self._given(cell))
        return ready if ready.tokenizer else replace(ready, tokenizer=_tokenizer_of(cell))

    def _loaded(self, cell: Cell, given: Ready | None) -> Ready:
        """Raises WeightsError."""
        if cell.weights_format == "gguf":
            return self._producer.gguf(cell, given)
        if cell.packing and not (given and given.packing):
            return self._producer.packed(cell, cell.packing, given)
        return given or self._producer.checkpoint(cell)

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
            weights.drop(made.path)

    def differences(self, cell: Cell, folder: Path, original: Ready) -> dict[str, Any]:
        """A checkpoint's tensors against those of the 16-bit weights. Raises NotReady."""
        with ExitStack() as stack:
            if original.format == "gguf":
                original = stack.enter_context(self.dequantized(cell, original, None))
            with _not_ready():
                return self._producer.differences(cell, folder, original.path)

    def know_prompts(self, records: Iterable[Record]) -> None:
        """Remember the prompts of kept records: every source of a model must tokenize the same."""
        for record in records:
            workload, file = record["workload"], record["model"]["weights"].get("file")
            if file and (source := workload.get("prompt_source")) in (TOKENIZED, FIXED):
                known = (str(file), workload["prompt"], str(source))
                self._prompts.setdefault((record["model"]["name"], workload["prompt_tokens"]), known)

    def prompt(self, cell: Cell, ready: Ready | None) -> tuple[list[int], str]:
        """The prompt's token ids, the same for every stack and variant of a model, and their source.

        Raises NotReady: the tokenizer returns too few ids, or another source of the model has other ids.
        """
        count = int(cell.workload.prompt_tokens or 0)
        if not count:
            return [], NO_PROMPT
        if ready is None:
            return _fixed_ids(FAKE_VOCABULARY, count), FIXED
        if ready.tokenizer is not None:
            try:
                ids, source = self._tokenize(cell, ready, ready.tokenizer, count), TOKENIZED
            except NoVocabulary:
                return self.prompt(cell, replace(ready, tokenizer=None))
        elif ready.vocab_size:
            ids, source = _fixed_ids(ready.vocab_size, count), FIXED
        else:
            raise NotReady("error", f"{ready.path}: has no input embedding, so its vocabulary is unknown")
        known = self._prompts.setdefault((cell.model.name, count), (str(ready.path), ids, source))
        if ids != known[1]:
            raise NotReady(
                "refused",
                f"{ready.path} and {known[0]} would get different prompts ({source}; {known[2]}): all stacks"
                " of a model need the same token ids; give both one tokenizer, or name them as two models",
            )
        return ids, source

    def _tokenize(self, cell: Cell, ready: Ready, source: Path, count: int) -> list[int]:
        if (source, count) not in self._tokenized:
            ids = self.tokenized(cell, ready, PROMPT_TEXT * (1 + count // 20), count).ids
            if len(ids) < count:
                raise NotReady(
                    "error",
                    f"{source}: its tokenizer returns fewer than {plural(count, 'token')} for the prompt",
                )
            self._tokenized[source, count] = ids
        return self._tokenized[source, count]

    def tokenized(self, cell: Cell, ready: Ready, text: str, count: int) -> Tokenized:
        """The first `count` ids of a text by the weights' own tokenizer, or all if they are fewer.

        Raises NotReady: there is no tokenizer, it fails, or the model has no such ids.
        """
        source = ready.tokenizer
        if source is None:
            raise NotReady("refused", f"{ready.path}: has no tokenizer, so a text has no token ids")
        try:
            if source == ready.path:  # a GGUF: only llama.cpp can read its vocabulary
                job = self._producer.request(cell, "tokenize", source, workloads=[{"text": text}])
                answer = self._producer.run(cell, job)
                if answer["ids"] is None:
                    why = f"{source}: llama.cpp does not read its vocabulary, so a text has no token ids"
                    raise NoVocabulary("refused", why)
                found = Tokenized(list(answer["ids"])[:count], answer["bos"])
            else:
                found = tokenizer.tokenized(source, text, count)
        except WeightsError as failure:
            raise NotReady("error", f"{ready.path}: cannot tokenize: {failure}") from failure
        largest = max([*found.ids, found.bos or 0])
        if ready.vocab_size is not None and largest >= ready.vocab_size:
            reason = f"its tokenizer returns id {largest}, but the model has {ready.vocab_size}"
            raise NotReady("error", f"{source}: {reason}")
        return found

    def _given(self, cell: Cell) -> Ready | None:
        """Weights from a local path or the hub, in a format the stack loads; null for synthetic weights.

        Raises WeightsError.
        """
        source, stack = cell.source, cell.variant.stack
        if source is None:
            raise weights.not_named(cell.model.name, cell.weights_format)
        if source.kind == "synthetic":
            return None
        if source.kind == "path":
            given = weights.local(Path(str(source.path)))
        elif source.file is not None and cell.weights_format != "gguf":  # known before the download
            name = f"{source.repo}/{source.file}"
            raise WeightsError(f"stack {stack} needs a Hugging Face checkpoint, but {name} is a GGUF")
        else:
            given = self._of_hub(cell, source)
        if cell.weights_format != "gguf":
            packed.check_loadable(given, cell.packing, cell.header, cell.options(self.threads))
        if cell.model.made is not None:
            weights.check_shape(given, cell.model.made)
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
    """That of the checkpoint on this machine which the config names beside the cell's own weights; null:
    none."""
    checkpoint = cell.model.of_format.get("hf")
    path = checkpoint and checkpoint.path and Path(checkpoint.path) / weights.TOKENIZER
    return path if path and path.is_file() else None


def _fixed_ids(vocabulary: int, count: int) -> list[int]:
    return [(1013 + 7919 * i) % vocabulary for i in range(count)]

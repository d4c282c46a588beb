"""The reference weights of a model, and their logits.

The reference is the model's 16-bit weights, or a variant's own weights, unpacked, so that only the kernels
differ: of a GPTQ or AWQ checkpoint, and of a quantized variant besides (`own`).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from harness.base.files import CacheError
from harness.campaign import provenance
from harness.campaign.forecast import local_weights
from harness.campaign.prepare import Preparation
from harness.campaign.repeat import Inputs, NotReady
from harness.campaign.scoring import LogitsJob, NoLogits
from harness.campaign.worker import Facts
from harness.campaign.worker_memory import vram_reader
from harness.config import Variant, Weights
from harness.config.experiment import Scalar
from harness.config.plan import Cell
from harness.machine.cgroups import free_memory_bytes
from harness.models.gguf_files import type_in
from harness.models.locate import Ready, WeightsError
from harness.models.make import FULL_TYPES, SOURCE_QUANT
from harness.records import checked
from harness.stacks.adopted import Interpreter
from harness.stacks.header import references
from harness.theory.ggml_types import element_bytes

_T = TypeVar("_T")
Job = Callable[[LogitsJob, str], _T]
"""A job of the reference, and why this precision."""

SAME_LIBRARY = (
    "its dequantized weights have no checkpoint here, so one library computes both: its kernels are compared,"
    " not its code for the architecture"
)
FREE_SHARE = 0.6  # of the free memory: the most that a float32 reference's weights may use


class NoReference(RuntimeError):
    """There is no reference to compare a variant's logits with; the message is the reason, one sentence.

    A reference that exists but fails raises NoLogits.
    """


class Reference:
    """The reference weights of one model, which run jobs of logits.

    Runs in the reference stack of checkpoints if the model has one, in float32 if that fits; else its 16- or
    32-bit GGUF runs in that of GGUFs. `unpacked`: whether it is a packed checkpoint, unpacked, or a variant's
    own weights, dequantized.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        preparation: Preparation,
        inputs: Callable[[Cell], Inputs | NotReady],
        seconds: float | None,
        folder: Path,
        own: Path | None = None,
    ) -> None:
        """`cells`: of one model, with the same packing; `inputs`: the Inputs of a cell, or why it cannot run;
        `seconds`: compute time; `folder`: for arrays, as long as the reference is used; `own`: the cells' own
        weights, dequantized, as the reference."""
        self.seconds, self.folder = seconds, folder
        self.unpacked = own is not None or cells[0].packing is not None
        self._cells, self._preparation, self._inputs, self._own = cells, preparation, inputs, own
        self._why: list[str] = []
        self._failure: NoLogits | None = None

    @cached_property
    def identity(self) -> checked.ReferenceAsked | None:
        """Identifies the reference across campaigns; None if there is none."""
        if self._cell is None:
            return None
        return {
            "stack": self._cell.variant.stack,
            "variant": self._cell.variant.name,
            "lock": digest_of(self._preparation.interpreter(self._cell.header)),
            "weights": self._preparation.fingerprint(self._cell),
        }

    def original(self) -> Ready | None:
        """The model's 16-bit weights; None if there are none. Raises NotReady."""
        return None if self._cell is None or self.unpacked else self._preparation.weights(self._cell)

    def run(self, job: Job[_T]) -> _T:
        """The result of a job of the reference, at the precision that fits.

        Raises NoReference: there is none; NoLogits: it failed (it is not tried again).
        """
        if (cell := self._cell) is None:
            which = "unpacked" if self.unpacked else "16-bit"
            raise NoReference(f"no {which} weights to compare with ({'; '.join(self._why)})")
        if self._failure:
            raise self._failure
        try:
            why = "; ".join(self._why)
            if cell.weights_format == "hf" and "dtype" in cell.header.options:
                ready = self._preparation.weights(cell)
                assert ready is not None  # its stack loads weights
                dtype, why = precision(ready.sizes["parameters"], free_bytes(self._preparation.device_id))
                cell = _in(cell, dtype)
            try:
                return self._run(job, cell, why)
            except NoLogits as failure:
                if failure.outcome != "oom" or cell.variant.options.get("dtype") != "fp32":
                    raise
                return self._run(job, _in(cell, "bf16"), f"in float32 it did not fit: {failure}")
        except (NoLogits, NotReady, CacheError, OSError) as failure:
            outcome = failure.outcome if isinstance(failure, (NoLogits, NotReady)) else "error"
            reason = f"the reference, in {cell.variant.stack}, failed: {failure}"
            self._failure = NoLogits(outcome, reason)
            raise self._failure from failure

    def _run(self, job: Job[_T], cell: Cell, why: str) -> _T:
        say = self._preparation.say
        say(f"loading the reference of {cell.model.name}: {cell.variant.stack} {cell.variant.name}")
        inputs = self._inputs(cell)
        if isinstance(inputs, NotReady):
            raise inputs
        with tempfile.TemporaryDirectory(prefix="harness-check-") as folder:
            return job(LogitsJob(cell, inputs, Path(folder), self.folder, self.seconds, say), why)

    def described(self, job: LogitsJob, why: str, job_facts: Facts) -> checked.Reference:
        """Describe a reference that has run, for a record."""
        cell, inputs = job.cell, job.inputs
        return {
            "name": f"{cell.variant.stack} {cell.variant.name}" + (", unpacked" if self.unpacked else ""),
            "why": why,
            "stack": cell.variant.stack,
            "options": inputs.options,
            "weights": provenance.weights_facts(inputs.weights) if inputs.weights else {},
            "unpacked": self.unpacked,
            "environment": provenance.environment_facts(cell, inputs.interpreter),
            "versions": job_facts.get("versions"),
            "seconds": job_facts.get("seconds"),
        }

    @cached_property
    def _cell(self) -> Cell | None:
        """The first candidate whose weights and interpreter are available; `_why` has what others lack."""
        if self.unpacked:
            return self._unpacked(self._cells[0])
        quantized = None
        for candidate in _candidates(self._cells):
            stack, name = candidate.variant.stack, candidate.variant.name
            try:
                if self._preparation.fingerprint(candidate) is None:
                    self._preparation.weights(candidate)  # raises with the reason
                self._preparation.interpreter(candidate.header)
                if candidate.weights_format == "gguf" or candidate.model.weights.kind != "synthetic":
                    ready = self._preparation.weights(candidate)
                    if ready and ready.quant not in FULL_TYPES:
                        quantized = f"{ready.path} is {ready.quant}"
                        raise NotReady("unavailable", quantized)
            except (NotReady, CacheError, OSError) as failure:
                self._why.append(f"{stack} {name}: {failure}")
                continue
            return candidate
        if quantized:  # the other reasons follow from it
            self._why = [quantized]
        return None

    def _unpacked(self, cell: Cell) -> Cell | None:
        try:
            path = self._own or self._preparation.unpacked(cell).path
        except (NotReady, CacheError, OSError) as failure:
            self._why.append(str(failure))
            return None
        form = "hf" if path.is_dir() else "gguf"
        stack = references().get(form)
        if stack is None:
            self._why.append(f"no stack is the reference of weights in the format {form}")
            return None
        if form == "gguf":
            self._why.append(SAME_LIBRARY)
        weights = Weights(kind="path", path=str(path))
        # Dequantized weights have no tokenizer: they are no source of prompts.
        name = cell.model.name + ", dequantized" * bool(self._own)
        model = cell.model.model_copy(update={"name": name, "weights": weights, "of_format": {}})
        named = "unpacked" if form == "hf" else SOURCE_QUANT
        variant = Variant(stack=stack.stack, name=named, options=stack.reference or {})
        return replace(cell, model=model, variant=variant)


def digest_of(interpreter: Interpreter) -> str:
    return hashlib.sha256(" ".join(interpreter.lock).encode()).hexdigest()[:12]


def precision(parameters: int, free: int | None) -> tuple[str, str]:
    """The reference's dtype, fp32 or bf16, and why. `free`: bytes; None: not known."""
    needed = 4 * parameters
    weights = f"in float32 its weights take {needed / 1e9:.1f} GB"
    if free is None:
        return "bf16", f"{weights}, and how much of the device is free is not known"
    why = f"{weights}, and {free / 1e9:.1f} GB are free"
    return "fp32" if needed <= FREE_SHARE * free else "bf16", why


def _in(cell: Cell, dtype: str) -> Cell:
    options = {**cell.variant.options, "dtype": dtype}
    return replace(cell, variant=Variant(stack=cell.variant.stack, name=dtype, options=options))


def _candidates(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Candidates for a model's 16-bit weights, best first; none for stacks that load no weights."""
    loading = [cell for cell in cells if cell.header.formats]
    trusted = any(cell.variant.options.get("trust_remote_code") for cell in loading)
    tried: list[tuple[str, str, dict[str, Scalar]]] = []
    by_format = references()
    if checkpoints := by_format.get("hf"):
        given = {**(checkpoints.reference or {}), **({"trust_remote_code": True} if trusted else {})}
        tried.append((checkpoints.stack, "checkpoint", given))
    if ggufs := by_format.get("gguf"):
        given = ggufs.reference or {}
        tried.append((ggufs.stack, "as stored", given))
        smallest_first = sorted(FULL_TYPES, key=element_bytes)  # f32 made from 16 bits is no more exact
        tried += [(ggufs.stack, quant, {**given, "quant": quant}) for quant in smallest_first]
    for stack, name, given in tried if loading else []:
        yield replace(loading[0], variant=Variant(stack=stack, name=name, options=given))


def expected(cell: Cell) -> bool | None:
    """Whether the model of a cell will have a reference; None: known once its weights are here."""
    if cell.packing:
        return "hf" in references()
    here: bool | None = False
    for candidate in _candidates([cell]):
        try:
            ready, source = local_weights(candidate), candidate.source
        except WeightsError:
            continue
        if ready and ready.quant in FULL_TYPES:
            return True
        quant = type_in(source.file.replace("*", "-")) if source and source.file else None
        if ready is None and quant in (None, *FULL_TYPES):
            here = None
    return here


def free_bytes(device_id: str) -> int | None:
    """Free memory of the device, without the driver's reserve; None if NVML does not report it."""
    import pynvml

    if device_id == "cpu":
        return free_memory_bytes()
    try:
        with vram_reader(device_id) as memory:
            return int(memory().free)
    except pynvml.NVMLError:
        return None

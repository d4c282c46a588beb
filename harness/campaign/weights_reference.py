"""The reference logits that weights are checked against."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from harness.analysis import agreement, own_weights
from harness.base.files import CacheError
from harness.base.text import duration
from harness.campaign import repeat, worker
from harness.campaign.forecast import local_weights
from harness.campaign.prepare import Preparation
from harness.campaign.repeat import Failure, Inputs, NotReady
from harness.campaign.worker import Facts
from harness.campaign.worker_memory import vram_reader
from harness.config import Variant, Weights
from harness.config.experiment import Scalar
from harness.config.plan import Cell
from harness.machine.host import free_memory_bytes
from harness.models.gguf_files import type_in
from harness.models.locate import Ready, WeightsError
from harness.models.make import FULL_TYPES, SOURCE_QUANT
from harness.records import kinds
from harness.stacks.adopted import Interpreter
from harness.stacks.header import references
from harness.theory.decoder import dense_fields
from harness.theory.tensors import element_bytes
from runners.protocol import SCORED, Died, Done, Event, Failed, Phase

# Run a job that computes logits in a cell's own stack.


Logits = tuple[NDArray[np.float32], list[int]]
"""Logits (positions, vocabulary), and the positions."""


class NoLogits(Failure):
    """A job ended without logits."""


@dataclass(frozen=True)
class LogitsJob:
    """A cell whose logits are computed in its own stack. `folder`: for the log; `arrays`: for the logits;
    `seconds`: compute time; `say`: shows its progress."""

    cell: Cell
    inputs: Inputs
    folder: Path
    arrays: Path
    seconds: float
    say: Callable[[str], None]

    def logits(
        self,
        ids: list[int],
        windows: Sequence[Sequence[int]],
        experts: Path | None = None,
        follow: Path | None = None,
    ) -> tuple[Logits, Facts]:
        """Run a `logits` job. Returns its logits and the facts of Done. `experts`: for the experts that are
        chosen; `follow`: those to choose (see runners/workloads/experts.py). Raises NoLogits."""
        (first, prompt_tokens), *deeper = windows
        file = self.arrays / "logits.npy"
        workload = {
            "ids": ids[: windows[-1][1]],
            "prompt_tokens": prompt_tokens,
            "prompt_keep": prompt_tokens - first,
            "windows": [list(window) for window in deeper],
            "seconds": self.seconds,
        }
        files = {"logits": file, "experts": experts, "follow": follow}
        named = {name: str(path) for name, path in files.items() if path}
        with _readable(file):
            ended = None
            for event in self._events("logits", workload, named):
                ended = event
                if isinstance(event, Phase) and event.name.startswith("logits: "):
                    self.say(f"{self.cell.id} computes {event.name}")
            job_facts = _done(ended)
            if not isinstance(job_facts.get("positions"), list):
                raise NoLogits("error", "worker protocol error: a logits job without positions")
            # Loaded now, because the next job may overwrite the file.
            return (np.load(file), job_facts["positions"]), job_facts

    def windows(
        self, windows: Sequence[Sequence[int]], keep: int, each: Callable[[int, NDArray[np.float32]], None]
    ) -> Facts:
        """Run a `score` job: calls `each` with the number of a window (from 0) and its logits after its last
        `keep` ids, one window at a time. Returns the facts of Done.

        Raises NoLogits, and what `each` raises.
        """
        file, ended, number = self.arrays / "logits.npy", None, 0
        left = TimeLeft([len(ids) for ids in windows])
        workload = {"windows": [list(ids) for ids in windows], "keep": keep}
        with _readable(file):
            for event in self._events("score", workload, {"logits": str(file)}):
                ended = event
                if isinstance(event, Phase) and event.name == SCORED:
                    logits = np.load(file)
                    if logits.ndim != 2 or len(logits) != keep or number == len(windows):
                        raise NoLogits("error", "worker protocol error: other windows than requested")
                    each(number, logits)
                    number += 1
                    self.say(f"scoring {self.cell.id}: {left.after(number)}")
            job_facts = _done(ended)
            if number != len(windows):
                raise NoLogits("error", "worker protocol error: a score job without all of its windows")
            return job_facts

    def _events(self, job: str, workload: Facts, files: dict[str, str]) -> Iterator[Event | Died]:
        inputs = self.inputs
        request = inputs.request(self.cell, job, workload, files)
        return worker.run_job(request, inputs.interpreter, self.folder, inputs.timeout_s, inputs.threads)


class TimeLeft:
    """The progress of windows of these lengths, from now on, in words."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths, self._began_s, self._first_s = lengths, time.monotonic(), 0.0

    def after(self, number: int) -> str:
        """After the first `number` windows. The first one includes loading, and is left out once there are
        others."""
        now_s = time.monotonic()
        if number == 1:
            self._first_s = now_s
        first, since_s = (0, self._began_s) if number == 1 else (1, self._first_s)
        done, left = sum(self._lengths[first:number]), sum(self._lengths[number:])
        left_s = (now_s - since_s) / done * left
        return f"{number} of {len(self._lengths)} windows, about {duration(left_s)} left"


def _done(ended: Event | Died | None) -> Facts:
    """The facts of the Done that ended a job. Raises NoLogits."""
    if isinstance(ended, (Failed, Died)):
        raise NoLogits(ended.outcome, ended.reason)
    if not isinstance(ended, Done):
        raise NoLogits("error", "worker protocol error: a job of logits without its end")
    return ended.facts


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn what goes wrong with the file of logits into NoLogits, and delete it."""
    try:
        yield
    except (OSError, ValueError) as damage:
        raise NoLogits("error", f"the job's logits cannot be read: {damage}") from damage
    except MemoryError as full:
        raise NoLogits("oom", f"the job's logits do not fit the controller's memory: {full}") from full
    finally:
        file.unlink(missing_ok=True)


# The reference weights of a model, and their logits.
#
# The reference is the model's 16-bit weights, or a variant's own weights, unpacked, so that only the kernels
# differ: of a GPTQ or AWQ checkpoint, and of a quantized variant besides (`own`).


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


def windows_of_reference(cell: Cell) -> list[list[int]]:
    return agreement.windows(int(cell.workload.prompt_tokens or 0), cell.tokens)


def lengthened(cell: Cell) -> Cell:
    """The cell with a prompt as long as its workload: the teacher-forced ids, which begin with its prompt."""
    return replace(cell, workload=cell.workload.model_copy(update={"prompt_tokens": cell.tokens}))


class Reference:
    """The 16-bit weights of one model, and their logits, computed on first use.

    Runs in the reference stack of checkpoints if the model has one, in float32 if that fits; else its 16- or
    32-bit GGUF runs in that of GGUFs. `identity`: identifies the reference across campaigns; null if there is
    none. `unpacked`: whether it is a packed checkpoint, unpacked.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        preparation: Preparation,
        inputs: Callable[[Cell], Inputs | NotReady],
        seconds: float,
        folder: Path,
        own: tuple[Path, list[int]] | None = None,
    ) -> None:
        """`cells`: of one model, with the same length and packing; `inputs`: the Inputs of a cell, or why it
        cannot run; `seconds`: compute time; `folder`: for arrays, as long as the reference is used; `own`: a
        checkpoint with the cells' own weights, dequantized, as the reference, and the token ids."""
        self.windows = windows_of_reference(cells[0])
        self.own = own
        self.unpacked = own is not None or cells[0].packing is not None
        self.folder = folder
        self.description: kinds.Reference | None = None
        self.ids: list[int] = []
        self.experts: Facts | None = None
        self._preparation, self._inputs, self._seconds = preparation, inputs, seconds
        self._why: list[str] = []
        self._failure: NoLogits | None = None
        self._logits: Logits | None = None
        self._cell = self._found(cells)

    @cached_property
    def identity(self) -> kinds.ReferenceAsked | None:
        if self._cell is None:
            return None
        interpreter = self._preparation.interpreter(self._cell.header)
        return {
            "stack": self._cell.variant.stack,
            "variant": self._cell.variant.name,
            "lock": digest_of(interpreter),
            "weights": self._preparation.fingerprint(self._cell),
        }

    def original(self) -> Ready | None:
        """The model's 16-bit weights; null if there are none. Raises NotReady."""
        if self._cell is None or self.unpacked:
            return None
        return self._preparation.weights(self._cell)

    def logits(self, follow: Path | None = None) -> Logits:
        """`follow`: experts for its routers to choose; `experts` then says how far that is from their own.

        Raises NoReference: there is none; NoLogits: it failed (it is not tried again).
        """
        if follow:
            return self.run(partial(self._computed, follow=follow))
        if self._logits is None:
            self._logits = self.run(self._computed)
        return self._logits

    def run(self, job: Job[_T]) -> _T:
        """The result of a job of the reference, at the precision that fits.

        Raises NoReference: there is none; NoLogits: it failed (it is not tried again).
        """
        if self._cell is None:
            which = "unpacked" if self.unpacked else "16-bit"
            raise NoReference(f"no {which} weights to compare with ({'; '.join(self._why)})")
        if self._failure:
            raise self._failure
        try:
            cell, why = self._sized(self._cell)
            try:
                return self._run(job, cell, why)
            except NoLogits as failure:
                if failure.outcome != "oom" or cell.variant.options.get("dtype") != "fp32":
                    raise
                return self._run(job, _in(cell, "bf16"), f"in float32 it did not fit: {failure}")
        except (NoLogits, NotReady, CacheError, OSError) as failure:
            outcome = failure.outcome if isinstance(failure, (NoLogits, NotReady)) else "error"
            reason = f"the reference, in {self._cell.variant.stack}, failed: {failure}"
            self._failure = NoLogits(outcome, reason)
            raise self._failure from failure

    def _run(self, job: Job[_T], cell: Cell, why: str) -> _T:
        self._preparation.say(
            f"loading the reference of {cell.model.name}: {cell.variant.stack} {cell.variant.name}"
        )
        inputs = self._inputs(cell)
        if isinstance(inputs, NotReady):
            raise inputs
        with tempfile.TemporaryDirectory(prefix="harness-check-") as folder:
            say = self._preparation.say
            return job(LogitsJob(cell, inputs, Path(folder), self.folder, self._seconds, say), why)

    def _computed(self, job: LogitsJob, why: str, follow: Path | None = None) -> Logits:
        """Raises NoLogits, NotReady."""
        prompted = lengthened(job.cell)
        self.ids = self.own[1] if self.own else self._preparation.prompts.ids(prompted, job.inputs.weights)[0]
        experts = self.folder / "reference-experts.npy" if follow else None
        found, job_facts = job.logits(self.ids, self.windows, experts, follow)
        self.experts = job_facts.get("experts")
        self.description = self.described(job, why, job_facts)
        return found

    def described(self, job: LogitsJob, why: str, job_facts: Facts) -> kinds.Reference:
        """Describe a reference that has run, for a record."""
        cell, inputs = job.cell, job.inputs
        return {
            "name": f"{cell.variant.stack} {cell.variant.name}" + (", unpacked" if self.unpacked else ""),
            "why": why,
            "stack": cell.variant.stack,
            "options": inputs.options,
            "weights": repeat.weights_facts(inputs.weights) if inputs.weights else {},
            "unpacked": self.unpacked,
            "environment": repeat.environment_facts(cell, inputs.interpreter),
            "versions": job_facts.get("versions"),
            "seconds": job_facts.get("seconds"),
        }

    def _found(self, cells: Sequence[Cell]) -> Cell | None:
        """The first candidate whose weights and interpreter are available."""
        if self.unpacked:
            return self._unpacked(cells[0])
        quantized = None
        for candidate in _candidates(cells):
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
            path = self.own[0] if self.own else self._preparation.unpacked(cell).path
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
        # Dequantized weights have no tokenizer, so they get the ids of `own`, and are no source of prompts.
        name = cell.model.name + ", dequantized" * bool(self.own)
        model = cell.model.model_copy(update={"name": name, "weights": weights, "of_format": {}})
        named = "unpacked" if form == "hf" else SOURCE_QUANT
        variant = Variant(stack=stack.stack, name=named, options=stack.reference or {})
        return replace(cell, model=model, variant=variant)

    def _sized(self, cell: Cell) -> tuple[Cell, str]:
        """The candidate at the precision that fits in memory, and why."""
        if cell.weights_format != "hf" or "dtype" not in cell.header.options:
            return cell, "; ".join(self._why)
        ready = self._preparation.weights(cell)
        assert ready is not None  # its stack loads weights
        dtype, why = precision(ready.sizes["parameters"], free_bytes(self._preparation.device_id))
        return _in(cell, dtype), why


def digest_of(interpreter: Interpreter) -> str:
    return hashlib.sha256(" ".join(interpreter.lock).encode()).hexdigest()[:12]


def precision(parameters: int, free: int | None) -> tuple[str, str]:
    """The reference's dtype, fp32 or bf16, and why. `free`: bytes; null: not known."""
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
    """Whether the model of a cell will have a reference; null: known once its weights are here."""
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
    """Free memory of the device, without the driver's reserve; null if NVML does not report it."""
    import pynvml

    if device_id == "cpu":
        return free_memory_bytes()
    try:
        with vram_reader(device_id) as memory:
            return int(memory().free)
    except pynvml.NVMLError:
        return None


# Compare a quantized variant with its own weights, dequantized: do the kernels compute correctly?
#
# The file's values and settings are also compared with the 16-bit weights, tensor by tensor.


# Bump when a check against own weights compares something else.
METHOD = 2
FAILURES = (NoLogits, NoReference, NotReady, CacheError, WeightsError, OSError, ValueError, MemoryError)


def identity(cell: Cell, preparation: Preparation) -> Mapping[str, str | int] | None:
    """Identifies the check against a variant's own weights across campaigns; null for one not quantized."""
    stack = references().get("hf")
    if (
        stack is None
        or cell.packing
        or "dequantize" in cell.header.cannot
        or cell.weights_format not in ("gguf", "hf")
    ):
        return None
    if cell.weights_format == "hf" and cell.quant in (None, *FULL_TYPES):
        return None
    if cell.weights_format == "gguf" and cell.quant in FULL_TYPES:
        return None
    try:
        return {"method": METHOD, "lock": digest_of(preparation.interpreter(stack))}
    except NotReady:
        return None


def is_quantized(cell: Cell, inputs: Inputs) -> bool:
    """Whether its weights as loaded are other than 16 or 32 bits, can be dequantized, and are no packed
    checkpoint's, which is compared with its own weights anyway."""
    stored = inputs.weights.quant if inputs.weights else None
    quant = stored if cell.weights_format == "gguf" else cell.quant or stored
    if cell.packing or "dequantize" in cell.header.cannot:
        return False
    return bool(stored) and quant not in FULL_TYPES


def compare(
    cell: Cell,
    preparation: Preparation,
    reference_of: Callable[[tuple[Path, list[int]]], Reference],
    original: Ready | None,
    ids: list[int],
    ours: Logits,
    windows: Sequence[Sequence[int]],
    chosen: Path | None,
) -> kinds.OwnWeights:
    """`reference_of`: the reference with these weights, fed these ids. `original`: the model's 16-bit
    weights; null: none. `ids`, `ours`: the token ids, and the variant's logits. `chosen`: the variant's
    experts, which the reference follows.

    Raises one of FAILURES.
    """
    given, settings, values = preparation.weights(cell), list[str](), None
    assert given is not None  # its logits are there
    mine, theirs = dense_fields(given.decoder), dense_fields(original.decoder if original else None)
    if given.format == "gguf" and mine and theirs:
        settings = own_weights.other_settings(mine, theirs)
    with preparation.dequantized(cell, given, original) as own:
        if original and not settings and own.format == "hf":
            values = preparation.differences(cell, own.path, original)
        reference = reference_of((own.path, ids))
        depths = agreement.compare(*reference.logits(chosen), *ours, windows)
    assert reference.description is not None  # it has run
    found: kinds.OwnWeights = {
        "settings": settings,
        "values": values,
        "depths": depths,
        "reference": reference.description,
    }
    if experts := followed(reference):
        found["experts"] = experts
    return found


def followed(reference: Reference) -> kinds.Experts | None:
    """Statistics on experts, from a reference that followed a variant's; null: it followed none."""
    found = reference.experts or {}
    if "followed" not in found:
        return None
    theirs = found["followed"]
    return {
        "experts": found["experts"],
        "used": found["used"],
        "chosen": theirs["used"],
        "choices": theirs["choices"],
        "others": theirs["others"],
        "gap": theirs["gap"],
    }

"""Experiment -> Cells: which cells to measure, their ids and order, and which are done. Pure."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.base import data
from harness.config import Experiment, MaxCtx, Model, Quality, Variant, Weights, Workload
from harness.config.variants import bits_of, quant_of, weights_format, weights_of
from harness.stacks.header import Header, Options, Value, holds, stacks
from harness.stacks.limits import Broken, Known, broken
from harness.theory.decoder import Decoder, dense_fields
from harness.theory.packed_sizes import Packing, packed_bytes
from harness.theory.tensors import of_shape

RETRIED_ALWAYS = ("interrupted",)
SHARD_BYTES = 5e9  # transformers before 5 and auto-gptq start a new file at this size


@dataclass(frozen=True)
class Cell:
    """One combination to measure: model, stack, options, workload. `id` is readable and depends only on the
    request (model, weights source, stack, options, workload), not on the machine."""

    id: str
    model: Model
    variant: Variant
    workload: Workload
    budget_bytes: int | None = None
    """Memory limit of its worker on a CPU, weights included. Not part of `id`."""

    @property
    def title(self) -> str:
        """Model, stack and variant, and the workload unless it is a decode; of several cells perhaps."""
        kind = "" if self.workload.kind == "decode" else f" {self.workload.kind}"
        return f"{self.model.name} {self.variant.stack} {self.variant.name}{kind}"

    @property
    def header(self) -> Header:
        return stacks()[self.variant.stack]

    @property
    def quant(self) -> str | None:
        """The requested quantization, or the stack's default; None: as stored."""
        return quant_of(self.variant)

    @property
    def weights_format(self) -> str:
        """The weights format of its stack: gguf, hf, gptq, awq, or none."""
        return weights_format(self.variant)

    @property
    def packing(self) -> Packing | None:
        """The requested GPTQ or AWQ packing, with the default group size; None for other formats."""
        bits = bits_of(self.variant)
        return Packing(self.weights_format, bits) if bits else None

    @property
    def source(self) -> Weights | None:
        """The source of its weights, placeholders filled in; None if the model has none in this format."""
        given = weights_of(self.model, self.variant)
        return given and given.filled(self.quant, self.packing.bits if self.packing else None)

    @property
    def further_files(self) -> list[Path]:
        """The models that options name besides its weights."""
        options, given = self.header.options, self.variant.options
        return [Path(str(path)) for name, path in given.items() if path and options[name].type == "path"]

    @property
    def searches(self) -> bool:
        """Whether it is a search for the longest context, which is not timed and runs once."""
        return isinstance(self.workload, MaxCtx)

    @property
    def scores(self) -> bool:
        """Whether its quality is scored, which is not timed and runs once."""
        return isinstance(self.workload, Quality)

    @property
    def bounded(self) -> bool:
        """Whether its worker has a memory limit."""
        return self.searches or self.budget_bytes is not None

    @property
    def tokens(self) -> int:
        """Tokens that the context must hold."""
        return self.workload.holds

    def impossible(self, threads: int) -> str | None:
        """Why its stack cannot run the workload: it lacks what that needs, or its KV cache cannot be cut to
        fewer tokens; None otherwise."""
        cannot = self.header.cannot
        if why := cannot.get(self.workload.kind) or cannot.get(self.workload.needs or ""):
            return f"{self.variant.stack} does not run {self.workload.kind}: {why}"
        options = self.options(threads)
        when = next((each for each in self.header.cannot_truncate if holds(each, options)), None)
        if when is None or not self.workload.cuts:
            return None
        with_these = ", ".join(f"{name} {json.dumps(options[name]).strip(chr(34))}" for name in when)
        return (
            f"workload {self.workload.kind} cuts the KV cache to fewer tokens: impossible with {with_these}"
        )

    def options(self, threads: int) -> dict[str, Value]:
        """All options of the stack, resolved for this machine."""
        sources = {"threads": threads, "tokens": self.tokens}
        given: Options = self.variant.options
        if self.bounded:
            given = {**given, "mmap": False}  # mapped weights would not count towards the budget
        return {
            name: given.get(name, sources.get(o.default_from or "", o.default))
            for name, o in self.header.options.items()
        }


def cells(experiment: Experiment) -> list[Cell]:
    """All cells, in the order of the config. Ids are unique."""
    budget = experiment.protocol.memory_budget_bytes
    return [
        Cell(_id(model, variant, workload), model, variant, workload, budget)
        for model, variant, workload in experiment.combinations()
    ]


def select(cells: Sequence[Cell], globs: Sequence[str]) -> list[Cell]:
    """The cells whose id matches any glob; all cells if there are no globs."""
    return [c for c in cells if not globs or any(fnmatch.fnmatchcase(c.id, glob) for glob in globs)]


def order(cells: Sequence[Cell], repeats: int, seed: int) -> list[tuple[Cell, int]]:
    """All repeats (from 1) of all cells. Each round has every cell once that still repeats, in a new random
    order, so that drift affects all cells alike."""
    rounds = []
    for repeat in range(1, repeats + 1):
        left = [cell for cell in cells if repeat <= cell.workload.repeated(repeats)]
        rounds += [(cell, repeat) for cell in shuffled(left, seed, repeat)]
    return rounds


def shuffled(cells: Sequence[Cell], seed: int, round: int) -> list[Cell]:
    """The cells of one round (from 1) in random order."""
    found = list(cells)
    random.Random(f"{seed}/{round}").shuffle(found)
    return found


def known_failures(
    cell: Cell,
    threads: int,
    device: str,
    compute_capability: tuple[int, int] | None,
    made: Decoder | None,
    packing: Packing | None = None,
    shards: int | None = None,
) -> list[Broken]:
    """The limits of its stack that a cell exceeds on a device of this family. Null: not known.

    `packing`, `shards`: of the weights on this machine; without them, the requested packing and the number of
    files that transformers would write.
    """
    if not cell.header.limits:
        return []
    packing = packing or cell.packing
    sharded = None if shards is None else shards > 1
    if sharded is None and packing and made and made.is_dense:
        sharded = sum(packed_bytes(of_shape(made), packing).values()) > SHARD_BYTES
    known = Known(device, cell.tokens, compute_capability, made, packing, sharded)
    return broken(cell.header, cell.options(threads), known)


def pairs(a: Sequence[Cell], b: Sequence[Cell]) -> tuple[list[tuple[Cell, Cell]], list[Cell]]:
    """The cells of two sides that belong together, and those without a partner.

    In this order: the same cell; the same model, workload and variant; the same model, workload, stack and
    quantization; the same model and workload, where each side has one such cell.
    """
    keys: list[Callable[[Cell], object]] = [
        lambda cell: cell.id,
        lambda cell: (_work(cell), cell.variant.stack, cell.variant.name),
        lambda cell: (_work(cell), cell.variant.stack, cell.quant),
        _work,
    ]
    found: list[tuple[Cell, Cell]] = []
    left, right = list(a), list(b)
    for key in keys:
        for each in list(left):
            mine = [cell for cell in left if key(cell) == key(each)]
            theirs = [cell for cell in right if key(cell) == key(each)]
            if len(mine) == len(theirs) == 1:
                found.append((each, theirs[0]))
                left.remove(each)
                right.remove(theirs[0])
    place = {cell.id: number for number, cell in enumerate(a)}
    return sorted(found, key=lambda pair: place[pair[0].id]), left + right


def _work(cell: Cell) -> object:
    return cell.model.name, cell.workload.model_dump_json()


def turns(count: int, seed: int, round: int) -> list[tuple[int, tuple[str, str]]]:
    """One round of `count` pairs: their numbers and the order of their two sides, both random."""
    chance = random.Random(f"{seed} {round}")
    numbers = list(range(count))
    chance.shuffle(numbers)
    return [(number, ("A", "B") if chance.random() < 0.5 else ("B", "A")) for number in numbers]


def content_key(
    cell: Cell,
    options: Options,
    stack: Sequence[str],
    fingerprint: str | None,
    machine: str,
    device: str,
) -> str:
    """Identifies a finished repeat: the cell, its resolved options, the stack's build and exact versions
    (`stack`), the weights, the machine, the device, and the memory budget if there is one."""
    request = _request(cell.model, cell.variant, cell.workload)
    return key_of(cell.id, request, options, stack, fingerprint, machine, device, cell.budget_bytes)


def key_of(
    cell_id: str,
    request: object,
    options: Options,
    stack: Sequence[str],
    fingerprint: str | None,
    machine: str,
    device: str,
    budget_bytes: int | None,
) -> str:
    """The content key of these values; `request`: model, stack, options and workload as in the config."""
    known = [cell_id, request, options, list(stack), fingerprint, machine, device]
    return _digest(known if budget_bytes is None else [*known, budget_bytes])[:20]


def is_done(latest: str | None, fresh: bool, retry_failed: bool) -> bool:
    """Whether a repeat can be skipped, given the status of its latest record with the same content key."""
    if latest is None or latest in RETRIED_ALWAYS or fresh:
        return False
    return latest in ("ok", "functional") or not retry_failed


def _id(model: Model, variant: Variant, workload: Workload) -> str:
    name = re.sub(r"[^A-Za-z0-9._=-]+", "_", variant.name)[:60]
    digest = _digest(_request(model, variant, workload))[:8]
    return f"{model.name}.{variant.stack}.{name}.{workload.kind}.{digest}"


def _request(model: Model, variant: Variant, workload: Workload) -> dict[str, object]:
    # Only the weights of its format: a new path for one format must not change the cells of the others.
    given = weights_of(model, variant) or model.weights
    chosen = model.model_copy(update={"weights": given})
    other = {"of_format", "described", "where"}
    asked = chosen.model_dump(mode="json", exclude=other) | {"shape": dense_fields(model.made)}
    if model.described and model.described.config:
        asked["described"] = model.described.config
    if name := data.weights_name(given.path):  # its folder is another in each installation
        asked["weights"]["path"] = name
    return {
        "model": asked,
        "stack": variant.stack,
        "options": variant.options,
        "workload": workload.model_dump(mode="json"),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()

"""Experiment -> Cells: what to measure, under which ids, in which order, and what is done already. Pure."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.config import Decode, Experiment, Model, Variant
from harness.envs.header import Header, stacks

RETRIED_ALWAYS = ("interrupted",)


@dataclass(frozen=True)
class Cell:
    """One thing to measure: a model in a stack with options, under a workload. `id` is readable and names
    what was asked: model, weights source, stack, options, workload, never what a machine made of it."""

    id: str
    model: Model
    variant: Variant
    workload: Decode

    @property
    def header(self) -> Header:
        return stacks()[self.variant.stack]

    @property
    def quant(self) -> str | None:
        """The quantization asked for, the stack's default included; null: as stored."""
        option = self.header.options.get("quant")
        asked = self.variant.options.get("quant", option.default if option else None)
        return None if asked is None else str(asked)

    @property
    def tokens(self) -> int:
        """Positions the workload fills: prompt and new tokens."""
        return int(self.workload.prompt_tokens or 0) + int(self.workload.new_tokens or 0)

    def options(self, threads: int) -> dict[str, Any]:
        """Every option of the stack, as resolved for this machine."""
        sources = {"threads": threads, "tokens": self.tokens}
        return {
            name: self.variant.options.get(name, sources.get(o.default_from or "", o.default))
            for name, o in self.header.options.items()
        }


def cells(experiment: Experiment) -> list[Cell]:
    """All cells, in the order of the config. Ids are unique."""
    return [
        Cell(_id(model, variant, workload), model, variant, workload)
        for model, variant, workload in experiment.combinations()
    ]


def select(cells: Sequence[Cell], globs: Sequence[str]) -> list[Cell]:
    """The cells whose id matches any glob; all of them when there is none."""
    return [c for c in cells if not globs or any(fnmatch.fnmatchcase(c.id, glob) for glob in globs)]


def order(cells: Sequence[Cell], repeats: int, seed: int) -> list[tuple[Cell, int]]:
    """Every repeat (from 1) of every cell. Each round has all cells, shuffled anew: drift meets all cells
    alike."""
    rounds = []
    for repeat in range(1, repeats + 1):
        shuffled = list(cells)
        random.Random(f"{seed}/{repeat}").shuffle(shuffled)
        rounds += [(cell, repeat) for cell in shuffled]
    return rounds


def content_key(
    cell: Cell,
    options: dict[str, Any],
    stack: Sequence[str],
    fingerprint: str | None,
    machine: str,
    device: str,
) -> str:
    """What a finished repeat is known by: the cell, its options as resolved, how the stack is built and its
    exact versions (`stack`), the weights, the machine and the device on it."""
    asked = _asked(cell.model, cell.variant, cell.workload)
    return _digest([cell.id, asked, options, list(stack), fingerprint, machine, device])[:20]


def is_done(latest: str | None, fresh: bool, retry_failed: bool) -> bool:
    """Whether a repeat whose latest record (same content key) has this status need not run again."""
    if latest is None or latest in RETRIED_ALWAYS or fresh:
        return False
    return latest == "ok" or not retry_failed


def _id(model: Model, variant: Variant, workload: Decode) -> str:
    name = re.sub(r"[^A-Za-z0-9._=-]+", "_", variant.name)[:60]
    return (
        f"{model.name}.{variant.stack}.{name}.{workload.kind}.{_digest(_asked(model, variant, workload))[:8]}"
    )


def _asked(model: Model, variant: Variant, workload: Decode) -> dict[str, Any]:
    return {
        "model": model.model_dump(mode="json"),
        "stack": variant.stack,
        "options": variant.options,
        "workload": workload.model_dump(mode="json"),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()

"""Which limits of a stack a cell would break, as known before a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.stacks.header import Header
from harness.stacks.rules import Limit, Options, holds
from harness.system.wording import plural
from harness.theory.packed import Packing, linears
from harness.theory.shapes import Shape


@dataclass(frozen=True)
class Known:
    """Known facts of a cell besides its options; null is not checked. `device`: its family.
    `sharded`: the weights are in several files. `tokens`: prompt + decode."""

    device: str
    tokens: int
    compute_capability: tuple[int, int] | None = None
    shape: Shape | None = None
    packing: Packing | None = None
    sharded: bool | None = None


@dataclass(frozen=True)
class Broken:
    """A rule that a cell breaks: the reason, and the library's message. `refuses`: do not start the cell."""

    reason: str
    says: str
    refuses: bool


def broken(header: Header, options: Options, known: Known) -> list[Broken]:
    """The rules that a cell breaks, each once. `options`: all of the stack's, resolved."""
    return [
        Broken(reason, limit.says, limit.refuses)
        for limit in header.limits
        if holds(limit.when, options)
        for reason in _reasons(limit, options, known)
    ]


def _reasons(limit: Limit, options: Options, known: Known) -> Iterator[str]:
    if limit.never:
        yield limit.says
    if limit.device is not None and known.device != limit.device:
        yield f"needs a GPU ({limit.device})"
    has, least = known.compute_capability, limit.compute_capability
    if has and least and has < least:
        yield f"compute capability {has[0]}.{has[1]}; at least {least[0]}.{least[1]} is needed"
    if has and (below := limit.compute_capability_below) and has >= below:
        yield f"compute capability {has[0]}.{has[1]}; less than {below[0]}.{below[1]} is needed"
    if known.shape is not None:
        yield from _features(limit, known.shape)
    if known.packing is not None:
        yield from _packing(limit, known.packing)
    if limit.sharded is False and known.sharded:
        yield "its weights are in several files"
    held = options[limit.covers] if limit.covers else None
    if isinstance(held, int) and held < known.tokens:
        yield f"{limit.covers} {held} does not cover the {plural(known.tokens, 'token')} of prompt and decode"


def _features(limit: Limit, shape: Shape) -> Iterator[str]:
    """The first linear layer whose size is not a multiple, for each side."""
    for side, (name, multiple) in enumerate(
        (("out_features", limit.out_features_multiple_of), ("in_features", limit.in_features_multiple_of))
    ):
        sizes = (matrix.dims[side] for matrix in linears(shape)) if multiple else ()
        odd = next((size for size in sizes if size % multiple), None) if multiple else None
        if odd is not None:
            yield f"{name} {odd} is not divisible by {multiple}"


def _packing(limit: Limit, packing: Packing) -> Iterator[str]:
    if limit.bits and packing.bits not in limit.bits:
        yield f"{packing.bits} bits; only {_listed(limit.bits)}"
    if limit.group_sizes and packing.group_size not in limit.group_sizes:
        yield f"group_size {packing.group_size}; only {_listed(limit.group_sizes)}"
    if limit.act_order is False and packing.act_order:
        yield "act-order"
    if limit.symmetric and not packing.symmetric:
        yield "asymmetric"


def _listed(values: tuple[int, ...]) -> str:
    *first, last = sorted(values)
    return f"{', '.join(map(str, first))} and {last}" if first else str(last)

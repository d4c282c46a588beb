"""What a header says of a cell: which limits it would break, and which values of options are worth trying.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.base.text import listed, plural
from harness.stacks.header import Given, Header, Limit, Options, Trial, holds
from harness.theory.decoder import Decoder
from harness.theory.packed_sizes import Packing, linears

Changes = Mapping[str, Given]
PINNED = "cpus"  # the option of a stack that can keep its threads on these


@dataclass(frozen=True)
class Known:
    """Known facts of a cell besides its options; None is not checked. `device`: its family.
    `sharded`: the weights are in several files. `tokens`: prompt + decode."""

    device: str
    tokens: int
    compute_capability: tuple[int, int] | None = None
    made: Decoder | None = None
    packing: Packing | None = None
    sharded: bool | None = None


@dataclass(frozen=True)
class Broken:
    """A rule that a cell breaks: the reason, and the library's message. `refuses`: do not start the cell."""

    reason: str
    message: str
    refuses: bool


def broken(header: Header, options: Options, known: Known) -> list[Broken]:
    """The rules that a cell breaks, each once. `options`: all of the stack's, resolved."""
    return [
        Broken(reason, limit.message, limit.refuses)
        for limit in header.limits
        if holds(limit.when, options) and not (limit.unless and holds(limit.unless, options))
        for reason in _reasons(limit, options, known)
    ]


def _reasons(limit: Limit, options: Options, known: Known) -> Iterator[str]:
    if limit.never:
        yield limit.message
    if limit.device is not None and known.device != limit.device:
        yield f"needs a GPU ({limit.device})"
    has, least = known.compute_capability, limit.compute_capability
    if has and least and has < least:
        yield f"compute capability {has[0]}.{has[1]}; at least {least[0]}.{least[1]} is needed"
    if has and (below := limit.compute_capability_below) and has >= below:
        yield f"compute capability {has[0]}.{has[1]}; less than {below[0]}.{below[1]} is needed"
    if has and has == limit.compute_capability_except:
        yield f"compute capability {has[0]}.{has[1]}; another is needed"
    if known.made is not None and known.made.is_dense:
        yield from _features(limit, known.made)
    if known.packing is not None:
        yield from _packing(limit, known.packing)
    if limit.sharded is False and known.sharded:
        yield "its weights are in several files"
    held = options[limit.covers] if limit.covers else None
    if isinstance(held, int) and held < known.tokens:
        yield f"{limit.covers} {held} does not cover the {plural(known.tokens, 'token')} of prompt and decode"


def _features(limit: Limit, made: Decoder) -> Iterator[str]:
    """The first linear layer whose size is not a multiple, for each side."""
    for side, (name, multiple) in enumerate(
        (("out_features", limit.out_features_multiple_of), ("in_features", limit.in_features_multiple_of))
    ):
        sizes = (matrix.dims[side] for matrix in linears(made)) if multiple else ()
        odd = next((size for size in sizes if size % multiple), None) if multiple else None
        if odd is not None:
            yield f"{name} {odd} is not divisible by {multiple}"


def _packing(limit: Limit, packing: Packing) -> Iterator[str]:
    if limit.bits and packing.bits not in limit.bits:
        yield f"{packing.bits} bits; only {listed(limit.bits)}"
    if limit.group_sizes and packing.group_size not in limit.group_sizes:
        yield f"group_size {packing.group_size}; only {listed(limit.group_sizes)}"
    if limit.act_order is False and packing.act_order:
        yield "act-order"
    if limit.symmetric and not packing.symmetric:
        yield "asymmetric"


def candidates(
    header: Header, device: str, purpose: str, cores: int, logical: int, cpus: str | None = None
) -> list[Sequence[Changes]]:
    """The changes to try, one option (or group that belongs together) after the other: threads first, as the
    others depend on them, then threads that stay on a CPU each. `device`: its family; `purpose`: decode or
    prefill; `cores`: physical cores, `logical`: CPUs, both usable; `cpus`: which, as in 0-3; None: any."""
    counts = [threads for threads in _halved(cores, logical) if device == "cpu"]
    found: list[Sequence[Changes]] = [
        [{name: count} for count in counts]
        for name, option in header.options.items()
        if option.default_from == "threads"
    ]
    if device == "cpu" and cpus and PINNED in header.options:
        found.append([{PINNED: cpus}])
    fitting = [each for each in header.trials if _on(each, device) and each.purpose in (None, purpose)]
    return [each for each in [*found, *(trial.settings for trial in fitting)] if each]


def without_effect(header: Header, name: str, device: str) -> bool:
    """Whether an option does nothing on this family of devices, by the header."""
    having = [each for each in header.trials if any(name in changes for changes in each.settings)]
    return bool(having) and not any(_on(each, device) for each in having)


def _on(trial: Trial, device: str) -> bool:
    return trial.device in (None, "cpu" if device == "cpu" else "gpu")


def _halved(cores: int, logical: int) -> list[int]:
    """`[1, 2, 4, 8, 16]` of 8 cores with two threads each."""
    counts = {cores, logical}
    while cores > 1:
        cores //= 2
        counts.add(cores)
    return sorted(counts)

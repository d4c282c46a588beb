"""Machine names as people and NVML write them: the known machines, one per memory size. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from harness.base import data
from harness.base.text import alike
from harness.theory import cpus
from harness.theory.machines import MACHINES, Figure, Machine
from harness.theory.names import LONGEST, MOST_LISTED, NotUnderstood, did_you_mean, listed
from harness.theory.quantities import memory_gib

_ALIASES = data.table("aliases.toml")["machines"]
_IGNORED, _OPTIONAL = (
    set(_ALIASES["ignored"]),
    set(_ALIASES["optional"]),
)


class _Chip(NamedTuple):
    """Words that a machine's name must and may contain."""

    must: set[str]
    may: set[str]


def machines(
    text: str, known: Mapping[str, Machine] = MACHINES, memory: float | None = None
) -> dict[str, Machine]:
    """The machines with a name: one, or one per kind and memory size sold.

    `memory` in GiB chooses among the sizes, or replaces them. Names that only `known` has are matched
    as they are, in lower case. `2x` before a name: two of them, and `memory` is of one. A CPU of cpus.toml
    has no size of its own. Raises NotUnderstood.
    """
    if several := _SEVERAL.match(text.strip().lower()):
        count, one = int(several[1]), text.strip()[several.end() :]
        found_once = machines(one, known, memory)
        if any(machine.family == "cpu" or machine.unified for machine in found_once.values()):
            raise NotUnderstood("only GPUs with memory of their own can be several in a computer")
        return {f"{count}x-{key}": machine.times(count) for key, machine in found_once.items()}
    name = _marketed(text.strip()).lower()
    if name in known and known[name] is not MACHINES.get(name):
        return _with_memory(name, known[name], (memory,) if memory else _sizes(known[name]))
    if name not in MACHINES and len(name) <= LONGEST and (cpu := cpus.find(name)):
        return _of_cpu(*cpu, memory)
    words = _words(name) if len(name) <= LONGEST else []
    typed = [gib for word in words if (gib := memory_gib(word))]
    rest = {word for word in words if not memory_gib(word)}
    if len(words) != len(set(words)) or len(typed) > 1 or not rest:
        raise NotUnderstood(_LIST)
    keys = [key for key, chip in _chips().items() if chip.must <= rest <= chip.must | chip.may]
    if not keys and re.match(r"-?[\d.]{1,2} ?x(?![a-z])", name):
        raise NotUnderstood("2 to 8 of a known GPU can be one machine, typed as in 2x-rtx-3090")
    if not keys:
        raise NotUnderstood(_hint(name, rest, [*known]))
    size_gib = memory or next(iter(typed), None)
    if size_gib is None:
        chosen = {key: _sizes(MACHINES[key]) for key in keys}
    else:
        chosen = {key: (size_gib,) for key in keys if size_gib in _sizes(MACHINES[key])}
    if memory and not chosen:
        if name not in keys and not same_speed([MACHINES[key] for key in keys]):
            raise NotUnderstood(f"to give it {memory:g} GB, name one of {listed(keys)}", ambiguous=True)
        chosen = {name if name in keys else keys[0]: (memory,)}
    if not chosen:
        sizes = {size for key in keys for size in _sizes(MACHINES[key])}
        sold = listed([f"{size:g}" for size in sorted(sizes)])
        raise NotUnderstood(f"it is sold with {sold} GB; harness theory --memory gives it any")
    return {n: m for key, sizes in chosen.items() for n, m in _with_memory(key, MACHINES[key], sizes).items()}


def _of_cpu(cpu: cpus.Cpu, typed: float | None, memory: float | None) -> dict[str, Machine]:
    """A CPU with its memory. Raises NotUnderstood without one."""
    if (gib := memory or typed) is None:
        raise NotUnderstood(
            f"{cpu.name} goes with any size of memory: give yours, as --memory 32GB", ambiguous=True
        )
    key = re.sub(r"[ -]+", "-", cpu.name.lower())
    return {f"{key}-{gib:g}gb": cpu.with_memory(gib)}


def _marketed(name: str) -> str:
    """The name on sale, which lspci has behind the chip's: `AD103M [GeForce RTX 4090 Laptop GPU]`."""
    return name.rpartition("[")[2].partition("]")[0] if "[" in name and "]" in name else name


def one_machine(
    text: str,
    memory: float | None = None,
    any_size: bool = False,
    known: Mapping[str, Machine] = MACHINES,
) -> Machine:
    """The one machine with a name; with `any_size`, whatever its memory. Raises NotUnderstood."""
    by_name = machines(text, known, memory)
    if len(by_name) > 1 and not (any_size and same_speed([*by_name.values()])):
        raise NotUnderstood(did_you_mean([*by_name]), ambiguous=True)
    return next(iter(by_name.values()))


@cache
def of_gpu(name: str | None, memory_bytes: int | None = None) -> Machine | None:
    """The known GPU of this name, as NVML spells it (`NVIDIA H100 80GB HBM3`); None for others, such as one
    of two with that name, or a MIG instance, which has a part of the bandwidth.

    Of one name sold with several memory sizes the nearest: NVML's total is a little less than what is sold.
    """
    try:
        gpus = [machine for machine in machines(name or "").values() if machine.compute_capability]
    except NotUnderstood:
        return None
    total = memory_bytes or 0
    gpus = [machine for machine in gpus if 0.9 < total / machine.memory_bytes <= 1] or gpus
    if len(gpus) > 1 and (memory_bytes is None or not same_speed(gpus)):
        return None
    return min(gpus, key=lambda machine: abs(machine.memory_bytes - (memory_bytes or 0)), default=None)


def same_speed(several: Sequence[Machine]) -> bool:
    """They differ in memory alone."""
    first, *others = ((m.bandwidth.value, {name: r.value for name, r in m.rates.items()}) for m in several)
    return all(other == first for other in others)


_speed_and_size = attrgetter("bandwidth_bytes_per_s", "flops", "memory_bytes")


def slowest(text: str, by_name: Mapping[str, Machine]) -> tuple[str, list[str]]:
    """The slowest machine with a name, of equally fast ones that with the least memory; and what to know of
    it: that there are others, or that it is several devices."""
    name = min(by_name, key=lambda key: _speed_and_size(by_name[key]))
    notes = []
    if len(by_name) > 1:
        by = "smallest" if same_speed([*by_name.values()]) else "slowest"
        notes.append(
            f"{text} is {listed([*by_name], 'or')}; the {by}, {name}, is taken: name another to change that"
        )
    if memory := by_name[name].assumed:
        gb_per_s = by_name[name].bandwidth_bytes_per_s / 1e9
        notes.append(
            f"{by_name[name].name} is taken with {memory}, {gb_per_s:.1f} GB/s: the fastest that its maker"
            " supports, on all channels (--memory-speed and --channels take another)"
        )
    if (count := by_name[name].count) > 1:
        notes.append(
            f"{text}: the memory of {count} GPUs, whose layers take turns, at the bandwidth of one; not"
            " measured, and without what the transfers between them take"
        )
    return name, notes


def joined(words: Sequence[str], is_name: Callable[[str], bool]) -> list[str]:
    """Join words that the shell split into names: `RTX 4060 Ti 16GB` is one, `m2 4090` two."""
    names, start = [], 0
    while start < len(words):
        ends = range(min(len(words), start + 8), start + 1, -1)
        end = next((end for end in ends if is_name(" ".join(words[start:end]))), start + 1)
        names.append(" ".join(words[start:end]))
        start = end
    return names


_LIST = "see harness theory --list-machines"
_SEVERAL = re.compile(r"([2-8]) ?x[ -]?(?=\w)")


def _words(name: str) -> list[str]:
    for pattern, plain in _ALIASES["spellings"]:
        name = re.sub(pattern, plain, name)
    return [word for word in re.split(r"[\s_/-]+", name) if word and word not in _IGNORED]


@cache
def _chips() -> dict[str, _Chip]:
    """The chip of each shipped machine, by the machine's key."""
    chips = {}
    for key in MACHINES:
        of_key = _ALIASES["words"].get(key, {})
        words = {word for word in _words(key) if not memory_gib(word)}
        may = words & (_OPTIONAL | set(of_key.get("optional", ())))
        chips[key] = _Chip(words - may, may | set(of_key.get("also", ())))
    return chips


def _sizes(machine: Machine) -> tuple[float, ...]:
    """The memory sizes it is sold with, in GiB."""
    return machine.sold_gib or (machine.memory_bytes / 2**30,)


def _with_memory(key: str, machine: Machine, sizes: Sequence[float]) -> dict[str, Machine]:
    """A machine with each of these sizes; its name has the size if several are possible."""
    by_name = {}
    for size in sizes:
        if size * 2**30 == machine.memory_bytes and not machine.sold_gib:
            by_name[key] = machine
            continue
        source = "a size it is sold with" if size in machine.sold_gib else "as given by --memory"
        name = f"{re.sub('-[0-9.]+gb', '', key)}-{size:g}gb"
        by_name[name] = replace(machine, memory=Figure(int(size * 2**30), source), sold_gib=())
    return by_name


def _hint(name: str, rest: set[str], known: Sequence[str]) -> str:
    """A suggestion from the same family, else what to do."""
    advice = "--from and ~/.config/harness/machines.toml take your own"
    if 0 < len(wider := [key for key, chip in _chips().items() if rest < chip.must]) <= MOST_LISTED:
        return did_you_mean(wider)
    if within := [key for key, chip in _chips().items() if chip.must < rest]:
        closest = max(within, key=lambda key: len(_chips()[key].must))
        extra = " ".join(sorted(rest - _chips()[closest].must - _chips()[closest].may))
        return f'{closest} is known, "{extra}" is not; {advice}'
    plain = re.sub(r"[\s_-]+", "-", re.sub(r"\b(?:nvidia|geforce|amd)\b", " ", name).strip())
    spelled = {part: key for key in known for part in (key, key.partition("-")[2]) if part[:3] == plain[:3]}
    if near := alike(plain, spelled):
        return did_you_mean([spelled[near[0]]])
    return f"{_LIST}; {advice}"

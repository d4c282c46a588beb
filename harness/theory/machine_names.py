"""Map machine names as people and NVML write them to the known machines, one per memory size. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from harness import data
from harness.theory.counts import memory_gib
from harness.theory.machine import Figure, Machine
from harness.theory.machines import MACHINES
from harness.theory.names import LONGEST, NotUnderstood, did_you_mean, listed

_ALIASES = data.table("aliases.toml")["machines"]
_IGNORED, _OPTIONAL = set(_ALIASES["ignored"]), set(_ALIASES["optional"])


class _Chip(NamedTuple):
    """Words that a machine's name must and may contain."""

    must: set[str]
    may: set[str]


def machines(
    text: str, known: Mapping[str, Machine] = MACHINES, memory: float | None = None
) -> dict[str, Machine]:
    """The machines that a name stands for: one, or one per kind and memory size sold.

    `memory` in GiB chooses among the sizes, or replaces them. Names that only `known` has are matched
    as they are, in lower case. Raises NotUnderstood.
    """
    name = _marketed(text.strip()).lower()
    if name in known and known[name] is not MACHINES.get(name):
        return _with_memory(name, known[name], (memory,) if memory else _sizes(known[name]))
    words = _words(name) if len(name) <= LONGEST else []
    typed = [gib for word in words if (gib := memory_gib(word))]
    rest = {word for word in words if not memory_gib(word)}
    if len(words) != len(set(words)) or len(typed) > 1 or not rest:
        raise NotUnderstood(_LIST)
    found = [key for key, chip in _chips().items() if chip.must <= rest <= chip.must | chip.may]
    if not found:
        raise NotUnderstood(_hint(name, rest, [*known]))
    wanted = memory or next(iter(typed), None)
    if wanted is None:
        chosen = {key: _sizes(MACHINES[key]) for key in found}
    else:
        chosen = {key: (wanted,) for key in found if wanted in _sizes(MACHINES[key])}
    if memory and not chosen:
        if name not in found and not same_speed([MACHINES[key] for key in found]):
            raise NotUnderstood(f"to give it {memory:g} GB, name one of {listed(found)}", ambiguous=True)
        chosen = {name if name in found else found[0]: (memory,)}
    if not chosen:
        sizes = {size for key in found for size in _sizes(MACHINES[key])}
        sold = listed([f"{size:g}" for size in sorted(sizes)])
        raise NotUnderstood(f"it is sold with {sold} GB; harness theory --memory gives it any")
    return {n: m for key, sizes in chosen.items() for n, m in _with_memory(key, MACHINES[key], sizes).items()}


def _marketed(name: str) -> str:
    """The name on sale, which lspci has behind the chip's: `AD103M [GeForce RTX 4090 Laptop GPU]`."""
    return name.rpartition("[")[2].partition("]")[0] if "[" in name and "]" in name else name


def one(
    text: str,
    memory: float | None = None,
    any_size: bool = False,
    known: Mapping[str, Machine] = MACHINES,
) -> Machine:
    """The one machine that a name stands for; with `any_size`, whatever its memory. Raises NotUnderstood."""
    found = machines(text, known, memory)
    if len(found) > 1 and not (any_size and same_speed([*found.values()])):
        raise NotUnderstood(did_you_mean([*found]), ambiguous=True)
    return next(iter(found.values()))


@cache
def of_gpu(name: str | None, memory_bytes: int | None = None) -> Machine | None:
    """The known GPU of this name, as NVML spells it (`NVIDIA H100 80GB HBM3`); null for others, such as one
    of two with that name, or a MIG instance, which has a part of the bandwidth.

    Of one name sold with several memory sizes the nearest: NVML's total is a little less than what is sold.
    """
    try:
        found = [machine for machine in machines(name or "").values() if machine.compute_capability]
    except NotUnderstood:
        return None
    total = memory_bytes or 0
    found = [machine for machine in found if 0.9 < total / machine.memory_bytes <= 1] or found
    if len(found) > 1 and (memory_bytes is None or not same_speed(found)):
        return None
    return min(found, key=lambda machine: abs(machine.memory_bytes - (memory_bytes or 0)), default=None)


def same_speed(found: Sequence[Machine]) -> bool:
    """They differ in memory alone."""
    first, *others = ((m.bandwidth.value, {name: r.value for name, r in m.rates.items()}) for m in found)
    return all(other == first for other in others)


def one_of_each(text: str, found: Mapping[str, Machine]) -> str | None:
    """The note that a name has several rows; null for one."""
    if len(found) == 1:
        return None
    several = len({machine.memory_bytes for machine in found.values()}) > 1
    chooses = "; --memory chooses a size" if several else ""
    return f"{text} is sold as {listed([*found])}: a row for each{chooses}"


def joined(words: Sequence[str], is_name: Callable[[str], bool]) -> list[str]:
    """Join words that the shell split into names: `RTX 4060 Ti 16GB` is one, `m2 4090` two."""
    found, at = [], 0
    while at < len(words):
        ends = range(min(len(words), at + 8), at + 1, -1)
        end = next((end for end in ends if is_name(" ".join(words[at:end]))), at + 1)
        found.append(" ".join(words[at:end]))
        at = end
    return found


_LIST = "see harness theory --list-machines"
_MOST_LISTED = 12


def _words(name: str) -> list[str]:
    for pattern, plain in _ALIASES["spellings"]:
        name = re.sub(pattern, plain, name)
    return [word for word in re.split(r"[\s_/-]+", name) if word and word not in _IGNORED]


@cache
def _chips() -> dict[str, _Chip]:
    """Of each shipped machine, by its key."""
    found = {}
    for key in MACHINES:
        of_key = _ALIASES["words"].get(key, {})
        words = {word for word in _words(key) if not memory_gib(word)}
        may = words & (_OPTIONAL | set(of_key.get("optional", ())))
        found[key] = _Chip(words - may, may | set(of_key.get("also", ())))
    return found


def _sizes(machine: Machine) -> tuple[float, ...]:
    """The memory sizes it is sold with, in GiB."""
    return machine.sold_gib or (machine.memory_bytes / 2**30,)


def _with_memory(key: str, machine: Machine, sizes: Sequence[float]) -> dict[str, Machine]:
    """A machine with each of these sizes; its name has the size if several are possible."""
    found = {}
    for size in sizes:
        if size * 2**30 == machine.memory_bytes and not machine.sold_gib:
            found[key] = machine
            continue
        source = "a size it is sold with" if size in machine.sold_gib else "as given by --memory"
        name = f"{re.sub('-[0-9.]+gb', '', key)}-{size:g}gb"
        found[name] = replace(machine, memory=Figure(int(size * 2**30), source), sold_gib=())
    return found


def _hint(name: str, rest: set[str], known: Sequence[str]) -> str:
    """A suggestion from the same family, else what to do."""
    own = "--from and ~/.config/harness/machines.toml take your own"
    if 0 < len(wider := [key for key, chip in _chips().items() if rest < chip.must]) <= _MOST_LISTED:
        return did_you_mean(wider)
    if within := [key for key, chip in _chips().items() if chip.must < rest]:
        closest = max(within, key=lambda key: len(_chips()[key].must))
        extra = " ".join(sorted(rest - _chips()[closest].must - _chips()[closest].may))
        return f'{closest} is known, "{extra}" is not; {own}'
    plain = re.sub(r"[\s_-]+", "-", re.sub(r"\b(?:nvidia|geforce|amd)\b", " ", name).strip())
    inside = [key for key in known if key[:3] == plain[:3]]
    if near := difflib.get_close_matches(plain, inside, 1):
        return did_you_mean(near)
    return f"{_LIST}; {own}"

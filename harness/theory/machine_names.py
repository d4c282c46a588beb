"""Map machine names as people and NVML write them to the known machines, one per memory size. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.theory.counts import memory_gib
from harness.theory.machine import Figure, Machine
from harness.theory.machines import MACHINES
from harness.theory.names import LONGEST, NotUnderstood, did_you_mean, listed

# The memory sizes sold, in GiB, from the makers' pages named with the machines' figures.
_SOLD: dict[str, tuple[float, ...]] = {
    "apple-m1": (8, 16),
    "apple-m2": (8, 16, 24),
    "apple-m2-pro": (16, 32),
    "apple-m2-max": (32, 64, 96),
    "apple-m2-ultra": (64, 128, 192),
    "rpi-4": (1, 2, 4, 8),
    "rpi-5": (2, 4, 8, 16),
}
_FORM = {"pcie", "sxm"}
# Words that add nothing to the chip's name.
_ALSO = {
    "a100-40gb": {"pcie", "sxm"},
    "h100-sxm": {"hbm3"},  # "H100 80GB HBM3", as NVML names it
    "rpi-4": {"model", "b"},
    "rpi-5": {"model", "b"},
    "ryzen-7950x": {"9", "16", "core"},
}
_SPELLINGS = (
    (r"\b(rtx|ryzen)(?=\d)", r"\1 "),
    (r"\b(?:imac|mac(?:book)?(?:[ -](?:air|pro|mini|studio))?)\b", " "),
    (r"\b(?:raspberry[ -]?pi|rpi|pi)(?=[ -]?\d|$)", "rpi "),
    (r"\brev \d\.\d\b", " "),
    (r"\bsxm\d\b", "sxm"),
    (r"(?<![\d.])(\d+)[ -]?g(?:i?b)?\b", r" \1gb "),
    (r"\b(\d{4}|m\d)(ti|x|pro|max|ultra|super)\b", r"\1 \2"),
)
_FILLING = {"nvidia", "geforce", "rtx", "tesla", "gpu", "apple", "amd", "ryzen", "cpu", "processor", "chip"}


class _Chip(NamedTuple):
    """Words that a machine's name must and may contain; the memory sizes it is sold with, in GiB."""

    must: set[str]
    may: set[str]
    sizes: tuple[float, ...]


def machines(
    text: str, known: Mapping[str, Machine] = MACHINES, memory: float | None = None
) -> dict[str, Machine]:
    """The machines that a name stands for: one, or one per kind and memory size sold.

    `memory` in GiB chooses among the sizes, or replaces them. Names that only `known` has are matched
    as they are, in lower case. Raises NotUnderstood.
    """
    name = text.strip().lower()
    if name in known and known[name] is not MACHINES.get(name):
        return _with_memory(name, known[name], (memory or known[name].memory_bytes / 2**30,))
    words = _words(name) if len(text) <= LONGEST else []
    typed = [gib for word in words if (gib := memory_gib(word))]
    rest = {word for word in words if not memory_gib(word)}
    if len(words) != len(set(words)) or len(typed) > 1 or not rest:
        raise NotUnderstood(_LIST)
    found = [key for key, chip in _CHIPS.items() if chip.must <= rest <= chip.must | chip.may]
    if not found:
        raise NotUnderstood(_hint(name, rest, [*known]))
    wanted = memory or next(iter(typed), None)
    if wanted is None:
        chosen = {key: _CHIPS[key].sizes for key in found}
    else:
        chosen = {key: (wanted,) for key in found if wanted in _CHIPS[key].sizes}
    if memory and not chosen:
        if name not in found and not same_speed([MACHINES[key] for key in found]):
            raise NotUnderstood(f"to give it {memory:g} GB, name one of {listed(found)}", ambiguous=True)
        chosen = {name if name in found else found[0]: (memory,)}
    if not chosen:
        sold = listed([f"{size:g}" for size in sorted({size for key in found for size in _CHIPS[key].sizes})])
        raise NotUnderstood(f"it is sold with {sold} GB; harness theory --memory gives it any")
    return {n: m for key, sizes in chosen.items() for n, m in _with_memory(key, MACHINES[key], sizes).items()}


def one(text: str, memory: float | None = None, any_size: bool = False) -> Machine:
    """The one machine that a name stands for; with `any_size`, whatever its memory. Raises NotUnderstood."""
    found = machines(text, memory=memory)
    if len(found) > 1 and not (any_size and same_speed([*found.values()])):
        raise NotUnderstood(did_you_mean([*found]), ambiguous=True)
    return next(iter(found.values()))


def same_speed(found: Sequence[Machine]) -> bool:
    """They differ in memory alone."""
    first = found[0]
    return all(
        (m.bandwidth.value, m.rate, m.flops) == (first.bandwidth.value, first.rate, first.flops)
        for m in found
    )


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
        ends = range(min(len(words), at + 6), at + 1, -1)
        end = next((end for end in ends if is_name(" ".join(words[at:end]))), at + 1)
        found.append(" ".join(words[at:end]))
        at = end
    return found


_LIST = "see harness theory --list-machines"


def _words(name: str) -> list[str]:
    for pattern, plain in _SPELLINGS:
        name = re.sub(pattern, plain, name)
    return [word for word in re.split(r"[\s_/-]+", name) if word and word not in _FILLING]


def _chip(key: str, machine: Machine) -> _Chip:
    words = set(_words(key))
    must = {word for word in words if not memory_gib(word)} - _FORM
    own = (machine.memory_bytes / 2**30,)
    return _Chip(must, words & _FORM | _ALSO.get(key, set()), _SOLD.get(key, own))


def _with_memory(key: str, machine: Machine, sizes: Sequence[float]) -> dict[str, Machine]:
    """A machine with each of these sizes; its name has the size if several are possible."""
    found = {}
    for size in sizes:
        if size * 2**30 == machine.memory_bytes and key not in _SOLD:
            found[key] = machine
            continue
        source = "a size it is sold with" if size in _SOLD.get(key, ()) else "as given by --memory"
        name = f"{re.sub('-[0-9.]+gb', '', key)}-{size:g}gb"
        found[name] = replace(machine, memory=Figure(int(size * 2**30), source))
    return found


def _hint(name: str, rest: set[str], known: Sequence[str]) -> str:
    """A suggestion from the same family, else what to do."""
    own = "harness theory --from takes your own"
    if wider := [key for key, chip in _CHIPS.items() if rest < chip.must]:
        return did_you_mean(wider)
    if within := [key for key, chip in _CHIPS.items() if chip.must < rest]:
        closest = max(within, key=lambda key: len(_CHIPS[key].must))
        extra = " ".join(sorted(rest - _CHIPS[closest].must - _CHIPS[closest].may))
        return f'{closest} is known, "{extra}" is not; {own}'
    plain = re.sub(r"[\s_-]+", "-", re.sub(r"\b(?:nvidia|geforce|amd)\b", " ", name).strip())
    inside = [key for key in known if key[:3] == plain[:3]]
    if near := difflib.get_close_matches(plain, inside, 1):
        return did_you_mean(near)
    return f"{_LIST}; {own}"


_CHIPS = {key: _chip(key, machine) for key, machine in MACHINES.items()}

"""Map machine names as people and NVML write them to the known machines, one per memory size. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from harness.theory.counts import memory_gib
from harness.theory.machine import Figure, Machine
from harness.theory.machines import MACHINES
from harness.theory.names import LONGEST, NotUnderstood, did_you_mean, listed

# The memory sizes sold, in GiB, from the makers' pages named with the machines' figures.
_SOLD: dict[str, tuple[float, ...]] = {
    "rtx-3080-laptop": (8, 16),
    "ryzen-ai-max-395": (32, 64, 96, 128),
    "core-ultra-7-258v": (16, 32),
    "snapdragon-x-elite": (16, 32, 64),
    "apple-m1": (8, 16),
    "apple-m1-pro": (16, 32),
    "apple-m1-max": (32, 64),
    "apple-m1-ultra": (64, 128),
    "apple-m2": (8, 16, 24),
    "apple-m2-pro": (16, 32),
    "apple-m2-max": (32, 64, 96),
    "apple-m2-ultra": (64, 128, 192),
    "apple-m3": (8, 16, 24),
    "apple-m3-pro": (18, 36),
    "apple-m3-max-30core": (36, 96),
    "apple-m3-max-40core": (48, 64, 128),
    "apple-m3-ultra": (96, 256, 512),
    "apple-m4": (16, 24, 32),
    "apple-m4-pro": (24, 48, 64),
    "apple-m4-max-40core": (48, 64, 128),
    "apple-m5": (16, 24, 32),
    "apple-m5-pro": (24, 48, 64),
    "apple-m5-max-40core": (48, 64, 128),
    "rpi-4": (1, 2, 4, 8),
    "rpi-5": (2, 4, 8, 16),
}
# Words of a key that a name may leave out: forms, types of memory, families.
_FORM = {"pcie", "sxm", "gddr6", "gddr6x", "30core", "32core", "40core", "jetson", "agx", "nx"}
_OPTIONAL = {
    "core-ultra-9-285k": {"core", "ultra", "9"},
    "core-ultra-7-258v": {"core", "ultra", "7"},
    "core-ultra-7-155h": {"core", "ultra", "7"},
    "core-i9-14900k": {"core", "i9"},
    "epyc-9654": {"epyc"},
    "epyc-9755": {"epyc"},
    "jetson-orin-nano-4gb": {"nano"},
    "jetson-orin-nano-8gb": {"nano"},
    "jetson-orin-nano-super": {"nano"},
    "quadro-rtx-8000": {"quadro"},
    "radeon-ai-pro-r9700": {"ai", "pro"},
    "radeon-pro-w7900": {"pro"},
    "xeon-6980p": {"xeon"},
}
_KIT = {"developer", "kit"}
_GENERATION = {"generation"}
_BLACKWELL = {"blackwell", "workstation", "edition"}
# Words that add nothing to the chip's name.
_ALSO = {
    "a100-40gb": {"pcie", "sxm"},
    "h100-sxm": {"hbm3"},  # "H100 80GB HBM3", as NVML names it
    **dict.fromkeys(("rtx-4000-ada", "rtx-5000-ada", "rtx-6000-ada"), _GENERATION),
    **dict.fromkeys(("rtx-pro-4000", "rtx-pro-4500", "rtx-pro-5000", "rtx-pro-6000"), _BLACKWELL),
    "rtx-pro-6000-max-q": _BLACKWELL,
    "ryzen-7950x": {"9", "16core"},
    "ryzen-9950x": {"9", "16core"},
    "ryzen-ai-max-395": {"pro", "w", "8060s"},
    "epyc-9654": {"96core"},
    "epyc-9755": {"128core"},
    "snapdragon-x-elite": {"oryon", "x1e78100", "x1e80100", "x1e84100"},
    "rpi-3": {"model", "b", "plus"},
    "rpi-4": {"model", "b"},
    "rpi-5": {"model", "b"},
    **dict.fromkeys(("jetson-agx-orin-32gb", "jetson-agx-orin-64gb"), _KIT),
    **dict.fromkeys(("jetson-orin-nano-8gb", "jetson-orin-nano-super"), _KIT),
}
_SPELLINGS = (
    (r"\([^)]*\)", " "),  # (R), (TM), (nvgpu), (rev a1)
    (r"\b(rtx|ryzen)(?=\d)", r"\1 "),
    (r"\b(?:imac|mac(?:book)?(?:[ -](?:air|pro|mini|studio))?)\b", " "),
    (r"\b(?:raspberry[ -]?pi|rpi|pi)(?=[ -]?\d|$)", "rpi "),
    (r"\b(?:dgx[ -]?)?spark(?:[ -]gb10)?\b|\bgb10\b", "spark"),
    (r"\btitan[ -]rtx\b", "titanrtx"),
    (r"\bstrix[ -]halo\b", "ai max 395"),
    (r"\bmax\+", "max"),
    (r"\bx1e-(\d\d)-100\b", r"x1e\g<1>100"),
    (r"\brev \d\.\d\b", " "),
    (r"\bsxm\d\b", "sxm"),
    (r"\b(?:mobile|notebook)\b", "laptop"),
    (r"(?<![\d.])(\d+)[ -]?g(?:i?b)?\b", r" \1gb "),
    (r"\b(\d+)[ -]cores?\b", r"\1core"),
    (r"\b(\d{4}|m\d)(ti|xtx|xt|x|pro|max|ultra|super|gre)\b", r"\1 \2"),
    (r"\bepyc (\d{4})p\b", r"epyc \1"),
)
_FILLING = {
    *("nvidia", "geforce", "rtx", "tesla", "gpu", "apple", "amd", "ryzen", "cpu", "processor", "chip"),
    *("radeon", "rx", "instinct", "intel", "arc", "graphics", "qualcomm"),
}


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
    name = _marketed(text.strip()).lower()
    if name in known and known[name] is not MACHINES.get(name):
        return _with_memory(name, known[name], (memory or known[name].memory_bytes / 2**30,))
    words = _words(name) if len(name) <= LONGEST else []
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


def _marketed(name: str) -> str:
    """The name on sale, which lspci has behind the chip's: `AD103M [GeForce RTX 4090 Laptop GPU]`."""
    return name.rpartition("[")[2].partition("]")[0] if "[" in name and "]" in name else name


def one(text: str, memory: float | None = None, any_size: bool = False) -> Machine:
    """The one machine that a name stands for; with `any_size`, whatever its memory. Raises NotUnderstood."""
    found = machines(text, memory=memory)
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
    for pattern, plain in _SPELLINGS:
        name = re.sub(pattern, plain, name)
    return [word for word in re.split(r"[\s_/-]+", name) if word and word not in _FILLING]


def _chip(key: str, machine: Machine) -> _Chip:
    words = {word for word in _words(key) if not memory_gib(word)}
    may = words & (_FORM | _OPTIONAL.get(key, set()))
    own = (machine.memory_bytes / 2**30,)
    return _Chip(words - may, may | _ALSO.get(key, set()), _SOLD.get(key, own))


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
    if 0 < len(wider := [key for key, chip in _CHIPS.items() if rest < chip.must]) <= _MOST_LISTED:
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

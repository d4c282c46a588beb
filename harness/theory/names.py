"""Parse user input: a model, a machine, a count of tokens or bytes. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from harness.base import data
from harness.base.text import alike
from harness.theory import cpus
from harness.theory.decoder import Decoder
from harness.theory.hf_config import SHAPES
from harness.theory.machines import MACHINES, Figure, Machine
from harness.theory.tensors import ALL_QUANTS

# Numbers as people type them: counts of tokens such as 32k, sizes of memory such as 16GB. Pure.


TOKENS = r"^[0-9]{1,9}(?:\.[0-9]{1,6})? ?[kKmM]$"
_THOUSANDS = {"k": 2**10, "m": 2**20}  # as contexts are named: 32k is 32,768
_MEMORY = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(?:([gt])(?:i?b)?)")


def token_count(text: str) -> int | None:
    """A count with k (1,024) or m (1,048,576): 32k is 32,768. None for any other text, or no whole number."""
    if not re.fullmatch(TOKENS, text):
        return None
    count = float(text[:-1]) * _THOUSANDS[text[-1].lower()]
    return int(count) if count == int(count) else None


def memory_gib(text: str) -> float | None:
    """GiB of a memory as sold, where 16GB is 16 GiB; also 16G, 16 GiB and 1TB. None for any other text."""
    found = _MEMORY.fullmatch(text.strip().lower())
    return float(found[1]) * (1024 if found[2] == "t" else 1) if found and float(found[1]) else None


# Map model names as people type them, of the hub or of Ollama, to the known shapes. Pure.
#
# A name is a set of words: Qwen2.5-7B-Instruct and qwen2.5:7b-instruct are {qwen, 2.5, 7b, instruct}. Every
# word must belong to the shape or be one that does not change it. A name that fits several shapes is an
# error.


LONGEST = 64  # characters; the comparison is quadratic in length, and no known name is that long
_MOST_LISTED = 12

_ALIASES = data.table("aliases.toml")["models"]
OWNERS = set(_ALIASES["owners"])
IGNORED, _ONLY_IF_TYPED = set(_ALIASES["ignored"]), set(_ALIASES["only_if_typed"])


class NotUnderstood(ValueError):
    """An unknown or ambiguous name; `hint`: what to do."""

    def __init__(self, hint: str, ambiguous: bool = False) -> None:
        super().__init__(hint)
        self.hint = hint
        self.ambiguous = ambiguous

    def sentence(self, kind: str, shown: str) -> str:
        """`unknown model qwen1.5-7; did you mean qwen1.5-7b?`"""
        return f"{'ambiguous' if self.ambiguous else 'unknown'} {kind} {shown}; {self.hint}"


class Named(NamedTuple):
    """Any model, and the name it goes by here. `note`: why a name stands for another; empty: it does not."""

    name: str
    made: Decoder
    note: str = ""


def named(text: str, shapes: Mapping[str, Decoder] = SHAPES, otherwise: str = "") -> Named:
    """The model with a name; names of `shapes` in lower case match as they are.

    Raises NotUnderstood, with a hint from the same family. `otherwise`: what to do for an unknown shape.
    """
    name = text.strip().lower()
    if name in shapes:
        return Named(name, shapes[name])
    words = _words(name)
    if not words or len(text) > LONGEST:
        raise NotUnderstood(_see_list(otherwise))
    if quant := re.search(rf"[-_:. ]({'|'.join(sorted(ALL_QUANTS, key=len, reverse=True))})$", name):
        base = named(name[: quant.start()], shapes, otherwise)
        raise NotUnderstood(f"the shape is {base.name}; {quant[1]} is a quantization, which is named apart")
    core = words - IGNORED
    core -= {date for word, date in _ALIASES["released"].items() if word in core}
    of = {known: _words(known) - IGNORED for known in shapes}
    exact = [known for known in shapes if of[known] == core]
    names_family = core & _families(shapes) and not core & set(_ALIASES["first_is_another"])
    wider = [known for known in shapes if core < of[known]] if names_family else []
    found = exact or [known for known in wider if not (of[known] - core) & _ONLY_IF_TYPED]
    if len(found) == 1:
        return with_context(found[0], shapes[found[0]], words, tuned=":" in name)
    if found:
        few = len(found) <= _MOST_LISTED
        hint = did_you_mean(found) if few else f"{len(found)} are known: see harness theory --list-models"
        raise NotUnderstood(hint, ambiguous=True)
    raise NotUnderstood(_hint(name, core, of, otherwise))


def did_you_mean(names: Sequence[str]) -> str:
    return f"did you mean {listed(names, 'or')}?"


def listed(names: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    return f" {last} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _see_list(otherwise: str) -> str:
    return "see harness theory --list-models" + (f", or {otherwise}" if otherwise else "")


def _words(name: str) -> set[str]:
    """The words of a name in lower case; none of a path."""
    owner, slash, rest = name.rpartition("/")
    if slash and owner not in OWNERS:
        return set()
    return set(word_list(rest))


def word_list(name: str) -> list[str]:
    """The words of a name without an owner, in its order."""
    parts = re.split(r"[\s_:-]+", name)
    found = [re.fullmatch(r"([a-z]{2,})(\d[\d.]*)", part) for part in parts]
    pairs = [match.groups() if match else (part,) for match, part in zip(found, parts, strict=True)]
    return [word for pair in pairs for word in pair if word]


def _families(shapes: Iterable[str]) -> set[str]:
    """The words that names begin with: qwen, llama, mistral."""
    return {match[0] for name in shapes if (match := re.match("[a-z]+", name))} - _ONLY_IF_TYPED


def with_context(name: str, made: Decoder, words: set[str], tuned: bool) -> Named:
    """Tuned models and base models may differ in context alone. A tag of Ollama's is a tuned model."""
    suffix = "base" if "base" in words else "instruct" if tuned or "instruct" in words else None
    version = next((word for word in ("2", "2.5", "3") if word in words and "qwen" in words), "")
    differs = {(each["qwen"], each["kind"]): each["context"] for each in _ALIASES["contexts"]}
    context = differs.get((version, suffix or ""), made.context)
    if context == made.context or made is not SHAPES.get(name):
        return Named(name, made)
    return Named(f"{name}-{suffix}", replace(made, context=context))


def _hint(name: str, core: set[str], of: Mapping[str, set[str]], otherwise: str) -> str:
    """A suggestion from the same family, else what to do."""
    starts = {match[0] for word in re.split(r"[\s_:/-]+", name) if (match := re.match("[a-z]+", word))}
    unknown = (family for family in _ALIASES["not_known_yet"] if family.lower() not in _families(of))
    if other := next((family for family in unknown if family.lower() in starts), None):
        which = f"{other} is not known yet"
        if set(of) <= set(SHAPES):
            which = f"no {other} is among the dense models that can be run (harness theory knows more)"
        return which + (f"; {otherwise}" if otherwise else "")
    families = _families(of)
    family = core & families or {near for start in starts for near in alike(start, families)}
    inside = [known for known, words in of.items() if words & family]
    if within := [known for known in inside if of[known] < core]:
        closest = max(within, key=lambda known: len(of[known]))
        extra = " ".join(sorted(core - of[closest]))
        return f'{closest} is known, "{extra}" is not' + (f"; {otherwise}" if otherwise else "")
    if near := alike(name, inside):
        return did_you_mean(near)
    return _see_list(otherwise)


# Map machine names as people and NVML write them to the known machines, one per memory size. Pure.


_MACHINE_NAMES_ALIASES = data.table("aliases.toml")["machines"]
_MACHINE_NAMES_IGNORED, _OPTIONAL = (
    set(_MACHINE_NAMES_ALIASES["ignored"]),
    set(_MACHINE_NAMES_ALIASES["optional"]),
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
        if any(each.family == "cpu" or each.unified for each in found_once.values()):
            raise NotUnderstood("only GPUs with memory of their own can be several in a computer")
        return {f"{count}x-{key}": each.times(count) for key, each in found_once.items()}
    name = _marketed(text.strip()).lower()
    if name in known and known[name] is not MACHINES.get(name):
        return _with_memory(name, known[name], (memory,) if memory else _sizes(known[name]))
    if name not in MACHINES and len(name) <= LONGEST and (cpu := cpus.find(name)):
        return _of_cpu(*cpu, memory)
    words = _machine_names_words(name) if len(name) <= LONGEST else []
    typed = [gib for word in words if (gib := memory_gib(word))]
    rest = {word for word in words if not memory_gib(word)}
    if len(words) != len(set(words)) or len(typed) > 1 or not rest:
        raise NotUnderstood(_LIST)
    found = [key for key, chip in _chips().items() if chip.must <= rest <= chip.must | chip.may]
    if not found and re.match(r"-?[\d.]{1,2} ?x(?![a-z])", name):
        raise NotUnderstood("2 to 8 of a known GPU can be one machine, typed as in 2x-rtx-3090")
    if not found:
        raise NotUnderstood(_machine_names_hint(name, rest, [*known]))
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
    found = machines(text, known, memory)
    if len(found) > 1 and not (any_size and same_speed([*found.values()])):
        raise NotUnderstood(did_you_mean([*found]), ambiguous=True)
    return next(iter(found.values()))


@cache
def of_gpu(name: str | None, memory_bytes: int | None = None) -> Machine | None:
    """The known GPU of this name, as NVML spells it (`NVIDIA H100 80GB HBM3`); None for others, such as one
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


_speed_and_size = attrgetter("bandwidth_bytes_per_s", "flops", "memory_bytes")


def slowest(text: str, found: Mapping[str, Machine]) -> tuple[str, list[str]]:
    """The slowest machine with a name, of equally fast ones that with the least memory; and what to know of
    it: that there are others, or that it is several devices."""
    name = min(found, key=lambda each: _speed_and_size(found[each]))
    notes = []
    if len(found) > 1:
        by = "smallest" if same_speed([*found.values()]) else "slowest"
        notes.append(
            f"{text} is {listed([*found], 'or')}; the {by}, {name}, is taken: name another to change that"
        )
    if memory := found[name].assumed:
        gb_per_s = found[name].bandwidth_bytes_per_s / 1e9
        notes.append(
            f"{found[name].name} is taken with {memory}, {gb_per_s:.1f} GB/s: the fastest that its maker"
            " supports, on all channels (harness recommend has --memory-speed and --channels for another)"
        )
    if (count := found[name].count) > 1:
        notes.append(
            f"{text}: the memory of {count} GPUs, whose layers take turns, at the bandwidth of one; not"
            " measured, and without what the transfers between them take"
        )
    return name, notes


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
_SEVERAL = re.compile(r"([2-8]) ?x[ -]?(?=\w)")


def _machine_names_words(name: str) -> list[str]:
    for pattern, plain in _MACHINE_NAMES_ALIASES["spellings"]:
        name = re.sub(pattern, plain, name)
    return [word for word in re.split(r"[\s_/-]+", name) if word and word not in _MACHINE_NAMES_IGNORED]


@cache
def _chips() -> dict[str, _Chip]:
    """The chip of each shipped machine, by the machine's key."""
    found = {}
    for key in MACHINES:
        of_key = _MACHINE_NAMES_ALIASES["words"].get(key, {})
        words = {word for word in _machine_names_words(key) if not memory_gib(word)}
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


def _machine_names_hint(name: str, rest: set[str], known: Sequence[str]) -> str:
    """A suggestion from the same family, else what to do."""
    own = "--from and ~/.config/harness/machines.toml take your own"
    if 0 < len(wider := [key for key, chip in _chips().items() if rest < chip.must]) <= _MOST_LISTED:
        return did_you_mean(wider)
    if within := [key for key, chip in _chips().items() if chip.must < rest]:
        closest = max(within, key=lambda key: len(_chips()[key].must))
        extra = " ".join(sorted(rest - _chips()[closest].must - _chips()[closest].may))
        return f'{closest} is known, "{extra}" is not; {own}'
    plain = re.sub(r"[\s_-]+", "-", re.sub(r"\b(?:nvidia|geforce|amd)\b", " ", name).strip())
    spelled = {part: key for key in known for part in (key, key.partition("-")[2]) if part[:3] == plain[:3]}
    if near := alike(plain, spelled):
        return did_you_mean([spelled[near[0]]])
    return f"{_LIST}; {own}"

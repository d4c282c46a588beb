"""CPUs by name, from data/cpus.toml: the fastest memory that their maker supports. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from harness.base import data
from harness.theory.machines import CITED, DOCUMENTS, Figure, Machine
from harness.theory.quantities import memory_in_name

CHANNEL_BYTES = 8  # a transfer on a channel of 64 bits
USUAL_CHANNELS = 2  # of desktops and laptops
_CALLED = [  # spellings, replaced one after the other in a name in lower case
    (r"\([^)]*\)", " "),  # (R), (TM)
    (r"@.*|\bw(?:/|ith) ?radeon.*", " "),  # a clock, the graphics in it
    (r"\b\d+(?:st|nd|rd|th) gen\b|\b\w+[- ]cores?\b", " "),
    (r"\br([3579])[ -](?=\d{4})", r"ryzen \1 "),
    (r"(?<=\d)(v\d)\b", r" \1"),
]
_CLASSES = {"3", "5", "7", "9", "i3", "i5", "i7", "i9", "e5"}
_IGNORED = {"0", "amd", "cpu", "intel", "processor"}


@dataclass(frozen=True)
class Cpu:
    """`memory`: its fastest, such as DDR5-5200; `channels`: of 64 bits. `kind`: as a machine's."""

    name: str
    memory: str
    channels: int
    kind: str
    source: str

    @property
    def words(self) -> set[str]:
        return set(_words(self.name))

    @property
    def number(self) -> set[str]:
        """The words that a name of it must have: its model number, and version."""
        return {word for word in self.words - _CLASSES if re.search(r"\d", word)}

    def with_memory(self, gib: float) -> Machine:
        mt_per_s = int(self.memory.partition("-")[2])
        buses = f"{self.channels} x 64 bits x {mt_per_s:,} MT/s"
        return Machine(
            name=self.name,
            memory=Figure(int(gib * 2**30), "as given"),
            bandwidth=Figure(bytes_per_s(mt_per_s * 1e6, self.channels), f"{buses}: {self.source}"),
            rates={},
            rate="",
            cpu_kind=self.kind,
            channels=self.channels,
            assumed=f"{self.memory} on {self.channels} channel{'s' * (self.channels > 1)}",
        )


def with_speed(cpu: Machine, transfers_per_s: float, channels: int | None) -> Machine:
    """A CPU with memory of this speed. `channels`: None for all that it has."""
    bandwidth = Figure(bytes_per_s(transfers_per_s, channels or cpu.channels), "given")
    return replace(cpu, bandwidth=bandwidth, peak_bandwidth=None, assumed="")


def bytes_per_s(transfers_per_s: float, channels: int) -> float:
    return transfers_per_s * CHANNEL_BYTES * channels


def find(text: str) -> tuple[Cpu, float | None] | None:
    """The CPU with a name as people and /proc/cpuinfo write it, and the GiB of memory that stand beside it;
    None for others. A number alone is no name."""
    sizes, name = memory_in_name(text)
    typed = _words(name)
    words = set(typed)
    if len(sizes) > 1 or all(word.isdigit() for word in words):
        return None
    for cpu in (cpu for word in typed for cpu in _by_number().get(word, ())):
        if cpu.number <= words <= cpu.words:
            return cpu, sizes[0] if sizes else None
    return None


def _words(name: str) -> list[str]:
    name = name.lower()
    for pattern, plain in _CALLED:
        name = re.sub(pattern, plain, name)
    return [word for word in re.split(r"[\s_-]+", name) if word and word not in _IGNORED]


@cache
def _by_number() -> dict[str, list[Cpu]]:
    by_number: dict[str, list[Cpu]] = {}
    for cpu in known():
        for word in cpu.number:
            by_number.setdefault(word, []).append(cpu)
    return by_number


@cache
def known() -> Sequence[Cpu]:
    series = dict(data.table("cpus.toml"))
    documents = series.pop(DOCUMENTS)
    return [
        Cpu(
            name=f"{row['brand']} {model}",
            memory=row["memory"],
            channels=row["channels"],
            kind=row.get("kind", ""),
            source=CITED.sub(lambda citation: documents[citation[1]], row["source"]),
        )
        for row in series.values()
        for model in row["models"]
    ]

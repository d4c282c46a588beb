"""Machines by name, from data/machines.toml: memory, bandwidth, rates, each figure with its source. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from harness import data
from harness.theory.machine import Bus, Figure, Machine

DOCUMENTS = "documents"
"""The table of sources that several records name."""
CITED = re.compile(r"\{([^{}]*)\}")
"""A document, or the record's `source`, inside another source."""


class Machines(Mapping[str, Machine]):
    """The shipped machines, and `own`, which override them. A record is read when its machine is asked for:
    all of them take 20 ms, one less than 1 ms."""

    def __init__(self, own: Mapping[str, Machine] | None = None) -> None:
        self._own = dict(own or {})

    def with_own(self, own: Mapping[str, Machine]) -> Machines:
        return Machines({**self._own, **own})

    def __getitem__(self, name: str) -> Machine:
        return self._own[name] if name in self._own else _shipped(name)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in _records() if name != DOCUMENTS)
        yield from (name for name in self._own if name not in _records())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._own or (name in _records() and name != DOCUMENTS)


MACHINES = Machines()


def machine(record: Mapping[str, Any], documents: Mapping[str, str]) -> Machine:
    """A machine of a record in the form of data/machines.toml. Raises KeyError for an unknown document."""
    sources: Mapping[str, str] = record.get("sources", {})

    def source(what: str) -> str:
        cited = CITED.sub(lambda found: documents[found[1]], record.get("source", ""))
        own = CITED.sub(lambda found: {"source": cited, **documents}[found[1]], sources.get(what, ""))
        return own or cited

    def bytes_per_s(what: str) -> Figure:
        return Figure(float(round(record[f"{what}_gb_per_s"] * 1e9)), source(what))

    rates = {
        rate: Figure(float(round(tera * 1e12)), source(rate))
        for rate, tera in record.get("tflops", {}).items()
    }
    family, capability = record["family"], record.get("compute_capability")
    peak = bytes_per_s("peak_bandwidth") if "peak_bandwidth_gb_per_s" in record else None
    bandwidth, bus = bytes_per_s("bandwidth"), record.get("bus_bits")
    major, _, minor = (capability or "").partition(".")
    return Machine(
        name=record["name"],
        memory=Figure(int(record["memory_gib"] * 2**30), source("memory")),
        bandwidth=bandwidth,
        rates=rates,
        rate=next(iter(rates), ""),
        compute_capability=(int(major), int(minor)) if capability else None,
        peak_bandwidth=peak,
        board=record.get("board", False),
        unified=record.get("unified", False),
        gpu_api=family if family not in ("cuda", "cpu") else None,
        memory_bus=Bus(bus, record["bus_mt_per_s"], (peak or bandwidth).source) if bus else None,
        sold_gib=tuple(record.get("sold_gib", ())),
    )


@cache
def _shipped(name: str) -> Machine:
    return machine(data.parsed(_records()[name]), _documents())


@cache
def _documents() -> dict[str, str]:
    return data.parsed(_records()[DOCUMENTS])


@cache
def _records() -> dict[str, str]:
    """The text of every table of the file, by its heading."""
    _, *parts = re.split(r"^\[([^]]+)\]$", data.text("machines.toml"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))

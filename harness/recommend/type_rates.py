"""How fast a CPU multiplies each type of weights: measured by a probe of ggml, kept, and given to traits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.predict.traits import GGML, Traits
from harness.recommend.kinds import NOT_REPACKED

FOLDER, NAME = "recommended", "types.jsonl"  # in the results folder
Rates = Mapping[str, float]
"""Bytes of weights per second by ggml's type, in the layout that llama.cpp uses."""


def keep(
    results: Path, device: str, threads: int, measured: Mapping[str, Mapping[str, float | None]]
) -> None:
    """Append what a probe measured on a device. Raises OSError."""
    (results / FOLDER).mkdir(parents=True, exist_ok=True)
    with (results / FOLDER / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"device": device, "threads": threads, "rates": measured}) + "\n")


def kept(results: Path, device: str, threads: int) -> Rates:
    """The best of those measured on a device with so many threads, by type: other processes only slow them.
    Empty without any. A damaged line does not count."""
    try:
        lines = (results / FOLDER / NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    found: dict[str, float] = {}
    for line in lines:
        try:
            each = json.loads(line)
            if (each["device"], each["threads"]) == (device, threads):
                for name, rate in each["rates"].items():
                    found[name] = max(found.get(name, 0.0), _used(rate))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def _used(rate: Mapping[str, Any]) -> float:
    """Of the layout that llama.cpp uses: a repacked one where there is one. Raises ValueError."""
    used = float(rate["repacked_bytes_per_s"] or rate["bytes_per_s"])
    if not 0 < used < 1e15:
        raise ValueError(used)
    return used


def given(traits: Traits, rates: Rates) -> Traits:
    """With the time of a step's weights by these rates, where all of its types have one."""
    on_cpu = traits.engine == GGML and traits.family == "cpu" and not traits.group.endswith(NOT_REPACKED)
    if not on_cpu or not traits.of_types or any(name not in rates for name, _ in traits.of_types):
        return traits
    weights_s = sum(size / rates[name] for name, size in traits.of_types)
    others = traits.read_bytes - sum(size for _, size in traits.of_types)
    return replace(traits, multiply_s=weights_s + others / traits.bytes_per_s)

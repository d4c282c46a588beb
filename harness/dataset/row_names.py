"""Unique names for the rows of one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from harness.analysis.columns import (
    Identity,
)
from harness.analysis.identity import SERVER
from harness.base.nvml import UUIDS

R = TypeVar("R", bound=Identity)


def synthetic(row: Mapping[str, Any]) -> bool:
    """Whether guesses were accepted whatever they were, so that its text is not the model's."""
    return bool((row.get("speculation") or {}).get("synthetic"))


def with_unique_names(rows: Sequence[R]) -> list[R]:
    """The rows with a unique `name`: model, stack, variant, the workload unless it is a decode, synthetic
    acceptance, and the device unless it is a CPU or a server's: of several NVIDIA cards a part of the UUID.
    Six characters of the content key follow where rows differ only in tokens, versions or machines."""
    cards = {device for row in rows if (device := str(row["device"])).startswith(UUIDS)}

    def plain(row: Identity) -> str:
        card = "cuda" if len(cards) == 1 else str(row["device"])[:12]
        is_plain = row["device"] in ("cpu", SERVER)
        device = "" if is_plain else f" on {card if row['device'] in cards else row['device']}"
        workload = row.get("workload", "decode")
        other = f" {workload}" if workload != "decode" else ""
        other += " (synthetic acceptance)" * synthetic(row)
        return f"{row['model']} {row['stack']} {row['variant']}{other}{device}"

    names = Counter(plain(row) for row in rows)
    named = [row.copy() for row in rows]
    for row in named:
        row["name"] = plain(row) + (f" ({row['content_key'][:6]})" if names[plain(row)] > 1 else "")
    return named

"""Where llama.cpp rotates positions otherwise than the model's config.json says. Pure."""

from __future__ import annotations

from harness.analysis.records.flags import Flag
from harness.results.kinds import Record


def clause(record: Record) -> str | None:
    """Null where it does not."""
    off = record["model"]["weights"].get("yarn_difference")
    if not off:
        return None
    return (
        f"llama.cpp rounds YaRN's range, which the model's config.json rules out (truncate: false): rotary"
        f" frequencies are up to {off:.0%} off, so it computes another model than transformers"
    )


def notes(record: Record) -> list[Flag]:
    found = clause(record)
    return [Flag("yarn_rounded", f"{found}, at the same speed", invalidates=None)] if found else []

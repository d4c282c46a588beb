"""How a study was measured, as headings and plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis import (
    time_split,
    traffic,
)
from harness.analysis.columns import Cell
from harness.base.text import plural
from harness.records import Stored
from harness.records.kinds import Record, loaded_of


def attention(cells: Sequence[Cell]) -> dict[str, object]:
    """Cost of context per stack, across its models: a fixed cost, and the bandwidth of KV cache reads."""
    lines = []
    for budget in time_split.budgets(cells):
        if budget.of == "W" and budget.bytes_per_s:
            fixed = (
                f"{budget.fixed_ms * 1e6:.0f} ns per token of context"
                if budget.fixed_ms > 0
                else "no fixed cost"
            )
            rate = f"{budget.bytes_per_s / 1e9:,.0f} GB/s of KV cache"
            if budget.bytes_per_s > (sheet := _data_sheet(cells, budget.group)):
                rate += f", above the {sheet / 1e9:,.0f} of the data sheet: the models' slopes do not fix it"
            lines.append(f"{', '.join(budget.group)}: {fixed}, and {rate} ({plural(budget.cells, 'cell')}).")
    return {"Cost of context": lines} if lines else {}


def _data_sheet(cells: Sequence[Cell], group: tuple[str | None, ...]) -> float:
    """Bandwidth of the data sheet of a stack, machine and device, bytes/s; infinite where unknown."""
    bandwidths = (
        W * 1e3 * kv
        for row in cells
        if (row["stack"], row["machine"], row["device"]) == group
        and (W := row["W_theory_tokens_per_ms"])
        and (kv := row["kv_bytes_per_token"]) is not None
    )
    return max(bandwidths, default=float("inf"))


def methods(stored: Sequence[Stored], probes: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """How the records were measured, and the commands that repeat it; differing values are all listed.
    `probes`: read bandwidths of each machine, bytes/s."""

    def distinct(values: Sequence[object]) -> list[object]:
        return list({str(value): value for value in values if value}.values())

    records = [stored_record.record for stored_record in stored]
    ours = [record for record in records if record["kind"] != "reported"]
    loaded = [record for record in ours if record["kind"] == "measured" or record.get("loaded")]
    sources = [
        f"{source['title']}, {source['url']}, {source['license']}"
        for record in records
        if (source := record.get("source"))
    ]
    methods: dict[str, object] = {
        "Sources": distinct(sources),
        "Protocol": distinct([record.get("protocol") for record in ours]),
        "Stacks": distinct([_versions(record) for record in loaded]),
        "Read bandwidth": [f"{slug}: {traffic.spread(rates)}" for slug, rates in probes.items() if rates],
        "Harness": distinct([record.get("harness") for record in ours]),
        "To repeat it": distinct([" ".join(r["campaign"].get("command_line") or []) for r in ours]),
    }
    return {heading: content for heading, content in methods.items() if content}


def _versions(record: Record) -> str | None:
    versions = loaded_of(record).get("versions")
    listed = (
        ", ".join(f"{name} {version}" for name, version in versions.items()) if versions else "not loaded"
    )
    adopted = (record.get("environment") or {}).get("adopted") or {}
    pins = "; not pinned" if adopted.get("pins_not_met") else ""
    return f"{record['stack']}: {listed}{pins}"

"""Searches for the longest context -> rows: predicted and verified lengths, and the probes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.analysis.records import traffic
from harness.analysis.records.identity import identity, weights
from harness.analysis.records.verdicts import USABLE, status
from harness.results.kinds import Record
from harness.results.kinds.searched import Probe

Row = dict[str, Any]

COPIED = (
    *("predicted_n_ctx", "predicted_allocated_n_ctx", "verified_n_ctx", "verified_by", "allocated_n_ctx"),
    *("limit_reason", "limit_bytes", "limit_stated", "not_filled", "granule", "need", "predicted_from"),
)


def row(record: Record) -> Row:
    """One search as a flat row. Missing values are null.

    `verified_by`: decode (at the end of a filled context) or allocation. `live_probes`: how many contexts
    were allocated. `search_s`: time without filling them.
    """
    state, reasons = status(record)
    search = record["search"]
    probes, budget = search["probes"], record.get("memory_budget")
    fill_s = sum(probe.get("fill_s") or 0.0 for probe in probes)
    all_s = search.get("account_s", 0.0) + sum(probe["seconds"] for probe in probes)
    return {
        **identity(record),
        "kind": record["kind"],
        "weights": weights(record),
        "status": state,
        "reasons": reasons,
        **{name: search.get(name) for name in COPIED},
        # An unfinished search has no result, whatever its probes found.
        **({} if state in USABLE else {"verified_n_ctx": None, "verified_by": None}),
        "model_bytes": traffic.model_bytes(record),
        "weight_bytes_per_token": traffic.weight_bytes_per_token(record),
        "kv_bytes_per_token": traffic.kv_bytes_per_token(record),
        "memory_budget_bytes": budget and budget["bytes"],
        "budget_means": budget and budget["means"],
        "live_probes": len(probes),
        "fill_s": fill_s,
        "search_s": all_s - fill_s,
        "speed_ratio": _at(probes, search.get("verified_n_ctx"), "speed_ratio"),
        "probes": probes,
    }


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last search per content key, in order of first appearance."""
    found: dict[str, Row] = {}
    for each in sorted(rows, key=lambda row: str(row["started_utc"])):
        found[each["content_key"]] = each
    return [found[key] for key in dict.fromkeys(row["content_key"] for row in rows)]


def _at(probes: Sequence[Probe], n_ctx: int | None, key: str) -> Any:
    return next((p.get(key) for p in reversed(probes) if p["n_ctx"] == n_ctx and p["fits"]), None)

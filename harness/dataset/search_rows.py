"""Searches for the longest context as rows: predicted and verified lengths, and the probes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from harness.analysis import (
    traffic,
)
from harness.analysis.columns import (
    Identity,
    Search,
)
from harness.analysis.identity import identity, weights
from harness.analysis.verdicts import USABLE, beyond_trained, status
from harness.analysis.warnings import Flag
from harness.records.kinds import Record, loaded_of
from harness.records.searched import Probe

R = TypeVar("R", bound=Identity)


def search_row(record: Record) -> Search:
    """One search as a flat row. Missing values are None.

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
        "predicted_n_ctx": search.get("predicted_n_ctx"),
        "predicted_allocated_n_ctx": search.get("predicted_allocated_n_ctx"),
        # An unfinished search has no result, whatever its probes found.
        "verified_n_ctx": search.get("verified_n_ctx") if state in USABLE else None,
        "verified_by": search.get("verified_by") if state in USABLE else None,
        "allocated_n_ctx": search.get("allocated_n_ctx"),
        "limit_reason": search.get("limit_reason"),
        "limited_by": search.get("limited_by"),
        "limit_bytes": search.get("limit_bytes"),
        "limit_stated": search.get("limit_stated"),
        "not_filled": search.get("not_filled"),
        "trained_context": loaded_of(record).get("trained_context"),
        "flags": [flag.row() for flag in searches_notes(record)] if state in USABLE else [],
        "granule": search.get("granule"),
        "need": search.get("need"),
        "predicted_from": search.get("predicted_from"),
        "model_bytes": traffic.model_bytes(record),
        "weight_bytes_per_token": traffic.weight_bytes_per_token(record),
        "kv_bytes_per_token": traffic.kv_bytes_per_token(record),
        "memory_budget_bytes": budget and budget["bytes"],
        "budget_means": budget and budget["means"],
        "live_probes": len(probes),
        "fill_s": fill_s,
        "search_s": all_s - fill_s,
        "speed_ratio": _speed_ratio(probes, search.get("verified_n_ctx")),
        "probes": probes,
    }


def searches_notes(record: Record) -> list[Flag]:
    """Notes on the length that a search found."""
    return beyond_trained(loaded_of(record), record["search"].get("verified_n_ctx"), "memory holds")


def trained_mark(search: Mapping[str, object]) -> str:
    """Follows a length at which the trained context ended a search, not the memory; else empty."""
    at_trained = search.get("limited_by") == "trained context"
    return " (trained context)" * (at_trained and search.get("verified_n_ctx") is not None)


def latest_searches(rows: Sequence[R]) -> list[R]:
    """The last row per content key, in order of first appearance."""
    latest: dict[str, R] = {}
    for search in sorted(rows, key=lambda row: str(row["started_utc"])):
        latest[search["content_key"]] = search
    return [latest[key] for key in dict.fromkeys(row["content_key"] for row in rows)]


def _speed_ratio(probes: Sequence[Probe], n_ctx: int | None) -> float | None:
    return next((p.get("speed_ratio") for p in reversed(probes) if p["n_ctx"] == n_ctx and p["fits"]), None)

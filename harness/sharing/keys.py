"""The content key of a shared record: made of what the record says, so that everybody can compute it. Pure.

A campaign's own key is made of paths, UUIDs and sources of weights, which a bundle does not have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from harness.results.kinds import Record

_WEIGHTS = (
    "kind",
    "seed",
    "repo",
    "revision",
    "fingerprint",
    "quant",
    "format",
    "synthetic",
    "header",
    "packing",
)
_ENVIRONMENT = ("name", "variables", "toolkit", "lock", "adopted")


def shared(record: Record) -> str | None:
    """The key of its cell, options, build, versions, weights, machine and device; null where they are not
    known: it never got ready to run, or it is a check or a published figure."""
    environment: dict[str, Any] = dict(record.get("environment") or {})
    if record["kind"] not in ("measured", "searched") or not environment or "options" not in record:
        return None
    protocol: dict[str, Any] = record.get("protocol") or {}
    weights: dict[str, Any] = dict(record["model"]["weights"])
    budget: dict[str, Any] = dict(record.get("memory_budget") or {})
    facts = [
        *(record["cell"], record["stack"], record["variant"], record["asked"].get("options")),
        *(record["options"], record.get("threads"), record["model"]["name"], record["model"].get("shape")),
        [weights.get(name) for name in _WEIGHTS],
        [environment.get(name) for name in _ENVIRONMENT],
        *(record["workload"], record["machine"]["slug"], record.get("device")),
        *(protocol.get("memory_budget"), budget.get("means")),
        protocol.get("timeout_s") if record["kind"] == "searched" else None,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def by_own(records: Sequence[Record], after: Sequence[Record]) -> dict[str, str]:
    """The shared key for each content key of some records; `after`: the same records as they are shared. None
    for a key whose records have several shared keys, or share theirs with another."""
    found: dict[str, set[str]] = {}
    for record, anonymous in zip(records, after, strict=True):
        if (key := shared(anonymous)) is not None:
            found.setdefault(record["content_key"], set()).add(key)
    once = {own: keys.pop() for own, keys in found.items() if len(keys) == 1}
    return {own: key for own, key in once.items() if [*once.values()].count(key) == 1}

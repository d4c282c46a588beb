"""How far a generation grew before memory ran out, and what of the free memory its cache had then. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = dict[str, Any]


def answers(record: Record) -> bool:
    """Whether memory that ran out is the answer, not a failure: of a generation that was to grow, once it
    decoded."""
    ran_out = record["workload"]["kind"] == "grow" and record["outcome"] == "oom"
    return bool(ran_out and record["tokens"])


def stopped(record: Record) -> str | None:
    """What ended a generation that was to grow before its target, in the words of who ended it; else null."""
    return record.get("reason") if answers(record) else (record.get("done") or {}).get("stopped")


def row(record: Record, device_bytes: int | None, kv_bytes_per_token: float | None) -> dict[str, Any]:
    """`max_ctx`: tokens of prompt and decode that were held, the last of them at least; `max_ctx_is_target`:
    it was told to go no further; `limit_reason`: what ended it. `kv_share_of_free`: the cache at the end, of
    what was free of the device, or the budget, when the model was loaded. Null for other workloads."""
    found: dict[str, Any] = dict.fromkeys(("max_ctx", "limit_reason", "kv_share_of_free"))
    found["max_ctx_is_target"] = False
    ended = record["outcome"] == "ok" or answers(record)
    if record["workload"]["kind"] != "grow" or not ended:
        return found
    length, why = record["workload"]["prompt_tokens"] + record["tokens"], stopped(record)
    found |= {"max_ctx": length, "limit_reason": why, "max_ctx_is_target": why is None}
    free = _free_when_loaded(record, device_bytes)
    if free and kv_bytes_per_token:
        found["kv_share_of_free"] = kv_bytes_per_token * length / free
    return found


def _free_when_loaded(record: Record, device_bytes: int | None) -> int | None:
    """Bytes of the budget that no anonymous memory had, or of the device that nobody had."""
    marks: Mapping[str, Record] = {mark["at"]: mark for mark in record.get("memory", {}).get("marks", [])}
    loaded, budget = marks.get("loaded", {}), (record.get("memory_budget") or {}).get("bytes")
    if record.get("device") == "cpu":
        limit, taken = budget, loaded.get("rss_anon_bytes")
    else:
        limit, taken = device_bytes, loaded.get("vram_bytes")
    return limit - taken if limit is not None and taken is not None and taken < limit else None

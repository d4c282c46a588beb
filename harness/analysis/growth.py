"""How far a growing generation got before memory ran out, and its cache's share of the free memory. Pure."""

from __future__ import annotations

from harness.analysis.columns import Growth
from harness.records.kinds import Record, done_of, memory_of


def ended_by_memory(record: Record) -> bool:
    """Whether running out of memory is the result, not a failure: a `grow` workload that decoded a token."""
    ran_out = record["workload"]["kind"] == "grow" and record["outcome"] == "oom"
    return bool(ran_out and record["tokens"])


def growth_stopped(record: Record) -> str | None:
    """Why a `grow` workload ended before its target, in the reporter's words; None where it did not."""
    return record.get("reason") if ended_by_memory(record) else done_of(record).get("stopped")


def growth_row(record: Record, device_bytes: int | None, kv_bytes_per_token: float | None) -> Growth:
    """Results of a `grow` workload; all None for others.

    `max_ctx`: tokens of prompt and decode, a lower bound. `max_ctx_is_target`: it reached its target.
    `limit_reason`: what ended it. `kv_share_of_free`: size of the KV cache at the end over the memory free
    once the model was loaded: of the budget, less anonymous memory; or of the device.
    """
    row = Growth(max_ctx=None, limit_reason=None, kv_share_of_free=None, max_ctx_is_target=False)
    ended = record["outcome"] == "ok" or ended_by_memory(record)
    if record["workload"]["kind"] != "grow" or not ended:
        return row
    length, why = record["workload"]["prompt_tokens"] + record["tokens"], growth_stopped(record)
    row |= {"max_ctx": length, "limit_reason": why, "max_ctx_is_target": why is None}
    loaded = next((mark for mark in memory_of(record).get("marks", []) if mark["at"] == "loaded"), None)
    budget = record.get("memory_budget")
    if record.get("device") == "cpu":
        limit, taken = budget and budget["bytes"], loaded and loaded["rss_anon_bytes"]
    else:
        limit, taken = device_bytes, loaded and loaded["vram_bytes"]
    if kv_bytes_per_token and limit is not None and taken is not None and taken < limit:
        row["kv_share_of_free"] = kv_bytes_per_token * length / (limit - taken)
    return row

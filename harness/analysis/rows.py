"""Records -> rows: one flat object per repeat, as lists and reports show it, and their medians per cell.
Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from harness.analysis import traffic
from harness.analysis.fit import Fit, fit
from harness.analysis.verdicts import status

Record = dict[str, Any]
Row = dict[str, Any]

MEDIANS = (
    "ttft_ms",
    "B_ms",
    "bpw",
    "weight_bytes_per_token",
    "start_tokens_per_s",
    "end_tokens_per_s",
    "bandwidth_share",
)


def row(record: Record, series: dict[str, list[int]], series_path: str | None, ceiling: float | None) -> Row:
    """One repeat. Missing is null; names carry units; `ceiling`: bytes/s its share of the bandwidth is taken
    of."""
    state, reasons = status(record, ceiling, has_series=bool(series))
    line = fit(series["n"], series["latency_ns"]) if series else Fit()
    loaded = record.get("loaded") or {}
    weights = record["model"]["weights"]
    synthetic = weights.get("synthetic", weights["kind"] == "synthetic")
    return {
        "cell": record["cell"],
        "repeat": record["repeat"],
        "model": record["model"]["name"],
        "stack": record["stack"],
        "variant": record["variant"],
        "weights": "synthetic" if synthetic else record["model"]["weights"]["kind"],
        "status": state,
        "reasons": reasons,
        "started_utc": record["started_utc"],
        "machine": record["machine"]["slug"],
        "device": record.get("device", record["asked"]["device"]),
        "content_key": record["content_key"],
        "prompt_tokens": record["workload"]["prompt_tokens"],
        "new_tokens": record["workload"]["new_tokens"],
        "tokens": record["tokens"],
        "n_ctx": (loaded.get("options") or {}).get("n_ctx"),
        "ttft_ms": line.ttft_ms,
        "B_ms": line.B_ms,
        "W_tokens_per_ms": line.W_tokens_per_ms,
        "start_tokens_per_s": line.start_tokens_per_s,
        "end_tokens_per_s": line.end_tokens_per_s,
        "bpw": traffic.bpw(record),
        "model_bytes": traffic.model_bytes(record),
        "weight_bytes_per_token": traffic.weight_bytes_per_token(record),
        "kv_bytes_per_token": traffic.kv_bytes_per_token(record),
        "bandwidth_share": traffic.bandwidth_share(record, ceiling),
        "bandwidth_bytes_per_s": ceiling,
        "bandwidth_probes_bytes_per_s": [p["read_bytes_per_s"] for p in record.get("bandwidth_probes", [])],
        "peak_rss_bytes": peak_rss_bytes(record),
        "peak_vram_bytes": record["memory"].get("peak_vram_bytes"),
        "series": series_path,
    }


def peak_rss_bytes(record: Record) -> int | None:
    """The highest of what the samples, the kernel's high-water mark and wait4 saw."""
    memory, done = record["memory"], record.get("done") or {}
    seen = (
        memory.get("peak_rss_bytes"),
        done.get("peak_rss_bytes"),
        (memory.get("rusage") or {}).get("max_rss_bytes"),
    )
    return max((int(value) for value in seen if value), default=None)


def per_cell(rows: Sequence[Row]) -> list[Row]:
    """One row a cell, machine, device and set of versions (content key), in order of first appearance:
    medians over its ok repeats, or what became of the others. Of a repeat measured again the latest
    counts."""
    latest: dict[tuple[str, int], Row] = {}
    for each in sorted(rows, key=lambda r: str(r["started_utc"])):
        latest[each["content_key"], each["repeat"]] = each
    grouped: dict[str, list[Row]] = {}
    for each in rows:
        if latest[each["content_key"], each["repeat"]] is each:
            grouped.setdefault(each["content_key"], []).append(each)
    return [_pooled(repeats) for repeats in grouped.values()]


def _pooled(repeats: list[Row]) -> Row:
    ok = [r for r in repeats if r["status"] == "ok"]
    shown = ok or repeats
    pooled = dict(shown[-1]) | {"repeats_ok": len(ok), "repeats": len(repeats)}
    for name in MEDIANS:
        values = [r[name] for r in shown if r[name] is not None]
        pooled[name] = statistics.median(values) if values else None
    # No W is a slope that is not positive: more tokens per ms than any number.
    W = statistics.median(math.inf if r["W_tokens_per_ms"] is None else r["W_tokens_per_ms"] for r in shown)
    pooled["W_tokens_per_ms"] = W if math.isfinite(W) else None
    pooled["peak_rss_bytes"] = max((r["peak_rss_bytes"] for r in shown if r["peak_rss_bytes"]), default=None)
    pooled["ok_series"] = [r["series"] for r in ok if r["series"]]
    pooled["reasons"] = list(dict.fromkeys(reason for r in repeats for reason in r["reasons"]))
    return pooled

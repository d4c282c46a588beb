"""Records -> rows: one flat object per repeat, and their summary per cell. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.records import energy, grow_results, sensor_summary, traffic
from harness.analysis.records.disturbances import counting
from harness.analysis.records.flags import Flag, Limit, flags, identical, published, same_changes
from harness.analysis.records.identity import device, identity, weights
from harness.analysis.records.verdicts import USABLE, notes, verdict
from harness.analysis.series import intervals, latency
from harness.analysis.series.latency import Analysis, Unusable
from harness.analysis.series.line import Floats
from harness.results.kinds import Record, done_of, loaded_of, memory_of
from harness.results.kinds.parts import StackFacts
from harness.results.token_times import NO_TOKENS, TokenTimes

Row = dict[str, Any]

MEDIANS = (
    *("ttft_ms", "nominal_bits", "bpw", "weight_bytes_per_token"),
    *("tokens_per_s", "start_tokens_per_s", "end_tokens_per_s"),
    *("bandwidth_share", "B_ratio", "W_ratio", "B_measured_ratio", "W_measured_ratio", "B_as_w16_ms"),
    *("W_declared_ratio", "W_declared_measured_ratio", "loaded_bytes"),
    *("robust_B_ms", "robust_W_tokens_per_ms", "slow_from_n", "median_ms"),
    *("joules_per_token", "hottest_c", "median_clock_mhz"),
)


def row(record: Record, times: TokenTimes, series_path: str | None, ceiling: float | None) -> Row:
    """One repeat as a flat row; missing values are null. `times`: of its tokens. `ceiling`: read bandwidth
    measured on its machine, in bytes/s."""
    reported = record.get("reported") or {}
    judged = verdict(record, ceiling, has_series=bool(times), times=times)
    state, reasons, disturbed = judged.status, judged.reasons, judged.disturbed
    # A `grow` run that ran out of memory gives a length; its latencies are not valid.
    found, unusable = _analysis(NO_TOKENS if grow_results.ended_by_memory(record) else times)
    if unusable:
        state, reasons, disturbed = "invalid", [*reasons, f"its series is unusable: {unusable}"], None
    figures = latency.row(found)
    limits = traffic.limits(record, ceiling)
    loaded = loaded_of(record)
    raised = notes(record)
    if times and not unusable:
        raised += flags(found, _higher(limits), _expected(record), loaded.get("kv_read"))
    # A fault of the slope alone keeps B of published figures, but invalidates our measurements.
    invalidating = [
        f for f in raised if f.invalidates == "all" or (f.invalidates == "W" and record["kind"] == "measured")
    ]
    if state in USABLE and invalidating:
        state, reasons = "invalid", [*reasons, *(flag.detail for flag in invalidating)]
    if any(flag.invalidates == "first token" for flag in raised):
        figures["first_token_ms"] = None
    if loaded.get("kv_read") == "full":
        figures["W_identifiable"] = False
    growth = grow_results.row(record, device_memory_bytes(record), traffic.kv_bytes_per_token(record))
    memory_budget = record.get("memory_budget")
    result = {
        **identity(record),
        "kind": record["kind"],
        "source": record.get("source"),
        "repeat": record["repeat"],
        "attempt": record.get("attempt", 1),
        "disturbed": disturbed,
        "weights": weights(record),
        "status": state,
        "reasons": reasons,
        "flags": [flag.row() for flag in raised],
        "device_memory_bytes": device_memory_bytes(record),
        "memory_budget_bytes": memory_budget and memory_budget["bytes"],
        "budget_means": memory_budget and memory_budget["means"],
        "workload": record["workload"]["kind"],
        "prompt_tokens": record["workload"]["prompt_tokens"],
        "new_tokens": record["workload"]["new_tokens"],
        "tokens": record["tokens"],
        "n_ctx": (loaded.get("options") or {}).get("n_ctx"),
        "kv_read": loaded.get("kv_read"),
        "ttft_ms": figures.pop("first_token_ms"),
        **figures,
        "bpw": traffic.bpw(record),
        "nominal_bits": traffic.nominal_bits(loaded.get("quant")),
        "model_bytes": traffic.model_bytes(record),
        "weight_bytes_per_token": traffic.weight_bytes_per_token(record),
        "kv_bytes_per_token": traffic.kv_bytes_per_token(record),
        "bandwidth_share": traffic.bandwidth_share(record, ceiling),
        "bandwidth_bytes_per_s": ceiling,
        "bandwidth_probes_bytes_per_s": [p["read_bytes_per_s"] for p in record.get("bandwidth_probes", [])],
        "peak_rss_bytes": peak_rss_bytes(record),
        "peak_vram_bytes": memory_of(record).get("peak_vram_bytes"),
        **_buffers(loaded | done_of(record).get("facts_changed", StackFacts())),
        **{key: value for key, value in reported.items() if key in REPORTED and value is not None},
        "loaded_bytes": loaded_bytes(record),
        "peak_allocator_bytes": _peak_allocator_bytes(record),
        **({"max_ctx_is_target": bool(reported.get("max_ctx_is_target"))} if reported else growth),
        "prefill_knees": traffic.prefill_knees(record),
        **energy.row(record),
        **sensor_summary.row(record),
        "series": series_path,
    }
    if found.line is None and reported:
        result |= {key: reported.get(key) for key in ("B_ms", "W_tokens_per_ms")}
        result["ttft_ms"] = reported.get("prefill_ms")
        raised = published(result["B_ms"], result["W_tokens_per_ms"], result["ttft_ms"], _higher(limits))
        result["flags"] = [flag.row() for flag in raised]
        result["W_identifiable"] = result["W_tokens_per_ms"] is not None and not any(
            flag.code == "slope_faster_than_limit" for flag in raised
        )
    return result | _against(result, limits)


REPORTED = (
    *("prefill_ms", "file_bytes", "vram_bytes", "model_buffer_bytes", "kv_buffer_bytes", "max_ctx"),
    *("perplexity", "perplexity_stderr"),
)


def _buffers(loaded: StackFacts) -> Row:
    """Buffer sizes after the run by part, as the stack reports them; null for keys of published figures."""
    memory = loaded.get("memory") or {}
    parts = {f"{part}_buffer_bytes": memory.get(part) for part in ("model", "kv", "compute")}
    return dict.fromkeys(REPORTED) | {key: sum(by.values()) if by else None for key, by in parts.items()}


def _analysis(times: TokenTimes) -> tuple[Analysis, str | None]:
    if not times:
        return Analysis(n_tokens=0), None
    n, ms, _ = latency.without_end(times.n.astype(float), times.ms)
    try:
        return latency.analyse(n, ms), None
    except Unusable as reason:
        return Analysis(n_tokens=0), str(reason)


def _expected(record: Record) -> int | None:
    if record["outcome"] != "ok" or grow_results.stopped(record):
        return None
    return int(record["workload"]["new_tokens"])


def _higher(limits: Mapping[str, Limit]) -> Limit | None:
    """The higher ceiling: anything faster is a measurement error."""
    return min(limits.values(), key=lambda limit: limit.B_ms, default=None)


def _against(row: Row, limits: Mapping[str, Limit]) -> Row:
    """Limits by the data sheet's bandwidth and by the measured one, and the shares reached: with the KV cache
    read once, and (`declared`) as the stack reports reading it."""
    B, W, bpw = row["B_ms"], row["W_tokens_per_ms"], row["bpw"]
    found: Row = {"B_as_w16_ms": B * 16 / bpw if B is not None and bpw else None}
    for name, prefix in (("data sheet", ""), ("measured", "measured_")):
        limit = limits.get(name)
        B_share, W_share = limit.shares(B, W, row["W_identifiable"]) if limit else (None, None)
        allows = limit.W_declared_tokens_per_ms if limit and row["kv_read"] else None
        found |= {
            f"B_{prefix}theory_ms": limit and limit.B_ms,
            f"W_{prefix}theory_tokens_per_ms": limit and limit.W_tokens_per_ms,
            f"B_{prefix}ratio": B_share,
            f"W_{prefix}ratio": W_share,
            f"W_declared_{prefix}theory_tokens_per_ms": allows,
            f"W_declared_{prefix}ratio": W / allows if W and allows and row["W_identifiable"] else None,
        }
    return found


def peak_rss_bytes(record: Record) -> int | None:
    """Peak RSS: the largest of the samples, the kernel's high-water mark and wait4."""
    memory, done = record.get("memory", {}), done_of(record)
    seen = (
        memory.get("peak_rss_bytes"),
        done.get("peak_rss_bytes"),
        (memory.get("rusage") or {}).get("max_rss_bytes"),
    )
    return max((int(value) for value in seen if value), default=None)


def device_memory_bytes(record: Record) -> int | None:
    """Total memory of the device; a CPU's is the machine's. Null where several GPUs match."""
    machine, on = record["machine"], device(record)
    gpus = machine.get("gpus") or []
    of = [machine] if on == "cpu" else [gpu for gpu in gpus if gpu.get("uuid") == on] or gpus
    known = of[0].get("memory_bytes") if len(of) == 1 else None
    return None if known is None else int(known)


def loaded_bytes(record: Record) -> int | None:
    """Memory in use once the model was loaded: on a GPU by the stack's allocator, else of the device; on a
    CPU the resident set."""
    memory, reported = record.get("memory", {}), record.get("reported") or {}
    if record.get("device") == "cpu":
        known = memory.get("after_load_rss_bytes")
    else:
        allocator = loaded_of(record).get("allocator") or {}
        known = allocator.get("allocated_bytes") or memory.get("after_load_vram_bytes")
    known = reported.get("vram_bytes") or known
    return int(known) if known else None


def _peak_allocator_bytes(record: Record) -> int | None:
    counters = done_of(record).get("counters") or {}
    peak = (counters.get("allocator") or {}).get("peak_allocated_bytes")
    return int(peak) if peak else None


def counted(rows: Sequence[Row]) -> list[Row]:
    """The row that counts for each repeat, in the order of `rows`."""
    attempts: dict[tuple[str, int], list[Row]] = {}
    for each in sorted(rows, key=lambda r: str(r["started_utc"])):
        attempts.setdefault((each["content_key"], each["repeat"]), []).append(each)
    counts = {
        key: counting(found, lambda r: r["status"] in USABLE, lambda r: r["disturbed"])
        for key, found in attempts.items()
    }
    return [each for each in rows if counts[each["content_key"], each["repeat"]] is each]


def per_cell(rows: Sequence[Row]) -> list[Row]:
    """One row per cell, machine, device and set of versions (content key), in order of first appearance.

    It has medians over the ok repeats, or the outcome of the others; of each repeat the row that counts.
    `disturbed_attempts`: number of disturbed attempts. `stayed_disturbed`: the disturbance of each repeat
    without an ok attempt.
    """
    disturbed = Counter(each["content_key"] for each in rows if each["disturbed"])
    grouped: dict[str, list[Row]] = {}
    for each in counted(rows):
        grouped.setdefault(each["content_key"], []).append(each)
    lines = intervals.of_cells([_shown(repeats) for repeats in grouped.values()])
    return [
        _pooled(repeats)
        | line
        | {
            "disturbed_attempts": disturbed[key],
            "stayed_disturbed": [each["disturbed"] for each in repeats if each["disturbed"]],
        }
        for (key, repeats), line in zip(grouped.items(), lines, strict=True)
    ]


def _shown(repeats: list[Row]) -> list[Row]:
    """The repeats that a cell's figures come from: the ok ones, or all if none is ok."""
    return [r for r in repeats if r["status"] in USABLE] or repeats


def _pooled(repeats: list[Row]) -> Row:
    """Medians over a cell's ok repeats."""
    usable = [r for r in repeats if r["status"] in USABLE]
    shown = _shown(repeats)
    pooled = dict(shown[-1]) | {"repeats_ok": len(usable), "repeats": len(repeats)}
    for name in MEDIANS:
        values = [r[name] for r in shown if r[name] is not None]
        pooled[name] = statistics.median(values) if values else None
    for name in ("peak_rss_bytes", "peak_allocator_bytes"):
        pooled[name] = max((r[name] for r in shown if r[name]), default=None)
    pooled["ok_series"] = [r["series"] for r in usable if r["series"] and r["status"] == "ok"]
    pooled["reasons"] = list(dict.fromkeys(reason for r in repeats for reason in r["reasons"]))
    raised = {(flag["code"], flag["detail"]): flag for r in repeats for flag in r["flags"]}
    pooled["flags"] = list(raised.values())
    return pooled


def flag_kernel_changes(rows: Sequence[Row]) -> None:
    """Flag rows of one stack whose mode changes at the same n: a change of kernel, not drift."""
    changes = same_changes({str(i): each["mode_changes_at"] for i, each in enumerate(rows)})
    for i, flag in changes.items():
        others = [known for known in rows[int(i)]["flags"] if known["code"] != "drift"]
        rows[int(i)]["flags"] = [*others, flag.row()]


def flag_identical_series(rows: Sequence[Row], latencies: Sequence[Floats]) -> None:
    """Flag rows of different cells whose series are equal to the last digit."""
    cells = {
        f"{r['cell']} {r['started_utc']}": ms for r, ms in zip(rows, latencies, strict=True) if len(ms) > 1
    }
    same: dict[str, Flag] = identical(cells)
    for each in rows:
        if flag := same.get(f"{each['cell']} {each['started_utc']}"):
            each["flags"].append(flag.row())
            each["status"], each["reasons"] = "invalid", [*each["reasons"], flag.detail]

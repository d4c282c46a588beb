"""Records -> rows: one flat object per repeat. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness.analysis.records import energy, grow_results, sensor_summary, surface, traffic
from harness.analysis.records.disturbances import CONTENTION_TOLERANCE
from harness.analysis.records.flags import (
    Flag,
    Limit,
    flags,
    identical,
    machine_drift,
    published,
    same_changes,
)
from harness.analysis.records.identity import computes, device, gpu, identity, weights
from harness.analysis.records.verdicts import USABLE, notes, verdict
from harness.analysis.rows import Figures, Flagged, Growth, Limits, Repeat, Sizes
from harness.analysis.series import drift as drifts
from harness.analysis.series import latency
from harness.analysis.series.drift import Drift
from harness.analysis.series.latency import Analysis, Unusable
from harness.analysis.series.line import Floats
from harness.results import tables
from harness.results.kinds import Record, done_of, loaded_of, memory_of
from harness.results.kinds.parts import StackFacts
from harness.results.kinds.reported import Reported
from harness.results.token_times import NO_TOKENS, TokenTimes


def row(
    record: Record,
    times: TokenTimes,
    series_path: str | None,
    ceiling: float | None,
    table: surface.Columns | None = None,
) -> Repeat:
    """One repeat as a flat row; missing values are null. `times`: of its tokens. `ceiling`: read bandwidth
    measured on its machine, in bytes/s. `table`: its timed rows, of a workload that has them."""
    reported = record.get("reported")
    table = table or {}
    judged = verdict(record, ceiling, bool(times) or bool(table), times, table)
    state, reasons, disturbed = judged.status, judged.reasons, judged.disturbed
    # A `grow` run that ran out of memory gives a length; its latencies are not valid.
    ended = grow_results.ended_by_memory(record)
    found, drift, unusable = _analysis(
        NO_TOKENS if ended else times, _control_ms(record), plain=record["kind"] == "reported"
    )
    if unusable:
        state, reasons, disturbed = "invalid", [*reasons, f"its series is unusable: {unusable}"], None
    of_depths = surface.figures(table) if tables.name_of(record) == "windows" else None
    figures = of_depths or latency.row(found)
    limits = traffic.limits(record, ceiling)
    least = _higher(traffic.limits(record, ceiling, past_cache=True))
    loaded = loaded_of(record)
    raised = [*notes(record), *machine_drift(drift)]
    if times and not unusable:
        raised += flags(found, least, _expected(record), loaded.get("kv_read"))
    if of_depths and (B_ends := of_depths["B_ci95_ms"]) and (slopes := of_depths["slope_ci95_ms"]):
        raised += published(B_ends[1], 1 / slopes[1] if slopes[1] > 0 else None, None, least)
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
    if found.line is None and reported:
        figures["B_ms"], figures["W_tokens_per_ms"] = reported["B_ms"], reported["W_tokens_per_ms"]
        figures["first_token_ms"] = reported["prefill_ms"]
        raised = published(reported["B_ms"], reported["W_tokens_per_ms"], reported["prefill_ms"], least)
        figures["W_identifiable"] = reported["W_tokens_per_ms"] is not None and not any(
            flag.code == "slope_faster_than_limit" for flag in raised
        )
    growth = (
        Growth(max_ctx=reported["max_ctx"], max_ctx_is_target=reported["max_ctx_is_target"])
        if reported
        else grow_results.row(record, device_memory_bytes(record), traffic.kv_bytes_per_token(record))
    )
    memory_budget = record.get("memory_budget")
    return {
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
        "ttft_ms": figures.pop("first_token_ms", None),
        **figures,
        "bpw": traffic.bpw(record),
        "nominal_bits": traffic.nominal_bits(loaded.get("quant")),
        "model_bytes": traffic.model_bytes(record),
        "weight_bytes_per_token": traffic.weight_bytes_per_token(record),
        "kv_bytes_per_token": traffic.kv_bytes_per_token(record),
        "bandwidth_share": traffic.bandwidth_share(record, ceiling),
        "past_cache_share": traffic.past_cache_share(record, ceiling),
        "bandwidth_bytes_per_s": ceiling,
        "bandwidth_probes_bytes_per_s": [p["read_bytes_per_s"] for p in record.get("bandwidth_probes", [])],
        "peak_rss_bytes": peak_rss_bytes(record),
        "peak_vram_bytes": memory_of(record).get("peak_vram_bytes"),
        **_sizes(loaded | done_of(record).get("facts_changed", StackFacts()), reported),
        "loaded_bytes": loaded_bytes(record),
        "peak_allocator_bytes": _peak_allocator_bytes(record),
        **growth,
        "prefill_knees": traffic.prefill_knees(record),
        **energy.row(record),
        **sensor_summary.row(record),
        "series": series_path,
        **_against(figures, limits, loaded.get("kv_read"), traffic.bpw(record)),
        "weights_check": None,
        "computes": computes(record),
        "quality": None,
        "kld_mean": None,
        "kld_mean_ci95": None,
        "top1": None,
        "drift": drift.share if drift else None,
        "drift_ci95": drift.ends if drift else None,
        **surface.row(record["workload"]["kind"], [table]),
    }


def _sizes(loaded: StackFacts, reported: Reported | None) -> Sizes:
    """Buffer sizes after the run by part, as the stack reports them, and the published figures."""
    memory = loaded.get("memory") or {}
    model, kv, compute = (
        sum(by.values()) if (by := memory.get(part)) else None for part in ("model", "kv", "compute")
    )
    found = Sizes(
        prefill_ms=None,
        file_bytes=None,
        vram_bytes=None,
        model_buffer_bytes=model,
        kv_buffer_bytes=kv,
        perplexity=None,
        perplexity_stderr=None,
        compute_buffer_bytes=compute,
    )
    if reported:
        found |= {
            "prefill_ms": reported["prefill_ms"],
            "file_bytes": reported["file_bytes"],
            "vram_bytes": reported["vram_bytes"],
            "model_buffer_bytes": reported["model_buffer_bytes"],
            "kv_buffer_bytes": reported["kv_buffer_bytes"],
            "perplexity": reported["perplexity"],
            "perplexity_stderr": reported.get("perplexity_stderr"),
        }
    return found


def _analysis(
    times: TokenTimes, control_ms: Floats, plain: bool
) -> tuple[Analysis, Drift | None, str | None]:
    if not times:
        return Analysis(n_tokens=0), None, None
    n, ms, _ = latency.without_end(times.n.astype(float), times.ms)
    try:
        return *drifts.analyse(n, ms, control_ms, plain), None
    except Unusable as reason:
        return Analysis(n_tokens=0), None, str(reason)


def _control_ms(record: Record) -> Floats:
    """Latencies of the first tokens decoded again; empty if they were not, or if threads waited for a CPU."""
    control = done_of(record).get("control")
    if not control:
        return np.empty(0)
    most_ns = CONTENTION_TOLERANCE * sum(control["latency_ns"]) * record["threads"]
    return np.empty(0) if (control["cpu_wait_ns"] or 0) > most_ns else np.array(control["latency_ns"]) / 1e6


def _expected(record: Record) -> int | None:
    if record["outcome"] != "ok" or grow_results.stopped(record):
        return None
    return int(record["workload"]["new_tokens"])


def _higher(limits: Mapping[str, Limit]) -> Limit | None:
    """The higher ceiling: anything faster is a measurement error."""
    return min(limits.values(), key=lambda limit: limit.B_ms, default=None)


class _Reached(NamedTuple):
    """Limits of B and W, and the shares reached."""

    B_ms: float | None = None
    W_tokens_per_ms: float | None = None
    B_ratio: float | None = None
    W_ratio: float | None = None
    W_declared_tokens_per_ms: float | None = None
    W_declared_ratio: float | None = None


def _against(figures: Figures, limits: Mapping[str, Limit], kv_read: str | None, bpw: float | None) -> Limits:
    """Limits by the data sheet's bandwidth and by the measured one, and the shares reached: with the KV cache
    read once, and (`declared`) as the stack reports reading it."""
    B = figures["B_ms"]
    sheet, measured = (_reached(figures, limits.get(name), kv_read) for name in ("data sheet", "measured"))
    return {
        "B_as_w16_ms": B * 16 / bpw if B is not None and bpw else None,
        "B_theory_ms": sheet.B_ms,
        "W_theory_tokens_per_ms": sheet.W_tokens_per_ms,
        "B_ratio": sheet.B_ratio,
        "W_ratio": sheet.W_ratio,
        "W_declared_theory_tokens_per_ms": sheet.W_declared_tokens_per_ms,
        "W_declared_ratio": sheet.W_declared_ratio,
        "B_measured_theory_ms": measured.B_ms,
        "W_measured_theory_tokens_per_ms": measured.W_tokens_per_ms,
        "B_measured_ratio": measured.B_ratio,
        "W_measured_ratio": measured.W_ratio,
        "W_declared_measured_theory_tokens_per_ms": measured.W_declared_tokens_per_ms,
        "W_declared_measured_ratio": measured.W_declared_ratio,
    }


def _reached(figures: Figures, limit: Limit | None, kv_read: str | None) -> _Reached:
    if limit is None:
        return _Reached()
    W, identifiable = figures["W_tokens_per_ms"], figures["W_identifiable"]
    allows = limit.W_declared_tokens_per_ms if kv_read else None
    share = W / allows if W and allows and identifiable else None
    shares = limit.shares(figures["B_ms"], W, identifiable)
    return _Reached(limit.B_ms, limit.W_tokens_per_ms, *shares, allows, share)


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
    of = record["machine"] if device(record) == "cpu" else gpu(record)
    known = of.get("memory_bytes") if of else None
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


def flag_kernel_changes(rows: Sequence[Flagged]) -> None:
    """Flag rows of one stack whose mode changes at the same n: a change of kernel, not drift."""
    changes = same_changes({str(i): each["mode_changes_at"] for i, each in enumerate(rows)})
    for i, flag in changes.items():
        others = [known for known in rows[int(i)]["flags"] if known["code"] != "drift"]
        rows[int(i)]["flags"] = [*others, flag.row()]


def drop_intervals(rows: Sequence[Flagged]) -> None:
    """Leave B of rows flagged for drift without an interval: no line describes what the machine did."""
    for each in rows:
        if any(flag["code"] == "drift" for flag in each["flags"]):
            each["B_ci95_ms"] = None


def flag_identical_series(rows: Sequence[Repeat], latencies: Sequence[Floats]) -> None:
    """Flag rows of different cells whose series are equal to the last digit."""
    cells = {
        f"{r['cell']} {r['started_utc']}": ms for r, ms in zip(rows, latencies, strict=True) if len(ms) > 1
    }
    same: dict[str, Flag] = identical(cells)
    for each in rows:
        if flag := same.get(f"{each['cell']} {each['started_utc']}"):
            each["flags"].append(flag.row())
            each["status"], each["reasons"] = "invalid", [*each["reasons"], flag.detail]

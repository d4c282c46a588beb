"""Records as rows: one flat object per repeat. Pure."""

from __future__ import annotations

from typing import cast

import numpy as np

from harness.analysis import (
    depth,
    device_energy,
    growth,
    repeat_figures,
    sensors,
    served,
    server_speed,
    speculation,
    traffic,
    users,
)
from harness.analysis import figures as registry
from harness.analysis.columns import (
    Buffers,
    Growth,
    JudgedRepeat,
    Limits,
    Repeat,
)
from harness.analysis.disturbances import CONTENTION_TOLERANCE, timed_threads
from harness.analysis.flags import (
    digest,
    flags,
    machine_drift,
    past_warm_up,
    published,
)
from harness.analysis.identity import computes, device, identity, recorded_gpu, weights
from harness.analysis.line_fit import Floats
from harness.analysis.memory import others_vram, peak_vram
from harness.analysis.repeat_figures import Analysis, Unusable
from harness.analysis.verdicts import USABLE, verdict
from harness.analysis.warnings import Warnings
from harness.records import tables
from harness.records.kinds import Record, done_of, loaded_of, memory_of, served_elsewhere
from harness.records.measured import Counters
from harness.records.parts import StackFacts
from harness.records.token_times import NO_TOKENS, TokenTimes


def repeat_row(
    record: Record,
    times: TokenTimes,
    series_path: str | None,
    ceiling: float | None,
    table: depth.Columns | None = None,
) -> Repeat:
    """One repeat as a flat row; missing values are None. `times`: of its tokens. `ceiling`: read bandwidth
    measured on its machine, in bytes/s. `table`: its timed rows, of a workload that has them."""
    reported = record.get("reported")
    table = table or {}
    judged = verdict(record, ceiling, bool(times) or bool(table), times, table)
    state, reasons, disturbed = judged.status, judged.reasons, judged.disturbed
    # A `grow` run that ran out of memory gives a length; its latencies are not valid.
    ended, guessed = growth.ended_by_memory(record), speculation.row(record)
    if untimed := served.times_are_unknown(record):
        table = {}
    timed = NO_TOKENS if ended or untimed else times
    analysis, unusable = _analysis(timed, _control_ms(record), plain=record["kind"] == "reported")
    drift = analysis.drift
    in_pieces = served.rate_error(record) is not None
    if averaged := bool(guessed) or in_pieces:
        later = timed.latency_ms[speculation.first_burst_tokens(record) :]
        analysis, drift = Analysis(repeat_figures.averages(analysis.figures, later)), None
    if unusable:
        state, disturbed = "invalid", None
        reasons = [*reasons, Warnings.series_unusable.flag(why=unusable).detail]
    of_depths = depth.surface_figures(table) if tables.name_of(record) == "windows" else None
    figures = of_depths or analysis.figures
    limits = {} if traffic.elsewhere_in_memory(record) else traffic.limits(record, ceiling)
    ceilings = traffic.limits(record, ceiling, past_cache=True).values()
    # The higher ceiling: anything faster is a measurement error.
    least = min(ceilings, key=lambda limit: limit.B_ms, default=None)
    loaded = loaded_of(record)
    anew = past_warm_up(record, times.latency_ns) if times and not (unusable or averaged) else []
    raised = [*judged.notes, *anew, *([] if anew else machine_drift(drift)), *users.notes(record, table)]
    whole_pieces = all(flag.warning is not Warnings.tokens_in_pieces for flag in raised)
    if not whole_pieces or guessed:
        figures["B_ci95_ms"], figures["W_identifiable"] = None, False
    elif times and not unusable:
        is_whole = record["outcome"] == "ok" and not growth.growth_stopped(record)
        expected = int(record["workload"]["new_tokens"]) if is_whole else None
        raised += flags(analysis, least, expected, loaded.get("kv_read"), first_token=not anew)
    if of_depths and (B_ends := of_depths["B_ci95_ms"]) and (slopes := of_depths["slope_ci95_ms"]):
        raised += published(B_ends[1], 1 / slopes[1] if slopes[1] > 0 else None, None, least)
    # A fault of the slope alone keeps B of published figures, but invalidates our measurements.
    invalidating = [
        f for f in raised if f.invalidates == "all" or (f.invalidates == "W" and record["kind"] == "measured")
    ]
    if (state in USABLE or disturbed) and invalidating:
        state, disturbed = "invalid", None
        reasons = [*reasons, *(flag.detail for flag in invalidating)]
    if any(flag.invalidates == "first token" for flag in raised):
        figures["first_token_ms"] = None
    if loaded.get("kv_read") == "full":
        figures["W_identifiable"] = False
    if analysis.figures["B_ms"] is None and reported:
        figures["B_ms"], figures["W_tokens_per_ms"] = reported["B_ms"], reported["W_tokens_per_ms"]
        figures["first_token_ms"] = reported["prefill_ms"]
        raised = published(reported["B_ms"], reported["W_tokens_per_ms"], reported["prefill_ms"], least)
        figures["W_identifiable"] = reported["W_tokens_per_ms"] is not None and not any(
            flag.warning is Warnings.slope_faster_than_limit for flag in raised
        )
    grown = (
        Growth(max_ctx=reported["max_ctx"], max_ctx_is_target=reported["max_ctx_is_target"])
        if reported
        else growth.growth_row(record, device_memory_bytes(record), traffic.kv_bytes_per_token(record))
    )
    peak_vram_bytes, vram_source = peak_vram(record)
    share, probes = traffic.bandwidth_share(record, ceiling), traffic.probed_bytes_per_s([record])
    rates = [*probes, ceiling] if ceiling else probes
    kv_read = loaded.get("kv_read")
    sheet, measured = (
        limits[by].figures(kv_read) if by in limits else None for by in ("data sheet", "measured")
    )
    columns = {
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
        "workload": record["workload"]["kind"],
        "prompt_tokens": record["workload"]["prompt_tokens"],
        "new_tokens": record["workload"]["new_tokens"],
        "outside_stack_ms": _outside_stack_ms(record),
        "ttft_ms": figures.pop("first_token_ms", None),
        **figures,
        "known_W": figures["W_tokens_per_ms"] if figures["W_identifiable"] else None,
        "bpw": traffic.bpw(record),
        "nominal_bits": traffic.nominal_bits(loaded.get("quant")),
        "model_bytes": traffic.model_bytes(record),
        "weight_bytes_per_token": traffic.weight_bytes_per_token(record),
        "kv_bytes_per_token": traffic.kv_bytes_per_token(record),
        "bandwidth_share": share,
        "bandwidth_share_range": traffic.share_range(share and ceiling and share * ceiling, rates),
        "past_cache_share": traffic.past_cache_share(record, ceiling),
        "bandwidth_bytes_per_s": ceiling,
        "bandwidth_probes_bytes_per_s": probes,
        "peak_rss_bytes": peak_rss_bytes(record),
        "peak_vram_bytes": peak_vram_bytes,
        "peak_vram_source": vram_source,
        "loaded_bytes": loaded_bytes(record),
        **grown,
        "prefill_knees": traffic.prefill_knees(record),
        **sensors.sensor_row(record),
        "series": series_path,
        "series_sha256": digest(times.latency_ns) if series_path and not in_pieces else None,
        "guess_group": speculation.group_of_ids(record, bool(guessed)),
        "computes": computes(record),
        "drift": drift.share if drift else None,
        "drift_ci95": drift.ends if drift else None,
        "speculation": None if tables.name_of(record) else guessed,
        **depth.surface_row(record["workload"]["kind"], [table]),
        "users_limit": users.limit(record, ceiling),
        "server": server_speed.row(record, ceiling),
        "record": record,
        "energy": device_energy.energy(record),
        "limits": Limits(sheet=sheet, measured=measured),
        "buffers": _buffers(record),
    }
    return registry.row_of(cast(JudgedRepeat, columns))


def _buffers(record: Record) -> Buffers:
    if reported := record.get("reported"):
        return {"model": reported["model_buffer_bytes"], "kv": reported["kv_buffer_bytes"], "compute": None}
    facts = loaded_of(record) | done_of(record).get("facts_changed", StackFacts())
    memory = facts.get("memory") or {}
    model, kv, compute = (
        sum(by.values()) if (by := memory.get(part)) else None for part in ("model", "kv", "compute")
    )
    return {"model": model, "kv": kv, "compute": compute}


def _analysis(times: TokenTimes, control_ms: Floats | None, plain: bool) -> tuple[Analysis, str | None]:
    """The analysis, and why the series is unusable; None: it is not."""
    unusable = None
    if times:
        n, ms, _ = repeat_figures.without_end(times.n.astype(float), times.latency_ms)
        try:
            return repeat_figures.analyse(n, ms, control_ms, plain), None
        except Unusable as reason:
            unusable = str(reason)
    return Analysis(repeat_figures.empty_figures(0)), unusable


def _control_ms(record: Record) -> Floats | None:
    """Latencies of the first tokens decoded again; None if they were not, or if threads waited for a CPU."""
    control = done_of(record).get("control")
    if not control:
        return None
    most_ns = CONTENTION_TOLERANCE * sum(control["latency_ns"]) * timed_threads(record)
    return None if (control["cpu_wait_ns"] or 0) > most_ns else np.array(control["latency_ns"]) / 1e6


def _outside_stack_ms(record: Record) -> float | None:
    steps, counters = record["tokens"] - 1, done_of(record).get("counters") or Counters()
    if (stack_ms := counters.get("stack_decode_ms")) is None or steps < 1:
        return None
    timing = record["timing"]
    return ((timing["last_token_ns"] - timing["first_token_ns"]) / 1e6 - stack_ms) / steps


def peak_rss_bytes(record: Record) -> int | None:
    """Peak RSS: the largest of the samples, the kernel's high-water mark and wait4; None for a server that is
    another process."""
    if served_elsewhere(record):
        return None
    memory, done = memory_of(record), done_of(record)
    seen = (
        memory.get("peak_rss_bytes"),
        done.get("peak_rss_bytes"),
        (memory.get("rusage") or {}).get("max_rss_bytes"),
    )
    return max((int(value) for value in seen if value), default=None)


def device_memory_bytes(record: Record) -> int | None:
    """Total memory of the device; a CPU's is the machine's. None where several GPUs match."""
    owner = record["machine"] if device(record) == "cpu" else recorded_gpu(record)
    memory_bytes = owner.get("memory_bytes") if owner else None
    return None if memory_bytes is None else int(memory_bytes)


def loaded_bytes(record: Record) -> int | None:
    """Memory in use once the model was loaded: on a GPU by the stack's allocator, else the worker's of the
    device; on a CPU the resident set."""
    memory, reported = memory_of(record), record.get("reported") or {}
    if record.get("device") == "cpu":
        loaded = memory.get("after_load_rss_bytes")
    else:
        allocator = loaded_of(record).get("allocator") or {}
        used, (others, _) = memory.get("after_load_vram_bytes"), others_vram(record)
        loaded = allocator.get("allocated_bytes") or (used and max(0, used - (others or 0)))
    loaded = reported.get("vram_bytes") or loaded
    return int(loaded) if loaded else None

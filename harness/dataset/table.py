"""Records as one row per repeat, and one row per cell."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar, cast

import numpy as np

from harness.analysis import (
    cell_intervals,
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
    withheld,
)
from harness.analysis import figures as registry
from harness.analysis.attempts import counting
from harness.analysis.columns import (
    Buffers,
    Cell,
    Ends,
    Flagged,
    Growth,
    Identity,
    JudgedRepeat,
    Limits,
    Repeat,
    Search,
)
from harness.analysis.disturbances import CONTENTION_TOLERANCE, timed_threads
from harness.analysis.flags import (
    Limit,
    digest,
    equal_series,
    flags,
    identical,
    machine_drift,
    past_warm_up,
    published,
    same_changes,
)
from harness.analysis.identity import SERVER, computes, device, identity, recorded_gpu, weights
from harness.analysis.line_fit import Floats
from harness.analysis.memory import others_vram, peak_vram
from harness.analysis.repeat_figures import Analysis, Unusable
from harness.analysis.verdicts import USABLE, beyond_trained, status, verdict
from harness.analysis.warnings import Flag, Warnings
from harness.base.nvml import UUIDS
from harness.base.text import list_named, plural
from harness.records import tables
from harness.records.kinds import Record, done_of, loaded_of, memory_of, served_elsewhere
from harness.records.measured import Counters
from harness.records.parts import StackFacts
from harness.records.searched import Probe
from harness.records.token_times import NO_TOKENS, TokenTimes

# Searches for the longest context -> rows: predicted and verified lengths, and the probes. Pure.


R = TypeVar("R", bound=Identity)


def search_row(record: Record) -> Search:
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
    found: dict[str, R] = {}
    for each in sorted(rows, key=lambda row: str(row["started_utc"])):
        found[each["content_key"]] = each
    return [found[key] for key in dict.fromkeys(row["content_key"] for row in rows)]


def _speed_ratio(probes: Sequence[Probe], n_ctx: int | None) -> float | None:
    return next((p.get("speed_ratio") for p in reversed(probes) if p["n_ctx"] == n_ctx and p["fits"]), None)


# Rows of repeats -> one row per cell, with the figures of all of its repeats. Pure.


TimedRows = Callable[[Repeat], depth.Columns]
"""The timed rows of a repeat, by column; empty: none."""


def counted(rows: Sequence[Repeat]) -> list[Repeat]:
    """The row that counts for each repeat, in the order of `rows`."""
    attempts: dict[tuple[str, int], list[Repeat]] = {}
    for each in sorted(rows, key=lambda r: str(r["started_utc"])):
        attempts.setdefault((each["content_key"], each["repeat"]), []).append(each)
    counts = {
        key: counting(found, lambda r: r["status"] in USABLE, lambda r: r["disturbed"])
        for key, found in attempts.items()
    }
    return [each for each in rows if counts[each["content_key"], each["repeat"]] is each]


def cell_identity(row: Repeat) -> tuple[str, int, str]:
    """Identify one repeat's row: content key, repeat, start."""
    return row["content_key"], row["repeat"], row["started_utc"]


def per_cell(rows: Sequence[Repeat], timed_rows: TimedRows = lambda row: {}) -> list[Cell]:
    """One row per cell, machine, device and set of versions (content key), in order of first appearance.

    A row has medians over the ok repeats, or the outcome of the others; of each repeat the row that counts.
    `disturbed_attempts`: number of disturbed attempts. `stayed_disturbed`: the disturbance of each repeat
    without an ok attempt.
    """
    disturbed = Counter(each["content_key"] for each in rows if each["disturbed"])
    grouped = _by_cell(rows)
    shown = [_shown(repeats) for repeats in grouped.values()]
    found: list[Cell] = [
        {**_pooled(repeats, disturbed[key], timed_rows), **line}
        for (key, repeats), line in zip(grouped.items(), cell_intervals.of_cells(shown), strict=True)
    ]
    for cell, repeats, rates in zip(found, shown, cell_intervals.rates_at_depths(shown), strict=True):
        withheld.withhold(cell, repeats)
        for at in cell["depths"]["at"] if cell["depths"] else []:
            at["tokens_per_s_ci95"] = rates.get(at["depth"])
    return found


def shown_repeats(rows: Sequence[Repeat]) -> dict[str, list[Repeat]]:
    """By content key, the repeats that the figures of a cell come from."""
    return {key: _shown(repeats) for key, repeats in _by_cell(rows).items()}


def _by_cell(rows: Sequence[Repeat]) -> dict[str, list[Repeat]]:
    grouped: dict[str, list[Repeat]] = {}
    for each in counted(rows):
        grouped.setdefault(each["content_key"], []).append(each)
    return grouped


def _shown(repeats: list[Repeat]) -> list[Repeat]:
    """The repeats that a cell's figures come from: the ok ones, or all if none is ok."""
    return [r for r in repeats if r["status"] in USABLE] or repeats


def _pooled(repeats: list[Repeat], disturbed_attempts: int, timed_rows: TimedRows) -> Cell:
    """Medians over a cell's ok repeats."""
    usable = [r for r in repeats if r["status"] in USABLE]
    shown = _shown(repeats)
    raised = {(flag["code"], flag["detail"]): flag for r in repeats for flag in r["flags"]}
    timed = [found for each in shown if (found := timed_rows(each))]
    pooled: Cell = {
        **shown[-1],
        **depth.surface_row(shown[-1]["workload"], timed),
        "repeats_ok": len(usable),
        "repeats": len(repeats),
        "ok_series": [r["series"] for r in usable if r["series"] and r["status"] == "ok"],
        "reasons": _distinct(reason for r in repeats for reason in r["reasons"]),
        "flags": list(raised.values()),
        "disturbed_attempts": disturbed_attempts,
        "bandwidth_probes_bytes_per_s": [
            rate
            for r in repeats
            if r["campaign"] == shown[-1]["campaign"]
            for rate in r["bandwidth_probes_bytes_per_s"]
        ],
        "stayed_disturbed": [r["disturbed"] for r in repeats if r["disturbed"]],
        "disturbed_reasons": _distinct(why for r in repeats if r["disturbed"] for why in r["reasons"]),
        "prefill": None,
        "drift_ci95": shown[-1]["drift_ci95"] if len(shown) == 1 else None,  # drift is a median over repeats
        "speculation": speculation.pooled([r["speculation"] for r in shown]),
        "bandwidth_share_range": _share_range(shown),
    }
    cell = {**pooled, **registry.pooled(shown)}
    return cast(Cell, cell | registry.again(cell))


def _distinct(reasons: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(reasons))


# Unique names for the rows of one table.


def synthetic(row: Mapping[str, Any]) -> bool:
    """Whether guesses were accepted whatever they were, so that its text is not the model's."""
    return bool((row.get("speculation") or {}).get("synthetic"))


def with_unique_names(rows: Sequence[R]) -> list[R]:
    """The rows with a unique `name`: model, stack, variant, the workload unless it is a decode, synthetic
    acceptance, and the device unless it is a CPU or a server's: of several NVIDIA cards a part of the UUID.
    Six characters of the content key follow where rows differ only in tokens, versions or machines."""
    cards = {device for row in rows if (device := str(row["device"])).startswith(UUIDS)}

    def plain(row: Identity) -> str:
        card = "cuda" if len(cards) == 1 else str(row["device"])[:12]
        is_plain = row["device"] in ("cpu", SERVER)
        device = "" if is_plain else f" on {card if row['device'] in cards else row['device']}"
        workload = row.get("workload", "decode")
        other = f" {workload}" if workload != "decode" else ""
        other += " (synthetic acceptance)" * synthetic(row)
        return f"{row['model']} {row['stack']} {row['variant']}{other}{device}"

    names = Counter(plain(row) for row in rows)
    found = [row.copy() for row in rows]
    for row in found:
        row["name"] = plain(row) + (f" ({row['content_key'][:6]})" if names[plain(row)] > 1 else "")
    return found


def _share_range(shown: Sequence[Repeat]) -> Ends | None:
    """MBU against the highest and the lowest bandwidth measured in all campaigns of these repeats."""
    reached = [
        share * ceiling
        for row in shown
        if (share := row["bandwidth_share"]) and (ceiling := row["bandwidth_bytes_per_s"])
    ]
    ceilings = [ceiling for row in shown if (ceiling := row["bandwidth_bytes_per_s"])]
    rates = [*ceilings, *(rate for row in shown for rate in row["bandwidth_probes_bytes_per_s"])]
    return traffic.share_range(statistics.median(reached) if reached else None, rates)


# The order of campaigns, also where a clock was wrong.


SKEW = timedelta(hours=1)  # between the clocks of two machines; more is a clock that is wrong
_COUNTED = re.compile(r"(.*)#(\d{6,9})", re.DOTALL)


def place(record: Record) -> str:
    """Sorts campaigns as they began: by their ids, which are times, but after all that were there before."""
    campaign = record["campaign"]
    return campaign["order"] if "order" in campaign else campaign["id"]


def next_place(campaign_id: str, before: Iterable[Record]) -> str | None:
    """The place of a new campaign; null where its id is later than all before, as with a clock that is right.
    Else the latest place with a counter."""
    latest = max(map(place, before), default="")
    if latest < campaign_id:
        return None
    counted = _COUNTED.fullmatch(latest)
    return f"{counted[1]}#{int(counted[2]) + 1:06}" if counted else f"{latest}#000001"


def from_the_future(campaign_id: str) -> bool:
    """Whether the start is later than now, so that one of the clocks is wrong."""
    try:
        began = datetime.fromisoformat(campaign_id)
    except ValueError:  # of published figures
        return False
    return began.replace(tzinfo=began.tzinfo or timezone.utc) > datetime.now(timezone.utc) + SKEW


def left_out(ids: Iterable[str]) -> str:
    """A note that campaigns from the future are left out."""
    dates = sorted({each[:16] for each in ids})
    clock = "correct the clock of this machine, or move the records away if theirs was wrong"
    return f"{plural(len(dates), 'campaign')} from the future left out ({list_named(dates, 3)}): {clock}"


# Records -> rows: one flat object per repeat. Pure.


def repeat_row(
    record: Record,
    times: TokenTimes,
    series_path: str | None,
    ceiling: float | None,
    table: depth.Columns | None = None,
) -> Repeat:
    """One repeat as a flat row; missing values are null. `times`: of its tokens. `ceiling`: read bandwidth
    measured on its machine, in bytes/s. `table`: its timed rows, of a workload that has them."""
    reported = record.get("reported")
    table = table or {}
    judged = verdict(record, ceiling, bool(times) or bool(table), times, table)
    state, reasons, disturbed = judged.status, judged.reasons, judged.disturbed
    # A `grow` run that ran out of memory gives a length; its latencies are not valid.
    ended, guessed = growth.ended_by_memory(record), speculation.row(record)
    if untimed := served.times_are_unknown(record):
        table = {}
    read = NO_TOKENS if ended or untimed else times
    found, unusable = _analysis(read, _control_ms(record), plain=record["kind"] == "reported")
    drift = found.drift
    in_pieces = served.rate_error(record) is not None
    if averaged := bool(guessed) or in_pieces:
        later = read.latency_ms[speculation.first_burst_tokens(record) :]
        found, drift = Analysis(repeat_figures.averages(found.figures, later)), None
    if unusable:
        state, disturbed = "invalid", None
        reasons = [*reasons, Warnings.series_unusable.flag(why=unusable).detail]
    of_depths = depth.surface_figures(table) if tables.name_of(record) == "windows" else None
    figures = of_depths or found.figures
    limits = {} if traffic.elsewhere_in_memory(record) else traffic.limits(record, ceiling)
    least = _higher(traffic.limits(record, ceiling, past_cache=True))
    loaded = loaded_of(record)
    anew = past_warm_up(record, times.latency_ns) if times and not (unusable or averaged) else []
    raised = [*judged.notes, *anew, *([] if anew else machine_drift(drift)), *users.notes(record, table)]
    whole_pieces = all(flag.warning is not Warnings.tokens_in_pieces for flag in raised)
    if not whole_pieces or guessed:
        figures["B_ci95_ms"], figures["W_identifiable"] = None, False
    elif times and not unusable:
        raised += flags(found, least, _expected(record), loaded.get("kv_read"), first_token=not anew)
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
    if found.figures["B_ms"] is None and reported:
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
    """The analysis, and why the series is unusable; null: it is not."""
    unusable = None
    if times:
        n, ms, _ = repeat_figures.without_end(times.n.astype(float), times.latency_ms)
        try:
            return repeat_figures.analyse(n, ms, control_ms, plain), None
        except Unusable as reason:
            unusable = str(reason)
    return Analysis(repeat_figures.empty_figures(0)), unusable


def _control_ms(record: Record) -> Floats | None:
    """Latencies of the first tokens decoded again; null if they were not, or if threads waited for a CPU."""
    control = done_of(record).get("control")
    if not control:
        return None
    most_ns = CONTENTION_TOLERANCE * sum(control["latency_ns"]) * timed_threads(record)
    return None if (control["cpu_wait_ns"] or 0) > most_ns else np.array(control["latency_ns"]) / 1e6


def _expected(record: Record) -> int | None:
    if record["outcome"] != "ok" or growth.growth_stopped(record):
        return None
    return int(record["workload"]["new_tokens"])


def _higher(limits: Mapping[str, Limit]) -> Limit | None:
    """The higher ceiling: anything faster is a measurement error."""
    return min(limits.values(), key=lambda limit: limit.B_ms, default=None)


def _outside_stack_ms(record: Record) -> float | None:
    steps, counters = record["tokens"] - 1, done_of(record).get("counters") or Counters()
    if (stack_ms := counters.get("stack_decode_ms")) is None or steps < 1:
        return None
    timing = record["timing"]
    return ((timing["last_token_ns"] - timing["first_token_ns"]) / 1e6 - stack_ms) / steps


def peak_rss_bytes(record: Record) -> int | None:
    """Peak RSS: the largest of the samples, the kernel's high-water mark and wait4; null for a server that is
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
    """Total memory of the device; a CPU's is the machine's. Null where several GPUs match."""
    of = record["machine"] if device(record) == "cpu" else recorded_gpu(record)
    known = of.get("memory_bytes") if of else None
    return None if known is None else int(known)


def loaded_bytes(record: Record) -> int | None:
    """Memory in use once the model was loaded: on a GPU by the stack's allocator, else the worker's of the
    device; on a CPU the resident set."""
    memory, reported = memory_of(record), record.get("reported") or {}
    if record.get("device") == "cpu":
        known = memory.get("after_load_rss_bytes")
    else:
        allocator = loaded_of(record).get("allocator") or {}
        used, (others, _) = memory.get("after_load_vram_bytes"), others_vram(record)
        known = allocator.get("allocated_bytes") or (used and max(0, used - (others or 0)))
    known = reported.get("vram_bytes") or known
    return int(known) if known else None


def flag_kernel_changes(rows: Sequence[Flagged]) -> None:
    """Flag rows of one stack whose mode changes at the same n: a change of kernel, not drift."""
    changes = same_changes({str(i): each["mode_changes_at"] for i, each in enumerate(rows)})
    for i, flag in changes.items():
        others = [known for known in rows[int(i)]["flags"] if known["code"] != Warnings.drift.name]
        rows[int(i)]["flags"] = [*others, flag.row()]


def drop_intervals(rows: Sequence[Flagged]) -> None:
    """Leave B of rows flagged for drift without an interval: no line describes the machine's speed."""
    for each in rows:
        if any(flag["code"] == Warnings.drift.name for flag in each["flags"]):
            each["B_ci95_ms"] = None


def flag_identical_series(rows: Sequence[Repeat]) -> None:
    """Flag rows whose series are equal to the last digit, with one sentence for all of a cell."""
    names = {id(each): f"{each['cell']} {each['started_utc']}" for each in rows}
    same = identical({names[id(each)]: each["series_sha256"] for each in rows})
    found = [each for each in rows if names[id(each)] in same]
    others: dict[str, dict[str, None]] = {}
    for each in found:
        others.setdefault(each["cell"], {}).update(dict.fromkeys(same[names[id(each)]]))
    for each in found:
        flag = equal_series([*others[each["cell"]]])
        each["flags"].append(flag.row())
        each["status"], each["reasons"] = "invalid", [*each["reasons"], flag.detail]
        each["disturbed"] = None

"""Split a worker's memory into parts, once loaded and at the peak: records -> parts in bytes. Pure.

The total is the resident set on a CPU. On a GPU the total is the device's memory in use, less what
is not the worker's. `unattributed` is the total minus the parts, and negative where the parts add up to
more than the total: parts are never scaled to fit. `by_difference` names an inferred part, computed as the
total minus the reported parts; `unattributed` is then None. docs/concepts/memory.md defines the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from typing_extensions import TypedDict

from harness.analysis import traffic
from harness.analysis.columns import Cell, Ended, VramSource
from harness.analysis.memory_growth import Columns, MemoryGrowth, memory_growth_row, sampled
from harness.records.kinds import Record, done_of, loaded_of, memory_of, served_elsewhere
from harness.records.measured import Counters, EndFacts, Mark, PeakAllocator
from harness.records.parts import Allocator, StackFacts
from harness.records.published import Reported
from harness.records.token_times import TokenTimes

PARTS = ("weights", "kv", "compute", "workspace", "slack", "runtime")
OF_CELL = (
    *("cell", "name", "kind", "model", "stack", "variant", "weights", "machine", "device", "content_key"),
    *("status", "n_ctx", "prompt_tokens", "new_tokens", "tokens"),
)
"""The columns of a cell that its row of memory has."""


class Moment(TypedDict):
    """A worker's memory at one moment, part by part."""

    total_bytes: int | None
    parts: dict[str, int | None]
    by_difference: list[str]
    unattributed_bytes: int | None
    unattributed_share: float | None


class Attribution(MemoryGrowth, Ended):
    """The parts of a cell's memory; see memory.py."""

    cell: str
    machine: str
    content_key: str
    n_ctx: int | None
    prompt_tokens: int
    new_tokens: int
    tokens: int
    kv_bytes_per_token: float | None
    file_bytes: int | None
    loaded: Moment | None
    peak: Moment | None


def others_vram(record: Record) -> tuple[int | None, VramSource | None]:
    """Bytes of the device's memory that are not the worker's, and how they are known: by NVML's figure of the
    worker's own processes at the last moment that has one; else what was used before the worker started.
    None of a server elsewhere, which may hold some of it."""
    if served_elsewhere(record):
        return None, None
    for at in ("finished", "warmed", "loaded"):
        used, own = _mark(record, at)["vram_bytes"], _mark(record, at).get("own_vram_bytes")
        if used is not None and own is not None:
            return max(0, used - own), "process"
    started = _mark(record, "started")["vram_bytes"]
    return started, None if started is None else "device less start"


def peak_vram(record: Record) -> tuple[int | None, VramSource | None]:
    """The worker's peak, and the source: the sampled peak of the device without what others held."""
    peak, (others, source) = memory_of(record).get("peak_vram_bytes"), others_vram(record)
    if peak is None or others is None:
        return peak, None if peak is None else "device"
    return max(0, peak - others), source


def attribution_row(cell: Cell, record: Record, times: TokenTimes, samples: Columns) -> Attribution:
    """Account for a cell's memory. `record`: the record behind the cell's row; `times`, `samples`: of its
    tokens, and its memory samples, each empty where missing.

    `loaded` and `peak` have total_bytes, parts (None: not reported), by_difference (names of parts),
    unattributed_bytes and unattributed_share. Both are None where the worker did not get that far. Published
    figures have sizes only.
    """
    growth = MemoryGrowth(measured_bytes_per_token=None, not_measured=None)
    peak: Moment | None
    if record["kind"] == "reported":
        figures = record["reported"]
        file_bytes, once_loaded, peak = figures.get("file_bytes"), _reported(figures), None
    else:
        file_bytes = record["model"]["weights"].get("file_bytes")
        once_loaded, peak = (_on_cpu if cell["device"] == "cpu" else _on_gpu)(record, samples)
        growth = memory_growth_row(record, times, samples)
    columns: Mapping[str, object] = {
        **{name: cell[name] for name in OF_CELL},  # type: ignore[literal-required]
        "kv_bytes_per_token": traffic.kv_bytes_per_token(record),
        "file_bytes": file_bytes,
        "loaded": once_loaded,
        "peak": peak,
        **growth,
    }
    return cast(Attribution, columns)


def _reported(figures: Reported) -> Moment | None:
    """Published sizes, which come from several runs, so that unattributed memory is unknown."""
    buffers = {"weights": figures.get("model_buffer_bytes"), "kv": figures.get("kv_buffer_bytes")}
    total = figures.get("vram_bytes")
    if total is None and not any(value is not None for value in buffers.values()):
        return None
    return {**_moment(total, buffers), "unattributed_bytes": None, "unattributed_share": None}


def _on_cpu(record: Record, samples: Columns) -> tuple[Moment | None, Moment | None]:
    """Parts of the resident set.

    llama.cpp's log reports the reserved size of the compute buffer, but only touched pages are resident: none
    once loaded; at the peak at most the growth since then that is in no other part.
    """
    before, after, done = _facts(record)
    total = memory_of(record).get("after_load_rss_bytes")
    if not before or total is None:
        return None, None
    imported, loaded, finished = (_mark(record, at) for at in ("imported", "loaded", "finished"))
    weights, kv = _weights(before, loaded), _sum(before, "kv")
    logits = _sum(before, "output") if "compute" in (before.get("memory") or {}) else None
    slack, runtime = _slack(before, before, loaded), _interpreter(imported, loaded)
    reported_once_loaded = {"weights": weights, "kv": kv, "slack": slack, "runtime": runtime}
    once_loaded = _moment(total, reported_once_loaded | {"compute": logits})
    highest = _highest_resident(record, samples)
    if not _has_finished(record) or highest is None:
        return once_loaded, None
    reported = {
        "weights": _weights(after, finished),
        "kv": _sum(after, "kv"),
        "slack": _slack(after, done, finished),
        "runtime": _interpreter(imported, finished),
    }
    since = sum((reported[part] or 0) - (then or 0) for part, then in reported_once_loaded.items())
    taken = max(0, highest - total - since)  # growth since loading that nothing reports
    if logits is not None:
        reserved = _sum(after, "compute") or 0
        inferred = ("compute",) if 0 < taken < reserved else ()
        return once_loaded, _moment(highest, reported | {"compute": logits + min(taken, reserved)}, inferred)
    if kv is None:  # the stack reports nothing about its memory
        return once_loaded, _moment(highest, reported)
    return once_loaded, _moment(highest, reported | {"workspace": taken}, ("workspace",) if taken else ())


def _weights(facts: StackFacts, mark: Mark) -> int | None:
    """As the stack reports them; of a server in its process, which reports none, pages of their file."""
    return mark.get("rss_weights_bytes") or None if facts.get("served") else _sum(facts, "model")


def _interpreter(imported: Mark, now: Mark) -> int | None:
    """Bytes of interpreter and libraries: anonymous memory before loading, and files mapped now other than
    the weights. Mapped files grow during a run: library code is read when it first runs."""
    anon, files = imported.get("rss_anon_bytes"), imported.get("rss_file_bytes")
    if anon is None or files is None:
        return None
    ours, mapped = now.get("rss_weights_bytes"), now.get("rss_file_bytes")
    return int(anon + (files if ours is None or mapped is None else mapped - ours))


def _slack(facts: StackFacts, heap: StackFacts | EndFacts, mark: Mark) -> int | None:
    """Bytes held but unused: free memory in malloc's heap, and pages of the weights' file that hold no weight
    in use. None where neither is reported."""
    free = heap.get("heap_free_bytes")
    pages = None if facts.get("served") else mark.get("rss_weights_bytes")
    if free is None and pages is None:
        return None
    held = (facts.get("memory") or {}).get("model") or {}
    in_place = sum(size for place, size in held.items() if "mapped" in place.lower())
    return int((free or 0) + max(0, (pages or 0) - in_place))


def _highest_resident(record: Record, samples: Columns) -> int | None:
    """Largest resident set since generation began, in bytes; None where it was never read."""
    finished, began = _mark(record, "finished"), done_of(record).get("start_ns") or 0
    rows = sampled(samples, "rss_anon_bytes", "rss_file_bytes")
    seen = [(anon, files) for t_ns, anon, files in rows if t_ns >= began]
    seen.append((finished.get("rss_anon_bytes"), finished.get("rss_file_bytes")))
    return max((anon + files for anon, files in seen if anon is not None and files is not None), default=None)


def _on_gpu(record: Record, samples: Columns) -> tuple[Moment | None, Moment | None]:
    """Parts of the device's memory. The driver's part (context and kernels; for llama.cpp also the pools of
    its backend) is inferred: total minus the parts of the stack and its allocator."""
    before, after, done = _facts(record)
    if not before:
        return None, None
    others, _ = others_vram(record)
    began = done_of(record).get("start_ns") or 0
    seen = [vram for t_ns, vram in sampled(samples, "vram_bytes") if t_ns >= began and vram is not None]
    if (last := _mark(record, "finished")["vram_bytes"]) is not None:
        seen.append(last)
    state = before.get("allocator") or Allocator()
    once_loaded = _on_device(
        memory_of(record).get("after_load_vram_bytes"),
        others,
        before,
        state.get("allocated_bytes"),
        state.get("reserved_bytes"),
    )
    if not _has_finished(record):
        return once_loaded, None
    peak = done.get("counters", Counters()).get("allocator") or PeakAllocator()
    allocated, reserved = peak.get("peak_allocated_bytes"), peak.get("peak_reserved_bytes")
    return once_loaded, _on_device(max(seen, default=None), others, after, allocated, reserved)


def _on_device(
    held: int | None, others: int | None, facts: StackFacts, allocated: int | None, reserved: int | None
) -> Moment:
    total = None if held is None or others is None else held - others
    weights, kv = _sum(facts, "model", on_gpu=True), _sum(facts, "kv", on_gpu=True)
    compute = None
    if "compute" in (facts.get("memory") or {}):
        compute = (_sum(facts, "compute", on_gpu=True) or 0) + (_sum(facts, "output", on_gpu=True) or 0)
    workspace = None if allocated is None else max(0, allocated - (weights or 0) - (kv or 0))
    slack = None if allocated is None or reserved is None else reserved - allocated
    reported = {"weights": weights, "kv": kv, "compute": compute, "workspace": workspace, "slack": slack}
    sizes = [part for part in reported.values() if part is not None]
    if total is None or not sizes or sum(sizes) > total:  # nothing remains for the driver
        return _moment(total, reported)
    return _moment(total, reported | {"runtime": total - sum(sizes)}, ("runtime",))


def _moment(
    total: int | None, reported: Mapping[str, int | None], by_difference: Sequence[str] = ()
) -> Moment:
    known = sum(part for part in reported.values() if part is not None)
    rest = None if total is None or by_difference else total - known
    return {
        "total_bytes": total,
        "parts": {part: reported.get(part) for part in PARTS},
        "by_difference": list(by_difference),
        "unattributed_bytes": rest,
        "unattributed_share": rest / total if rest is not None and total and total > 0 else None,
    }


def _facts(record: Record) -> tuple[StackFacts, StackFacts, EndFacts]:
    """Facts that the stack reported once loaded, after the run, and about the run; empty where nothing."""
    before, done = loaded_of(record), done_of(record)
    return before, before | done.get("facts_changed", StackFacts()), done


def _mark(record: Record, at: str) -> Mark:
    """The memory read at one moment, the last one of this name; nothing if it was not reached."""
    marks = {mark["at"]: mark for mark in memory_of(record).get("marks") or []}
    return marks.get(at, {"at": at, "rss_anon_bytes": None, "rss_file_bytes": None, "vram_bytes": None})


def _has_finished(record: Record) -> bool:
    return any(mark["at"] == "finished" for mark in memory_of(record).get("marks") or [])


def _sum(facts: StackFacts, part: str, on_gpu: bool = False) -> int | None:
    """Reported bytes of a part, summed over all places or those on a GPU; None: not reported."""
    places = (facts.get("memory") or {}).get(part)
    if places is None:
        return None
    if on_gpu:  # not in host memory: `cpu`, `CPU_Mapped`, `CUDA_Host`
        places = {
            place: size
            for place, size in places.items()
            if not (place.lower().startswith("cpu") or place.endswith("_Host"))
        }
    return int(sum(places.values()))

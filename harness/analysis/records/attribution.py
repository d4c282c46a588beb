"""Where a worker's memory goes: records -> parts of what was held once loaded and at the peak. Pure.

On a CPU the total is the resident set; on a GPU it is the device's memory in use less that before the worker
started. What no part claims is `unattributed`, which is negative where the parts claim more than was held:
nothing is spread over the parts to make them fit. A part that nobody tells, and that is taken to be what the
others leave over, is named in `by_difference`; at such a moment nothing can be said of a rest, which is null.
docs/memory.md says what each part is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.analysis.records import traffic

Record = dict[str, Any]
Row = dict[str, Any]
Columns = Mapping[str, Sequence[Any]]

PARTS = ("weights", "kv", "compute", "workspace", "slack", "runtime")
FEWEST_SAMPLES = 8  # for a slope
TOLD_FROM_NOISE = 5.0  # times the scatter about the line that memory has to grow by
HIDING = 0.1  # of that growth; a cache first grows into what the allocator held free, and nothing rises
_OF_CELL = (
    *("cell", "name", "kind", "model", "stack", "variant", "weights", "machine", "device", "content_key"),
    *("status", "n_ctx", "prompt_tokens", "new_tokens", "tokens"),
)
_NO_SLOPE = dict.fromkeys(("measured_bytes_per_token", "not_measured"))


def row(cell: Row, record: Record, latency: Columns, samples: Columns) -> Row:
    """Where the memory of a cell goes, from the record that its row is of, that one's series and its memory
    samples (each empty where there is none).

    `loaded` and `peak`: total_bytes, parts (null: not told), by_difference (names of parts),
    unattributed_bytes, unattributed_share; null where the worker never came so far. Of what others published
    the sizes alone are known.
    """
    said = {key: cell[key] for key in _OF_CELL} | {"kv_bytes_per_token": traffic.kv_bytes_per_token(record)}
    if record["kind"] == "reported":
        return said | _reported(record["reported"]) | _NO_SLOPE
    once_loaded, peak = _on_cpu(record, samples) if said["device"] == "cpu" else _on_gpu(record, samples)
    return (
        said
        | {"file_bytes": record["model"]["weights"].get("file_bytes"), "loaded": once_loaded, "peak": peak}
        | _slope(record, latency, samples)
    )


def _reported(figures: Row) -> Row:
    """As published: of several runs, so that nothing can be said of a rest."""
    buffers = {"weights": figures.get("model_buffer_bytes"), "kv": figures.get("kv_buffer_bytes")}
    total = figures.get("vram_bytes")
    known = total is not None or any(value is not None for value in buffers.values())
    moment: Row = {
        "total_bytes": total,
        "parts": dict.fromkeys(PARTS) | buffers,
        "by_difference": [],
        "unattributed_bytes": None,
        "unattributed_share": None,
    }
    return {"file_bytes": figures.get("file_bytes"), "loaded": moment if known else None, "peak": None}


def _on_cpu(record: Record, samples: Columns) -> tuple[Row | None, Row | None]:
    """Of the resident set. llama.cpp's compute buffer is reserved by the log and resident by what it touched:
    nothing when loaded, and at the peak at most what came since and is in no other part."""
    before, after, done = _facts(record)
    memory, marks = record.get("memory") or {}, _marks(record)
    total = memory.get("after_load_rss_bytes")
    if not before or total is None:
        return None, None
    imported, loaded, finished = (marks.get(at, {}) for at in ("imported", "loaded", "finished"))
    weights, kv = _sum(before, "model"), _sum(before, "kv")
    logits = _sum(before, "output") if "compute" in (before.get("memory") or {}) else None
    slack, runtime = _slack(before, before, loaded), _interpreter(imported, loaded)
    once_told = {"weights": weights, "kv": kv, "slack": slack, "runtime": runtime}
    once_loaded = _moment(total, once_told | {"compute": logits})
    highest = _highest_resident(record, samples)
    if not finished or highest is None:
        return once_loaded, None
    told = {
        "weights": _sum(after, "model"),
        "kv": _sum(after, "kv"),
        "slack": _slack(after, done, finished),
        "runtime": _interpreter(imported, finished),
    }
    since = sum((told[part] or 0) - (then or 0) for part, then in once_told.items())
    taken = max(0, highest - total - since)  # what else came since, and nobody tells of
    if logits is not None:
        reserved = _sum(after, "compute") or 0
        left_over = ("compute",) if 0 < taken < reserved else ()
        return once_loaded, _moment(highest, told | {"compute": logits + min(taken, reserved)}, left_over)
    if kv is None:  # of a stack that tells nothing of its memory
        return once_loaded, _moment(highest, told)
    return once_loaded, _moment(highest, told | {"workspace": taken}, ("workspace",) if taken else ())


def _interpreter(imported: Row, now: Row) -> int | None:
    """Interpreter and libraries: all that was there before loading, and the files mapped now that are not the
    weights': libraries' code is read as it first runs."""
    anon, files = imported.get("rss_anon_bytes"), imported.get("rss_file_bytes")
    if anon is None or files is None:
        return None
    ours, mapped = now.get("rss_weights_bytes"), now.get("rss_file_bytes")
    return int(anon + (files if ours is None or mapped is None else mapped - ours))


def _slack(facts: Record, heap: Record, mark: Row) -> int | None:
    """What is held and of no use: free in malloc's heap, and pages of the weights' file that no weight is
    read from. Null where neither is told."""
    free, pages = heap.get("heap_free_bytes"), mark.get("rss_weights_bytes")
    if free is None and pages is None:
        return None
    held = (facts.get("memory") or {}).get("model") or {}
    in_place = sum(size for place, size in held.items() if "mapped" in place.lower())
    return int((free or 0) + max(0, (pages or 0) - in_place))


def _highest_resident(record: Record, samples: Columns) -> int | None:
    """Most of the resident set at once since generation began, in bytes; null where it was never read."""
    finished = _marks(record).get("finished", {})
    pairs = zip(
        samples.get("t_ns", ()),
        samples.get("rss_anon_bytes", ()),
        samples.get("rss_file_bytes", ()),
        strict=False,
    )
    began = (record.get("done") or {}).get("start_ns") or 0
    seen = [(anon, files) for t_ns, anon, files in pairs if t_ns >= began]
    seen.append((finished.get("rss_anon_bytes"), finished.get("rss_file_bytes")))
    return max((anon + files for anon, files in seen if anon is not None and files is not None), default=None)


def _on_gpu(record: Record, samples: Columns) -> tuple[Row | None, Row | None]:
    """Of the device's memory. What neither the stack nor its allocator has is taken to be the driver's:
    context and kernels; of llama.cpp also the pools of its backend."""
    before, after, done = _facts(record)
    if not before:
        return None, None
    marks = _marks(record)
    started = marks.get("started", {}).get("vram_bytes")
    began = (record.get("done") or {}).get("start_ns") or 0
    pairs = zip(samples.get("t_ns", ()), samples.get("vram_bytes", ()), strict=False)
    seen = [vram for t_ns, vram in pairs if t_ns >= began and vram is not None]
    if (last := marks.get("finished", {}).get("vram_bytes")) is not None:
        seen.append(last)
    state = before.get("allocator") or {}
    once_loaded = _on_device(
        (record.get("memory") or {}).get("after_load_vram_bytes"),
        started,
        before,
        state.get("allocated_bytes"),
        state.get("reserved_bytes"),
    )
    if "finished" not in marks:
        return once_loaded, None
    state = (done.get("counters") or {}).get("allocator") or {}
    allocated, reserved = state.get("peak_allocated_bytes"), state.get("peak_reserved_bytes")
    return once_loaded, _on_device(max(seen, default=None), started, after, allocated, reserved)


def _on_device(
    held: int | None, started: int | None, facts: Record, allocated: int | None, reserved: int | None
) -> Row:
    total = None if held is None or started is None else held - started
    weights, kv = _sum(facts, "model", on_gpu=True), _sum(facts, "kv", on_gpu=True)
    compute = None
    if "compute" in (facts.get("memory") or {}):
        compute = (_sum(facts, "compute", on_gpu=True) or 0) + (_sum(facts, "output", on_gpu=True) or 0)
    workspace = None if allocated is None else max(0, allocated - (weights or 0) - (kv or 0))
    slack = None if allocated is None or reserved is None else reserved - allocated
    told = {"weights": weights, "kv": kv, "compute": compute, "workspace": workspace, "slack": slack}
    known = [part for part in told.values() if part is not None]
    if total is None or not known or sum(known) > total:  # nothing is left over
        return _moment(total, told)
    return _moment(total, told | {"runtime": total - sum(known)}, ("runtime",))


def _moment(total: int | None, told: Mapping[str, int | None], by_difference: Sequence[str] = ()) -> Row:
    known = sum(part for part in told.values() if part is not None)
    rest = None if total is None or by_difference else total - known
    return {
        "total_bytes": total,
        "parts": {part: told.get(part) for part in PARTS},
        "by_difference": list(by_difference),
        "unattributed_bytes": rest,
        "unattributed_share": rest / total if rest is not None and total and total > 0 else None,
    }


def _facts(record: Record) -> tuple[Record, Record, Record]:
    """What the stack said once loaded, and after the run, and what it said of the run; empty where it came
    to none."""
    before, done = record.get("loaded") or {}, record.get("done") or {}
    return before, before | (done.get("facts_changed") or {}), done


def _marks(record: Record) -> dict[str, Row]:
    return {each["at"]: each for each in (record.get("memory") or {}).get("marks") or []}


def _sum(facts: Record, part: str, on_gpu: bool = False) -> int | None:
    """Bytes of a part, by the stack, over all places, or over those on a GPU; null where it does not tell."""
    places = (facts.get("memory") or {}).get(part)
    if places is None:
        return None
    return int(sum(size for place, size in places.items() if not (on_gpu and _is_host(place))))


def _is_host(place: str) -> bool:
    """`cpu`, `CPU_Mapped`, `CUDA_Host`: memory of the machine, not of the GPU."""
    return place.lower().startswith("cpu") or place.endswith("_Host")


def _slope(record: Record, latency: Columns, samples: Columns) -> Row:
    """Bytes that a token of context really took: the slope of memory against tokens held, least squares.
    Null, and `not_measured` says why, where the cache does not grow or the run is too short to tell."""
    loaded, done = record.get("loaded") or {}, record.get("done") or {}
    if not done:
        return {"measured_bytes_per_token": None, "not_measured": "it did not come to its end"}
    if _sum(loaded, "kv") or loaded.get("kv_read") not in ("grows", "copied"):
        return {"measured_bytes_per_token": None, "not_measured": "its cache is allocated when it is loaded"}
    steps = done.get("memory_steps")
    n, held = _of_steps(steps) if steps else _of_samples(record, latency, samples)
    slope = _line(n, held, 0 if steps else _free(record))
    return {
        "measured_bytes_per_token": slope,
        "not_measured": None
        if slope is not None
        else "it is too short to tell growth from noise, and from free memory used",
    }


def _of_steps(steps: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Tokens held and the bytes that the stack's allocator had given out."""
    found = np.asarray(steps, dtype=float)
    return found[:, 0], found[:, 1]


def _of_samples(record: Record, latency: Columns, samples: Columns) -> tuple[Any, Any]:
    """Tokens held at each sample taken while they came, and the bytes held: anonymous, or the device's."""
    key = "rss_anon_bytes" if record.get("device") == "cpu" else "vram_bytes"
    pairs = zip(samples.get("t_ns", ()), samples.get(key, ()), strict=False)
    known = [(t_ns, held) for t_ns, held in pairs if held is not None]
    gaps = np.asarray(latency.get("latency_ns", ()), dtype=float)
    began = record["done"].get("start_ns")
    if not known or not len(gaps) or began is None:
        return np.empty(0), np.empty(0)
    for index, ns in record["done"].get("flushes") or ():
        if index < len(gaps):  # the stack stood still before this token
            gaps[index] += ns
    stamps = began + gaps.cumsum()
    t_ns, held = np.asarray(known, dtype=float).T
    within = (t_ns >= stamps[0]) & (t_ns <= stamps[-1])
    n = record["workload"]["prompt_tokens"] + np.searchsorted(stamps, t_ns[within], side="right")
    return n, held[within]


def _free(record: Record) -> int:
    """Bytes that the allocator held free once the model was loaded."""
    loaded = record["loaded"]
    if record.get("device") == "cpu":
        return int(loaded.get("heap_free_bytes") or 0)
    state = loaded.get("allocator") or {}
    return int((state.get("reserved_bytes") or 0) - (state.get("allocated_bytes") or 0))


def _line(n: Any, held: Any, free: int) -> float | None:
    if len(n) < FEWEST_SAMPLES or np.ptp(n) == 0:
        return None
    slope, at_zero = np.polyfit(n, held, 1)
    scatter = float(np.std(held - slope * n - at_zero))
    grown = float(slope * np.ptp(n))
    return float(slope) if grown > TOLD_FROM_NOISE * scatter and HIDING * grown >= free else None

"""The share of a ceiling that the fastest decode and prefill of the same model, weights and machine reach,
published or measured here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.base import bounds, data
from harness.base.files import read_regular, strict_json
from harness.theory import floors, machine_names
from harness.theory.decoder import Decoder, dense
from harness.theory.machines import Machine
from harness.theory.rows import Reached, ReachedPrefill, Row

if TYPE_CHECKING:
    from harness.records import Record

Unread = dict[str, Any]
"""A record that is not checked against its types: reading 60 of them in full would take seconds."""
Speed = tuple[float, float, str]
"""Tokens per second, the context they were measured at, and the source."""
NEWEST = 60  # records of a model that are read
_BITS = {"16 bits": 16, "8 bits": 8, "4 bits": 4}  # stand for any type with this many bits


def add_reached(row: Row, records: Sequence[Unread], machine: Machine) -> None:
    """Set `reached` and `reached_prefill`; None without a measurement or a known ceiling. `records`: see
    of_model."""
    if row["B_ms"] is None:
        return
    of_row = [(r, _speed(r)) for r in records if _is_on(r, machine) and _has(r, row["weights"])]
    row["reached"] = _decode(row, of_row)
    row["reached_prefill"] = _prefill(row, of_row)


def _decode(row: Row, records: Sequence[tuple[Unread, Speed | None]]) -> Reached | None:
    B_ms, W = row["B_ms"], row["W_tokens_per_ms"]
    candidates: list[Reached] = []
    for record, speed in records:
        if B_ms is not None and speed is not None:
            tokens_per_s, n, source = speed
            floor_ms = B_ms + (n / W if W else 0.0)
            candidates.append(
                {
                    "tokens_per_s": tokens_per_s,
                    "share": floor_ms * tokens_per_s / 1e3,
                    "stack": record["stack"],
                    "variant": record["variant"],
                    "source": source,
                }
            )
    return max(candidates, key=lambda reached: reached["share"], default=None)


def _prefill(row: Row, records: Sequence[tuple[Unread, Speed | None]]) -> ReachedPrefill | None:
    """The prefill of a prompt of the same length. Times below the limit, or below a later step's (see
    floors.UNSYNCHRONISED), are excluded: the clock was read too early."""
    floor_ms, prompt = (row["prefill_ms"] or {}).get("last"), row["prompt_tokens"]
    candidates: list[ReachedPrefill] = []
    for record, speed in records:
        if floor_ms is None or prompt is None or (timed := _prefill_ms(record, prompt)) is None:
            continue
        ms, source = timed
        step_ms = 1e3 / speed[0] if speed else 0.0
        if ms >= max(floor_ms, floors.UNSYNCHRONISED * step_ms):
            candidates.append(
                {
                    "ms": ms,
                    "share": floor_ms / ms,
                    "stack": record["stack"],
                    "variant": record["variant"],
                    "source": source,
                }
            )
    return max(candidates, key=lambda reached: reached["share"], default=None)


def of_model(model: str, made: Decoder, results: Path) -> Iterator[Unread]:
    """The records of a dense model of this name and shape, published and below a results folder. Skips
    unreadable ones."""
    published = (data.HERE / data.PUBLISHED).glob(f"*/{model}/*/record.json")
    own = sorted(results.glob(f"*/{model}/*/*/record.json"), key=lambda path: path.parent.name)
    for path in [*published, *own[-NEWEST:]]:
        try:
            record = strict_json(read_regular(path, bounds.RECORD_BYTES))
            stored = dense(**record["model"]["shape"])
            if stored == made and record["workload"]["kind"] == "decode" and record["outcome"] == "ok":
                yield record | {"path": path}
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            continue


def _is_on(record: Unread, machine: Machine) -> bool:
    from harness.analysis.identity import recorded_gpu

    if record.get("device") == "cpu":
        return str(record["machine"].get("cpu")) == machine.name
    if (on := recorded_gpu(cast("Record", record))) is None:
        return False
    name, memory = str(on.get("name")), on.get("memory_bytes")
    known = machine_names.of_gpu(name, memory if isinstance(memory, int) else None)
    return known.name == machine.name if known else f" {name.lower()}".endswith(f" {machine.name.lower()}")


def _has(record: Unread, weights: str) -> bool:
    """Whether its weights are those of a row."""
    from harness.stacks.header import references  # pydantic takes 0.1 s

    reported = record.get("reported") or {}
    quant = record["variant"] if reported else (record.get("loaded") or {}).get("quant")
    of_gguf = record["stack"] == references()["gguf"].stack
    if weights in _BITS:
        bits = reported.get("bpw") or _bits(quant)
        return not of_gguf and bits == _BITS[weights]
    return of_gguf and str(quant).replace("fp16", "f16") == weights


def _bits(quant: str | None) -> int | None:
    from harness.analysis.traffic import nominal_bits

    return nominal_bits(quant)


def _speed(record: Unread) -> Speed | None:
    """The speed in a record; None if the record has no valid one."""
    if reported := record.get("reported"):
        source = record["source"]["title"]
        return (1e3 / reported["B_ms"], 0.0, source) if reported.get("B_ms") else None
    if (whole := _valid(record)) is None:
        return None
    timing, steps = whole["timing"], whole["tokens"] - 1
    if steps < 1 or "last_token_ns" not in timing:
        return None
    context = whole["workload"]["prompt_tokens"] + whole["tokens"] / 2
    rate = steps / (timing["last_token_ns"] - timing["first_token_ns"]) * 1e9
    return rate, context, _here(record)


def _prefill_ms(record: Unread, prompt: int) -> tuple[float, str] | None:
    """Milliseconds of a prompt of this length, and the source; None if that was not measured."""
    same = record["workload"]["prompt_tokens"] == prompt
    if reported := record.get("reported"):
        ms = reported.get("prefill_ms") if same else _in_series(record, prompt)
        return (ms, record["source"]["title"]) if ms else None
    whole = _valid(record) if same else None
    if whole is None or "first_token_ns" not in whole["timing"]:
        return None
    return whole["timing"]["first_token_ns"] / 1e6, _here(record)


def _in_series(record: Unread, prompt: int) -> float | None:
    from harness.records import ResultsError, Stored, prefill_series

    try:
        series = prefill_series(Stored(record["path"].parent, cast("Record", record)))
    except ResultsError:
        return None
    times = dict(zip(series.get("n", []), series.get("latency_ns", []), strict=True))
    return times[prompt] / 1e6 if prompt in times else None


def _valid(record: Unread) -> Record | None:
    """The whole of a record of our own; None if it cannot be read or its verdict is not ok."""
    from harness import records
    from harness.analysis.verdicts import verdict

    try:
        whole = records.read(record["path"])
        return whole if verdict(whole).status == "ok" else None
    except records.ResultsError:
        return None


def _here(record: Unread) -> str:
    return f"measured here, {record['started_utc'][:10]}"

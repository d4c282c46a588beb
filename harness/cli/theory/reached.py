"""The share of a ceiling reached by the fastest decode of the same model, weights and machine, published or
measured here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import shipped
from harness.stacks.header import references
from harness.system.files import MOST_RECORD_BYTES, read_regular
from harness.theory.machine import Machine
from harness.theory.row_types import Reached, Row
from harness.theory.shapes import Shape

Unread = dict[str, Any]
"""A record that is not held against its types: reading 60 of them in full would take seconds."""
RESULTS = Path("results")  # relative to the working directory
NEWEST = 60  # records of a model that are read
_BITS = {"w16": 16, "w8": 8, "w4": 4}  # forms of the weights that stand for any type with this many bits


def add(row: Row, records: Sequence[Unread], machine: Machine) -> None:
    """Set `reached`; null without a measurement or a known ceiling. `records`: see of_model."""
    B_ms, W = row["B_ms"], row["W_tokens_per_ms"]
    if B_ms is None:
        return
    found: list[Reached] = []
    for record in records:
        if not _is_on(record, machine) or not _has(record, row["weights"]):
            continue
        if (speed := _speed(record)) is not None:
            tokens_per_s, n, source = speed
            floor_ms = B_ms + (n / W if W else 0.0)
            found.append(
                {
                    "tokens_per_s": tokens_per_s,
                    "share": floor_ms * tokens_per_s / 1e3,
                    "stack": record["stack"],
                    "variant": record["variant"],
                    "source": source,
                }
            )
    row["reached"] = max(found, key=lambda each: each["share"], default=None)


def of_model(model: str, shape: Shape) -> Iterator[Unread]:
    """The records of a model of this name and shape, published and own. Skips unreadable ones."""
    published = (shipped.HERE / shipped.PUBLISHED).glob(f"*/{model}/*/record.json")
    own = sorted(RESULTS.glob(f"*/{model}/*/*/record.json"), key=lambda path: path.parent.name)
    for path in [*published, *own[-NEWEST:]]:
        try:
            record = json.loads(read_regular(path, MOST_RECORD_BYTES))
            stored = Shape(**record["model"]["shape"])
            if stored == shape and record["workload"]["kind"] == "decode" and record["outcome"] == "ok":
                yield record | {"path": path}
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _is_on(record: Unread, machine: Machine) -> bool:
    machines = record["machine"]
    if record.get("device") == "cpu":
        return str(machines.get("cpu")) == machine.name
    names = [str(gpu.get("name")) for gpu in machines.get("gpus") or []]
    return any(name.lower().endswith(machine.name.lower()) for name in names)


def _has(record: Unread, weights: str) -> bool:
    """Whether its weights are those of a row. Excludes fused layers of the published study: their cache drops
    tokens past 2,048."""
    reported = record.get("reported") or {}
    quant = record["variant"] if reported else (record.get("loaded") or {}).get("quant")
    of_gguf = record["stack"] == references()["gguf"].stack
    if weights in _BITS:
        bits = reported.get("bpw") or _bits(quant)
        return not of_gguf and bits == _BITS[weights] and "fused" not in record["variant"]
    return of_gguf and str(quant).replace("fp16", "f16") == weights


def _bits(quant: str | None) -> int | None:
    from harness.analysis.records.traffic import nominal_bits

    return nominal_bits(quant)


def _speed(record: Unread) -> tuple[float, float, str] | None:
    """Tokens per second, the context they were measured at, and the source; null if it is no measurement."""
    if reported := record.get("reported"):
        source = record["source"]["title"]
        return (1e3 / reported["B_ms"], 0.0, source) if reported.get("B_ms") else None
    from harness import results
    from harness.analysis.records.verdicts import verdict

    try:
        whole = results.read(record["path"])
        if verdict(whole).status != "ok":
            return None
    except results.ResultsError:
        return None
    timing, steps = whole["timing"], whole["tokens"] - 1
    if steps < 1 or "last_token_ns" not in timing:
        return None
    context = whole["workload"]["prompt_tokens"] + whole["tokens"] / 2
    rate = steps / (timing["last_token_ns"] - timing["first_token_ns"]) * 1e9
    return rate, context, f"measured here, {record['started_utc'][:10]}"

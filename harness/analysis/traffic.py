"""What a decode step reads from memory, and what share of a bandwidth that is. Pure: from a record alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.analysis.flags import Limit
from harness.theory import demand, floors
from harness.theory.ggml import element_bytes
from harness.theory.machines import MACHINES, Machine
from harness.theory.rows import knees
from harness.theory.shapes import Shape
from harness.theory.units import SI

Record = dict[str, Any]


def model_bytes(record: Record) -> int | None:
    """Bytes of all tensors as stored: from the file's header, else as the stack says."""
    return _weights(record).get("model_bytes")


def bpw(record: Record) -> float | None:
    """Bits per weight: model_bytes * 8 / parameters."""
    if reported := (record.get("reported") or {}).get("bpw"):
        return float(reported)
    weights = _weights(record)
    if not weights.get("parameters") or weights.get("model_bytes") is None:
        return None
    return float(weights["model_bytes"] * 8 / weights["parameters"])


def weight_bytes_per_token(record: Record) -> int | None:
    """Bytes of weights one decode step reads: all but an untied input embedding, of which it reads one
    row. By bits per weight and shape where only those are known."""
    weights, shape, bits = _weights(record), _shape(record), bpw(record)
    if weights.get("model_bytes") is None:
        return round(demand.of_bits(shape, bits).weight_bytes_per_token) if shape and bits else None
    return int(
        weights["model_bytes"] - (0 if weights.get("tied", True) else weights["input_embedding_bytes"])
    )


def kv_bytes_per_token(record: Record) -> float | None:
    """Bytes of KV cache a token adds: 2 * layers * kv_heads * head_dim * element bytes, K and V as typed."""
    attention, shape = record["model"]["weights"].get("attention"), _shape(record)
    if not attention and shape:
        attention = {"layers": shape.layers, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    if not attention:
        return None
    options = record.get("options", {})
    element = element_bytes(options.get("type_k", "f16")) + element_bytes(options.get("type_v", "f16"))
    return float(attention["layers"] * attention["kv_heads"] * attention["head_dim"] * element)


def ceiling_bytes_per_s(records: Iterable[Record]) -> float | None:
    """The best read bandwidth measured on this machine in these records' campaigns; null when none was."""
    rates = [float(p["read_bytes_per_s"]) for r in records for p in r.get("bandwidth_probes", [])]
    return max(rates, default=None)


def data_sheet(record: Record) -> Machine | None:
    """The GPU's data sheet; null on a CPU, whose memory no name tells, and for others."""
    if record.get("device") == "cpu":
        return None
    names = [str(gpu.get("name")).lower() for gpu in record["machine"].get("gpus") or []]
    known = (m for m in MACHINES.values() if any(name.endswith(m.name.lower()) for name in names))
    return next(known, None)


def prefill_knees(record: Record) -> dict[str, list[int | None] | None] | None:
    """Prompt lengths between which prefill is bound by compute, as `harness theory` gives them."""
    machine, shape, bits = data_sheet(record), _shape(record), bpw(record)
    if machine is None or shape is None or bits is None:
        return None
    ceiling = floors.Ceiling(machine.bandwidth_bytes_per_s, machine.flops)
    return knees(demand.of_bits(shape, bits), ceiling, SI)


def limits(record: Record, ceiling: float | None) -> dict[str, Limit]:
    """What the data sheet's bandwidth and the measured one allow, by name; those that are known.

    What fits the last-level cache of a CPU is not counted. A cache that is read in full is part of B.
    """
    weights, kv = weight_bytes_per_token(record), kv_bytes_per_token(record)
    if weights is None:
        return {}
    loaded = record.get("loaded") or {}
    read, slope = float(weights), kv
    if loaded.get("kv_read") == "full":
        read, slope = read + (kv or 0) * ((loaded.get("options") or {}).get("n_ctx") or 0), None
    if record.get("device") == "cpu":
        read = max(0.0, read - (record["machine"].get("last_level_cache_bytes") or 0))
    machine = data_sheet(record)
    ceilings = {"data sheet": machine and machine.bandwidth_bytes_per_s, "measured": ceiling}
    return {
        name: Limit(read / rate * 1e3, slope / rate * 1e3 if slope else None)
        for name, rate in ceilings.items()
        if rate
    }


def bandwidth_share(record: Record, ceiling: float | None) -> float | None:
    """Bytes a mean decode step streams (weights, and the context so far once) over its time, as a share of
    ceiling.

    What fits the last-level cache is not counted: it need not come from memory again. Null when none is left.
    """
    timing, weights = record.get("timing", {}), weight_bytes_per_token(record)
    steps = record["tokens"] - 1
    on_cpu = record.get("device") == "cpu"
    if ceiling is None or weights is None or steps < 1 or "last_token_ns" not in timing or not on_cpu:
        return None
    mean_context = record["workload"]["prompt_tokens"] + record["tokens"] / 2
    read = weights + (kv_bytes_per_token(record) or 0) * mean_context
    read -= record["machine"]["last_level_cache_bytes"] or 0
    if read <= 0:
        return None
    seconds = (timing["last_token_ns"] - timing["first_token_ns"]) / 1e9 / steps
    return float(read / seconds / ceiling)


def _weights(record: Record) -> dict[str, Any]:
    return record["model"]["weights"].get("header") or record.get("loaded") or {}


def _shape(record: Record) -> Shape | None:
    shape = record["model"].get("shape")
    return Shape(**shape) if shape else None

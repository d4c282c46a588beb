"""Bytes that a decode step reads from memory, and the share of bandwidth reached. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from harness.analysis import speculation
from harness.analysis.columns import Ends
from harness.analysis.flags import Limit
from harness.analysis.identity import recorded_gpu
from harness.records.kinds import Record, loaded_of, served_elsewhere
from harness.records.parts import Attention, DecoderFacts, Header, Placed, StackFacts
from harness.theory import decoder, floors, machine_names
from harness.theory.decoder import Decoder, dense
from harness.theory.floors import SI
from harness.theory.ggml_types import element_bytes
from harness.theory.loaded_sizes import ELEMENT_BYTES
from harness.theory.machines import MACHINES, Machine
from harness.theory.rows import is_quantized, knees


def model_bytes(record: Record) -> int | None:
    """Bytes of all tensors: as loaded where the stack counts them exactly, else from the file's header."""
    return _weights(record).get("model_bytes")


def bpw(record: Record) -> float | None:
    """Bits per weight: model_bytes * 8 / parameters."""
    if reported := (record.get("reported") or {}).get("bpw"):
        return float(reported)
    weights = _weights(record)
    size, parameters = weights.get("model_bytes"), weights.get("parameters")
    return size * 8 / parameters if size is not None and parameters else None


def nominal_bits(quant: str | None) -> int | None:
    """The bits in a type's name, without scales and without tensors kept in 16 bits; None for none.

    `q4_k_m`, `nf4` and `gptq-int4` 4; `int8` 8; f16, bf16 and fp32 16.
    """
    if re.fullmatch(r"(f|bf|fp)(16|32)", quant or ""):
        return 16
    digits = re.search(r"\d+", quant or "")
    return int(digits[0]) if digits else None


def weight_bytes_per_token(record: Record) -> int | None:
    """Bytes of weights that one decode step reads: all but an untied input embedding, where it reads one row,
    and layers that only draft tokens; of experts those that a token uses.

    From bits per weight and shape where only those are known.
    """
    weights, model, bits = _weights(record), _dense(record), bpw(record)
    if (size := weights.get("model_bytes")) is None:
        return round(floors.demand_of_bits(model, bits).weight_bytes_per_token) if model and bits else None
    size -= weights.get("draft_bytes", 0)
    if not weights.get("tied", True):
        size -= weights["input_embedding_bytes"] or 0
    if decoder := _decoder(record):
        size -= weights.get("table_bytes", 0)
        idle = 1 - decoder["experts_used"] / decoder["experts"] if decoder["experts"] else 0.0
        size -= round(weights.get("expert_bytes", 0) * idle)
    return size


def kv_bytes_per_token(record: Record) -> float | None:
    """Bytes of KV cache per token, before any window is full: as the stack reports, else 2 * layers *
    kv_heads * head_dim * element bytes, with the types of K and V."""
    if known := _known_step(record):
        return known.kv_bytes_per_token
    reported = loaded_of(record).get("kv_bytes_per_token")
    if reported is not None:
        return float(reported)
    attention: Mapping[str, int] | Attention | None = record["model"]["weights"].get("attention")
    if attention:
        elements = attention["layers"] * attention["kv_heads"] * attention["head_dim"]
    elif model := _dense(record):
        elements = decoder.kv_elements_per_token(model) // 2
    else:
        return None
    return float(elements * sum(_kv_types(record)))


def probed_bytes_per_s(records: Iterable[Record]) -> list[float]:
    """All read bandwidths measured on this machine in these records' campaigns."""
    return [float(p["read_bytes_per_s"]) for r in records for p in r.get("bandwidth_probes", [])]


def ceiling_bytes_per_s(records: Iterable[Record]) -> float | None:
    """The best read bandwidth measured in these records' campaigns; None: not measured."""
    return max(probed_bytes_per_s(records), default=None)


# Of the highest over the lowest probe: 1.0002 on an H200, 1.7 on a shared virtual machine with two CPUs,
# where an MBU of 33% became 19%.
UNSTABLE = 1.2


def spread(rates: Sequence[float]) -> str:
    """`25 GB/s, the highest read bandwidth measured here (probes read 24 to 25 GB/s)`."""
    low, high = (f"{rate / 1e9:.0f}" for rate in (min(rates), max(rates)))
    probes = f"probes read {low} to {high} GB/s" if low != high else f"{len(rates)} probes agree"
    if max(rates) > UNSTABLE * min(rates):
        probes += ": this machine's bandwidth is not stable"
    return f"{high} GB/s, the highest read bandwidth measured here ({probes})"


def share_range(bytes_per_s: float | None, rates: Sequence[float]) -> Ends | None:
    """A rate as a share of the highest and of the lowest of these read bandwidths; None where they differ by
    at most a fifth."""
    if bytes_per_s is None or not rates or max(rates) <= UNSTABLE * min(rates):
        return None
    return [bytes_per_s / max(rates), bytes_per_s / min(rates)]


def data_sheet(record: Record) -> Machine | None:
    """The data sheet of the GPU that it ran on, or of the board with this CPU; None: unknown, and for other
    CPUs, whose name does not determine their memory."""
    if record.get("device") == "cpu":
        return board(record["machine"].get("cpu"))
    gpu = recorded_gpu(record)
    return machine_names.of_gpu(gpu["name"], gpu["memory_bytes"]) if gpu else None


@lru_cache(maxsize=64)
def board(cpu: str | None) -> Machine | None:
    """The single-board computer with this CPU name; None for others.

    `Raspberry Pi 5 Model B Rev 1.0` is a Raspberry Pi 5; a `Raspberry Pi 500` is not.
    """
    known = (m for m in MACHINES.values() if m.board and f"{cpu} ".startswith(f"{m.name} "))
    return next(known, None)


def prefill_demand(record: Record) -> floors.Demand | None:
    """Bytes and FLOP of its model by shape and bits per weight; None where those are not known."""
    if known := _known_step(record):
        return known
    model, bits = _dense(record), bpw(record)
    return floors.demand_of_bits(model, bits) if model and bits else None


def batch_demand(record: Record) -> floors.Demand | None:
    """Bytes and FLOP of a step of several users, with weights and KV cache as loaded; without FLOP where the
    model's shape is not known. None where a step may give a user several tokens."""
    needs, weights = prefill_demand(record) or _step(record), weight_bytes_per_token(record)
    if needs is None or weights is None or served_elsewhere(record) or speculation.row(record):
        return None
    if (kv := kv_bytes_per_token(record)) is not None:
        needs = floors.with_kv(needs, kv)
    return replace(needs, layer_bytes=weights - needs.lm_head_bytes)


def prefill_ceiling(record: Record) -> floors.Ceiling | None:
    """The data sheet's bandwidth, and its rate for such weights; None where the rate is unknown, for a board,
    whose rate depends on the kernel of each type, and for a model in two memories."""
    machine, bits = data_sheet(record), bpw(record)
    if machine is None or machine.board or bits is None or elsewhere_in_memory(record):
        return None
    if (flops := machine.kernel_flops(is_quantized(bits))) is None:
        return None
    return floors.Ceiling(machine.data_sheet_bytes_per_s, flops)


def highest_ceiling(record: Record, measured_bytes_per_s: float | None) -> floors.Ceiling | None:
    """The higher of the data sheet's bandwidth and the measured one, with the data sheet's FLOP/s, or without
    a limit of them: anything faster is a measurement error. None where neither is known."""
    ceiling = prefill_ceiling(record)
    rate = max(ceiling.bytes_per_s if ceiling else 0.0, measured_bytes_per_s or 0.0)
    return floors.Ceiling(rate, ceiling.flops if ceiling else math.inf) if rate else None


def prefill_knees(record: Record) -> dict[str, list[int | None] | None] | None:
    """Prompt lengths between which prefill is compute-bound, as in `harness theory`; None without a
    `prefill_demand` or `prefill_ceiling`."""
    needs, ceiling = prefill_demand(record), prefill_ceiling(record)
    return knees(needs, ceiling, SI) if needs and ceiling else None


def limits(record: Record, ceiling: float | None, past_cache: bool = False) -> dict[str, Limit]:
    """Limits by the data sheet's bandwidth and by the measured one, by name, where known.

    `past_cache`: without the bytes that fit a CPU's last-level cache, which need not be read from memory
    again: nothing is faster than that. A KV cache that is read in full is part of B but not
    of the first token: prefill need not attend to empty cells.
    """
    step, (kv_read, length) = _step(record), _reading(record)
    if step is None:
        return {}
    cached = cache_bytes(record) if past_cache else 0
    machine = data_sheet(record)
    by_name = {}
    for name, rate in (
        ("data sheet", machine and machine.data_sheet_bytes_per_s),
        ("measured", ceiling),
    ):
        if not rate:
            continue
        at_most = floors.Ceiling(rate, math.inf)
        B_s, first_s = (floors.B_s(step, at_most, read, length) for read in (kv_read, "grows"))
        by_name[name] = Limit(
            max(0.0, B_s - cached / rate) * 1e3,
            _slope_ms(record, step, at_most, "grows"),
            max(0.0, first_s - cached / rate) * 1e3,
            _slope_ms(record, step, at_most, kv_read),
        )
    return by_name


def bandwidth_share(record: Record, ceiling: float | None) -> float | None:
    """MBU: bytes per mean decode step over its time, as a share of ceiling. None where a part of the model is
    on another device than the one whose bandwidth that is.

    A step reads the weights, and the context so far once: a static KV cache in full, a sliding one up to its
    window. All of these bytes count, so a model that fits the CPU's cache may exceed 100%.
    """
    return _share(record, ceiling, cached=0)


def past_cache_share(record: Record, ceiling: float | None) -> float | None:
    """The same without the bytes that fit the last-level cache, which need not be read from memory again: no
    honest run exceeds 100%. None where all weights fit, and on a GPU, whose cache is not known."""
    step, cached = _step(record), cache_bytes(record)
    if step is None or step.weight_bytes_per_token <= cached or record.get("device") != "cpu":
        return None
    return _share(record, ceiling, cached)


def _share(record: Record, ceiling: float | None, cached: int) -> float | None:
    timing, step = record.get("timing", {}), _step(record)
    steps = record["tokens"] - 1
    if ceiling is None or step is None or steps < 1 or "last_token_ns" not in timing:
        return None
    if speculation.row(record) or elsewhere_in_memory(record):  # a step may give several tokens
        return None
    read = step.weight_bytes_per_token + _mean_kv_bytes(record, step) - cached
    seconds = (timing["last_token_ns"] - timing["first_token_ns"]) / 1e9 / steps
    return float(read / seconds / ceiling)


def elsewhere_in_memory(record: Record) -> str | None:
    """What of a model on a GPU a step reads from main memory, in words; None for nothing, and on a CPU."""
    if record.get("device") == "cpu":
        return None
    loaded = loaded_of(record)
    parts = []
    for part, places in (loaded.get("devices") or {}).items():
        if isinstance(places, dict):  # not the list of devices that are present
            count = sum(n for place, n in places.items() if place.lower() == "cpu")
            if count:
                parts.append(f"{count} of {sum(places.values())} {part}")
    held = (loaded.get("placement") or Placed(misplaced=[])).get("bytes") or {}
    if size := sum(n for place, n in held.items() if place.startswith("CPU") or place.endswith("_Host")):
        parts.append(f"{size / 1e6:,.0f} MB of tensors that the options place there")
    return ", ".join(parts) or None


def cache_bytes(record: Record) -> int:
    """Bytes of a CPU's last-level cache; 0 on a GPU, or where unknown."""
    return (record["machine"].get("last_level_cache_bytes") or 0) if record.get("device") == "cpu" else 0


def _step(record: Record) -> floors.Demand | None:
    """The bytes of a decode step; None for a server in another process, which may run on another device."""
    return None if served_elsewhere(record) else step(record)


def step(record: Record) -> floors.Demand | None:
    """The bytes of a decode step, without its compute; None where they are not known."""
    if (weights := weight_bytes_per_token(record)) is None:
        return None
    if known := _known_step(record):
        return replace(known, reaches=tuple(replace(reach, flops=0.0) for reach in known.reaches))
    return floors.Demand(0, 0, weights, 0, 0, (floors.Reach(kv_bytes_per_token(record) or 0),))


def _reading(record: Record) -> tuple[str, int]:
    """How the stack reads its KV cache, and the size in tokens of a static cache or a window; 0: unreported,
    which gives the loosest limit."""
    loaded = loaded_of(record)
    kv_read, model = loaded.get("kv_read") or "grows", _dense(record)
    if kv_read == "window":
        return kv_read, loaded.get("window") or (model and model.window) or 0
    return kv_read, (loaded.get("options") or {}).get("n_ctx") or 0


def _slope_ms(record: Record, step: floors.Demand, ceiling: floors.Ceiling, kv_read: str) -> float | None:
    """The least ms that a token of context adds, with the cache read as `kv_read`.

    None where latency has no one slope: a static cache, or a run past a sliding window.
    """
    declared, length = _reading(record)
    past = declared == "window" and record["workload"]["prompt_tokens"] + record["tokens"] > length
    if declared == "full" or past or not step.kv_bytes_per_token:
        return None
    ends = record["workload"]["prompt_tokens"] + record["tokens"]
    if any(reach.window and reach.window < ends for reach in step.reaches):
        return None
    W = floors.W_tokens_per_s(step, ceiling, kv_read)
    return 1e3 / W if W else None


def _mean_kv_bytes(record: Record, step: floors.Demand) -> float:
    """Mean bytes of KV cache that a decode step attends to, and of states that it reads and writes."""
    kv_read, length = _reading(record)
    steps, first = record["tokens"] - 1, record["workload"]["prompt_tokens"]
    attended = kv_read if kv_read in ("full", "window") else "grows"  # neither padding nor copies
    work = floors.cost(step, floors.Pass(steps, first, kv_read=attended, length=length, kv_block=1))
    return work.cache / steps + work.states


def _weights(record: Record) -> StackFacts | Header:
    """Sizes of the weights: from a stack that reports `tied`, which counts exactly, else from the file's
    header."""
    loaded = loaded_of(record)
    if "tied" in loaded and loaded.get("model_bytes") is not None:
        return loaded
    return record["model"]["weights"].get("header") or loaded


def _known_step(record: Record) -> floors.Demand | None:
    """The demand of a step of a model that is not dense; None for others, and where bytes are unknown."""
    decoder, weights = _decoder(record), weight_bytes_per_token(record)
    if decoder is None or weights is None:
        return None
    bits = bpw(record) or 16
    k_bytes, v_bytes = _kv_types(record)
    lm_head = decoder["lm_head_params"] * bits / 8
    return floors.demand_of(
        decoder,
        weights - lm_head,
        lm_head,
        _weights(record).get("expert_bytes", 0),
        k_bytes,
        v_bytes,
        latent=record["model"]["weights"].get("format") == "gguf",
    )


def _kv_types(record: Record) -> tuple[float, float]:
    """Bytes of an element of K and of V; 16 bits if the stack has no option for it."""
    options = record.get("options", {})
    if dtype := options.get("dtype"):
        return (ELEMENT_BYTES[dtype],) * 2
    return element_bytes(options.get("type_k", "f16")), element_bytes(options.get("type_v", "f16"))


def _decoder(record: Record) -> DecoderFacts | None:
    return record["model"]["weights"].get("decoder")


def _dense(record: Record) -> Decoder | None:
    shape = record["model"].get("shape")
    return dense(**shape) if shape else None

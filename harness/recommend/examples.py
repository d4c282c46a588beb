"""Turn the user's records into examples for predictions: each measured variant's traits and speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.analysis import traffic
from harness.analysis.columns import Cell, DepthsRow
from harness.recommend import candidates, sides, variant_costs
from harness.recommend.traits import GGML, Example, Traits
from harness.recommend.variant_costs import OfModel
from harness.records import ResultsError, Stored, prefill_series
from harness.records.kinds import Record, loaded_of
from harness.stacks.header import Header, stacks
from harness.theory.decoder import dense
from harness.theory.floors import MOVED_STATE
from harness.theory.ggml_quants import ALL_QUANTS
from harness.theory.rows import is_quantized

if TYPE_CHECKING:
    from harness.dataset.study import Study

PROMPT_TOKENS = 64  # a shorter prompt tells nothing of the compute rate
_PASSES = ("n", "latency_ns", "depth")
_NO_DEPTHS: DepthsRow = {"at": [], "curved": False}
_BNB = {"int8": "int8", "int4": "nf4"}  # as the published study names them


def of_own(gathered: Study, bandwidths: Mapping[str, float]) -> list[Example]:
    """One example per cell that was measured in full, and one for each depth of its windows. Shares of a
    device's bandwidth mean the same in all: they are of the best that was measured on it, or of
    `bandwidths`, by CPU."""
    own_examples: list[Example] = []
    for cell in gathered.cells:
        if (stored := gathered.behind(cell)) is None or cell["status"] != "ok":
            continue
        measured = cell["bandwidth_bytes_per_s"]
        if measured is None and stored.record.get("device") == "cpu":
            measured = bandwidths.get(str(stored.record["machine"]["cpu"]))
        traits = traits_of_record(stored.record, cell["variant"], measured)
        if traits is not None:
            own_examples += _of_cell(cell, stored, traits)
    best: dict[str, float] = {}
    for example in own_examples:
        best[example.traits.device] = max(best.get(example.traits.device, 0.0), example.traits.bytes_per_s)
    best |= bandwidths
    return [
        replace(example, traits=_at(example.traits, best[example.traits.device])) for example in own_examples
    ]


def _at(traits: Traits, bytes_per_s: float) -> Traits:
    """The traits at another bandwidth, by which the rate of a CPU is known too."""
    scale = bytes_per_s / traits.bytes_per_s if traits.family == "cpu" else 1.0
    return replace(traits, bytes_per_s=bytes_per_s, flops=traits.flops and traits.flops * scale)


def traits_of_record(
    record: Record, variant: str, measured_bytes_per_s: float | None = None
) -> Traits | None:
    """The traits of a record; None where stack, model, bytes or the device's bandwidth are unknown."""
    header = stacks().get(record["stack"])
    sheet = traffic.data_sheet(record)
    bandwidth = sheet.data_sheet_bytes_per_s if sheet else measured_bytes_per_s
    if header is None or not bandwidth or (model := _of_model(record)) is None or is_special(record):
        return None
    group = variant_costs.cost_group(header, variant, record.get("options") or {})
    engine, on_cpu = variant_costs.engine(header, group), record.get("device") == "cpu"
    quant = _type(str(loaded_of(record).get("quant") or variant)) if engine == GGML else ""
    if not (read := _read_bytes(record, header, variant, quant)):
        return None
    packed = is_quantized(traffic.bpw(record) or 16)
    family = "cpu" if on_cpu else "cuda"
    needs = traffic.prefill_demand(record)
    state, experts = (needs.state_bytes, needs.expert_bytes) if needs else (0.0, 0.0)
    return Traits(
        group=group,
        engine=engine,
        type=quant,
        model=record["model"]["name"],
        device=sheet.name if sheet else str(record["machine"]["cpu"]),
        family=family,
        read_bytes=read + MOVED_STATE * state,
        bytes_per_s=bandwidth,
        packed=packed,
        flops=variant_costs.prompt_flops(sheet, family, packed)
        if sheet
        else variant_costs.cpu_flops(bandwidth),
        expert_bytes=experts,
        expert_share=needs.experts_used / needs.experts if needs and needs.experts else 1.0,
        generation=variant_costs.generation(sheet) if sheet else "",
        maker=variant_costs.maker_of(sheet) if sheet else "CPU",
        **model,
    )


def _type(quant: str) -> str:
    """The harness's name of a type; llama.cpp's names are `MXFP4 MoE`, `IQ4_XS - 4.25 bpw`."""
    return quant.partition(" - ")[0].replace(" ", "_")


def is_special(record: Record) -> bool:
    """Whether some layers or tensors were on the GPU's host CPU, or a search tried the options."""
    options = record.get("options") or {}
    is_split = record.get("device") != "cpu" and options.get(sides.OPTION, sides.ALL) != sides.ALL
    is_placed = any(options.get(name) for name in ("n_cpu_moe", "override_tensor"))
    return is_split or is_placed or "setting" in (record.get("campaign") or {})


def _of_model(record: Record) -> OfModel | None:
    """The shared traits of a record's model; None where shape and layers are unknown."""
    shape, decoder = record["model"].get("shape"), record["model"]["weights"].get("decoder")
    if decoder and (needs := traffic.prefill_demand(record)):
        return variant_costs.kind_of_demand(needs, sum(cache["layers"] for cache in decoder["caches"]))
    kv_bytes = traffic.kv_bytes_per_token(record)
    return variant_costs.kind_of_model(dense(**shape), kv_bytes) if shape and kv_bytes else None


def _read_bytes(record: Record, header: Header, variant: str, quant: str) -> float | None:
    """Bytes of weights read in a step. Published variants have only nominal bits; the rest follows from
    their formats."""
    shape = record["model"].get("shape")
    if record.get("reported") and shape:
        if quant in ALL_QUANTS:
            return candidates.in_type(dense(**shape), quant).needs.weight_bytes_per_token
        of_torch = variant_costs.read_bytes(header, dense(**shape), _BNB.get(variant), traffic.bpw(record))
        if of_torch:
            return of_torch
    return traffic.weight_bytes_per_token(record)


def _of_cell(cell: Cell, stored: Stored, traits: Traits) -> Iterator[Example]:
    first, at_ms = first_token(stored) if traits.flops else {}, _decode(cell)
    if at_ms or first:
        yield Example(traits, at_ms, first)
    for depth in (cell["depths"] or _NO_DEPTHS)["at"]:
        yield Example(traits, {depth["depth"] + 1: depth["ms"]}, {})


def first_token(stored: Stored) -> dict[int, float]:
    """The longest prompt from an empty cache, if it is long enough, and its median time in ms."""
    try:
        series = prefill_series(stored)
    except ResultsError:
        return {}
    columns = zip(*(series.get(name, []) for name in _PASSES), strict=True)
    rows = [(n, ns / 1e6) for n, ns, depth in columns if not depth]
    longest = max((n for n, _ in rows), default=0)
    if longest < PROMPT_TOKENS:
        return {}
    return {longest: statistics.median(ms for n, ms in rows if n == longest)}


def _decode(cell: Cell) -> dict[int, float]:
    """Latency on the fitted line, or in the middle of a series too short for one. A static cache is read
    whole at each position."""
    first, last = cell["prompt_tokens"] + 1, cell["prompt_tokens"] + cell["new_tokens"]
    median, length = cell["median_ms"], cell["n_ctx"] if cell["kv_read"] == "full" else None
    line = of_line(cell["B_ms"], cell["W_tokens_per_ms"], first, last) if cell["W_identifiable"] else {}
    if line and not length:
        return line
    return {} if median is None else {length or (first + last) // 2: median}


def of_line(B_ms: float | None, W_tokens_per_ms: float | None, first: int, last: int) -> dict[int, float]:
    """Latencies at two positions on a line fitted from the first position to the last: where it meets any
    parabola that it was fitted to. Empty: the line is not known."""
    if B_ms is None or W_tokens_per_ms is None:
        return {}
    middle, off = (first + last) / 2, (last - first) / 2 / math.sqrt(3)
    return {n: B_ms + n / W_tokens_per_ms for n in {round(middle - off), round(middle + off)}}

"""Turn records into examples for predictions: the traits and the speed of each measured variant."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.analysis import traffic
from harness.analysis.columns import Cell, DepthsRow
from harness.analysis.figures import BY_NAME
from harness.recommend import candidates
from harness.recommend.candidates import OfModel, Rates
from harness.recommend.terms import OLDER, OLDER_YEAR, STUDY_LOOP
from harness.recommend.traits import GGML, Example, Traits
from harness.records import ResultsError, Stored, prefill_series
from harness.records.kinds import Record, loaded_of
from harness.stacks.header import Header, references, stacks
from harness.theory.decoder import dense
from harness.theory.floors import MOVED_STATE
from harness.theory.public_speeds import PublicSpeed, maker
from harness.theory.rows import is_quantized
from harness.theory.tensors import ALL_QUANTS

if TYPE_CHECKING:
    from harness.dataset.study import Study

PROMPT_TOKENS = 64  # a shorter prompt tells nothing of the compute rate
_PASSES = ("n", "latency_ns", "depth")
_NO_DEPTHS: DepthsRow = {"at": [], "curved": False}
_BNB = {"int8": "int8", "int4": "nf4"}  # as the published study names them


def of_published(published: Iterable[Stored]) -> list[Example]:
    """One example per published variant with B and W."""
    found = []
    for stored in published:
        record = stored.record
        reported, workload = record.get("reported"), record["workload"]
        traits = _traits(record, stored.record["variant"], None, None)
        if traits is None or not reported or record["outcome"] != "ok":
            continue
        B, W = reported["B_ms"], reported["W_tokens_per_ms"]
        if B is None or W is None:
            continue
        last = workload["prompt_tokens"] + workload["new_tokens"]
        line = {1: B, last: B + (last - 1) / W}
        first = _first_token(stored) if traits.flops else {}
        traits = replace(traits, setup=STUDY_LOOP, software=STUDY_LOOP)
        found.append(Example(traits, line, (workload["prompt_tokens"] + 1, last), first))
    return found


def of_public(rows: Iterable[PublicSpeed]) -> list[Example]:
    """One example per measurement of others; none of a GPU that ran by another interface than its maker's."""
    found = []
    for row in rows:
        if row.family != row.device.family and row.maker != "AMD":
            continue
        n = row.context or 1
        at_ms = {n: 1e3 / row.tok_s} if row.tok_s else {}
        traits = _traits_of_public(row)
        first = (
            {row.prompt_tokens: 1e3 * row.prompt_tokens / row.prompt_tok_s}
            if (row.prompt_tokens and row.prompt_tok_s and traits.flops)
            else {}
        )
        found.append(Example(traits, at_ms, (n, n), first))
    return found


# Variants of PyTorch's stacks, as public rows name them.
_PUBLIC_VARIANTS = {
    "hf": "hf bf16",
    "autoawq exllama": "autoawq exllama",
    "autoawq gemm fused": "autoawq gemm-fused",
}


def _traits_of_public(row: PublicSpeed) -> Traits:
    group = _PUBLIC_VARIANTS.get(row.stack, references()["gguf"].stack)
    header = stacks()[group.partition(" ")[0]]
    engine = candidates.engine(header, group)
    read = row.demand.weight_bytes_per_token
    if engine != GGML:
        read = candidates.read_bytes(header, row.made, None, None) or read
    needs = row.demand
    return Traits(
        group=group,
        engine=engine,
        type=row.quant if engine == GGML else "",
        model=row.name,
        device=row.device.name,
        family=row.family,
        read_bytes=read + MOVED_STATE * needs.state_bytes,
        bytes_per_s=row.device.bandwidth_bytes_per_s,
        packed=row.packed,
        flops=candidates.prompt_flops(row.device, row.family, row.packed),
        expert_bytes=needs.expert_bytes,
        expert_share=needs.experts_used / needs.experts if needs.experts else 1.0,
        waits=candidates.waits(header, group),
        setup=_setup(row.source),
        software=OLDER if row.year and row.year <= OLDER_YEAR and engine == GGML else "",
        generation=candidates.generation(row.device),
        maker=row.maker,
        **candidates.kind_of_model(row.made, needs.kv_bytes_per_token),
    )


def _setup(source: str) -> str:
    """Who measured: a repository, or a thread; never empty, which is the user."""
    first = source.partition(" ")[0]
    return first if "/" in first else re.sub(r" ?\(.*|/\d+$", "", source) or "unknown"


def of_own(gathered: Study, bandwidths: Mapping[str, float] | None = None) -> list[Example]:
    """One example per cell that was measured in full, and one for each depth of its windows. Shares of a
    device's bandwidth mean the same in all: they are of the best that was measured on it. `bandwidths`: by
    CPU, for records whose campaign could not measure it."""
    found: list[Example] = []
    for cell in gathered.cells:
        if (stored := gathered.behind(cell)) is None or cell["status"] != "ok":
            continue
        length = cell["n_ctx"] if cell["kv_read"] == "full" else None
        measured = cell["bandwidth_bytes_per_s"]
        if measured is None and bandwidths and stored.record.get("device") == "cpu":
            measured = bandwidths.get(str(stored.record["machine"]["cpu"]))
        traits = _traits(stored.record, cell["variant"], measured, length)
        if traits is not None:
            found += _of_cell(cell, stored, traits)
    best: dict[str, float] = {}
    for each in found:
        best[each.traits.device] = max(best.get(each.traits.device, 0.0), each.traits.bytes_per_s)
    return with_bandwidths(found, best)


def with_bandwidths(examples: Iterable[Example], of_device: Mapping[str, float]) -> list[Example]:
    """The examples, those of these devices with these bandwidths."""
    found = []
    for each in examples:
        bandwidth = of_device.get(each.traits.device, each.traits.bytes_per_s)
        found.append(replace(each, traits=replace(each.traits, bytes_per_s=bandwidth)))
    return found


def with_rates(examples: Iterable[Example], device: str, rates: Rates) -> list[Example]:
    """The examples, those of a device with its rates by type."""
    return [
        replace(each, traits=candidates.given_rates(each.traits, rates))
        if each.traits.device == device
        else each
        for each in examples
    ]


def _traits(
    record: Record, variant: str, measured_bytes_per_s: float | None, static_tokens: int | None
) -> Traits | None:
    """The traits of a record; null where stack, model, bytes or the device's bandwidth are unknown."""
    header = stacks().get(record["stack"])
    sheet = traffic.data_sheet(record)
    bandwidth = sheet.data_sheet_bytes_per_s if sheet else measured_bytes_per_s
    if header is None or not bandwidth or (model := _of_model(record)) is None or is_special(record):
        return None
    group = candidates.cost_group(header, variant, record.get("options") or {})
    engine, on_cpu = candidates.engine(header, group), record.get("device") == "cpu"
    quant = _type(str(loaded_of(record).get("quant") or variant)) if engine == GGML else ""
    if not (read := _read_bytes(record, header, variant, quant)):
        return None
    packed = is_quantized(traffic.bpw(record) or 16)
    needs = traffic.prefill_demand(record)
    state, experts = (needs.state_bytes, needs.expert_bytes) if needs else (0.0, 0.0)
    return Traits(
        group=group,
        engine=engine,
        type=quant,
        model=record["model"]["name"],
        device=sheet.name if sheet else str(record["machine"]["cpu"]),
        family="cpu" if on_cpu else "cuda",
        read_bytes=read + MOVED_STATE * state,
        bytes_per_s=bandwidth,
        packed=packed,
        flops=sheet.kernel_flops(packed) if sheet else None,
        static_tokens=static_tokens,
        expert_bytes=experts,
        expert_share=needs.experts_used / needs.experts if needs and needs.experts else 1.0,
        of_types=_of_types(record, quant, read),
        waits=candidates.waits(header, group),
        generation=candidates.generation(sheet) if sheet else "",
        maker="CPU" if on_cpu else maker(sheet) if sheet else "NVIDIA",
        **model,
    )


def _type(quant: str) -> str:
    """The harness's name of a type; llama.cpp's names are `MXFP4 MoE`, `IQ4_XS - 4.25 bpw`."""
    return quant.partition(" - ")[0].replace(" ", "_")


def is_special(record: Record) -> bool:
    """Whether some layers or tensors were on the GPU's host CPU, or a search tried the options."""
    options = record.get("options") or {}
    is_split = (
        record.get("device") != "cpu" and options.get(candidates.OPTION, candidates.ALL) != candidates.ALL
    )
    is_placed = any(options.get(name) for name in ("n_cpu_moe", "override_tensor"))
    return is_split or is_placed or "setting" in (record.get("campaign") or {})


def _of_model(record: Record) -> OfModel | None:
    """The shared traits of a record's model; null where shape and layers are unknown."""
    given, made = record["model"].get("shape"), record["model"]["weights"].get("decoder")
    if made and (needs := traffic.prefill_demand(record)):
        return candidates.kind_of_demand(needs, sum(each["layers"] for each in made["caches"]))
    kv_bytes = traffic.kv_bytes_per_token(record)
    return candidates.kind_of_model(dense(**given), kv_bytes) if given and kv_bytes else None


def _read_bytes(record: Record, header: Header, variant: str, quant: str) -> float | None:
    """Bytes of weights read in a step. Published variants have only nominal bits; the rest follows from
    their formats."""
    given = record["model"].get("shape")
    if record.get("reported") and given:
        if quant in ALL_QUANTS:
            return sum(size for _, size in candidates.in_type(dense(**given), quant).types)
        found = candidates.read_bytes(header, dense(**given), _BNB.get(variant), traffic.bpw(record))
        if found:
            return found
    return traffic.weight_bytes_per_token(record)


def _of_types(record: Record, quant: str, read: float) -> tuple[tuple[str, float], ...]:
    """Split the bytes by type, by llama.cpp's rules for a dense model, else by all tensors of the file.
    Empty: not known."""
    given, header = record["model"].get("shape"), record["model"]["weights"].get("header")
    if given and quant in ALL_QUANTS:
        found = candidates.in_type(dense(**given), quant).types
    else:
        found = tuple(header.get("bytes_by_type", {}).items()) if header else ()
    whole = sum(size for _, size in found)
    return tuple((name, size * read / whole) for name, size in found)


def _of_cell(cell: Cell, stored: Stored, traits: Traits) -> Iterator[Example]:
    first = _first_token(stored) if traits.flops else {}
    at_ms, of_line = _decode(cell)
    if at_ms or first:
        yield Example(traits, at_ms, of_line, first, BY_NAME["joules_per_token"].number(cell))
    for at in (cell["depths"] or _NO_DEPTHS)["at"]:
        yield Example(traits, {at["depth"] + 1: at["ms"]}, (at["depth"] + 1,) * 2, {})


def _first_token(stored: Stored) -> dict[int, float]:
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


def _decode(cell: Cell) -> tuple[dict[int, float], tuple[int, int]]:
    """Latency at the ends of the fitted line, or in the middle of a series too short for one, and the range
    of positions."""
    first, last = cell["prompt_tokens"] + 1, cell["prompt_tokens"] + cell["new_tokens"]
    B, W, median = cell["B_ms"], cell["W_tokens_per_ms"], cell["median_ms"]
    if B is not None and W is not None and cell["W_identifiable"]:
        return {1: B, last: B + (last - 1) / W}, (first, last)
    return ({(first + last) // 2: median} if median is not None else {}), (first, last)

"""Records -> examples for predictions: what each measured variant was, and how fast."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from harness.analysis.records import traffic
from harness.analysis.rows import Cell
from harness.analysis.surface_rows import DepthsRow
from harness.dataset.gather import Gathered
from harness.predict.traits import GGML, Example, Traits
from harness.recommend import kinds
from harness.results import ResultsError, Stored, prefill_series
from harness.results.kinds import Record, loaded_of
from harness.stacks.header import Header, stacks
from harness.theory.demand import pair_flops
from harness.theory.rows import is_quantized
from harness.theory.shapes import Shape, active_params

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
        found.append(Example(traits, line, (workload["prompt_tokens"] + 1, last), first, "published"))
    return found


def of_own(gathered: Gathered) -> list[Example]:
    """One example per cell that was measured in full, and one for each depth of its windows. Shares of a
    device's bandwidth mean the same in all: they are of the best that was measured on it."""
    found: list[Example] = []
    for cell in gathered.cells:
        if (stored := gathered.behind(cell)) is None or cell["status"] != "ok":
            continue
        length = cell["n_ctx"] if cell["kv_read"] == "full" else None
        traits = _traits(stored.record, cell["variant"], cell["bandwidth_bytes_per_s"], length)
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


def _traits(
    record: Record, variant: str, measured_bytes_per_s: float | None, static_tokens: int | None
) -> Traits | None:
    """Null where the stack, the shape, the bytes or the device's bandwidth are not known."""
    header, given = stacks().get(record["stack"]), record["model"].get("shape")
    kv_bytes, read = traffic.kv_bytes_per_token(record), _read_bytes(record, header, variant)
    sheet = traffic.data_sheet(record)
    bandwidth = sheet.data_sheet_bytes_per_s if sheet else measured_bytes_per_s
    if header is None or not given or kv_bytes is None or not read or not bandwidth:
        return None
    shape, group = Shape(**given), kinds.group(header, variant, record.get("options") or {})
    rate = sheet and sheet.kernel_rate(is_quantized(traffic.bpw(record) or 16))
    engine, on_cpu = kinds.engine(header, group), record.get("device") == "cpu"
    return Traits(
        group=group,
        engine=engine,
        type=str(loaded_of(record).get("quant") or variant) if engine == GGML else "",
        model=record["model"]["name"],
        device=sheet.name if sheet else str(record["machine"]["cpu"]),
        family="cpu" if on_cpu else "cuda",
        layers=shape.layers,
        heads=shape.heads,
        read_bytes=read,
        kv_bytes=kv_bytes,
        bytes_per_s=bandwidth,
        pass_flops=2.0 * active_params(shape),
        pair_flops=pair_flops(shape),
        packed=is_quantized(traffic.bpw(record) or 16),
        flops=sheet.rates[rate].value if sheet and rate else None,
        static_tokens=static_tokens,
    )


def _read_bytes(record: Record, header: Header | None, variant: str) -> float | None:
    """Of a step. Of published variants only the nominal bits are known; their formats tell the rest."""
    given = record["model"].get("shape")
    if record.get("reported") and header and given:
        found = kinds.read_bytes(header, Shape(**given), _BNB.get(variant), traffic.bpw(record))
        if found:
            return found
    return traffic.weight_bytes_per_token(record)


def _of_cell(cell: Cell, stored: Stored, traits: Traits) -> Iterator[Example]:
    first = _first_token(stored) if traits.flops else {}
    at_ms, of_line = _decode(cell)
    if at_ms or first:
        yield Example(traits, at_ms, of_line, first, "here")
    for at in (cell["depths"] or _NO_DEPTHS)["at"]:
        yield Example(traits, {at["depth"] + 1: at["ms"]}, (at["depth"] + 1,) * 2, {}, "here")


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

"""Tools whose logs have a time for each token or chunk: vLLM, SGLang, Ollama, optimum-benchmark.

Formats: vllm/benchmarks/serve.py (github.com/vllm-project/vllm), python/sglang/bench_serving.py
(github.com/sgl-project/sglang), docs/api.md (github.com/ollama/ollama),
optimum_benchmark/scenarios/inference (github.com/huggingface/optimum-benchmark).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.records.foreign.chunks import series
from harness.records.foreign.form import Format, Item, Row, value_at
from harness.records.foreign.log import MS, SHARED, UNITS, Floats, LogError, Series, overlapping

MANY = 1.05  # mean number of requests in flight above which they were concurrent
DETAILS = {
    "vLLM benchmark result": "`vllm bench serve --save-detailed`",
    "SGLang benchmark result": "`sglang.bench_serving --output-details`",
}
_LISTS = ("ttfts", "itls", "input_lens", "output_lens", "errors")


def serving(form: Format, runs: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """The requests of one or more runs of vLLM's or SGLang's client: a run has lists of a value for each
    request; `itls` has the gaps between its chunks. Raises LogError."""
    items, notes = [], []
    for number, run in enumerate(runs, 1):
        if "itls" not in run or "ttfts" not in run:
            raise LogError(f"the {form.name} has averages only; run {DETAILS[form.name]} for per-token times")
        blank = [None] * len(run["ttfts"])
        lists = [run.get(name) or blank for name in _LISTS]
        if len({len(values) for values in lists}) > 1:
            raise LogError(f"the lists {', '.join(_LISTS)} of the {form.name} differ in length")
        accepted = max(run.get(name) or 1.0 for name in ("accept_length", "spec_decode_acceptance_length"))
        prefix = f"run {number} " if len(runs) > 1 else ""
        for place, values in enumerate(zip(*lists, strict=True), 1):
            row = dict(zip(_LISTS, values, strict=True))
            name, failed = f"{prefix}request {place}", bool(row["errors"])
            items.append(Item(row, name, failed=failed, drafts=accepted > 1))
        notes += [f"with a draft: {accepted:g} tokens a step"] if accepted > 1 else []
        notes += [SHARED] if _concurrent(run) else []
    return items, notes


def _concurrent(run: Row) -> bool:
    """Whether requests ran at the same time: as counted, or as the options of the client allowed.

    Older versions count nothing. Without max_concurrency a rate of `inf` sends all requests at once.
    """
    if (most := run.get("max_concurrent_requests")) is not None:
        return bool(most > 1)
    if (mean := run.get("concurrency")) is not None:
        return bool(mean > MANY)
    starts, ttfts = run.get("start_times") or [], run["ttfts"]
    if len(starts) == len(ttfts):
        ends = (
            start + ttft + sum(gaps) for start, ttft, gaps in zip(starts, ttfts, run["itls"], strict=True)
        )
        return overlapping(zip(starts, ends, strict=True))
    allowed = run.get("max_concurrency")
    return len(ttfts) > 1 and (str(run.get("request_rate")) == "inf" if allowed is None else allowed > 1)


UNEVEN = "totals only: the chunks are not the tokens (thinking, tool calls, text held back)"
_ZONE = re.compile(r"(Z|[+-]\d\d:\d\d)$")


def ollama(form: Format, objects: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """The requests of responses or streams, in which `done` ends a request, and each chunk has a time."""
    items: list[Item] = []
    streams: dict[object, list[Row]] = {}  # by model: two may be saved to one file at once
    first: dict[object, int] = {}
    spans: list[tuple[float, float]] = []
    for place, chunk in enumerate(objects):
        model = chunk.get("model")
        first.setdefault(model, place)
        if not chunk["done"]:
            streams.setdefault(model, []).append(chunk)
            continue
        spans.append((first.pop(model), place))
        tokens, prompt = chunk.get("eval_count"), chunk.get("prompt_eval_count") or 0
        row = {**chunk, "prompt_eval_count": prompt}  # missing: the whole prompt was in the cache
        note = ""
        if gaps := _gaps_ms(streams.pop(model, [])):
            uneven = series(prompt, None, gaps, tokens)[0].fault
            row, note = (row, UNEVEN) if uneven else (row | {"gaps": gaps}, "")
        items.append(Item(row, failed=not tokens or not chunk.get("eval_duration"), note=note))
    notes = ["the last stream is cut: its chunks are left out"] if streams else []
    return items, [*notes, *([SHARED] if overlapping(spans) else [])]


def _gaps_ms(chunks: Sequence[Row]) -> list[float]:
    """The times between chunks, made by one clock in one time zone."""
    times = [np.datetime64(_ZONE.sub("", str(chunk["created_at"])), "ns") for chunk in chunks]
    return [float(gap) for gap in np.diff(np.array(times, "datetime64[ns]")).astype(np.int64) / 1e6]


COPIES = (
    "per_token repeats the latencies of earlier runs ({:,} values, {:,} measured): each run is shown once"
)


def optimum(form: Format, documents: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """The runs of each report, alone or beside its config: `per_token.latency.values` has the tokens of all
    runs. Raises LogError."""
    items: list[Item] = []
    notes: list[str] = []
    for number, document in enumerate(documents, 1):
        prefix = f"report {number} " if len(documents) > 1 else ""
        report = document.get("report") or document
        prefill, decode, steps = (_values_ms(report, part) for part in ("prefill", "decode", "per_token"))
        runs = len(decode) or len(prefill)
        if not len(steps) or not runs:
            first = float(np.mean(prefill)) if len(prefill) else None
            items.append(Item({**report, "first": first}, f"{prefix}mean"))
            continue
        measured = _measured(steps, runs)
        notes += [COPIES.format(len(steps), len(measured))] if len(measured) < len(steps) else []
        if len(measured) % runs:
            raise LogError(
                f"an {form.name} whose {len(steps)} per-token latencies are not of {runs} equal runs"
            )
        prompt = int(value_at(document, "config.scenario.input_shapes.sequence_length") or 0)
        for run, latencies in enumerate(measured.reshape(runs, -1)):
            ttft = float(prefill[run]) if len(prefill) == runs else np.nan
            n = prompt + 1 + np.arange(len(latencies) + 1, dtype=float)
            run_series = Series(n, np.concatenate([[ttft], latencies]))
            items.append(Item(name=f"{prefix}run {run + 1}", series=run_series))
    return items, notes


def _measured(steps: Floats, runs: int) -> Floats:
    """The latencies without copies. The list is not cleared between runs: after R runs it holds run 1, then
    runs 1 and 2, and so on to runs 1 to R."""
    tokens, rest = divmod(len(steps), runs * (runs + 1) // 2)
    last = steps[-runs * tokens :]
    prefixes = [last[: run * tokens] for run in range(1, runs + 1)]
    return last if runs > 1 and not rest and np.array_equal(np.concatenate(prefixes), steps) else steps


def _values_ms(report: Row, part: str) -> Floats:
    """The latencies of a part of a report; none where it has none."""
    latency: Any = value_at(report, f"{part}.latency") or {}
    return np.asarray(latency.get("values") or [], dtype=float) * MS[UNITS[latency.get("unit", "s")]]

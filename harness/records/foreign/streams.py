"""Tools whose logs have a time for each token or chunk: vLLM, SGLang, Ollama.

Formats: vllm/benchmarks/serve.py (github.com/vllm-project/vllm), python/sglang/bench_serving.py
(github.com/sgl-project/sglang), docs/api.md (github.com/ollama/ollama).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.records.foreign.chunks import series
from harness.records.foreign.form import Format, Item, Row
from harness.records.foreign.log import SHARED, LogError, moments_ms, overlapping

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
        moments = moments_ms(str(part["created_at"]) for part in streams.pop(model, []))
        if len(moments) > 1:
            gaps = np.diff(moments).tolist()
            uneven = series(prompt, None, gaps, tokens)[0].fault
            row, note = (row, UNEVEN) if uneven else (row | {"gaps": gaps}, "")
        items.append(Item(row, failed=not tokens or not chunk.get("eval_duration"), note=note))
    notes = ["the last stream is cut: its chunks are left out"] if streams else []
    return items, [*notes, *([SHARED] if overlapping(spans) else [])]

"""Results of `vllm bench serve --save-result --save-detailed` and of SGLang's `bench_serving
--output-details`: TTFT and gaps of each request.

One JSON object per run; `--append-result` and SGLang write several, one per line. Times are seconds of the
client's clock; `itls` has the gaps between chunks of each request's stream. The formats are defined in
vllm/benchmarks/serve.py (github.com/vllm-project/vllm) and python/sglang/bench_serving.py
(github.com/sgl-project/sglang).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.records.foreign.chunks import DRAFTS, Requests
from harness.records.foreign.log import SHARED, Log, LogError, Reader, of_objects, of_text, overlapping

FORMAT = "vLLM benchmark result"
SGLANG = "SGLang benchmark result"
PRINTED = "printed summary of a serving benchmark (vLLM, SGLang)"
WHOLE = "result of `vllm bench latency` or `vllm bench throughput`"
DETAILS = {FORMAT: "`vllm bench serve --save-detailed`", SGLANG: "`sglang.bench_serving --output-details`"}
# Mean tokens per step with a draft, by the server's own count.
ACCEPTED = ("accept_length", "spec_decode_acceptance_length")
MANY = 1.05  # mean number of requests in flight above which they were concurrent
_Run = Mapping[str, Any]


def _is_sglang(document: _Run) -> bool:
    return bool({"accept_length", "total_output_tokens_retokenized"} & document.keys())


def _is_vllm(document: _Run) -> bool:
    return "itls" in document or {"request_throughput", "completed"} <= document.keys()


def _read(runs: Sequence[_Run], form: str) -> Log:
    """The requests of one or more runs. Raises LogError."""
    found = Requests(form)
    notes: dict[str, None] = {}
    for number, run in enumerate(runs, 1):
        if "itls" not in run or "ttfts" not in run:
            raise LogError(f"the {form} has averages only; run {DETAILS[form]} for per-token times")
        prefix = f"run {number} " if len(runs) > 1 else ""
        ttfts, itls = run["ttfts"], run["itls"]
        prompts = run.get("input_lens") or [0] * len(ttfts)
        lengths = run.get("output_lens") or [None] * len(ttfts)
        errors = run.get("errors") or [""] * len(ttfts)
        if len({len(each) for each in (ttfts, itls, prompts, lengths, errors)}) > 1:
            raise LogError(
                f"the lists ttfts, itls, input_lens, output_lens, errors of the {form} differ in length"
            )
        accepted = max(run.get(name) or 1.0 for name in ACCEPTED)
        for at, (ttft, gaps, prompt, length, error) in enumerate(
            zip(ttfts, itls, prompts, lengths, errors, strict=True), 1
        ):
            if error:
                found.add_failed()
                continue
            gaps_ms = [gap * 1e3 for gap in gaps]
            found.add(f"{prefix}request {at}", prompt, ttft * 1e3, gaps_ms, length, drafts=accepted > 1)
        if accepted > 1:
            notes[f"{accepted:g} tokens a step: {DRAFTS}"] = None
        if _concurrent(run):
            notes[SHARED] = None
    return found.log([*notes])


def _concurrent(run: _Run) -> bool:
    """Whether requests ran at the same time: as counted, or as the options of the client allowed.

    Older versions count nothing. Without max_concurrency a rate of `inf` sends all requests at once.
    """
    if (most := run.get("max_concurrent_requests")) is not None:
        return bool(most > 1)
    if (mean := run.get("concurrency")) is not None:
        return bool(mean > MANY)
    starts, ttfts, itls = run.get("start_times") or [], run["ttfts"], run["itls"]
    if len(starts) == len(ttfts):
        took = (ttft + sum(gaps) for ttft, gaps in zip(ttfts, itls, strict=True))
        return overlapping([(start, start + s) for start, s in zip(starts, took, strict=True)])
    if len(ttfts) < 2:
        return False
    allowed = run.get("max_concurrency")
    return str(run.get("request_rate")) == "inf" if allowed is None else bool(allowed > 1)


def _whole_runs(runs: Sequence[_Run]) -> Log:
    count = sum(len(run.get("latencies") or ()) for run in runs)
    times = f"the times of {count} whole runs" if count else "one time of all requests"
    raise LogError(
        f"the {WHOLE} has {times}, and neither the tokens of one nor TTFT, so no tok/s of decode; run"
        f" {DETAILS[FORMAT]} for per-token times"
    )


def _is_whole(run: _Run) -> bool:
    return {"avg_latency", "latencies"} <= run.keys() or {"elapsed_time", "num_requests"} <= run.keys()


def _refuse(text: str) -> Log:
    raise LogError(
        f"the {PRINTED} has averages only; run {' or '.join(DETAILS.values())} for per-token times"
    )


READERS: tuple[Reader, ...] = (
    of_objects(WHOLE, _is_whole, _whole_runs),
    of_objects(SGLANG, _is_sglang, lambda runs: _read(runs, SGLANG)),
    of_objects(FORMAT, _is_vllm, lambda runs: _read(runs, FORMAT)),
    of_text(PRINTED, lambda text: "= Serving Benchmark Result =" in text, _refuse),
)

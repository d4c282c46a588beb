"""Results of `vllm bench serve --save-result --save-detailed`: TTFT and gaps of each request.

One JSON object per run; `--append-result` writes several, one per line. Times are seconds of the client's
clock; `itls` has the gaps between chunks of each request's stream. The format is defined in
vllm/benchmarks/serve.py (github.com/vllm-project/vllm); docs.vllm.ai/en/latest/cli/bench/serve describes the
options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.logs.log import SHARED, Log, LogError, Series, generation, left_out

FORMAT = "vLLM benchmark result"


def is_one(document: Any) -> bool:
    return isinstance(document, dict) and (
        "itls" in document or {"request_throughput", "completed"} <= document.keys()
    )


def read(runs: Sequence[Mapping[str, Any]]) -> Log:
    """The requests of one or more runs. Raises LogError."""
    series: dict[str, Series] = {}
    failed = requests = 0
    shared = False
    for number, run in enumerate(runs, 1):
        if "itls" not in run or "ttfts" not in run:
            raise LogError(
                f"a {FORMAT} with averages only; run `vllm bench serve --save-detailed` for per-token times"
            )
        prefix = f"run {number} " if len(runs) > 1 else ""
        ttfts, itls = run["ttfts"], run["itls"]
        prompts = run.get("input_lens") or [0] * len(ttfts)
        lengths = run.get("output_lens") or [None] * len(ttfts)
        errors = run.get("errors") or [""] * len(ttfts)
        if len({len(each) for each in (ttfts, itls, prompts, lengths, errors)}) > 1:
            raise LogError(
                f"a {FORMAT} whose lists ttfts, itls, input_lens, output_lens, errors differ in length"
            )
        requests += len(ttfts)
        for at, (ttft, gaps, prompt, length, error) in enumerate(
            zip(ttfts, itls, prompts, lengths, errors, strict=True)
        ):
            if error or not gaps:
                failed += bool(error)
                continue
            series[f"{prefix}request {at + 1}"] = generation(
                prompt, ttft * 1e3, [g * 1e3 for g in gaps], length
            )
        shared |= (run.get("max_concurrent_requests") or 1) > 1
    notes = [*left_out(failed, requests), *([SHARED] if shared else [])]
    if not series:
        raise LogError(f"a {FORMAT} without a request of two or more tokens")
    return Log(FORMAT, series, notes=notes)

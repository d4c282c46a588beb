"""GuideLLM's benchmarks.json: TTFT and mean inter-token latency per request, no per-token times.

The format is defined in src/guidellm/schemas/base/request_stats.py (github.com/vllm-project/guidellm). Each
benchmark has requests by outcome, with `time_to_first_token_ms` and the mean `inter_token_latency_ms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.records.foreign.log import (
    SHARED,
    Log,
    LogError,
    Reader,
    Request,
    left_out,
    of_objects,
    overlapping,
)

FORMAT = "GuideLLM report"
MEANS = "GuideLLM stores the mean inter-token latency per request, not per-token times: no B, W or shape"


def _is_one(document: Mapping[str, Any]) -> bool:
    benchmarks = document.get("benchmarks")
    return (
        isinstance(benchmarks, list)
        and "latency_mode" not in document
        and all(isinstance(each, dict) and "requests" in each for each in benchmarks)
    )


def _read(reports: Sequence[Mapping[str, Any]]) -> Log:
    """The requests of all benchmarks of all reports. Raises LogError."""
    requests: dict[str, Request] = {}
    failed, spans = 0, []
    benchmarks = [each for report in reports for each in report["benchmarks"]]
    several = len(benchmarks) > 1
    for number, benchmark in enumerate(benchmarks, 1):
        outcomes = benchmark["requests"] or {}
        failed += sum(len(outcomes.get(outcome) or []) for outcome in ("incomplete", "errored"))
        for at, request in enumerate(outcomes.get("successful") or [], 1):
            gap = request.get("inter_token_latency_ms")
            name = f"{f'benchmark {number} ' if several else ''}request {at}"
            requests[name] = Request(
                request.get("output_tokens"),
                request.get("time_to_first_token_ms"),
                1e3 / gap if gap else None,
            )
            # request_start_time is start_time in reports up to 0.3.
            start, end = (
                request.get(f"request_{when}_time", request.get(f"{when}_time")) for when in ("start", "end")
            )
            if start is not None and end is not None:
                spans.append((start, end))
    if not requests:
        raise LogError(f"a {FORMAT} without a successful request")
    notes = [MEANS, *left_out(failed, failed + len(requests)), *([SHARED] if overlapping(spans) else [])]
    return Log(FORMAT, requests=requests, notes=notes)


READERS: tuple[Reader, ...] = (of_objects(FORMAT, _is_one, _read),)

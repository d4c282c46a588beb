"""llama.cpp's server: responses with `timings`, streams of them with `timings_per_token`, and its log.

The formats are documented in tools/server/README.md (github.com/ggml-org/llama.cpp). `timings` are totals of
a request so far: a stream that repeats them with each token gives every token's latency, a single response
gives totals only. print_timings() in tools/server writes the log's lines; llama-cli's differ in a prefix and
a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.logs.log import Log, LogError, Request, Series

FORMAT = "llama.cpp server log"
TOTALS = (
    "llama.cpp's timings are totals of a request: no B, W or shape; "
    'request a stream with "timings_per_token": true for per-token times'
)
LINE = re.compile(r"(prompt )?eval time\s*=\s*([\d.]+) ms /\s*(\d+) (?:tokens|runs)")
Timings = Mapping[str, Any]


def is_one(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(document.get("timings"), dict)


def is_log(text: str) -> bool:
    return LINE.search(text) is not None


def is_stream(text: str) -> bool:
    """Server-sent events, as `curl -N` writes them."""
    return text.lstrip().startswith("data:")


def read_stream(text: str) -> Log:
    """The requests of saved server-sent events. Raises LogError."""
    events = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    try:
        chunks = [json.loads(event) for event in events if event and event != "[DONE]"]
    except (ValueError, RecursionError) as damage:  # ValueError: also a number of thousands of digits
        why = getattr(damage, "msg", None) or damage
        raise LogError(f"a stream of events with one that is not JSON: {why}") from damage
    if not any(is_one(chunk) for chunk in chunks):
        raise LogError('a stream without timings; send "timings_per_token": true to llama-server')
    return read([chunk for chunk in chunks if is_one(chunk)])


def read(responses: Sequence[Mapping[str, Any]]) -> Log:
    """The requests of responses, or of chunks of streams. Raises LogError."""
    generations: list[list[Timings]] = []
    for timings in (response["timings"] for response in responses):
        if not {"predicted_n", "predicted_ms"} <= timings.keys():
            raise LogError("a llama-server response with timings that lack predicted_n or predicted_ms")
        same_request = generations and _continues(generations[-1][-1], timings)
        generations[-1].append(timings) if same_request else generations.append([timings])
    series: dict[str, Series] = {}
    requests: dict[str, Request] = {}
    for number, chunks in enumerate(generations, 1):
        if len(chunks) > 1:
            series[f"request {number}"] = _series(chunks)
        else:
            last = chunks[-1]
            prompt_ms = last.get("prompt_ms")
            requests[f"request {number}"] = _totals(prompt_ms, last["predicted_n"], last["predicted_ms"])
    return Log(FORMAT, series, requests, [TOTALS] if requests else [])


def read_log(text: str) -> Log:
    """The requests with totals in a log of llama-server or llama-cli."""
    requests: dict[str, Request] = {}
    prompt_ms: float | None = None
    for prompt, ms, tokens in LINE.findall(text):
        if prompt:
            prompt_ms = float(ms)
            continue
        requests[f"request {len(requests) + 1}"] = _totals(prompt_ms, int(tokens), float(ms))
        prompt_ms = None
    return Log(FORMAT, requests=requests, notes=[TOTALS])


def _continues(before: Timings, timings: Timings) -> bool:
    """Whether a chunk continues the same request; the last chunk repeats the previous count."""
    same = all(before.get(key) == timings.get(key) for key in ("prompt_n", "prompt_ms", "cache_n"))
    return (
        same
        and timings["predicted_n"] >= before["predicted_n"]
        and timings["predicted_ms"] >= before["predicted_ms"]
    )


def _series(chunks: Sequence[Timings]) -> Series:
    """One request as a series. The first token is prefill; a chunk without a new token adds no latency."""
    last_of = {int(chunk["predicted_n"]): float(chunk["predicted_ms"]) for chunk in reversed(chunks)}
    counts = np.array(sorted(last_of), dtype=float)
    prompt_tokens = chunks[0].get("cache_n", 0) + chunks[0].get("prompt_n", 0)
    gaps = np.diff([last_of[int(count)] for count in counts])
    steps = np.diff(counts)
    first_ms = chunks[0].get("prompt_ms")
    ms = np.concatenate([[np.nan if first_ms is None else first_ms], gaps])
    at = int(np.argmax(steps > 1)) if (steps > 1).any() else None
    fault = None if at is None else f"{steps[at]:.0f} tokens came in one chunk after token {counts[at]:.0f}"
    return Series(prompt_tokens + counts, ms, fault)


def _totals(prompt_ms: float | None, tokens: int, ms: float) -> Request:
    return Request(tokens, prompt_ms, 1e3 * tokens / ms if ms > 0 else None)

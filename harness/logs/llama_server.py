"""llama.cpp's server: responses with `timings`, streams of them with `timings_per_token`, and its log.

The forms are those of tools/server/README.md (github.com/ggml-org/llama.cpp): `timings` are totals of a
request so far, so that a stream that repeats them with each token has every token's latency, and one response
has totals alone. The log's lines are those that print_timings() in tools/server writes; llama-cli's differ in
a prefix and a word.
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
    "llama.cpp's timings are totals of a request: no B, W or shape follows from them; "
    'a stream with "timings_per_token": true has each token'
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
    except json.JSONDecodeError as damage:
        raise LogError(f"a stream of events, one of which is no JSON: {damage.msg}") from damage
    if not any(is_one(chunk) for chunk in chunks):
        raise LogError('a stream without timings; ask llama-server for "timings_per_token": true')
    return read([chunk for chunk in chunks if is_one(chunk)])


def read(responses: Sequence[Mapping[str, Any]]) -> Log:
    """The requests of responses, or of chunks of streams. Raises LogError."""
    generations: list[list[Timings]] = []
    for timings in (response["timings"] for response in responses):
        if not {"predicted_n", "predicted_ms"} <= timings.keys():
            raise LogError("a response of llama-server whose timings lack predicted_n or predicted_ms")
        goes_on = generations and _goes_on(generations[-1][-1], timings)
        generations[-1].append(timings) if goes_on else generations.append([timings])
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
    """The requests that a log of the server, or of llama-cli, gives totals of."""
    requests: dict[str, Request] = {}
    prompt_ms: float | None = None
    for prompt, ms, tokens in LINE.findall(text):
        if prompt:
            prompt_ms = float(ms)
            continue
        requests[f"request {len(requests) + 1}"] = _totals(prompt_ms, int(tokens), float(ms))
        prompt_ms = None
    return Log(FORMAT, requests=requests, notes=[TOTALS])


def _goes_on(before: Timings, timings: Timings) -> bool:
    """Whether a chunk belongs to the same request; the last one repeats the count of the one before it."""
    same = all(before.get(key) == timings.get(key) for key in ("prompt_n", "prompt_ms", "cache_n"))
    return (
        same
        and timings["predicted_n"] >= before["predicted_n"]
        and timings["predicted_ms"] >= before["predicted_ms"]
    )


def _series(chunks: Sequence[Timings]) -> Series:
    """The first token is the prompt's; a chunk that adds no token adds no latency."""
    last_of = {int(chunk["predicted_n"]): float(chunk["predicted_ms"]) for chunk in reversed(chunks)}
    counts = np.array(sorted(last_of), dtype=float)
    prompt_tokens = chunks[0].get("cache_n", 0) + chunks[0].get("prompt_n", 0)
    gaps = np.diff([last_of[int(count)] for count in counts])
    steps = np.diff(counts)
    first_ms = chunks[0].get("prompt_ms")
    ms = np.concatenate([[np.nan if first_ms is None else first_ms], gaps])
    at = int(np.argmax(steps > 1)) if (steps > 1).any() else None
    fault = None if at is None else f"{steps[at] + 1:.0f} tokens came as one after the {counts[at]:.0f}th"
    return Series(prompt_tokens + counts, ms, fault)


def _totals(prompt_ms: float | None, tokens: int, ms: float) -> Request:
    return Request(tokens, prompt_ms, 1e3 * tokens / ms if ms > 0 else None)

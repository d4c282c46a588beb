"""llama.cpp's server: responses with `timings`, streams of them with `timings_per_token`, and its log.

The formats are documented in tools/server/README.md (github.com/ggml-org/llama.cpp). `timings` are totals of
a request so far: a stream that repeats them with each token gives every token's latency, a single response
gives totals only. print_timings() in tools/server writes the log's lines; llama-cli's differ in a prefix and
a word, and both write the decimal point of their locale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.base import bounds
from harness.records.foreign import numerals
from harness.records.foreign.chunks import DRAFTS
from harness.records.foreign.log import (
    SHARED,
    Log,
    LogError,
    Reader,
    Request,
    Series,
    numbered,
    of_objects,
    of_text,
    once,
    overlapping,
    timed,
)

FORMAT = "llama.cpp server log"
TOTALS = (
    "llama.cpp's timings are totals of a request: no B, W or shape; "
    'request a stream with "timings_per_token": true for per-token times'
)
CLI = "llama-cli answer"
RATES = "llama-cli prints rates without counts: no TTFT, B, W or shape; --perf adds the time of the prompt"
CACHED = "no token of a prompt was evaluated (all of it was cached): TTFT is unknown"
MIXED = "lines of several slots name no slot: which prompt belongs to which request is unknown"
PROGRESS = "a request without its final lines has the figures of its last progress line (n_decoded, tg)"
_NUMBER = f"({numerals.NUMBER})"
_TIMES = re.compile(rf"(prompt )?eval time\s*=\s*{_NUMBER} ms /\s*(\d+) (?:tokens|runs)")
_PROGRESS = re.compile(rf"n_decoded =\s*(\d+), tg =\s*{_NUMBER} t/s")
_EVENT = re.compile(r"^data: ?\{", re.MULTILINE)
_DRAFT = re.compile(r"draft acceptance(?: rate)? = [\d.,]+ \(\s*(\d+) accepted /\s*(\d+) generated\)")
# Lines of a slot at work; a task of -1 is none.
_SLOT = re.compile(r"(print_timing|launch_slot_|update_slots|release).{0,40}?\bid\s+(\d+) \| task (\d+)\b")
_OLD_SLOT = re.compile(r"(print_timings?)\b.{0,400}\bid_slot=(\d+) id_task=(\d+)")
_CLI = re.compile(rf"\[ Prompt: {_NUMBER} t/s \| Generation: {_NUMBER} t/s \]")
BEGIN = ("launch_slot_", "update_slots")
Timings = Mapping[str, Any]
Response = Mapping[str, Any]


def _is_one(document: Response) -> bool:
    return isinstance(document.get("timings"), dict)


def _is_log(text: str) -> object:
    return ("eval time" in text and _TIMES.search(text)) or _PROGRESS.search(text)


def _is_stream(text: str) -> object:
    """Server-sent events, as `curl -N` writes them."""
    return text.lstrip().startswith("data:") or _EVENT.search(text)


def _read_stream(text: str) -> Log:
    """The requests of saved server-sent events. Raises LogError."""
    events = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    try:
        chunks = [json.loads(event) for event in events if event and event != "[DONE]"]
    except (ValueError, RecursionError) as damage:  # ValueError: also a number of thousands of digits
        why = getattr(damage, "msg", None) or damage
        raise LogError(f"a stream of events with one that is not JSON: {why}") from damage
    timed = [chunk for chunk in chunks if isinstance(chunk, dict) and _is_one(chunk)]
    if not timed:
        raise LogError('a stream without timings; send "timings_per_token": true to llama-server')
    return _read(timed)


def _read(responses: Sequence[Response]) -> Log:
    """The requests of responses, or of chunks of streams, which may be interleaved. Raises LogError."""
    generations: list[list[tuple[int, Timings]]] = []
    latest: dict[object, int] = {}  # of each sender of chunks, its latest generation
    for at, response in enumerate(responses):
        timings = response["timings"]
        if not {"predicted_n", "predicted_ms"} <= timings.keys():
            raise LogError("a llama-server response with timings that lack predicted_n or predicted_ms")
        sender = (response.get("id"), response.get("id_slot"), response.get("index"))
        before = latest.get(sender)
        if before is not None and _continues(generations[before][-1][1], timings):
            generations[before].append((at, timings))
        else:
            latest[sender] = len(generations)
            generations.append([(at, timings)])
    series: dict[str, Series] = {}
    totals: dict[str, Request] = {}
    drafted = reused = cached = False
    for number, placed in enumerate(generations, 1):
        chunks = [timings for _, timings in placed]
        last = chunks[-1]
        if _is_cached(last.get("prompt_ms"), last.get("prompt_n")):
            cached = True
        elif last.get("cache_n"):
            reused = True
        drafted |= bool(last.get("draft_n"))
        if len(chunks) > 1 and not last.get("draft_n"):
            series[f"request {number}"] = _series(chunks)
        else:
            request = _totals(
                last.get("prompt_ms"), last.get("prompt_n"), last["predicted_n"], last["predicted_ms"]
            )
            totals[f"request {number}"] = request
    requests, notes = once(totals)
    notes += [TOTALS] if requests and not drafted else []
    notes += [DRAFTS] if drafted else []
    notes += ["part of a prompt came from the cache: TTFT is of the rest"] if reused else []
    notes += [CACHED] if cached else []
    spans = [(float(placed[0][0]), float(placed[-1][0])) for placed in generations]
    notes += [SHARED] if overlapping(spans) else []
    return Log(FORMAT, series, requests, notes)


@dataclass
class _Task:
    """The log's lines on one task of a slot."""

    first: int  # line
    last: int = 0
    prompt: tuple[float | None, int | None] = (None, None)  # ms and tokens
    waiting: int = 0  # prompts without their eval line yet
    mixed: bool = False  # several were waiting at once
    progress: tuple[int, float] | None = None
    done: bool = False


def _read_log(text: str) -> Log:
    """The requests with totals in a log of llama-server or llama-cli."""
    found: list[Request] = []
    tasks = [_Task(0)]  # the first is of lines that name none
    current: dict[tuple[str, str], _Task] = {}
    task = tasks[0]
    cached = mixed = False
    accepted = generated = 0
    for at, line in enumerate(each[: bounds.LOG_LINE_CHARACTERS] for each in text.splitlines()):
        if slot := _SLOT.search(line) or _OLD_SLOT.search(line):
            key, begins = (slot[2], slot[3]), slot[1] in BEGIN
            if key not in current or (
                begins and current[key].done
            ):  # a server that was restarted counts anew
                current[key] = _Task(at)
                tasks.append(current[key])
            task = current[key]
            task.last = at
        if times := _TIMES.search(line):
            ms, tokens = numerals.ungrouped(times[2]), int(times[3])
            if times[1]:
                task.waiting += 1
                task.mixed |= task.waiting > 1
                mixed |= task.mixed
                cached |= _is_cached(ms, tokens)
                task.prompt = (ms, tokens)
                continue
            found.append(_totals(*((None, None) if task.mixed else task.prompt), tokens, ms))
            task.prompt, task.done = (None, None), True
            task.waiting = max(0, task.waiting - 1)
            task.mixed &= task.waiting > 0
        elif progress := _PROGRESS.search(line):
            task.progress = (int(progress[1]), numerals.ungrouped(progress[2]))
        elif draft := _DRAFT.search(line):
            accepted, generated = accepted + int(draft[1]), generated + int(draft[2])
    unfinished = [each.progress for each in tasks if each.progress and not each.done]
    for tokens, rate in unfinished:
        found.append(Request(tokens, None, rate))
    requests, notes = once(numbered(found))
    notes += [CACHED] if cached else []
    notes += [PROGRESS] if unfinished else []
    notes += [f"{accepted} of {generated} drafted tokens were accepted: {DRAFTS}"] if generated else [TOTALS]
    notes += [MIXED] if mixed else []
    notes += [SHARED] if mixed or overlapping([(each.first, each.last) for each in tasks[1:]]) else []
    return Log(FORMAT, requests=requests, notes=notes)


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
    unknown = first_ms is None or _is_cached(first_ms, chunks[0].get("prompt_n"))
    ms = np.concatenate([[np.nan if unknown else first_ms], gaps])
    at = int(np.argmax(steps > 1)) if (steps > 1).any() else None
    fault = None if at is None else f"{steps[at]:.0f} tokens came in one chunk after token {counts[at]:.0f}"
    return Series(prompt_tokens + counts, ms, fault)


def _totals(prompt_ms: float | None, prompt_tokens: int | None, tokens: int, ms: float) -> Request:
    first_ms = None if _is_cached(prompt_ms, prompt_tokens) else prompt_ms
    return timed(tokens, first_ms, ms, prompt_tokens or None)


def _is_cached(prompt_ms: float | None, prompt_tokens: int | None) -> bool:
    """Whether no token of a prompt was evaluated; llama.cpp also prints that as 1 token in 0 ms."""
    return prompt_tokens == 0 or prompt_ms == 0


def _read_cli(text: str) -> Log:
    """The rates that llama-cli prints after each answer, with one decimal and no counts."""
    found = [Request(None, None, numerals.ungrouped(each[2])) for each in _CLI.finditer(text)]
    return Log(CLI, requests=numbered(found), notes=[RATES])


READERS: tuple[Reader, ...] = (
    of_objects(FORMAT, _is_one, _read),
    of_text(FORMAT, _is_stream, _read_stream),
    of_text(FORMAT, _is_log, _read_log),
    of_text(CLI, _CLI.search, _read_cli),
)

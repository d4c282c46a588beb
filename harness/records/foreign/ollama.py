"""Ollama: responses of its API, streams of them (one JSON object a line), and what `--verbose` prints.

The fields are documented in docs/api.md (github.com/ollama/ollama): durations in ns; `prompt_eval_count` is
missing where the whole prompt came from the cache. A stream has a `created_at` for each chunk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.base.text import plural
from harness.records.foreign import numerals
from harness.records.foreign.chunks import Requests, series
from harness.records.foreign.log import (
    SHARED,
    Log,
    LogError,
    Reader,
    Request,
    numbered,
    of_objects,
    of_text,
    once,
    overlapping,
    timed,
)

FORMAT = "Ollama result"
TOTALS = (
    "Ollama gives totals of a request: no B, W or shape; save a stream (curl -N, without "
    '"stream": false) as JSONL for per-token times'
)
UNEVEN = "totals only: the chunks are not the tokens (thinking, tool calls, text held back)"
_PARTS = {"h": 3.6e6, "m": 6e4, "s": 1e3, "ms": 1.0, "us": 1e-3, "µs": 1e-3, "μs": 1e-3, "ns": 1e-6}
_PART = re.compile(rf"({numerals.NUMBER})(ms|us|µs|μs|ns|h|m|s)")
_LINE = re.compile(r"^[ \t]*(total|load|prompt eval|eval) (duration|count):[ \t]+(\S+)", re.MULTILINE)
_ZONE = re.compile(r"(Z|[+-]\d\d:\d\d)$")
_Object = Mapping[str, Any]


def _is_one(document: _Object) -> bool:
    return {"created_at", "done"} <= document.keys()


def _is_verbose(text: str) -> bool:
    if "eval duration" not in text:
        return False
    return {("eval", "duration"), ("eval", "count")} <= {(line[1], line[2]) for line in _LINE.finditer(text)}


def _read(objects: Sequence[_Object]) -> Log:
    """The requests of responses or streams; `done` ends a request. Raises LogError."""
    found = Requests(FORMAT)
    totals: dict[str, Request] = {}
    streams: dict[object, list[_Object]] = {}  # by model: two may be saved to one file at once
    began: dict[object, int] = {}
    spans: list[tuple[float, float]] = []
    uneven = number = 0
    for at, each in enumerate(objects):
        model = each.get("model")
        began.setdefault(model, at)
        if not each["done"]:
            streams.setdefault(model, []).append(each)
            continue
        chunks = streams.pop(model, [])
        spans.append((began.pop(model), at))
        number += 1
        name = f"request {number}"
        if not each.get("eval_count") or not each.get("eval_duration"):
            found.add_failed()
            continue
        prompt, tokens = each.get("prompt_eval_count") or 0, each["eval_count"]
        ms = each["eval_duration"] / 1e6
        prompt_ms = each.get("prompt_eval_duration", 0) / 1e6
        gaps = _gaps_ms(chunks) if chunks else []
        first_ms = prompt_ms if prompt else None
        if gaps and series(prompt, first_ms, gaps, tokens)[0].fault is None:
            found.add(name, prompt, first_ms, gaps, tokens)
        else:
            uneven += bool(chunks)
            totals[name] = timed(tokens, first_ms, ms, prompt or None)
    unfinished = ["the last stream is cut: its chunks are left out"] if streams else []
    unfinished += [SHARED] if overlapping(spans) else []
    requests, notes = once(totals)
    for name, request in requests.items():
        found.add_totals(name, request)
    notes += [f"{plural(uneven, 'request')}: {UNEVEN}"] if uneven else []
    notes += [TOTALS] if requests and not uneven else []
    return found.log([*notes, *unfinished])


def _gaps_ms(chunks: Sequence[_Object]) -> list[float]:
    """The times between chunks, made by one clock in one time zone."""
    times = [np.datetime64(_ZONE.sub("", str(chunk["created_at"])), "ns") for chunk in chunks]
    return [float(gap) for gap in np.diff(np.array(times)).astype(np.int64) / 1e6]


def _read_verbose(text: str) -> Log:
    """The requests of one or more blocks of statistics, each of which begins with its total duration."""
    blocks: list[dict[tuple[str, str], str]] = []
    for line in _LINE.finditer(text):
        key = (line[1], line[2])
        if not blocks or key == ("total", "duration"):
            blocks.append({})
        blocks[-1][key] = line[3]
    found = []
    for block in blocks:
        tokens = numerals.count(block.get(("eval", "count"), "0"))
        prompt = numerals.count(block.get(("prompt eval", "count"), "0"))
        ms = _duration_ms(block.get(("eval", "duration"), ""))
        prompt_ms = _duration_ms(block.get(("prompt eval", "duration"), ""))
        if tokens:
            found.append(timed(tokens, prompt_ms if prompt else None, ms, prompt or None))
    if not found:
        raise LogError(f"the {FORMAT} has no generated token")
    requests, notes = once(numbered(found))
    return Log(FORMAT, requests=requests, notes=[*notes, TOTALS])


def _duration_ms(text: str) -> float | None:
    """Parse a duration as Go prints it: `1m2.653s`, `345ms`, never with groups of thousands; null: none."""
    parts = _PART.findall(text)
    return sum(numerals.ungrouped(number) * _PARTS[unit] for number, unit in parts) if parts else None


READERS: tuple[Reader, ...] = (
    of_objects(FORMAT, _is_one, _read),
    of_text(FORMAT, _is_verbose, _read_verbose),
)

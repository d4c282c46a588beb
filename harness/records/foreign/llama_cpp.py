"""llama.cpp's server: responses with `timings`, streams of them with `timings_per_token`, and its log, which
llama-cli's resembles.

Formats: tools/server/README.md, print_timings() in tools/server (github.com/ggml-org/llama.cpp). `timings`
are totals of a request so far: a stream that repeats them with each token gives every token's latency, a
single response gives totals only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness.records.foreign.form import NUMBER, Format, Item, Row
from harness.records.foreign.log import SHARED, LogError, Series, number, overlapping

CACHED = "no token of its prompt was evaluated (all of it was cached): TTFT is unknown"
REUSED = "part of its prompt came from the cache: TTFT is of the rest"
PROGRESS = "without its final lines: the figures are of its last progress line (n_decoded, tg)"


def timings(form: Format, responses: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """The requests of responses, or of chunks of streams, which may be interleaved. Raises LogError."""
    generations: list[list[tuple[int, Row]]] = []
    latest: dict[object, int] = {}  # of each sender of chunks, its latest generation
    for place, response in enumerate(responses):
        so_far = response["timings"]
        if not {"predicted_n", "predicted_ms"} <= so_far.keys():
            raise LogError("a llama-server response with timings that lack predicted_n or predicted_ms")
        sender = (response.get("id"), response.get("id_slot"), response.get("index"))
        before = latest.get(sender)
        if before is not None and _continues(generations[before][-1][1], so_far):
            generations[before].append((place, so_far))
        else:
            latest[sender] = len(generations)
            generations.append([(place, so_far)])
    items = []
    for generation in generations:
        last = generation[-1][1]
        drafts = bool(last.get("draft_n"))
        series = _series([chunk for _, chunk in generation]) if len(generation) > 1 and not drafts else None
        note = CACHED if _is_cached(last) else REUSED if last.get("cache_n") else ""
        items.append(Item(last, series=series, drafts=drafts, note=note))
    spans = [(generation[0][0], generation[-1][0]) for generation in generations]
    return items, [SHARED] if overlapping(spans) else []


def _is_cached(timings: Row) -> bool:
    """Whether no token of a prompt was evaluated; llama.cpp also prints that as 1 token in 0 ms."""
    return timings.get("prompt_n") == 0 or timings.get("prompt_ms") == 0


def _continues(before: Row, timings: Row) -> bool:
    """Whether a chunk continues the same request; the last chunk repeats the previous count."""
    same = all(before.get(key) == timings.get(key) for key in ("prompt_n", "prompt_ms", "cache_n"))
    return same and all(timings[key] >= before[key] for key in ("predicted_n", "predicted_ms"))


def _series(chunks: Sequence[Row]) -> Series:
    """One request as a series. The first token is prefill; a chunk without a new token adds no latency."""
    last_of = {int(chunk["predicted_n"]): float(chunk["predicted_ms"]) for chunk in reversed(chunks)}
    counts = np.array(sorted(last_of), dtype=float)
    first_ms = np.nan if _is_cached(chunks[0]) else chunks[0].get("prompt_ms", np.nan)
    ms = np.concatenate([[first_ms], np.diff([last_of[int(count)] for count in counts])])
    steps = np.diff(counts)
    at = int(np.argmax(steps > 1)) if (steps > 1).any() else None
    fault = None if at is None else f"{steps[at]:.0f} tokens came in one chunk after token {counts[at]:.0f}"
    return Series(chunks[0].get("cache_n", 0) + chunks[0].get("prompt_n", 0) + counts, ms, fault)


# A line of a slot at work (a task of -1 is none), of times, of progress or of a draft.
LOG = (
    r"\bid +(?P<slot>\d+) \| task (?P<task>\d+)\b"
    rf"|(?P<prompt>prompt )?eval time *= *(?P<ms>{NUMBER}) ms / *(?P<tokens>\d+) (?:tokens|runs)"
    rf"|n_decoded = *(?P<decoded>\d+), tg = *(?P<tg>{NUMBER}) t/s"
    r"|draft acceptance(?: rate)? = [\d.,]+ \( *(?P<accepted>\d+) accepted / *(?P<drafted>\d+) generated\)"
)


@dataclass
class _Task:
    """The log's lines on one request, from the first to the last match."""

    first: int
    last: int = 0
    prompts: list[Row] = field(default_factory=list)
    decode: Row | None = None
    progress: Row | None = None

    def item(self) -> Item | None:
        """Its totals, else its last progress; None where it has neither."""
        if self.decode:
            row = {"predicted_n": self.decode["tokens"], "predicted_ms": self.decode["ms"]}
            if len(self.prompts) != 1:  # lines of several slots that name no slot
                return Item(row)
            (prompt,) = self.prompts
            row |= {"prompt_n": prompt["tokens"], "prompt_ms": prompt["ms"]}
            return Item(row, note=CACHED if not number(prompt["tokens"]) or not number(prompt["ms"]) else "")
        if self.progress:
            row = {"predicted_n": self.progress["decoded"], "rate": self.progress["tg"]}
            return Item(row, note=PROGRESS)
        return None


def log(form: Format, lines: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """The requests with totals in a log of llama-server or llama-cli."""
    tasks: list[_Task] = []
    current: dict[tuple[str, str], _Task] = {}
    key = ("", "")
    for place, line in enumerate(lines):
        if "slot" in line:
            key = (line["slot"], line["task"])
        task = current.get(key)
        if task is None or (task.decode and not line.keys() & {"slot", "drafted"}):  # a server was restarted
            current[key] = task = _Task(place)
            tasks.append(task)
        if not task.decode:
            task.last = place
        if "prompt" in line:
            task.prompts.append(line)
        elif "ms" in line:
            task.decode = line
        elif "tg" in line:
            task.progress = line
    items = [item for task in tasks if (item := task.item())]
    notes = []
    drafts = [(int(line["accepted"]), int(line["drafted"])) for line in lines if "drafted" in line]
    if drafts:
        accepted, drafted = (sum(counts) for counts in zip(*drafts, strict=True))
        notes.append(f"{accepted} of {drafted} drafted tokens were accepted")
        items = [replace(item, drafts=True) for item in items]
    if any(len(task.prompts) > 1 for task in tasks) or overlapping((task.first, task.last) for task in tasks):
        notes.append(SHARED)
    return items, notes

"""Fill a context: to its end, back to a depth, or until memory runs out."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from runners.clock import Clock, Emit, stamp
from runners.protocol import Instruments, Session, reason_of

# Fill a context to its end, timing a few decode steps at several depths. Standard library only.


DECODED = 8  # tokens one by one at each depth; the fastest is taken: memory that spilled slows them all
DEPTHS = (
    1 / 8,
    1 / 4,
    1 / 2,
    3 / 4,
    1,
)  # of the context; the shallower ones predict the end
ENOUGH_CHUNKS = 4  # for an estimate that may stop a fill
SURE = 2.0  # standard errors; a slope caused by one late chunk at the end is 1.7, for any number of chunks
SAY_EVERY_S = 1.0

Chunk = tuple[int, int, float]
"""Position of its first token (from 0), tokens, seconds."""


def fill(
    session: Session,
    tokens: int,
    prompt: list[int],
    most_s: float,
    say: Callable[[str], None],
    instruments: Instruments,
    threads: int,
) -> dict[str, Any]:
    """Fill `tokens` positions with the prompt's ids, repeated; raises the errors of the stack.

    `held`: positions used, 0 if stopped. `fill_s`: total time, decode included; `decode_s`: time of the
    decode steps; `decode_wait_ns`: how long their `threads` were ready without a CPU. `decode`: [position of
    the last token, ms of the fastest step] by depth, minus the mean CPU wait per thread, so that a busy
    machine does not look like spilled memory. `estimate_s`: of fill_s, from the first ENOUGH_CHUNKS chunks. A
    fill that would exceed `most_s` is stopped; `left_out` has the reason.
    """

    def waited_ns() -> int:
        return instruments.cpu_wait_ns() or 0

    def clock() -> float:
        return instruments.clock_ns() / 1e9

    ids, steps, chunks = itertools.cycle(prompt), depths(tokens), list[Chunk]()
    at, decode, estimate_s = 0, list[list[float]](), None
    decode_s, wait_ns = 0.0, 0
    session.empty(tokens)
    began = last_report = clock()
    for depth in steps:
        while at < depth - DECODED:
            # The partial chunk goes first, so that a whole one fills the end, where memory is short.
            given = list(itertools.islice(ids, (depth - DECODED - at) % session.chunk or session.chunk))
            start = clock()
            session.feed(given, 1)
            now = clock()
            chunks.append((at, len(given), now - start))
            at += len(given)
            left_s = time_left_s(chunks, at, tokens)
            if len(chunks) >= ENOUGH_CHUNKS:
                whole_s = now - began + left_s
                estimate_s = whole_s if estimate_s is None else estimate_s
                if whole_s > most_s:
                    reason = (
                        f"filling {tokens} tokens would take about {lasting(whole_s)}, "
                        f"more than the {most_s:.0f} s allowed"
                    )
                    return _result(0, clock() - began, estimate_s, [], reason)
            if now - last_report >= SAY_EVERY_S:
                say(f"fill: {at} of {tokens} tokens, about {lasting(left_s)} left")
                last_report = now
        took = []
        while at < depth:
            token = next(ids)
            start, waiting_ns = clock(), waited_ns()
            session.feed([token], 1)
            step_wait_ns = waited_ns() - waiting_ns
            step_s = clock() - start
            took.append(step_s - step_wait_ns / threads / 1e9)
            decode_s += step_s
            wait_ns += step_wait_ns
            at += 1
        decode.append([at, min(took) * 1e3])
    busy = {"decode_s": decode_s, "decode_wait_ns": wait_ns}
    return _result(at, clock() - began, estimate_s, decode, None) | busy


def _result(
    held: int,
    fill_s: float | None,
    estimate_s: float | None,
    decode: list[list[float]],
    left_out: str | None,
) -> dict[str, Any]:
    return {
        "held": held,
        "fill_s": fill_s,
        "estimate_s": estimate_s,
        "decode": decode,
        "left_out": left_out,
    }


def not_filled() -> dict[str, Any]:
    """The result of fill() for a context that is not to be filled."""
    return _result(0, None, None, [], None)


def depths(tokens: int) -> list[int]:
    """Positions at which a timed decode ends, the last at the end of the context; none overlap."""
    found = [0]
    for share in DEPTHS:
        if int(tokens * share) - found[-1] > DECODED:
            found.append(int(tokens * share))
    return [*found[1:-1], tokens]


def largest_chunk(tokens: int, chunk: int) -> int:
    """The most ids fed at once, for a session with this `chunk`."""
    ends = [0, *depths(tokens)]
    return max(1, min(chunk, max(end - begin - DECODED for begin, end in itertools.pairwise(ends))))


def time_left_s(chunks: list[Chunk], at: int, tokens: int) -> float:
    """Seconds for the positions from `at` to `tokens`, a position costing a + b * depth: least squares over
    the chunks so far. The first one, a warm-up, counts only until there are two others.

    Only the part of b above SURE standard errors counts: a fill is hundreds of times as long as the first
    chunks, which multiplies the error of one late chunk.
    """
    known = chunks[1:] if len(chunks) > 2 else chunks
    weight = sum(count for _, count, _ in known)
    mean_s = sum(seconds for _, _, seconds in known) / weight
    middle = sum(count * (first + count / 2) for first, count, _ in known) / weight
    points = [
        (first + count / 2 - middle, seconds / count - mean_s, count) for first, count, seconds in known
    ]
    spread = sum(count * x * x for x, _, count in points)
    slope = 0.0
    if len(known) > 2:
        slope = sum(count * x * y for x, y, count in points) / spread
        scatter = sum(count * (y - slope * x) ** 2 for x, y, count in points) / (len(known) - 2)
        slope = max(0.0, slope - SURE * math.sqrt(scatter / spread))
    return (tokens - at) * (mean_s + slope * ((at + tokens) / 2 - middle))


def lasting(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# A session's context at any depth: filled with text by prefill, kept, restored. Standard library only.


CHUNK = 512  # tokens at once; nothing is timed while filling
MOST_KEPT_BYTES = 2 << 30  # of main memory for a copy of the context
SAY_EVERY_NS = 1_000_000_000


class Context:
    """The text's ids, repeated, in a session's KV cache, up to `deepest`, with room for `tokens`.

    A copy of the filled context is kept where it is small enough. Without one, going deeper than what was
    overwritten means filling again. `file`: to keep it in for other processes, and to take it from; the name
    on the disk also has the checksum of its bytes.
    """

    def __init__(
        self,
        session: Session,
        text: list[int],
        deepest: int,
        tokens: int,
        clock: Callable[[], int],
        say: Callable[[str], None],
        file: str | None = None,
    ) -> None:
        self._session, self._text = session, text
        self._clock, self._say = clock, say
        self._kept: Any = None
        self._kept_tokens = self._whole = 0
        self.fill_s = 0.0
        session.empty(tokens)
        path = whole_file(Path(file)) if file else None
        self.from_file = path is not None
        if path:
            self._kept, self._kept_tokens = session.read_kept(path), deepest
        self.to(deepest)
        self.keeps = session.context_bytes() <= MOST_KEPT_BYTES
        if self.keeps and not self.from_file:
            self._kept, self._kept_tokens = session.keep(), deepest
            if file:
                partial = Path(file).with_suffix(".partial")
                session.write_kept(self._kept, partial)
                partial.replace(_summed(Path(file), partial))

    def groups(self, depths: list[int]) -> list[list[int]]:
        """The depths to measure together: all, or without a copy one after the other, the deepest first."""
        return [depths] if self.keeps else [[depth] for depth in sorted(depths, reverse=True)]

    def ids(self, begin: int, count: int) -> list[int]:
        """The text's ids at `count` positions from `begin` on."""
        return [self._text[at % len(self._text)] for at in range(begin, begin + count)]

    def to(self, depth: int) -> None:
        """Hold exactly the first `depth` positions of the text. Raises RuntimeError if the cache does not."""
        if depth > self._whole and depth <= self._kept_tokens:
            self._session.restore(self._kept, depth)
        else:
            self._session.truncate(min(depth, self._whole))
            self._fill(depth)
        self._whole = depth
        if (held := self._session.held()) != depth:
            raise RuntimeError(f"the KV cache holds {held} tokens where {depth} were put")

    def _fill(self, depth: int) -> None:
        began = reported = self._clock()
        chunks: list[Chunk] = []
        at = self._session.held()
        while at < depth:
            count = min(CHUNK, depth - at)
            start = self._clock()
            self._session.feed(self.ids(at, count), 1)
            now = self._clock()
            chunks.append((at, count, (now - start) / 1e9))
            at += count
            if now - reported >= SAY_EVERY_NS:
                left = lasting(time_left_s(chunks, at, depth)) if at < depth else "0 s"
                self._say(f"fill: {at} of {depth} tokens, about {left} left")
                reported = now
        self.fill_s += (self._clock() - began) / 1e9


def whole_file(file: Path) -> Path | None:
    """Where a context was kept under the name `file`, if its bytes are those that were written; else None.
    Deletes a damaged one: a stack may crash on foreign bytes."""
    for path in file.parent.glob(f"{file.stem}.*{file.suffix}"):
        if path == _summed(file, path):
            return path
        path.unlink()
    return None


def _summed(file: Path, contents: Path) -> Path:
    """The name `file` with the CRC-32 of a file's contents before its suffix."""
    checksum = 0
    with contents.open("rb") as stream:
        while piece := stream.read(1 << 24):
            checksum = zlib.crc32(piece, checksum)
    return file.with_suffix(f".{checksum:08x}{file.suffix}")


# A generation that grows until memory runs out. Standard library only.


RESERVE_BYTES = 8 * 2**20  # 1 MiB is enough to look up the versions of four packages


class Growth:
    """A generation that ends when memory runs out."""

    def __init__(
        self, session: Session, prompt_tokens: int, does_not_fit: tuple[type[BaseException], ...]
    ) -> None:
        self._session, self._prompt_tokens, self._does_not_fit = session, prompt_tokens, does_not_fit
        self._ask = getattr(session, "memory_state", lambda: None)
        self._reserve = bytes(RESERVE_BYTES)  # never written to: allocated, but not resident
        self._steps: list[list[int]] = []
        self._stopped: str | None = None

    def stamped(self, stream: Iterable[int], emit: Emit, clock: Clock) -> dict[str, Any]:
        return stamp(self._until_full(stream), emit, clock, self._step)

    def _until_full(self, stream: Iterable[int]) -> Iterator[int]:
        try:
            yield from stream
        except self._does_not_fit as failure:
            self._reserve = b""  # facts and counters need memory too
            self._stopped = reason_of(failure)

    def _step(self, tokens: int) -> None:
        """Record the allocator's state after `tokens` tokens."""
        if state := self._ask():
            self._steps.append([self._prompt_tokens + tokens, *state])

    def summary(self) -> dict[str, Any]:
        return {"stopped": self._stopped, "memory_steps": self._steps}

    def counters(self) -> dict[str, Any]:
        """The session's; empty if too little memory is left to read them."""
        try:
            return self._session.counters()
        except self._does_not_fit:
            return {}

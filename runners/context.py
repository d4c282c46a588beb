"""A session's context at any depth: filled with text by prefill, kept, restored. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runners.filling import Chunk, lasting, time_left_s
from runners.protocol import Session

CHUNK = 512  # tokens at once; nothing is timed while filling
MOST_KEPT_BYTES = 2 << 30  # of main memory for a copy of the context
SAY_EVERY_NS = 1_000_000_000


class Context:
    """The text's ids, repeated, in a session's KV cache, up to `deepest`, with room for `tokens`.

    A copy of the filled context is kept where it is small enough. Without one, going deeper than what was
    overwritten means filling again.
    """

    def __init__(
        self,
        session: Session,
        text: list[int],
        deepest: int,
        tokens: int,
        clock: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self._session, self._text = session, text
        self._clock, self._say = clock, say
        self._kept: Any = None
        self._kept_tokens = self._whole = 0
        self.fill_s = 0.0
        session.empty(tokens)
        self.to(deepest)
        self.keeps = session.context_bytes() <= MOST_KEPT_BYTES
        if self.keeps:
            self._kept, self._kept_tokens = session.keep(), deepest

    def groups(self, depths: list[int]) -> list[list[int]]:
        """The depths to measure together: all, or without a copy one after the other, the deepest first."""
        return [depths] if self.keeps else [[depth] for depth in sorted(depths, reverse=True)]

    def ids(self, begin: int, count: int) -> list[int]:
        """Those of the text at `count` positions from `begin` on."""
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

"""A session's context at any depth: filled with text by prefill, kept, restored. Standard library only."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runners.filling import Chunk, lasting, time_left_s
from runners.protocol import Session

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


def whole_file(file: Path) -> Path | None:
    """Where a context was kept under the name `file`, if its bytes are those that were written; else null.
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

"""A generation that grows until memory runs out. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from runners.clock import Clock, Emit, stamp
from runners.protocol import Session, reason_of

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

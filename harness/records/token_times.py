"""When the tokens of one generation came: one value, from the worker's stamps to every figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from runners.protocol import Event, Tokens

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Numbers = TypeVar("Numbers", Ints, Floats)
Flushes = Iterable[Sequence[int]]
"""[index of the next token, ns]: a write of the worker between two tokens, for which no token waits."""


@dataclass(frozen=True, eq=False)
class TokenTimes:
    """`n`: the position of each token. `latency_ns`: its time since the one before, flushes left out.
    `ids`: None if not known. `device_ns`: its time by the device's own clock, which runs on through flushes;
    None if there is none."""

    n: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    latency_ns: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ids: Sequence[int] | None = None
    device_ns: Sequence[int | None] | None = None

    @classmethod
    def of_events(
        cls, events: Iterable[Event], prompt_tokens: int, device_ns: Sequence[int] | None = None
    ) -> TokenTimes:
        """Read the worker's Tokens events. Keep `device_ns` if the device timed every token."""
        tokens = [event for event in events if isinstance(event, Tokens)]
        t_ns = np.array([t for event in tokens for t in event.t_ns], dtype=np.int64)
        whole = device_ns if device_ns and len(device_ns) == len(t_ns) else None
        n = np.arange(prompt_tokens + 1, prompt_tokens + 1 + len(t_ns))
        return cls(n, np.diff(t_ns, prepend=0), [i for event in tokens for i in event.ids], whole)

    @classmethod
    def of_columns(cls, columns: Mapping[str, Sequence[int]]) -> TokenTimes:
        """Read the columns of tokens.parquet; no times without columns."""
        if not columns:
            return cls()
        n, latency_ns = (np.asarray(columns[name], dtype=np.int64) for name in ("n", "latency_ns"))
        return cls(n, latency_ns, columns.get("token_id"), columns.get("device_ns"))

    def __len__(self) -> int:
        return len(self.latency_ns)

    def columns(self) -> dict[str, Sequence[int | None]]:
        """The columns of tokens.parquet; none without a token."""
        if not len(self):
            return {}
        known = {"token_id": self.ids, "latency_ns": self.latency_ns.tolist(), "device_ns": self.device_ns}
        return {"n": self.n.tolist()} | {name: found for name, found in known.items() if found is not None}

    @cached_property
    def latency_ms(self) -> Floats:
        return self.latency_ns / 1e6

    def t_ns(self, start_ns: int = 0, flushes: Flushes = ()) -> Ints:
        """The moment of each token. With the start and the flushes: on the clock of the samples."""
        t_ns: Ints = start_ns + _plus(self.latency_ns, flushes).cumsum()
        return t_ns

    def device_latency_ns(self, flushes: Flushes) -> Floats | None:
        """Each token's latency by the device's clock, without flushes; None if one is not known."""
        if self.device_ns is None or None in self.device_ns:
            return None
        device_ns: Floats = np.array(self.device_ns, dtype=float)
        return _plus(device_ns, ((index, -flush_ns) for index, flush_ns in flushes))


def _plus(latency_ns: Numbers, flushes: Flushes) -> Numbers:
    """The latencies, each with the flushes before its token added."""
    longer: Numbers = latency_ns.copy()
    for index, flush_ns in flushes:
        if index < len(longer):
            longer[index] += flush_ns
    return longer


NO_TOKENS = TokenTimes()

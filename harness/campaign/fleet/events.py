"""What happens in a fleet, as plain data: lines of a terminal, or of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from typing_extensions import NotRequired, TypedDict

Kind = Literal[
    "joined", "refused", "lost", "left_out", "begins", "record", "moved", "message", "warning", "ended"
]


class Event(TypedDict):
    """`event`: what happened. `device`: name; `node`: its address. `repeats_done`, `repeats`: of all cells of
    the device, kept ones included."""

    event: Kind
    device: NotRequired[str]
    node: NotRequired[str]
    cell: NotRequired[str]
    repeat: NotRequired[int]
    status: NotRequired[str]
    reasons: NotRequired[Sequence[str]]
    text: NotRequired[str]
    folder: NotRequired[str]
    repeats_done: NotRequired[int]
    repeats: NotRequired[int]


class FleetWatcher(Protocol):
    """Receives what happens in a fleet and shows it to the user."""

    def happened(self, event: Event) -> None: ...

"""What happens in a fleet, as plain data: for the view of a terminal, and for lines of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from typing_extensions import NotRequired, TypedDict

Kind = Literal[
    "joined",
    "refused",
    "lost",
    "left_out",
    "begins",
    "record",
    "moved",
    "message",
    "warning",
    "progress",
    "ended",
]


class Event(TypedDict):
    """`event`: what happened. `device`: name; `node`: its address."""

    event: Kind
    device: NotRequired[str]
    node: NotRequired[str]
    cell: NotRequired[str]
    repeat: NotRequired[int]
    status: NotRequired[str]
    reasons: NotRequired[Sequence[str]]
    text: NotRequired[str]
    folder: NotRequired[str]
    devices: NotRequired[list[DeviceProgress]]


class DeviceProgress(TypedDict):
    """`nodes`: that are alive and have the device. `repeats_done`, `repeats`: with those kept from before.
    `eta_s`: seconds until its cells are done, at the rate so far; null: not known."""

    device: str
    nodes: int
    now: list[str]
    repeats_done: int
    repeats: int
    eta_s: float | None


class FleetWatcher(Protocol):
    """Receives what happens in a fleet and shows it to the user."""

    def happened(self, event: Event) -> None: ...

"""One device of a fleet, that is all equal ones of this name: its cells, what is done, and what waits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.config import Experiment
from harness.fleet import share
from harness.fleet.events import DeviceProgress
from harness.plan import Cell
from harness.results import Draft

MOST_MOVES = 3  # of a cell whose campaigns are lost: it may be what kills the nodes


def repeats_of(cell: Cell, experiment: Experiment) -> int:
    return 1 if cell.searches else cell.workload.repeated(experiment.protocol.repeats)


@dataclass
class Campaign:
    """A portion of a device's cells, given to Ray. `node`: where it runs; null: nowhere yet. `begun`: the
    repeat that is being measured. `failed`: why it ended early. `because`: why its cells lost a campaign
    before; empty: they did not."""

    name: str
    device: str
    cells: list[Cell]
    because: str = ""
    node: str | None = None
    begun: Draft | None = None
    failed: str | None = None
    ended: bool = False


@dataclass
class Device:
    """`shared`, `facts`: parts of a record that was not measured, by cell. `work`: the estimated time of each
    cell's repeats, in any unit. `waiting`: cells without a campaign, with the reason; empty: none was given
    yet. `given_up`: cells that lost too many campaigns. `finished`: repeats of cells, by number."""

    name: str
    cells: dict[str, Cell]
    repeats: dict[str, int]
    shared: Draft
    facts: Mapping[str, Draft]
    work: dict[str, float]
    waiting: dict[str, str] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    finished: dict[str, set[int]] = field(default_factory=dict)
    measured: float = 0.0
    began_s: float | None = None

    @classmethod
    def of(cls, name: str, cells: Iterable[Cell], experiment: Experiment, line: Mapping[str, Any]) -> Device:
        """As a node with this device has surveyed it."""
        mine = {cell.id: cell for cell in cells}
        repeats = {cell.id: repeats_of(cell, experiment) for cell in mine.values()}
        known = line["cells"]
        return cls(
            name=name,
            cells=mine,
            repeats=repeats,
            shared=line["shared"],
            facts={key: known[key]["facts"] for key in mine},
            work=share.weights({key: known[key]["seconds"] for key in mine}, repeats),
            waiting=dict.fromkeys(mine, ""),
        )

    @property
    def slug(self) -> str:
        return str(self.shared["machine"]["slug"])

    def begins(self) -> None:
        self.began_s = self.began_s or time.monotonic()

    def finishes(self, cell: str, repeat: int) -> None:
        """A repeat was measured, and will not be again."""
        if cell in self.cells and repeat not in self.finished.setdefault(cell, set()):
            self.finished[cell].add(repeat)
            self.measured += self.work[cell] / self.repeats[cell]

    def is_done(self, cell: str) -> bool:
        return len(self.finished.get(cell, ())) >= self.repeats[cell]

    def ends(self, campaign: Campaign) -> None:
        """All cells of a campaign are done, those kept from earlier runs included."""
        for cell in campaign.cells:
            self.finished[cell.id] = set(range(1, self.repeats[cell.id] + 1))

    def loses(self, campaign: Campaign, reason: str) -> list[str]:
        """A campaign did not end: its cells that are not done wait for another one. Returns them."""
        left = [cell.id for cell in campaign.cells if not self.is_done(cell.id)]
        if campaign.node is not None:
            self.lost.update(left)
        for cell in left:
            if self.lost[cell] > MOST_MOVES:
                self.given_up[cell] = f"lost with {self.lost[cell]} campaigns, the last time because {reason}"
            else:
                self.waiting[cell] = reason
        return [cell for cell in left if cell in self.waiting]

    def facts_of(self, cell: str) -> Draft:
        """A record that was not measured, without its outcome."""
        return {**self.shared, **self.facts[cell], "attempt": 1}

    def progress(self, nodes: int, now: list[str]) -> DeviceProgress:
        done = sum(self.work[c] * len(found) / self.repeats[c] for c, found in self.finished.items())
        left = sum(self.work.values()) - done
        eta = None
        if self.measured and self.began_s is not None:
            eta = (time.monotonic() - self.began_s) * left / self.measured
        return {
            "device": self.name,
            "nodes": nodes,
            "now": now,
            "repeats_done": sum(len(found) for found in self.finished.values()),
            "repeats": sum(self.repeats.values()),
            "eta_s": eta,
        }

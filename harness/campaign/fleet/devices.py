"""One device of a fleet, that is all equal ones of its name: its cells, what is done, and what waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.campaign.fleet import portions
from harness.campaign.provenance import utc_now
from harness.config import Experiment
from harness.config.plan import Cell
from harness.records import Draft

MOST_MOVES = 3  # of a cell whose campaigns are lost: it may be what kills the nodes


def repeats_of(cell: Cell, experiment: Experiment) -> int:
    return 1 if cell.searches else cell.workload.repeated(experiment.protocol.repeats)


@dataclass
class Device:
    """`cells`: that fit; `no_room`: why others do not. `shared`, `facts`: parts of a record that was not
    measured, by cell. `work`: the estimated time of each cell's repeats, in any unit. `waiting`: cells
    without a campaign, with the reason why they lost one, or empty. `given_up`: cells that lost too many.
    `done`: repeats of cells, by number."""

    name: str
    cells: list[str]
    no_room: dict[str, str]
    repeats: dict[str, int]
    shared: Draft
    facts: Mapping[str, Draft]
    work: dict[str, float]
    waiting: dict[str, str]
    given_up: dict[str, str] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    done: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, cells: Iterable[Cell], experiment: Experiment, line: Mapping[str, Any]) -> Device:
        """A device from the survey of a node."""
        surveyed = line["cells"]
        no_room = {cell: facts["no_room"] for cell, facts in surveyed.items() if facts["no_room"]}
        repeats = {
            cell.id: repeats_of(cell, experiment)
            for cell in cells
            if cell.id in surveyed and cell.id not in no_room
        }
        return cls(
            name=name,
            cells=[*repeats],
            no_room=no_room,
            repeats=repeats,
            shared=line["shared"],
            facts={cell: facts["facts"] for cell, facts in surveyed.items()},
            work=portions.work_of({cell: surveyed[cell]["seconds"] for cell in repeats}, repeats),
            waiting=dict.fromkeys(repeats, ""),
        )

    @property
    def slug(self) -> str:
        return str(self.shared["machine"]["slug"])

    def take(self, devices: int) -> tuple[list[str], bool]:
        """Cells for one of so many equal devices, and whether they have lost a campaign: these come first."""
        lost = [cell for cell, reason in self.waiting.items() if reason]
        cells = portions.taken({cell: self.work[cell] for cell in lost or self.waiting}, devices)
        for cell in cells:
            del self.waiting[cell]
        return cells, bool(lost)

    def finishes(self, cell: str, repeat: int) -> None:
        """A repeat was measured, and will not be again."""
        if cell in self.repeats:
            self.done.setdefault(cell, set()).add(repeat)

    def ends(self, cells: Iterable[str]) -> None:
        """All repeats of these cells are done, those kept from earlier runs included."""
        for cell in cells:
            self.done[cell] = set(range(1, self.repeats[cell] + 1))

    def loses(self, cells: Collection[str], measured: str | None, reason: str) -> list[str]:
        """A campaign did not end: its cells that are not done wait for another one. Returns them. `measured`:
        the one that was being measured, if any: it may be the cause."""
        left = [cell for cell in cells if len(self.done.get(cell, ())) < self.repeats[cell]]
        self.lost.update([measured] if measured in left else left)
        for cell in left:
            if self.lost[cell] > MOST_MOVES:
                self.given_up[cell] = f"lost with {self.lost[cell]} campaigns, the last time because {reason}"
            else:
                self.waiting[cell] = reason
        return [cell for cell in left if cell in self.waiting]

    def facts_of(self, cell: str) -> Draft:
        """A record that was not measured, without its outcome."""
        return {**self.shared, **self.facts[cell], "attempt": 1, "started_utc": utc_now()}

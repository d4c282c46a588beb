"""Which repeats are exported: those that are ok; the others are counted, with why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from harness.dataset.by_campaign import campaigns
from harness.results import Stored

Row = dict[str, Any]
Told = tuple[Row, Stored]


@dataclass
class Chosen:
    """Repeats that are ok, read one campaign at a time as they are asked for; `left_out` counts the others,
    by why, of what was read so far. `fits`: why an ok one cannot be exported; empty where it can."""

    stored: Iterable[Stored]
    fits: Callable[[Row], str] = lambda row: ""
    left_out: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    seen: int = 0

    def by_campaign(self) -> Iterator[list[Told]]:
        """The repeats of each campaign, the oldest first."""
        for campaign in campaigns(self.stored):
            self.warnings += campaign.gathered.warnings
            self.left_out.update("search" for _ in campaign.searches)
            found = []
            for row, each in campaign.repeats:
                self.seen += 1
                if why := self._unfit(row):
                    self.left_out[why] += 1
                else:
                    found.append((row, each))
            if found:
                yield found

    def _unfit(self, row: Row) -> str:
        if row["status"] != "ok":
            return "disturbed" if row["disturbed"] else str(row["status"])
        return self.fits(row)

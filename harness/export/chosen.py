"""Choose the repeats to export: those that are ok. The others are counted by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from harness.analysis.rows import Repeat as Row
from harness.dataset.by_campaign import campaigns
from harness.results import Stored

Repeat = tuple[Row, Stored]


@dataclass
class Chosen:
    """The ok repeats, read lazily one campaign at a time. `left_out`: the others read so far, by reason.

    `fits`: returns why an ok repeat cannot be exported; empty where it can.
    """

    stored: Iterable[Stored]
    fits: Callable[[Row], str] = lambda row: ""
    left_out: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    seen: int = 0

    def by_campaign(self) -> Iterator[list[Repeat]]:
        """The repeats of each campaign, oldest first."""
        for campaign in campaigns(self.stored):
            self.warnings += campaign.gathered.warnings
            self.left_out.update("search" for _ in campaign.searches)
            found: list[Repeat] = []
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

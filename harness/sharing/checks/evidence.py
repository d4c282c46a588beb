"""One record with all of its files, read once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness import results
from harness.analysis.records.verdicts import USABLE, verdict
from harness.results import Stored, TokenTimes
from harness.results.files import read_columns
from harness.results.kinds import Record, done_of

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Evidence:
    """`name`: of its folder in the bundle. `memory`, `table`: columns; empty without a file."""

    name: str
    record: Record
    times: TokenTimes
    memory: Columns
    table: Columns

    @classmethod
    def of(cls, stored: Stored, name: str) -> Evidence:
        """Read the files of a record, all of them, so that a damaged one is refused. Raises ResultsError."""
        read_columns(stored.folder / "sensors.parquet", ("t_ns",))
        memory, table = results.memory_series(stored), results.table(stored)
        return cls(name, stored.record, stored.times, memory, table)

    @property
    def is_reported(self) -> bool:
        """Whether it is a published figure, which was not measured by this harness."""
        return self.record["kind"] == "reported"

    @cached_property
    def usable(self) -> bool:
        """Whether it was measured here and is valid: a disturbed one may have any times."""
        judged = verdict(self.record, has_series=True, times=self.times, table=self.table)
        return not self.is_reported and judged.status in USABLE and bool(done_of(self.record))

    @cached_property
    def timed_ns(self) -> int:
        """From the begin of the timed part to its end, flushes included; 0 without one."""
        done = done_of(self.record)
        if surface := done.get("surface"):
            return surface.get("elapsed_ns", 0)
        flushes = sum(ns for index, ns in done.get("flushes", []) if index < len(self.times))
        return int(self.times.gaps_ns.sum()) + flushes

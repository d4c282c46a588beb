"""The cells of one side: rows of repeats, searches and scores by campaign, and why figures are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.analysis.records import quality, searches
from harness.analysis.records.verdicts import USABLE
from harness.analysis.rows import Repeat, Score, Search
from harness.compare.judge import Runs
from harness.compare.sides import Key, Side, cell_of
from harness.dataset import names
from harness.dataset.gather import Gathered
from harness.results import Record, Stored
from harness.system.wording import plural

Row = Repeat | Search | Score
NAMES_SHOWN = 3


class Cells:
    """The cells of one side; each file is read once."""

    def __init__(self, side: Side) -> None:
        self._rows: dict[Key, dict[str, list[Row]]] = {}
        self._records: dict[Key, list[Record]] = {}
        of = {each.folder: name for name, found in side.campaigns.items() for each in found}
        every = [each for found in side.campaigns.values() for each in found]
        measured = [each for each in every if each.record["kind"] in ("measured", "scored")]
        gathered = Gathered([*measured, *side.checks])
        self.damages = [*side.damages, *gathered.warnings]
        rows: list[tuple[Stored, Row]] = [*zip(gathered.stored, gathered.repeats, strict=True)]
        rows += [(each, searches.row(each.record)) for each in every if each.record["kind"] == "searched"]
        rows += [(each, quality.row(each.record)) for each in every if each.record["kind"] == "scored"]
        for each, row in rows:
            key = cell_of(each)
            self._rows.setdefault(key, {}).setdefault(of[each.folder], []).append(row)
            self._records.setdefault(key, []).append(each.record)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def rename(self, keys: Mapping[Key, Key]) -> None:
        """Give cells the keys of those that they are compared with."""
        for mine, theirs in keys.items():
            self._rows[theirs], self._records[theirs] = self._rows.pop(mine), self._records.pop(mine)

    def runs(self, key: Key) -> Runs:
        """The usable rows by campaign, oldest first."""
        usable = {
            name: [row for row in rows if row["status"] in USABLE] for name, rows in self._rows[key].items()
        }
        return Runs({name: rows for name, rows in usable.items() if rows})

    def records(self, key: Key) -> list[Record]:
        return self._records[key]

    def examples(self) -> dict[Key, Record]:
        """A record of each cell: of those that got ready to run, if there are any."""
        return {key: max(found, key=_got_ready) for key, found in self._records.items()}

    def lacks(self, key: Key) -> str | None:
        """Why a cell has no figure at all, as a clause; null where it has one."""
        rows = self._every(key)
        if any(row["status"] in USABLE for row in rows):
            return None
        return _statuses(rows)

    def lost(self, key: Key) -> str | None:
        """How many repeats are not usable, and why, as a clause; null: none."""
        rows = self._every(key)
        bad = [row for row in rows if row["status"] not in USABLE]
        return f"{len(bad)} of {plural(len(rows), 'repeat')}: {_statuses(bad)}" if bad else None

    def weights(self, key: Key) -> set[str]:
        """Sources of its weights: synthetic, path or hub."""
        return {row["weights"] for row in self._every(key)}

    def _every(self, key: Key) -> list[Row]:
        return [row for of_campaign in self._rows[key].values() for row in of_campaign]

    def names(self) -> dict[Key, str]:
        """A unique name for each cell."""
        first = {key: self._every(key)[0] for key in self._rows}
        found: dict[Key, str] = {}
        for searched in (False, True):
            of_kind = {key: row for key, row in first.items() if (row["kind"] == "searched") == searched}
            named = names.named(list(of_kind.values()))
            words = " max_ctx" if searched else ""
            found |= {key: row["name"] + words for key, row in zip(of_kind, named, strict=True)}
        return found


def _got_ready(record: Record) -> bool:
    return "environment" in record


def _statuses(rows: Sequence[Row]) -> str:
    """`crash (killed by SIGSEGV), oom (...)`, without duplicates."""
    statuses = dict.fromkeys(f"{row['status']} ({'; '.join(row['reasons'])})" for row in rows)
    return ", ".join([*statuses][:NAMES_SHOWN])

"""The cells of one side of a comparison, and which cell of the other side is the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from harness.analysis.columns import Repeat, Score, Search
from harness.analysis.identity import weights_content
from harness.analysis.verdicts import USABLE
from harness.base.text import list_named, plural
from harness.compare.judge import Runs
from harness.compare.sides import Key, Side, cell_of
from harness.dataset import row_names
from harness.dataset.judging import rows_of
from harness.dataset.study import study_of
from harness.records import Record, Stored
from harness.stacks.header import Options

Row = Repeat | Search | Score
R = TypeVar("R", bound=Row)
NAMES_SHOWN = 3
DERIVED = ("prompt", "prompt_source")  # of a workload: they follow from the weights


class Run(NamedTuple):
    campaign: str
    row: Row
    stored: Stored


class Cells:
    """The repeats, searches and scores of a side, by cell."""

    def __init__(self, side: Side) -> None:
        judged = [(record, name) for name, of_side in side.campaigns.items() for record in of_side]
        study = study_of(
            [
                *(record for record, _ in judged if record.facts["kind"] in ("measured", "scored")),
                *side.checks,
            ]
        )
        self.damages = [*side.damages, *study.warnings]
        by_folder = {record.stored.folder: (record, name) for record, name in judged}
        rows: list[tuple[Row, Path]] = [
            (row, stored.folder) for row, stored in zip(study.repeats, study.stored, strict=True)
        ]
        for kind in ("searched", "scored"):
            of_kind = [record for record, _ in judged if record.facts["kind"] == kind]
            rows += zip(rows_of(of_kind), (record.stored.folder for record in of_kind), strict=True)
        self._runs: dict[Key, list[Run]] = {}
        for row, folder in rows:
            record, name = by_folder[folder]
            self._runs.setdefault(cell_of(record), []).append(Run(name, row, record.stored))

    def __iter__(self) -> Iterator[Key]:
        return iter(self._runs)

    def __contains__(self, key: Key) -> bool:
        return key in self._runs

    def rename(self, keys: Mapping[Key, Key]) -> None:
        """Give cells the keys of those that they are compared with."""
        for mine, theirs in keys.items():
            self._runs[theirs] = self._runs.pop(mine)

    def runs(self, key: Key) -> Runs:
        """The usable rows by campaign, oldest first."""
        usable: dict[str, list[Row]] = {}
        for run in self._runs[key]:
            if run.row["status"] in USABLE:
                usable.setdefault(run.campaign, []).append(run.row)
        return Runs(usable)

    def rows(self, key: Key) -> list[Row]:
        return [run.row for run in self._runs[key]]

    def stored(self, key: Key) -> list[Stored]:
        return [run.stored for run in self._runs[key]]

    def example(self, key: Key) -> Record:
        """The first record of a cell that got ready to run, if there is one."""
        every = self.stored(key)
        return next((stored.record for stored in every if "environment" in stored.record), every[0].record)

    def weights(self, key: Key) -> set[str]:
        """Sources of its weights: synthetic, path or hub."""
        return {row["weights"] for row in self.rows(key)}

    def names(self) -> dict[Key, str]:
        """A unique name for each cell."""
        names: dict[Key, str] = {}
        for searched in (False, True):
            first = {key: runs[0].row for key, runs in self._runs.items()}
            of_kind = {key: row for key, row in first.items() if (row["kind"] == "searched") == searched}
            named = row_names.with_unique_names(list(of_kind.values()))
            names |= {
                key: row["name"] + " max_ctx" * searched for key, row in zip(of_kind, named, strict=True)
            }
        return names


def lost(rows: Sequence[R], counts: Callable[[R], object] = lambda row: True) -> str | None:
    """How many rows are not usable, and why, as a clause; None: none. `counts`: which of them are counted."""
    unusable = [row for row in rows if row["status"] not in USABLE and counts(row)]
    return f"{len(unusable)} of {plural(len(rows), 'repeat')}: {statuses(unusable)}" if unusable else None


def statuses(rows: Sequence[Row]) -> str:
    """`crash (killed by SIGSEGV), oom (...)`, without duplicates."""
    words = dict.fromkeys(f"{row['status']} ({'; '.join(row['reasons'])})" for row in rows)
    return list_named([*words], NAMES_SHOWN)


def same_weights(before: Cells, after: Cells) -> dict[Key, Key]:
    """Map a new cell's key to the key of the baseline's cell with equal weights, and all else equal. Keys on
    both sides, and keys with several matches, are left out."""
    theirs = _by_content({key: before.example(key) for key in before if key not in after})
    ours = _by_content({key: after.example(key) for key in after if key not in before})
    return {
        keys[0]: theirs[what][0] for what, keys in ours.items() if len(keys) == len(theirs.get(what, ())) == 1
    }


def _by_content(records: Mapping[Key, Record]) -> dict[str, list[Key]]:
    by_content: dict[str, list[Key]] = {}
    for key, record in records.items():
        if content := weights_content(record):
            what = [key[:2], record["stack"], record["variant"], content, _options(record), _workload(record)]
            by_content.setdefault(json.dumps(what, sort_keys=True), []).append(key)
    return by_content


def path(record: Record) -> str:
    """The path of a record's weights."""
    return str(record["model"]["weights"].get("file"))


def difference(one: Record, other: Record) -> str:
    """What two cells of one name have apart, as `other weights (a.gguf and b.gguf)`."""
    apart = []
    contents = [weights_content(record) for record in (one, other)]
    if None not in contents and contents[0] != contents[1]:
        apart.append(f"other weights ({path(one)} and {path(other)})")
    for what, values_of in (("other options", _options), ("another workload", _workload)):
        if values := [*_apart(values_of(one), values_of(other))]:
            apart.append(f"{what} ({list_named(values, NAMES_SHOWN)})")
    return " and ".join(apart) or "another config"


def _apart(one: Mapping[str, object], other: Mapping[str, object]) -> Iterator[str]:
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            yield f"{name}: {one.get(name, 'default')} and {other.get(name, 'default')}"


def _options(record: Record) -> Options:
    options: Options = record["asked"]["options"]
    return options


def _workload(record: Record) -> dict[str, object]:
    return {name: value for name, value in record["workload"].items() if name not in DERIVED}

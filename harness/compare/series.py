"""Results of many nights: a series of each figure of each cell, and the steps in it: when the figure moved to
another level and stayed there, and what else changed then."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

from harness import records
from harness.analysis.columns import Repeat
from harness.analysis.figures import COMPARED, Figure
from harness.analysis.steps import Level, levels
from harness.base.text import few
from harness.compare.surroundings import changed
from harness.dataset import campaign_order, nights, row_names
from harness.dataset.nights import NightRow
from harness.dataset.rows import Found, of_folder
from harness.dataset.study import by_size, study_of
from harness.records import Record, ResultsError

NO_FIGURE = "ok, but without this figure"
LONG = 2.0  # times the usual interval between nights: a longer one is a gap
COMPARED_NIGHTS = 2  # nights on either side of a step whose surroundings are compared: its date is +- 1 night


class Cell(NamedTuple):
    """A kind of record of one cell on one device."""

    kind: str
    name: str
    machine: str
    device: str


Night = Sequence[NightRow]
"""The rows of one campaign: several where a run failed before its device was known."""


@dataclass(frozen=True)
class Series:
    """One figure of one cell on one device, oldest night first; at least one night has a value.

    `name`: display name of the cell. `values`: the mean over the ok repeats of each night; None: the night
    has none, for the reason in `whys`, which is empty otherwise. `spread`: median relative standard error of
    a night's mean, from its repeats.
    """

    name: str
    identity: Mapping[str, str]
    metric: Figure
    nights: Sequence[Night]
    values: Sequence[float | None]
    whys: Sequence[str]
    spread: float

    @cached_property
    def levels(self) -> list[Level]:
        return levels(self.values, self.spread)

    @cached_property
    def began(self) -> list[datetime]:
        """The start of each campaign, UTC."""
        return [_time(rows[0]["began"]) for rows in self.nights]

    @cached_property
    def days(self) -> list[str]:
        """The UTC date of each night, with its time where another night of the series has the same date."""
        dates = [at.date().isoformat() for at in self.began]
        count = Counter(dates)
        return [
            f"{at:%Y-%m-%d %H:%M}" if count[date] > 1 else date
            for at, date in zip(self.began, dates, strict=True)
        ]

    @cached_property
    def long(self) -> timedelta:
        """The longest usual interval between two nights; a longer one is a gap."""
        intervals = (later - earlier for earlier, later in pairwise(self.began))
        return LONG * statistics.median_high([*intervals] or [timedelta()])


@lru_cache(maxsize=1 << 16)
def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


@dataclass
class History:
    """The series of a results folder `root`. `campaigns`: how many there are. `cells_without_data`: by name,
    the number of nights and why the last one failed."""

    root: Path
    warnings: list[str]
    campaigns: int
    series: list[Series] = field(default_factory=list)
    cells_without_data: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """When the first and the last night of all series began; needs at least one series."""
        return min(series.began[0] for series in self.series), max(series.began[-1] for series in self.series)


def history(root: Path, results: Found | None = None) -> History:
    """The series of the measured, searched and scored records of a folder, models by size. `results`: these
    records, if they were read. Raises ResultsError if it has no records of measurements."""
    results = results or of_folder(root)
    warnings = results.skipped
    if not (judged := results.own):
        raise ResultsError("; ".join([f"{root}: no records of measurements", *few(warnings)]))
    study = study_of(judged, with_cells=False)
    nightly = nights.nights(judged, study, root)
    campaigns = {night["campaign"] for night in nightly}
    late = set(filter(campaign_order.from_the_future, campaigns))
    warnings += [*study.warnings, *([campaign_order.left_out(late)] if late else [])]
    history = History(root, warnings, len(campaigns - late))
    cells = _cells([night for night in nightly if night["campaign"] not in late])
    for (cell, ran), name in zip(cells.items(), _names(cells), strict=True):
        every = [series for metric in COMPARED if (series := _series(name, cell, metric, ran))]
        history.series += every
        if not every:
            history.cells_without_data[name] = (len(ran), _why(ran[-1]) or NO_FIGURE)
    return history


def _cells(nightly: Sequence[NightRow]) -> dict[Cell, list[Night]]:
    """The nights of each cell, oldest first: measurements first, models by size.

    Runs that failed before they had a device have only the requested one: they count for the device that
    measured the cell, if only one did.
    """

    devices: dict[tuple[str, str, str], set[str]] = {}
    for night in nightly:
        if night["usable"]:
            devices.setdefault((night["kind"], night["cell"], night["machine"]), set()).add(night["device"])
    cells: dict[Cell, dict[str, list[NightRow]]] = {}
    for night in sorted(nightly, key=lambda night: (night["place"], night["began"])):
        kind, name, machine = night["kind"], night["cell"], night["machine"]
        measured = devices.get((kind, name, machine), set())
        device = next(iter(measured)) if len(measured) == 1 else night["device"]
        campaigns = cells.setdefault(Cell(kind, name, machine, str(device)), {})
        campaigns.setdefault(night["campaign"], []).append(night)

    def order(cell: Cell) -> tuple[object, ...]:
        ((first, *_), *_) = cells[cell].values()
        kind, size = (cell.kind != "measured", cell.kind == "scored"), by_size(first["model"])
        return kind, size, cell.machine, cell.name, cell.device

    return {cell: [*cells[cell].values()] for cell in sorted(cells, key=order)}


def _names(cells: Mapping[Cell, Sequence[Night]]) -> list[str]:
    """A unique name for each cell, with the machine and the cell's id where needed."""
    machines = {cell.machine for cell in cells}
    names = []
    for cell, ((night, *_), *_) in cells.items():
        row = night | {"device": cell.device, "speculation": {"synthetic": night["synthetic"]}}
        name = str(row_names.with_unique_names([cast(Repeat, row)])[0]["name"])
        names.append(f"{name} @ {cell.machine}" if len(machines) > 1 else name)
    count = Counter(names)
    return [
        name if count[name] == 1 else f"{name} ({'search, ' * (cell.kind == 'searched')}{cell.name})"
        for name, cell in zip(names, cells, strict=True)
    ]


def _series(name: str, cell: Cell, metric: Figure, ran: Sequence[Night]) -> Series | None:
    """The series of a figure; None where no night has a value."""
    values = [next((row[metric.name] for row in rows if row[metric.name] is not None), None) for rows in ran]
    if all(value is None for value in values):
        return None
    counted = "ok" if metric.statuses == ("ok",) else "usable"
    whys = [
        "" if value is not None else NO_FIGURE if any(row[counted] for row in rows) else _why(rows)
        for value, rows in zip(values, ran, strict=True)
    ]
    error = nights.error_of(metric)
    spreads = [row[error] for rows in ran for row in rows if row[error] is not None]
    identity = {key: ran[0][0][key] for key in ("cell", "model", "stack", "variant", "machine")}
    identity["device"] = cell.device
    return Series(name, identity, metric, ran, values, whys, statistics.median(spreads or [0.0]))


def _why(rows: Night) -> str:
    return "; ".join(dict.fromkeys(row["why"] for row in rows if row["why"]))


@dataclass(frozen=True)
class Step:
    """A step from one level of a series to the next.

    `gap`: nights between the levels failed or are missing. `changed`: differences of the surroundings, see
    surroundings.changed.
    """

    series: Series
    before: Level
    after: Level
    gap: bool
    changed: Sequence[dict[str, str]]

    @property
    def change(self) -> float:
        """Relative change: new / old - 1."""
        return self.after.value / self.before.value - 1

    @property
    def word(self) -> str:
        """The verdict: SLOWER, FASTER and so on."""
        metric = self.series.metric
        worse = metric.cost(self.after.value) > metric.cost(self.before.value)
        return metric.worse if worse else metric.improved

    @property
    def began(self) -> datetime:
        """The first night of the new level."""
        return self.series.began[self.after.first]

    @property
    def when(self) -> str:
        """`on 2026-11-03`, or across a gap `between 2026-11-01 and 2026-11-03`."""
        last, first = (self.series.days[night] for night in (self.before.last, self.after.first))
        return f"between {last} and {first}" if self.gap else f"on {first}"

    @property
    def row(self) -> dict[str, object]:
        """As `--json` has it. Times are UTC; `before` and `after` are medians over the nights of a level."""
        return {
            "name": self.series.name,
            **self.series.identity,
            "metric": self.series.metric.name,
            "unit": self.series.metric.unit,
            "verdict": self.word,
            "when": self.when,
            "first_utc": self.began.isoformat(),
            "last_before_utc": self.series.began[self.before.last].isoformat(),
            "gap": self.gap,
            "before": self.before.value,
            "after": self.after.value,
            "change": self.change,
            "changed": list(self.changed),
        }


def steps_of(history: History) -> list[Step]:
    """The steps of all series, latest first. Reads records of the nights around each; raises ResultsError."""
    steps = [step for series in history.series for step in _steps(series, history.root)]
    return sorted(steps, key=lambda step: step.began, reverse=True)


def _steps(series: Series, root: Path) -> Iterator[Step]:
    def around(places: Iterable[int]) -> list[Record]:
        """The usable records of the first nights with a figure; a failed repeat may lack its surroundings."""
        ran = sorted([night for night in places if series.values[night] is not None][:COMPARED_NIGHTS])
        rows = [row for night in ran for row in series.nights[night]]
        folders = [folder for row in rows for folder in row["usable_folders"]]
        return [records.read(root / folder / "record.json") for folder in folders]

    began = series.began
    for before, after in pairwise(series.levels):
        gap = after.first - before.last > 1 or began[after.first] - began[before.last] > series.long
        old = around(range(before.last, before.first - 1, -1))
        new = around(range(after.first, after.last + 1))
        yield Step(series, before, after, gap, changed(old, new))

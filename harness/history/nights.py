"""Records -> nights: each metric of each cell by campaign; a failed night has a reason instead of a value."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from harness.analysis.records.metrics import METRICS, Metric
from harness.analysis.records.verdicts import USABLE
from harness.analysis.rows import Repeat, Score, Search
from harness.dataset import names, order
from harness.dataset.by_campaign import campaigns
from harness.results import Stored

NO_FIGURE = "ok, but without this figure"


@dataclass(frozen=True)
class Night:
    """One metric of one cell in one campaign.

    `began`: start of the campaign, UTC. `value`: mean over its ok repeats; null: none, with the reason in
    `why`. `records`: the source folders.
    """

    began: datetime
    value: float | None
    why: str
    records: Sequence[Path]


@dataclass(frozen=True)
class Series:
    """One metric of one cell on one device, oldest night first; at least one night has a value.

    `name`: display name of the cell. `spread`: median relative standard error of a night's mean, from its
    repeats.
    """

    name: str
    identity: Mapping[str, str]
    metric: Metric
    nights: Sequence[Night]
    spread: float


@dataclass
class History:
    """`cells_without_data`: by name, the number of nights and why the last one failed. `campaigns`: number of
    campaigns over all cells."""

    series: list[Series] = field(default_factory=list)
    cells_without_data: dict[str, tuple[int, str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    campaigns: int = 0

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """When the first and the last night of all series began; needs at least one series."""
        nights = [night.began for each in self.series for night in each.nights]
        return min(nights), max(nights)


Key = tuple[str, str, str, str]  # kind of record, cell, machine, device
Ran = dict[tuple[str, datetime], list[tuple[Repeat | Search | Score, Path]]]
"""By place and start of the campaign: the rows of a cell, each with its record's folder."""


def history(stored: Iterable[Stored]) -> History:
    """The series of measured, searched and scored records, cells in order of first appearance.

    Raises ResultsError for a record that disappeared since it was found.
    """
    made = History()
    cells: dict[Key, Ran] = {}
    future: set[str] = set()
    for campaign in campaigns(_until_now(stored, future)):
        made.warnings += campaign.gathered.warnings
        ours: list[tuple[Repeat | Search | Score, Stored]] = [*campaign.searches, *campaign.scores]
        ours = [each for each in campaign.repeats if each[0]["kind"] == "measured"] + ours
        made.campaigns += bool(ours)
        for row, found in ours:
            key = (row["kind"], row["cell"], row["machine"], str(row["device"]))
            cells.setdefault(key, {}).setdefault((campaign.place, campaign.began), []).append(
                (row, found.folder)
            )
    made.warnings += [order.left_out(future)] if future else []
    cells = _with_a_device(cells)
    names = _names(cells)
    for key, ran in cells.items():
        every = [_series(names[key], key[3], metric, ran) for metric in METRICS]
        made.series += (usable := [each for each in every if each])
        if not usable:
            made.cells_without_data[names[key]] = (len(ran), _why([row for row, _ in list(ran.values())[-1]]))
    return made


def _until_now(stored: Iterable[Stored], future: set[str]) -> Iterator[Stored]:
    """The records without those of campaigns from the future, whose ids go to `future`."""
    for each in stored:
        campaign = each.record["campaign"]["id"]
        if order.from_the_future(campaign):
            future.add(campaign)
        else:
            yield each


def _with_a_device(cells: Mapping[Key, Ran]) -> dict[Key, Ran]:
    """Assign runs that failed before they had a device to the device that measured the cell, if only one did.

    Until then they have only the requested device.
    """
    measured: dict[tuple[str, str, str], list[str]] = {}
    for (kind, cell_id, machine, device), ran in cells.items():
        if any(row["status"] in USABLE for night in ran.values() for row, _ in night):
            measured.setdefault((kind, cell_id, machine), []).append(device)
    found: dict[Key, Ran] = {}
    for (kind, cell_id, machine, device), ran in cells.items():
        known = measured.get((kind, cell_id, machine), [])
        home = known[0] if len(known) == 1 and device not in known else device
        whole = found.setdefault((kind, cell_id, machine, home), {})
        for when, night in ran.items():
            whole.setdefault(when, []).extend(night)
    return {key: dict(sorted(ran.items())) for key, ran in found.items()}


def _names(cells: Mapping[Key, Ran]) -> dict[Key, str]:
    """A unique name for each cell, with the machine and the cell's id where needed."""
    first = {key: next(iter(ran.values()))[0][0] | {"device": key[3]} for key, ran in cells.items()}
    plain = {key: str(names.named([row])[0]["name"]) for key, row in first.items()}
    if len({machine for _, _, machine, _ in cells}) > 1:
        plain = {key: f"{name} @ {key[2]}" for key, name in plain.items()}
    count = Counter(plain.values())
    return {
        key: name if count[name] == 1 else f"{name} ({'search, ' * (key[0] == 'searched')}{key[1]})"
        for key, name in plain.items()
    }


def _series(name: str, device: str, metric: Metric, ran: Ran) -> Series | None:
    """The series of a metric; null where no night has a value."""
    nights, spreads = [], []
    # The speed of a functional stack means nothing; its memory and longest context do.
    statuses = ("ok",) if metric.family == "slower" else USABLE
    for (_, began), night in ran.items():
        rows = [row for row, _ in night if row["status"] in statuses]
        values = [value for row in rows if (value := metric.value(row)) is not None]
        value = statistics.fmean(values) if values else None
        why = "" if values else NO_FIGURE if rows else _why([row for row, _ in night])
        nights.append(Night(began, value, why, [folder for _, folder in night]))
        if len(values) > 1:
            logs = [math.log(each) for each in values]
            spreads.append(statistics.stdev(logs) / math.sqrt(len(logs)))
    if all(each.value is None for each in nights):
        return None
    (row, _), *_ = next(iter(ran.values()))
    of = {"cell": row["cell"], "model": row["model"], "stack": row["stack"], "variant": row["variant"]}
    of |= {"machine": row["machine"], "device": device}
    return Series(name, of, metric, nights, statistics.median(spreads or [0.0]))


def _why(rows: Sequence[Repeat | Search | Score]) -> str:
    """`oom: CUDA out of memory; timeout: ...`, without duplicates."""
    reasons = (": ".join([row["status"], *row["reasons"][:1]]) for row in rows)
    return "; ".join(dict.fromkeys(reasons))

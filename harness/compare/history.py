"""Results of many nights, and the steps in them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from harness import records
from harness.analysis.columns import Repeat
from harness.analysis.figures import COMPARED, Figure
from harness.analysis.steps import SHORTEST, Level, levels
from harness.analysis.verdicts import USABLE, status
from harness.base.text import SKIPPED, few, plural
from harness.compare.surroundings import changed
from harness.dataset import nights, table
from harness.dataset.rows import of_folder
from harness.dataset.study import by_size, study_of
from harness.records import Record, ResultsError
from harness.report import page
from harness.report.parts import lines, scatter
from harness.report.plots import COLOURS, Chart, Mark, figure_layout, plain_figure, upright_figure
from harness.report.text_table import Table

# Nights of all cells -> the series of each metric; a failed night has a reason instead of a value.


NO_FIGURE = "ok, but without this figure"


@dataclass(frozen=True)
class Series:
    """One metric of one cell on one device, oldest night first; at least one night has a value.

    `name`: display name of the cell. `began`: start of each campaign, UTC. `values`: the mean over the ok
    repeats of each night; null: none, with the reason in `whys`, else empty. `rows`: of each night in the
    table of nights. `spread`: median relative standard error of a night's mean, from its repeats.
    """

    name: str
    identity: Mapping[str, str]
    metric: Figure
    began: Sequence[datetime]
    values: Sequence[float | None]
    whys: Sequence[str]
    rows: Sequence[Sequence[int]]
    spread: float

    @cached_property
    def levels(self) -> list[Level]:
        return levels(self.values, self.spread)

    @cached_property
    def days(self) -> list[str]:
        """The UTC date of each night, with its time where another night of the series has the same date."""
        dates = [_date(at) for at in self.began]
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
def _date(at: datetime) -> str:
    return f"{at:%Y-%m-%d}"


@lru_cache(maxsize=1 << 16)
def _iso(at: datetime) -> str:
    return at.isoformat()


@dataclass
class History:
    """`cells_without_data`: by name, the number of nights and why the last one failed. `campaigns`: number of
    campaigns over all cells. `folders`: of the records of a row in the table of nights."""

    folders: Callable[[int], Sequence[Path]]
    series: list[Series] = field(default_factory=list)
    cells_without_data: dict[str, tuple[int, str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    campaigns: int = 0

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """When the first and the last night of all series began; needs at least one series."""
        return min(each.began[0] for each in self.series), max(each.began[-1] for each in self.series)


Columns = Mapping[str, Sequence[Any]]
Key = tuple[str, str, str, str]  # kind of record, cell, machine, device


def history(root: Path) -> History:
    """The series of the measured, searched and scored records of a folder, models by size.
    Raises ResultsError without records of measurements."""
    found = of_folder(root)
    warnings = [f"{SKIPPED}{damage}" for damage in found.damages]
    judged = [each for each in found.judged if each.facts["kind"] != "reported"]
    if not judged:
        raise ResultsError("; ".join([f"{root}: no records of measurements", *few(warnings)]))
    study = study_of(judged)
    nightly = nights.nights(judged, study, root)
    of = {name: [night[name] for night in nightly] for name in nights.columns()}
    made = History(
        lambda row: [root / folder for folder in nightly[row]["folders"]],
        warnings=[*warnings, *study.warnings],
    )
    late = {campaign for campaign in {*of["campaign"]} if table.from_the_future(campaign)}
    made.warnings += [table.left_out(late)] if late else []
    made.campaigns = len({*of["campaign"]} - late)
    cells = _cells([row for row, campaign in enumerate(of["campaign"]) if campaign not in late], of)
    names = _names(cells, of)
    known = [metric for metric in COMPARED if any(value is not None for value in of[metric.name])]
    starts = {text: datetime.fromisoformat(text) for text in {*of["began"]}}
    for key, of_cell in cells.items():
        of_campaign: dict[str, list[int]] = {}
        for row in sorted(of_cell, key=lambda row: (of["place"][row], starts[of["began"][row]])):
            of_campaign.setdefault(of["campaign"][row], []).append(row)
        ran = [*of_campaign.values()]
        began = [starts[of["began"][rows[0]]] for rows in ran]
        of_cell_and_metric = [_series(names[key], key[3], metric, ran, began, of) for metric in known]
        usable = [series for series in of_cell_and_metric if series]
        made.series += usable
        if not usable:
            made.cells_without_data[names[key]] = (len(ran), _why(ran[-1], of) or NO_FIGURE)
    return made


def _cells(rows: Sequence[int], of: Columns) -> dict[Key, list[int]]:
    """The nights of each cell: measurements first, models by size.

    Runs that failed before they had a device have only the requested one: they count for the device that
    measured the cell, if only one did.
    """
    by_device: dict[Key, list[int]] = {}
    for row in rows:
        key = (of["kind"][row], of["cell"][row], of["machine"][row], str(of["device"][row]))
        by_device.setdefault(key, []).append(row)
    measured: dict[tuple[str, str, str], list[str]] = {}
    for (kind, cell, machine, device), ran in by_device.items():
        if any(of["usable"][row] for row in ran):
            measured.setdefault((kind, cell, machine), []).append(device)

    def order(key: Key) -> tuple[object, ...]:
        kind, cell, machine, device = key
        return (
            kind != "measured",
            kind == "scored",
            by_size(of["model"][by_device[key][0]]),
            machine,
            cell,
            device,
        )

    cells: dict[Key, list[int]] = {}
    for kind, cell, machine, device in sorted(by_device, key=order):
        devices = measured.get((kind, cell, machine), [])
        home = devices[0] if len(devices) == 1 else device
        cells.setdefault((kind, cell, machine, home), []).extend(by_device[kind, cell, machine, device])
    return cells


def _names(cells: Mapping[Key, Sequence[int]], of: Columns) -> dict[Key, str]:
    """A unique name for each cell, with the machine and the cell's id where needed."""
    machines = {key[2] for key in cells}
    names = {}
    for key, (row, *_) in cells.items():
        whole = {name: of[name][row] for name in (*nights.NAMED, "workload")}
        whole |= {"device": key[3], "speculation": {"synthetic": of["synthetic"][row]}}
        name = str(table.with_unique_names([cast(Repeat, whole)])[0]["name"])
        names[key] = f"{name} @ {key[2]}" if len(machines) > 1 else name
    count = Counter(names.values())
    return {
        key: name if count[name] == 1 else f"{name} ({'search, ' * (key[0] == 'searched')}{key[1]})"
        for key, name in names.items()
    }


def _series(
    name: str,
    device: str,
    metric: Figure,
    ran: Sequence[Sequence[int]],
    began: Sequence[datetime],
    of: Columns,
) -> Series | None:
    """The series of a metric; null where no night has a value. `ran`: the rows of each night."""
    column, counts = of[metric.name], of["ok" if nights.counts(metric) == ("ok",) else "usable"]
    values = [next((column[row] for row in rows if column[row] is not None), None) for rows in ran]
    if all(value is None for value in values):
        return None
    whys = [
        "" if value is not None else NO_FIGURE if any(counts[row] for row in rows) else _why(rows, of)
        for value, rows in zip(values, ran, strict=True)
    ]
    errors = of[nights.error_of(metric)]
    spreads = [error for rows in ran for row in rows if (error := errors[row]) is not None]
    of_cell = {key: of[key][ran[0][0]] for key in ("cell", "model", "stack", "variant", "machine")}
    identity = {**of_cell, "device": device}
    return Series(name, identity, metric, began, values, whys, ran, statistics.median(spreads or [0.0]))


def _why(rows: Sequence[int], of: Columns) -> str:
    return "; ".join(dict.fromkeys(of["why"][row] for row in rows if of["why"][row]))


# Nights -> steps: when a figure moved to another level and stayed there, and what else changed then.


COMPARED_NIGHTS = 2  # nights on either side of a step whose surroundings are compared: its date is +- 1 night
LONG = 2.0  # times the usual interval between nights: a longer one is a gap
CHANGES_SHOWN = 3


@dataclass(frozen=True)
class Step:
    """A step from one level of a series to the next.

    `last`: the place of the last night of the old level, `first`: of the first of the new one. `gap`: nights
    between them failed or are missing. `changed`: differences of the surroundings, see surroundings.changed.
    """

    series: Series
    before: Level
    after: Level
    last: int
    first: int
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
        return self.series.began[self.first]

    @property
    def when(self) -> str:
        """`on 2026-11-03`, or across a gap `between 2026-11-01 and 2026-11-03`."""
        days = self.series.days
        return f"between {days[self.last]} and {days[self.first]}" if self.gap else f"on {days[self.first]}"


def found_in(history: History) -> list[Step]:
    """The steps of all series, latest first. Reads records of the nights around each; raises ResultsError."""
    steps = [step for series in history.series for step in _steps(series, history.folders)]
    return sorted(steps, key=lambda step: step.began, reverse=True)


def step_row(step: Step) -> dict[str, object]:
    """A step as a flat row. Times are UTC; `before` and `after` are medians over the nights of a level."""
    return {
        "name": step.series.name,
        **step.series.identity,
        "metric": step.series.metric.name,
        "unit": step.series.metric.unit,
        "verdict": step.word,
        "when": step.when,
        "first_utc": step.began.isoformat(),
        "last_before_utc": step.series.began[step.last].isoformat(),
        "gap": step.gap,
        "before": step.before.value,
        "after": step.after.value,
        "change": step.change,
        "changed": list(step.changed),
    }


def shown_steps(metric: Figure, value: float) -> str:
    """A figure in its unit; MB are 1e6 bytes."""
    if metric.unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,.0f} {metric.unit}" if value >= 1e4 else f"{value:,.4g} {metric.unit}"


def step_changes(step: Step, most: int = CHANGES_SHOWN) -> str:
    """What changed, as text; at most the first `most` changes."""
    parts = [f"{each['what']}: {each['before']} -> {each['after']}" for each in step.changed]
    more = f"; and {len(parts) - most} more" if len(parts) > most else ""
    return "; ".join(parts[:most]) + more or "nothing recorded"


def _steps(series: Series, folders: Callable[[int], Sequence[Path]]) -> Iterator[Step]:
    def around(places: Iterable[int]) -> list[Record]:
        """The usable records of the first nights with a figure; a failed repeat may lack its surroundings."""
        ran = sorted([place for place in places if series.values[place] is not None][:COMPARED_NIGHTS])
        of_nights = [folder for place in ran for row in series.rows[place] for folder in folders(row)]
        every = [records.read(folder / "record.json") for folder in of_nights]
        return [record for record in every if status(record)[0] in USABLE]

    began = series.began
    for before, after in pairwise(series.levels):
        last, first = before.last, after.first
        gap = first - last > 1 or began[first] - began[last] > series.long
        old, new = around(range(last, before.first - 1, -1)), around(range(first, after.last + 1))
        yield Step(series, before, after, last, first, gap, changed(old, new))


# A history as one offline HTML page: the steps, then a plot of every metric of every cell.


FEWEST = 2 * SHORTEST  # nights with a figure that a step needs
NO_STEPS = "No figure of any cell moved to another level."
TOO_FEW = f"There are too few nights: a step needs {FEWEST}, three before and three after."
HEADINGS = {
    "cell": "model, stack and variant; the device where it is no CPU",
    "figure": "the metric that changed level",
    "verdict": "better or worse",
    "since": "the first night at the new level; across a gap, the nights around it",
    "from": "median over the nights of the old level",
    "to": "median over the nights of the new level",
    "change": "relative change",
    "what changed": "differences in versions, options, clocks and the machine, over two nights before and"
    " after",
}
MEANINGS = (
    "A night is a campaign. Its figure is the mean over its ok repeats. A night without a figure is a gap,"
    " not a zero: a mark at the bottom of the plot gives the reason.",
    "A step is a move to another level for at least three nights, found as piecewise constants by penalised"
    " likelihood on logarithms, with the correlation of neighbouring nights. One or two outlying nights are"
    " not a step. Up to 5% of histories of 60 nights without a change show a step (docs/validation.md).",
    "The changes listed at a step happened at the same time. They need not be its cause.",
)
LEVEL, FAILED = COLOURS[1], "#8a4b00"
NIGHT = "%{x|%Y-%m-%d %H:%M}"
MOST_DRAWN = 100  # points of a figure, which has room for so many; of more nights, each is the median of some
MARGIN = 0.1  # above and below, at least this share of the figure: otherwise noise fills the plot


def history_page(title: str, history: History, steps: Sequence[Step], latest: Sequence[str] = ()) -> str:
    """The whole file as text; needs at least one series. `latest`: how the last night differs."""
    first, last = history.ends
    cells = {series.name: "" for series in history.series} | dict.fromkeys(history.cells_without_data, "")
    lead = (
        f"{counted(len(steps), 'step')} in {counted(len(cells), 'cell')}, over"
        f" {counted(history.campaigns, 'campaign')} from {first:%Y-%m-%d} to {last:%Y-%m-%d}."
    )
    drawn: dict[str, list[Chart]] = {}
    for series in history.series:
        drawn.setdefault(str(series.identity["model"]), []).append(figure(series, steps))
    missing = [
        f"{name}: no figure in {counted(nights, 'night')}; the last: {why}"
        for name, (nights, why) in history.cells_without_data.items()
    ]
    return page.filled(
        "history.html",
        title=title,
        lead=lead,
        warnings=[*latest, *missing, *few(history.warnings)],
        models=drawn,
        steps=_table(steps),
        no_steps=NO_STEPS if enough(history) else f"{NO_STEPS} {TOO_FEW}",
        meanings=MEANINGS,
    )


def counted(number: int, what: str) -> str:
    """`no steps`, `1 step`, `3 steps`."""
    return f"{plural(number, what) if number else f'no {what}s'}"


def figure(series: Series, steps: Sequence[Step]) -> Chart:
    """Nights as points, levels as lines, a dotted line at each step, failed nights at the bottom."""
    metric, levels = series.metric, series.levels
    unit, per = ("MB", 1e6) if metric.unit == "bytes" else (metric.unit, 1.0)
    began = series.began
    together = math.ceil(len(began) / MOST_DRAWN)
    parts = [range(at, min(at + together, len(began))) for at in range(0, len(began), together)]
    points = [_middle(series, part, per) for part in parts]
    known = [value for value in points if value is not None]
    low, high = min(known), max(known)
    headroom = max(MARGIN * (low + high) / 2, (high - low) * MARGIN)
    drawn: list[tuple[str | None, float | None]] = []
    for part, point in zip(parts, points, strict=True):
        if part[0] and began[part[0]] - began[part[0] - 1] > series.long:
            drawn.append((None, None))  # break the line across a gap
        drawn.append((_iso(began[part[len(part) // 2]]), point))
    hover = f"%{{y:,.5~g}} {plain_figure(unit)}<extra></extra>"
    nights = lines(
        "nights" if together == 1 else f"medians of {together} nights",
        [date for date, _ in drawn],
        [value for _, value in drawn],
        Mark(COLOURS[0], "circle"),
        f"{NIGHT}: {hover}",
    )
    nights["marker"]["size"], nights["line"] = 6, {"color": COLOURS[5], "width": 1}
    of_levels = lines(
        "levels",
        [at for level in levels for at in (_iso(began[level.first]), _iso(began[level.last]), None)],
        [at for level in levels for at in (level.value / per, level.value / per, None)],
        Mark(LEVEL, ""),
        f"level {hover}",
        dash="solid",
    )
    of_levels["line"]["width"] = 2.5
    failed = [(_iso(at), plain_figure(why)) for at, why in zip(began, series.whys, strict=True) if why]
    without = scatter(
        "no figure",
        [date for date, _ in failed],
        [low - headroom * 0.9] * len(failed),
        Mark(FAILED, "x"),
        f"{NIGHT}: %{{text}}<extra></extra>",
        text=[why for _, why in failed],
    )
    own = [step for step in steps if step.series is series]
    figure_name = metric.name.removesuffix(f"_{metric.unit}")
    summary = "; ".join(f"{step.word} ({step.change:+.1%}) {step.when}" for step in reversed(own))
    return Chart(
        f"{series.name}-{metric.name}",
        f"{series.name}: {metric.name}",
        f"{figure_name} of {series.name} in {unit}, night by night, and its levels. "
        + (f"{summary[:1].upper()}{summary[1:]}." if summary else "No step."),
        [nights, of_levels, *[without][: len(failed)]],
        figure_layout(
            "night (UTC)",
            f"{figure_name}, {unit}",
            xaxis={"type": "date"},
            yaxis={"range": [low - headroom, high + headroom]},
            shapes=[upright_figure(step.began.isoformat(), "dot") for step in own],
        ),
        ["night", unit, "reason if missing"],
        [
            [
                series.days[part[0]] + f" to {series.days[part[-1]]}" * (len(part) > 1),
                "-" if point is None else f"{point:,.5g}",
                "; ".join(dict.fromkeys(why for at in part if (why := series.whys[at]))) or "-",
            ]
            for part, point in zip(parts, points, strict=True)
        ],
        height=300,
        across=2,
    )


def _middle(series: Series, part: Sequence[int], per: float) -> float | None:
    """The median of some nights; null where none has a value."""
    values = [value / per for at in part if (value := series.values[at]) is not None]
    return statistics.median(values) if values else None


def enough(history: History) -> bool:
    """Whether any series has enough nights for a step."""
    return any(sum(value is not None for value in each.values) >= FEWEST for each in history.series)


def _table(steps: Sequence[Step]) -> Table:
    lines = [
        [
            *(step.series.name, step.series.metric.name, step.word, step.when.removeprefix("on ")),
            *(shown_steps(step.series.metric, level.value) for level in (step.before, step.after)),
            *(f"{step.change:+.1%}", step_changes(step, len(step.changed))),
        ]
        for step in steps
    ]
    numeric = [heading in ("from", "to", "change") for heading in HEADINGS]
    marked = ["red" * (step.word == step.series.metric.worse) for step in steps]
    return Table([*HEADINGS], lines, numeric, marked, "Steps", [*HEADINGS.values()])

"""Results of many nights, and the steps in them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness import records
from harness.analysis.columns import Repeat, Score, Search
from harness.analysis.metrics import METRICS, Metric
from harness.analysis.verdicts import USABLE, status
from harness.base.text import plural
from harness.compare.surroundings import changed
from harness.dataset import table
from harness.dataset.study import campaigns
from harness.records import Record, Stored
from harness.report import page
from harness.report.plots import COLOURS, Figure, Plotly, figure_layout, plain_figure, upright_figure
from harness.report.text_table import Table

# Detect steps in a series of nights: a figure moves to another level and stays there. Pure.
#
# Levels are piecewise constants of logarithms, plus noise in which neighbouring nights correlate
# (autoregressive of order one). Levels and correlation are found together, as those of the highest
# penalised likelihood: each alone would take a step for correlation, or slow noise for steps. Outliers are
# first replaced by the median of their neighbours, so that one or two bad nights are not a level.


Floats = NDArray[np.float64]

SHORTEST = 3  # nights of a level: one or two bad nights are not a step
NEAR = 5  # nights whose median identifies an outlier
ALONE = 3.0  # standard deviations from that median that make an outlier
CORRELATIONS = np.arange(0.0, 0.95, 0.1)
# Least improvement by a further level, in variances; what correlation adds, and each factor of e in nights
# beyond 60. docs/validation.md has the rates.
PENALTY, PENALTY_OF_CORRELATION, PENALTY_OF_LENGTH = 11.0, 7.0, 2.5
# Few nights determine the correlation badly: it is drawn to this one, with this weight.
USUAL_CORRELATION, ITS_WEIGHT = 0.6, 8.0
# Few nights determine the noise badly (6 nights: to a factor of two), so it is raised by this / nights.
FEW_NIGHTS = 5.0
FINEST = 0.002  # smallest relative noise assumed from night to night: memory is counted in pages
NORMAL_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class Level:
    """Nights `first` to `last`, inclusive, with the median `value`. Both ends have a value."""

    first: int
    last: int
    value: float


def levels(values: Sequence[float | None], spread: float = 0.0) -> list[Level]:
    """The levels of successive nights; empty where no night has a value.

    `values`: positive; null: a gap, part of no level. `spread`: relative standard error of a night's value
    from its own repeats, a lower bound for the noise between nights. A step is the first night of a level.
    """
    nights = [index for index, value in enumerate(values) if value is not None]
    if not nights:
        return []
    logs = np.log([value for value in values if value is not None])
    ends = [0, *_ends(logs, spread)]
    return [
        Level(nights[first], nights[end - 1], math.exp(float(np.median(logs[first:end]))))
        for first, end in pairwise(ends)
    ]


def noise(logs: Floats) -> float:
    """Standard deviation from night to night without outliers and steps, from the median of absolute
    differences. Needs at least two values."""
    return NORMAL_MAD * float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)


def _ends(logs: Floats, spread: float) -> list[int]:
    """The index after each level; the last is the number of nights."""
    count = len(logs)
    if count < 2 * SHORTEST:
        return [count]
    deviation = max(noise(logs), spread, FINEST) * (1 + FEW_NIGHTS / count)
    drawn_in = _drawn_in(logs, ALONE * deviation)
    innovation = 1 + CORRELATIONS  # its variance over that which differences of neighbours give
    longer = max(0.0, math.log(count / 60))
    penalty = PENALTY + PENALTY_OF_CORRELATION * CORRELATIONS + PENALTY_OF_LENGTH * longer
    costs, last = _partitions((drawn_in - drawn_in.mean()) / deviation, penalty * innovation)
    scores = costs / innovation + count * np.log1p(CORRELATIONS) - np.log(1 - CORRELATIONS**2)
    scores += ITS_WEIGHT * (CORRELATIONS - USUAL_CORRELATION) ** 2
    best, ends = int(scores.argmin()), [count]
    while start := int(last[best, ends[0]]):
        ends.insert(0, start)
    return ends


def _partitions(values: Floats, penalty: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The least cost of all nights by correlation, and the best start of a level that ends before each night.

    Optimal partitioning (Jackson 2005, doi:10.1109/LSP.2001.838216). A level's cost is that of its mean:
    squared innovations, the first night of a level being one of the stationary process.
    """
    count, rho = len(values), CORRELATIONS[:, None]
    innovations = np.pad(values[1:] - rho * values[:-1], ((0, 0), (2, 0)))
    sums, squares = np.cumsum(innovations, axis=1), np.cumsum(innovations**2, axis=1)
    costs = np.full((len(rho), count + 1), np.inf)
    costs[:, 0] = -penalty
    last = np.zeros(costs.shape, dtype=np.int64)
    for end in range(SHORTEST, count + 1):
        starts = np.arange(end - SHORTEST + 1)
        first = values[starts]
        # The cost of a level is quadratic in its mean: weight * mean^2 - 2 * product * mean + square.
        weight = (1 - rho**2) + (end - starts - 1) * (1 - rho) ** 2
        product = (1 - rho**2) * first + (1 - rho) * (sums[:, end : end + 1] - sums[:, starts + 1])
        square = (1 - rho**2) * first**2 + squares[:, end : end + 1] - squares[:, starts + 1]
        through = costs[:, starts] + square - product**2 / weight + penalty[:, None]
        last[:, end] = through.argmin(axis=1)
        costs[:, end] = through.min(axis=1)
    return costs[:, count], last


def _drawn_in(logs: Floats, far: float) -> Floats:
    """Replace each night that is `far` from the median of the NEAR nights around it by that median (Hampel
    filter). A level of SHORTEST nights is a majority of NEAR, so it stays."""
    middles = np.median(np.lib.stride_tricks.sliding_window_view(logs, NEAR), axis=1)
    around = np.pad(middles, NEAR // 2, mode="edge")
    return np.where(np.abs(logs - around) > far, around, logs)


# Records -> nights: each metric of each cell by campaign; a failed night has a reason instead of a value.


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
        made.warnings += campaign.study.warnings
        ours: list[tuple[Repeat | Search | Score, Stored]] = [*campaign.searches, *campaign.scores]
        ours = [each for each in campaign.repeats if each[0]["kind"] == "measured"] + ours
        made.campaigns += bool(ours)
        for row, found in ours:
            key = (row["kind"], row["cell"], row["machine"], str(row["device"]))
            cells.setdefault(key, {}).setdefault((campaign.place, campaign.began), []).append(
                (row, found.folder)
            )
    made.warnings += [table.left_out(future)] if future else []
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
        if table.from_the_future(campaign):
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
    plain = {key: str(table.with_unique_names([row])[0]["name"]) for key, row in first.items()}
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


# Nights -> steps: when a figure moved to another level and stayed there, and what else changed then.


COMPARED_NIGHTS = 2  # nights on either side of a step whose surroundings are compared: its date is +- 1 night
LONG = 2.0  # times the usual interval between nights: a longer one is a gap
CHANGES_SHOWN = 3


@dataclass(frozen=True)
class Step:
    """A step from one level of a series to the next.

    `last`: last night of the old level. `first`: first night of the new one. `gap`: nights between them
    failed or are missing. `changed`: differences of the surroundings, see surroundings.changed.
    """

    series: Series
    before: Level
    after: Level
    last: Night
    first: Night
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
    def when(self) -> str:
        """`on 2026-11-03`, or across a gap `between 2026-11-01 and 2026-11-03`."""
        first = day(self.first.began, self.series)
        return f"between {day(self.last.began, self.series)} and {first}" if self.gap else f"on {first}"


def found_in(history: History) -> list[Step]:
    """The steps of all series, latest first. Reads records of the nights around each; raises ResultsError."""
    steps = [step for series in history.series for step in _steps(series)]
    return sorted(steps, key=lambda step: step.first.began, reverse=True)


def levels_of(series: Series) -> list[Level]:
    return levels([night.value for night in series.nights], series.spread)


def step_row(step: Step) -> dict[str, object]:
    """A step as a flat row. Times are UTC; `before` and `after` are medians over the nights of a level."""
    return {
        "name": step.series.name,
        **step.series.identity,
        "metric": step.series.metric.name,
        "unit": step.series.metric.unit,
        "verdict": step.word,
        "when": step.when,
        "first_utc": step.first.began.isoformat(),
        "last_before_utc": step.last.began.isoformat(),
        "gap": step.gap,
        "before": step.before.value,
        "after": step.after.value,
        "change": step.change,
        "changed": list(step.changed),
    }


def day(when: datetime, series: Series) -> str:
    """The UTC date of a night, with its time where another night of the series has the same date."""
    days = [night.began.date() for night in series.nights]
    return f"{when:%Y-%m-%d}" if days.count(when.date()) < 2 else f"{when:%Y-%m-%d %H:%M}"


def long(series: Series) -> timedelta:
    """The longest usual interval between two nights of the series; a longer one is a gap."""
    intervals = (later.began - earlier.began for earlier, later in pairwise(series.nights))
    return LONG * statistics.median_high([*intervals] or [timedelta()])


def shown_steps(metric: Metric, value: float) -> str:
    """A figure in its unit; MB are 1e6 bytes."""
    if metric.unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,.0f} {metric.unit}" if value >= 1e4 else f"{value:,.4g} {metric.unit}"


def step_changes(step: Step, most: int = CHANGES_SHOWN) -> str:
    """What changed, as text; at most the first `most` changes."""
    parts = [f"{each['what']}: {each['before']} -> {each['after']}" for each in step.changed]
    more = f"; and {len(parts) - most} more" if len(parts) > most else ""
    return "; ".join(parts[:most]) + more or "nothing recorded"


def _steps(series: Series) -> list[Step]:
    nights, found = series.nights, []
    for before, after in pairwise(levels_of(series)):
        last, first = nights[before.last], nights[after.first]
        gap = after.first - before.last > 1 or first.began - last.began > long(series)
        old = [night for night in nights[before.first : before.last + 1] if night.value is not None]
        new = [night for night in nights[after.first : after.last + 1] if night.value is not None]
        differs = changed(_records(old[-COMPARED_NIGHTS:]), _records(new[:COMPARED_NIGHTS]))
        found.append(Step(series, before, after, last, first, gap, differs))
    return found


def _records(nights: Sequence[Night]) -> list[Record]:
    """The usable records of the nights; a failed repeat may lack its surroundings."""
    found = [records.read(folder / "record.json") for night in nights for folder in night.records]
    return [record for record in found if status(record)[0] in USABLE]


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
MARGIN = 0.1  # above and below, at least this share of the figure: otherwise noise fills the plot


def history_page(title: str, history: History, steps: Sequence[Step]) -> str:
    """The whole file as text; needs at least one series."""
    first, last = history.ends
    cells = {series.name: "" for series in history.series} | dict.fromkeys(history.cells_without_data, "")
    lead = (
        f"{counted(len(steps), 'step')} in {counted(len(cells), 'cell')}, over"
        f" {counted(history.campaigns, 'campaign')} from {first:%Y-%m-%d} to {last:%Y-%m-%d}."
    )
    drawn: dict[str, list[Figure]] = {}
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
        warnings=[*missing, *history.warnings],
        models=drawn,
        steps=_table(steps),
        no_steps=NO_STEPS if enough(history) else f"{NO_STEPS} {TOO_FEW}",
        meanings=MEANINGS,
    )


def counted(number: int, what: str) -> str:
    """`no steps`, `1 step`, `3 steps`."""
    return f"{plural(number, what) if number else f'no {what}s'}"


def figure(series: Series, steps: Sequence[Step]) -> Figure:
    """Nights as points, levels as lines, a dotted line at each step, failed nights at the bottom."""
    metric, nights, levels = series.metric, series.nights, levels_of(series)
    unit, per = ("MB", 1e6) if metric.unit == "bytes" else (metric.unit, 1.0)
    values = [night.value / per for night in nights if night.value is not None]
    low, high = min(values), max(values)
    headroom = max(MARGIN * (low + high) / 2, (high - low) * MARGIN)
    dates = [night.began.isoformat() for night in nights]
    drawn: list[tuple[str | None, float | None]] = []
    most = long(series)
    for place, night in enumerate(nights):
        if place and night.began - nights[place - 1].began > most:
            drawn.append((None, None))  # break the line across a gap
        drawn.append((dates[place], None if night.value is None else night.value / per))
    data: list[Plotly] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "nights",
            "x": [date for date, _ in drawn],
            "y": [value for _, value in drawn],
            "line": {"color": COLOURS[5], "width": 1},
            "marker": {"color": COLOURS[0], "size": 6},
            "hovertemplate": f"%{{x|%Y-%m-%d %H:%M}}: %{{y:,.5~g}} {plain_figure(unit)}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "levels",
            "x": [at for level in levels for at in (dates[level.first], dates[level.last], None)],
            "y": [at for level in levels for at in (level.value / per, level.value / per, None)],
            "line": {"color": LEVEL, "width": 2.5},
            "hovertemplate": f"level %{{y:,.5~g}} {plain_figure(unit)}<extra></extra>",
        },
    ]
    failed = [(date, night.why) for date, night in zip(dates, nights, strict=True) if night.value is None]
    if failed:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "no figure",
                "x": [date for date, _ in failed],
                "y": [low - headroom * 0.9] * len(failed),
                "text": [plain_figure(why) for _, why in failed],
                "marker": {"color": FAILED, "symbol": "x", "size": 8},
                "hovertemplate": "%{x|%Y-%m-%d %H:%M}: %{text}<extra></extra>",
            }
        )
    own = [step for step in steps if step.series is series]
    figure_name = metric.name.removesuffix(f"_{metric.unit}")
    summary = "; ".join(f"{step.word} ({step.change:+.1%}) {step.when}" for step in reversed(own))
    return Figure(
        f"{series.name}-{metric.name}",
        f"{series.name}: {metric.name}",
        f"{figure_name} of {series.name} in {unit}, night by night, and its levels. "
        + (f"{summary[:1].upper()}{summary[1:]}." if summary else "No step."),
        data,
        figure_layout(
            "night (UTC)",
            f"{figure_name}, {unit}",
            xaxis={"type": "date"},
            yaxis={"range": [low - headroom, high + headroom]},
            shapes=[upright_figure(step.first.began.isoformat(), "dot") for step in own],
        ),
        ["night", unit, "reason if missing"],
        [
            [day(n.began, series), "-" if n.value is None else f"{n.value / per:,.5g}", n.why or "-"]
            for n in nights
        ],
        height=300,
        across=2,
    )


def enough(history: History) -> bool:
    """Whether any series has enough nights for a step."""
    return any(sum(night.value is not None for night in each.nights) >= FEWEST for each in history.series)


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
    marked = [step.word == step.series.metric.worse for step in steps]
    return Table([*HEADINGS], lines, numeric, marked, "Steps", [*HEADINGS.values()])

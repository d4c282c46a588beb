"""A history as one offline HTML page: the steps, then a plot of every metric of every cell."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.series.steps import SHORTEST
from harness.history.nights import History, Series
from harness.history.steps import Step, changes, day, levels_of, long, shown
from harness.report import markup
from harness.report.drawing import COLOURS, Figure, Trace, layout, plain, upright
from harness.report.table import Table
from harness.system.wording import plural

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
    " not a step. Up to 5% of histories of 60 nights without a change show a step (docs/history.md).",
    "The changes listed at a step happened at the same time. They need not be its cause.",
)
LEVEL, FAILED = COLOURS[1], "#8a4b00"
MARGIN = 0.1  # above and below, at least this share of the figure: otherwise noise fills the plot


def page(title: str, history: History, steps: Sequence[Step]) -> str:
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
    return markup.filled(
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
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "nights",
            "x": [date for date, _ in drawn],
            "y": [value for _, value in drawn],
            "line": {"color": COLOURS[5], "width": 1},
            "marker": {"color": COLOURS[0], "size": 6},
            "hovertemplate": f"%{{x|%Y-%m-%d %H:%M}}: %{{y:,.5~g}} {plain(unit)}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "levels",
            "x": [at for level in levels for at in (dates[level.first], dates[level.last], None)],
            "y": [at for level in levels for at in (level.value / per, level.value / per, None)],
            "line": {"color": LEVEL, "width": 2.5},
            "hovertemplate": f"level %{{y:,.5~g}} {plain(unit)}<extra></extra>",
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
                "text": [plain(why) for _, why in failed],
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
        layout(
            "night (UTC)",
            f"{figure_name}, {unit}",
            xaxis={"type": "date"},
            yaxis={"range": [low - headroom, high + headroom]},
            shapes=[upright(step.first.began.isoformat(), "dot") for step in own],
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
            *(shown(step.series.metric, level.value) for level in (step.before, step.after)),
            *(f"{step.change:+.1%}", changes(step, len(step.changed))),
        ]
        for step in steps
    ]
    numeric = [heading in ("from", "to", "change") for heading in HEADINGS]
    marked = [step.word == step.series.metric.worse for step in steps]
    return Table([*HEADINGS], lines, numeric, marked, "Steps", [*HEADINGS.values()])

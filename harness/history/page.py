"""A history as one offline HTML page: the steps, then a plot of every metric of every cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from harness.analysis.records.metrics import Metric
from harness.analysis.series.steps import SHORTEST
from harness.history.nights import History, Series
from harness.history.steps import Step, changes, day, levels_of, long, shown
from harness.report import document, markup
from harness.report.drawing import COLOURS, Figure, layout, plain, upright
from harness.system.wording import plural

FEWEST = 2 * SHORTEST  # nights with a figure that a step needs

HEADINGS = (
    ("cell", False, "model, stack and variant; the device where it is no CPU"),
    ("figure", False, "the metric that changed level"),
    ("verdict", False, "better or worse"),
    ("since", False, "the first night at the new level; across a gap, the nights around it"),
    ("from", True, "median over the nights of the old level"),
    ("to", True, "median over the nights of the new level"),
    ("change", True, "relative change"),
    (
        "what changed",
        False,
        "differences in versions, options, clocks and the machine, over two nights before and after",
    ),
)
MEANINGS = (
    "A night is a campaign. Its figure is the mean over its ok repeats. A night without a figure is a gap,"
    " not a zero: a mark at the bottom of the plot gives the reason.",
    "A step is a move to another level for at least three nights, found as piecewise constants by penalised"
    " least squares on logarithms. One or two outlying nights are not a step. About 1% of 60-night histories"
    " without a change show a step. A step of four times the noise is dated to within one night in 97% of"
    " cases.",
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
    models = dict.fromkeys(str(series.identity["model"]) for series in history.series)
    body = [
        f"<header><h1>{escape(title)}</h1><p class=lead>{escape(lead)}</p>",
        *_warnings(history),
        "<nav aria-label=Contents>",
        *(f'<a href="#m{place}">{escape(model)}</a> ' for place, model in enumerate(models)),
        '<a href="#methods">Methods</a></nav></header><main>',
        *_table(steps, enough(history)),
    ]
    for place, model in enumerate(models):
        drawn = [figure(s, steps) for s in history.series if s.identity["model"] == model]
        body += [f'<section id="m{place}"><h2>{escape(model)}</h2><div class=figures>']
        body += [*(markup.figure(each, f"m{place}") for each in drawn), "</div></section>"]
    body += ['<section id="methods"><h2>Methods</h2>', *(f"<p>{escape(text)}</p>" for text in MEANINGS)]
    return document.whole(title, "".join([*body, "</section></main>"]))


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
    data: list[dict[str, Any]] = [
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
    summary = "; ".join(f"{step.word} ({step.change:+.1%}) {step.when}" for step in reversed(own))
    return Figure(
        f"{series.name}-{metric.name}",
        f"{series.name}: {metric.name}",
        f"{metric.name} of {series.name} in {unit}, night by night, and its levels. "
        + (f"{summary[:1].upper()}{summary[1:]}." if summary else "No step."),
        data,
        layout(
            "night (UTC)",
            f"{metric.name.removesuffix(f'_{metric.unit}')}, {unit}",
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


def _warnings(history: History) -> Iterator[str]:
    missing = [
        f"{name}: no figure in {counted(nights, 'night')}; the last: {why}"
        for name, (nights, why) in history.cells_without_data.items()
    ]
    if missing or history.warnings:
        yield "<h2>Warnings</h2>" + markup.listed(map(escape, [*missing, *history.warnings]))


def enough(history: History) -> bool:
    """Whether any series has enough nights for a step."""
    return any(sum(night.value is not None for night in each.nights) >= FEWEST for each in history.series)


def _table(steps: Sequence[Step], enough_nights: bool) -> Iterator[str]:
    yield '<section id="steps"><h2>Steps</h2>'
    if not steps:
        few = (
            ""
            if enough_nights
            else f" There are too few nights: a step needs {FEWEST}, three before and three after."
        )
        yield f"<p>No figure of any cell moved to another level.{few}</p></section>"
        return
    yield f"{markup.sortable('Steps', HEADINGS, ''.join(map(_line, steps)))}</section>"


def _line(step: Step) -> str:
    metric: Metric = step.series.metric
    kind = " class=bad" if step.word == metric.worse else ""
    texts = [metric.name, step.word, step.when.removeprefix("on ")]
    numbers = [shown(metric, step.before.value), shown(metric, step.after.value), f"{step.change:+.1%}"]
    cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
    cells += "".join(f"<td class=num>{escape(text)}</td>" for text in numbers)
    # Only the column of sentences may wrap.
    cells += f'<td style="white-space:normal;min-width:18rem">{escape(changes(step, len(step.changed)))}</td>'
    return f'<tr{kind}><th scope="row">{escape(step.series.name)}</th>{cells}</tr>'

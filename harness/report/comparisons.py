"""Cells side by side: bars, pairs, tuning."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict

from harness.analysis.columns import Ends, ShownCell
from harness.analysis.figures import Figure
from harness.analysis.racing import DEFAULTS, FIRST_LOOK, Result, Setting, options_label
from harness.base.text import plural
from harness.dataset.study import Study, bounds, failure, finite, labels
from harness.report import parts
from harness.report.plots import (
    FAINT,
    INK,
    NO_COLOUR,
    Chart,
    Mark,
    Named,
    Plotly,
    figure_layout,
    named_axis,
    plain_figure,
    words,
)
from harness.report.tables import B, W, hidden, interval, of_baseline
from harness.report.text_table import NONE, Table, formatted
from harness.stacks.header import Header, Options, Value

# Figures of B and W: one bar per variant with its confidence interval and its limits.


BAR_HEIGHT = 24
CEILINGS = ("limit by the data sheet", "limit measured here")
SIGNS = {  # beside the bars: symbol, its size, the width of its line, and its sign in words
    CEILINGS[0]: ("line-ns-open", 16, 2.5, "|"),
    CEILINGS[1]: ("x-thin-open", 9, 1.5, "x"),
    "baseline": ("diamond-open", 9, 1.5, "◇"),
}


def bars(model: str, named: Named, marks: Mapping[str, Mark]) -> list[Chart]:
    """B and W of each variant with the confidence interval and the limits."""
    drawn = (
        _bars(model, named, marks, "B", _B_bar, "B: TPOT at zero context, ms"),
        _bars(model, named, marks, "W", _W_bar, "W: tokens of context per further ms of TPOT"),
    )
    return [each for each in drawn if each]


@dataclass(frozen=True)
class Bar:
    """`text`: in place of a figure that is null. `limits`: as CEILINGS."""

    value: float | None
    interval: Ends | None
    text: str
    limits: tuple[float | None, float | None]
    baseline: float | None


def _B_bar(row: ShownCell) -> Bar:
    def limit(theory: float | None, ratio: float | None) -> float | None:
        if theory is not None:
            return theory
        return B_ms * ratio if B_ms is not None and ratio is not None else None

    B_ms = finite(row["B_ms"])
    limits = limit(row["B_theory_ms"], row["B_ratio"]), limit(None, row["B_measured_ratio"])
    return Bar(B_ms, row["B_ci95_ms"], B(row), limits, of_baseline(row, lambda other: other["B_ms"]))


def _W_bar(row: ShownCell) -> Bar:
    def limit(theory: float | None, ratio: float | None) -> float | None:
        return theory if theory is not None else known / ratio if known is not None and ratio else None

    known = finite(row["W_tokens_per_ms"])
    limits = limit(row["W_theory_tokens_per_ms"], row["W_ratio"]), limit(None, row["W_measured_ratio"])
    baseline = of_baseline(row, lambda other: other["W_tokens_per_ms"])
    return Bar(None if hidden(row) else known, row["W_ci95"], W(row), limits, baseline)


INVALID_BAR: Plotly = {  # an entry of the legend
    "type": "bar",
    "orientation": "h",
    "x": [None],
    "name": "hatched: invalid",
    "marker": {"color": FAINT, "opacity": 0.6, "pattern": {"shape": "/"}},
}


def _bars(
    model: str, named: Named, marks: Mapping[str, Mark], name: str, of: Callable[[ShownCell], Bar], title: str
) -> Chart | None:
    bars = [of(row) for _, row in named]
    values = [bar.value for bar in bars]
    if not any(value is not None for value in values):
        return None
    axis = named_axis([label for label, _ in named])
    names = axis["tickvals"]  # escaped
    hatched = [row["status"] == "invalid" for _, row in named]
    data = [
        parts.bars(
            name,
            values,
            names,
            [marks[row["name"]].colour for _, row in named],
            f"%{{y}}: {name} %{{x:,.2f}}<extra></extra>",
            orientation="h",
            marker={
                "opacity": 0.6,  # overlays stay visible
                "pattern": {"shape": ["/" * is_hatched for is_hatched in hatched]},
            },
            error_x=parts.error_bars(values, (bar.interval for bar in bars), INK, width=4),
            showlegend=False,
        )
    ]
    points = {
        CEILINGS[0]: [bar.limits[0] for bar in bars],
        CEILINGS[1]: [bar.limits[1] for bar in bars],
        "baseline": [bar.baseline for bar in bars],
    }
    for word, (symbol, size, width, _) in SIGNS.items():
        if any(point is not None for point in points[word]):
            look = {"size": size, "line": {"width": width, "color": INK}}
            hover = f"%{{y}}: {word} %{{x:,.2f}}<extra></extra>"
            data.append(
                parts.scatter(word, points[word], names, Mark(INK, symbol), hover, kind=word, marker=look)
            )
    overlays, _ = parts.overlays(data, {word: (f"{sign} {word}", "") for word, (*_, sign) in SIGNS.items()})
    has_ends = any(end is not None for bar in bars for end in bounds(bar.interval))
    shown = [
        bar.text if bar.text != NONE else failure(row) or NONE
        for bar, (_, row) in zip(bars, named, strict=True)
    ]
    if any(hatched):
        data.append(INVALID_BAR | {"y": names[:1]})
    missing = {y: why for y, value, why in zip(names, values, shown, strict=True) if value is None}
    if missing:
        data.append(words(missing, at=0))
    digits = 3 if name == "B" else 0
    form = f"{{:,.{digits}f}}"
    return Chart(
        name,
        title,
        f"{title}, of each variant of {model}"
        + ", with 95% confidence intervals (an open end has no whisker)" * has_ends
        + (f", compared with: {', '.join(overlays)}" if overlays else "")
        + "."
        + " Hatched: invalid." * any(hatched),
        data,
        figure_layout(
            "",
            "",
            yaxis={**axis, "gridcolor": NO_COLOUR},
            xaxis={"rangemode": "tozero", "tickformat": ",~r"},
            margin={"l": 50, "r": 16, "t": 8, "b": 30},
            bargap=0.35,
            barmode="overlay",
        ),
        ["variant", name, "95% CI", *CEILINGS, "baseline"],
        [
            [
                label,
                formatted(bar.value, form) if bar.value is not None else why,
                interval(bar.interval, digits),
                *(formatted(limit, form) for limit in bar.limits),
                formatted(bar.baseline, form),
            ]
            for (label, _), bar, why in zip(named, bars, shown, strict=True)
        ],
        height=60 + BAR_HEIGHT * len(named),
        across=2,
        overlays=overlays,
    )


# MBU against model size, and the Pareto front.


def share(study: Study, marks: Mapping[str, Mark]) -> Chart | None:
    """MBU at B against model size, one line per variant: small models use less of the bandwidth."""
    by_label: dict[str, list[tuple[float, float, ShownCell]]] = {}
    for model, rows in study.decodes.items():
        for row, label in zip(rows, labels(rows, model), strict=True):
            size, ratio = finite(row["weight_bytes_per_token"]), finite(row["B_ratio"])
            if size is not None and ratio is not None and row["status"] == "ok":
                by_label.setdefault(label, []).append((size / 1e9, ratio, row))
    if max((len(points) for points in by_label.values()), default=0) < 2:
        return None
    data: list[Plotly] = []
    for v, (label, points) in enumerate(by_label.items()):
        points.sort(key=lambda point: point[0])
        mark = marks[points[0][2]["name"]]
        data.append(
            parts.lines(
                label,
                [round(x, 6) for x, _, _ in points],
                [round(y, 5) for _, y, _ in points],
                mark,
                "%{text}: MBU %{y:.1%}, %{x:.3f} GB per token",
                v,
                text=[plain_figure(row["model"]) for *_, row in points],
            )
        )
    return Chart(
        "share-of-limit",
        "MBU against model size",
        "Model bandwidth utilisation (MBU) of each variant at B, of the bandwidth of the data sheet, against"
        " the GB of weights read per token. A fixed cost per token matters most for small models.",
        data,
        figure_layout(
            "weights read per token, GB",
            "MBU at B",
            xaxis={"type": "log", "dtick": "D2"},
            yaxis={"tickformat": ".0%", "rangemode": "tozero"},
        ),
        ["variant", "model", "GB per token", "MBU"],
        [
            [label, str(row["model"]), f"{x:.3f}", f"{y:.1%}"]
            for label, points in by_label.items()
            for x, y, row in points
        ],
        legend=[(label, marks[points[0][2]["name"]]) for label, points in by_label.items()],
    )


def pareto(points: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the points that no other point dominates; lower is better."""
    found: set[int] = set()
    best = float("inf")
    last: tuple[float, float] | None = None
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if points[i][1] < best or points[i] == last:
            found.add(i)
            best, last = points[i][1], points[i]
    return found


# The result of `harness tune`: a table of settings, the verdict, and how to run the winner.


@dataclass(frozen=True)
class Found:
    """`winner`: null: none. `finalist`: the setting of the last race, if there was one. `metric`: of which
    more is better. `threshold`: the smallest relative gain that matters. `reasons`: by setting, why it has no
    figure."""

    results: Sequence[Result]
    winner: Setting | None
    finalist: Setting | None
    metric: Figure
    threshold: float
    reasons: Mapping[Setting, str]

    @property
    def measured(self) -> bool:
        """Whether there is a figure of the defaults, without which there is no verdict."""
        return any(each.setting == DEFAULTS and each.cost is not None for each in self.results)

    @property
    def decided(self) -> bool:
        """Whether every setting was compared with the defaults, or failed by its own fault."""
        return self.measured and not any(each.undecided for each in self.results)


def tuned_table(found: Found) -> Table:
    """A line for each setting. A gain that is not significant is shown by its interval alone."""
    headings = ["setting", "rounds", found.metric.unit, "gain", "95% CI", ""]
    lines = []
    for row, result in zip(tuned_rows(found), found.results, strict=True):
        gain = NONE if row["gain"] is None or not result.significant else _signed(row["gain"])
        figures = [_number(row["figure"]), gain, _between(row) or NONE]
        lines.append([row["name"], str(row["rounds"]), *figures, _mark(row)])
    return Table(headings, lines, [False, True, True, True, True, False])


class TunedRow(TypedDict):
    """`gain`: against the defaults, as a share of their figure; null: not measured, of the defaults, or
    `provisional`: too few rounds, or too much noise, for a gain."""

    name: str
    options: dict[str, Value]
    rounds: int
    metric: str
    unit: str
    figure: float | None
    gain: float | None
    gain_ci95: list[float] | None
    winner: bool
    provisional: bool
    reason: str | None


def tuned_rows(found: Found) -> list[TunedRow]:
    gains = [_gain(found.metric, each) for each in found.results]
    return [
        {
            "name": options_label(each.setting),
            "options": dict(each.setting),
            "rounds": each.rounds,
            "metric": found.metric.name,
            "unit": found.metric.unit,
            "figure": None if each.cost is None else found.metric.figure(each.cost),
            "gain": gain,
            "gain_ci95": ends,
            "winner": each.setting == found.winner,
            "provisional": each.undecided,
            "reason": _reason(found, each),
        }
        for each, (gain, ends) in zip(found.results, gains, strict=True)
    ]


def _reason(found: Found, result: Result) -> str | None:
    """Why a setting has no figure or no gain; null if it has both."""
    lost = found.reasons.get(result.setting)
    if result.cost is None:
        return lost
    if not result.undecided:
        return None
    if result.rounds >= FIRST_LOOK:
        return "the rounds differ too much for a gain"
    few = f"compared in {plural(result.rounds, 'round')} of at least {FIRST_LOOK}"
    return "; ".join(filter(None, [few, lost or found.reasons.get(DEFAULTS)]))


def tuned_verdict(found: Found) -> str:
    """One sentence."""
    if not found.measured:
        why = found.reasons.get(DEFAULTS, "no round of it has a valid figure")
        return f"the defaults could not be measured: {why}"
    undecided = sum(each.undecided for each in found.results)
    of = plural(len(found.results) - 1, "setting")
    failed = sum(each.failed for each in found.results)
    lost = f"; {plural(failed, 'setting')} gave no valid figure" if failed else ""
    none = f"no setting is significantly faster than the defaults{lost}"
    again = "measure again on a quiet machine, with more --rounds, or with --busy"
    if undecided and found.winner is None:
        return f"provisional: {undecided} of {of} could not be compared with the defaults{lost}; {again}"
    if found.finalist is None:
        return f"{none}; gains below {100 * found.threshold:.3g}% are not looked for"
    (row,) = (each for each in tuned_rows(found) if each["name"] == options_label(found.finalist))
    if found.winner is None:
        return f"{none}; the best of them, {row['name']}, has {_between(row)} of {row['unit']} (95% CI)"
    gain = f"{_signed(row['gain'] or 0.0)} {row['unit']}, 95% CI {_between(row)}"
    others = f"; {undecided} of {of} could not be compared: {again}" if undecided else ""
    return f"{row['name']} is significantly faster than the defaults: {gain}{others}"


def _between(row: TunedRow) -> str:
    return " to ".join(map(_signed, row["gain_ci95"] or ()))


def tuned_command(header: Header, options: Options, weights: str | None) -> str | None:
    """The command line of the stack's own program with these options (resolved), but for the length of the
    context; null: it has none."""
    if not header.program or weights is None:
        return None
    words = [
        option.flag_for(options.get(name))
        for name, option in header.options.items()
        if option.default_from != "tokens"
    ]
    return " ".join([header.program.replace("{}", shlex.quote(weights)), *filter(None, words)])


def config_row(stack: str, options: Options) -> str:
    """`{stack: llamacpp, quant: q4_0, threads: 2}`, for the variants of a config."""
    pairs = (f"{key}: {_tuned_word(value)}" for key, value in {"stack": stack, **options}.items())
    return f"{{{', '.join(pairs)}}}"


def _gain(metric: Figure, result: Result) -> tuple[float | None, list[float] | None]:
    if result.setting == DEFAULTS or not result.rounds or result.undecided:
        return None, None
    ends = result.change.ends
    known = sorted(metric.change(end) for end in ends) if ends else None
    return metric.change(result.change.cost), known


def _mark(row: TunedRow) -> str:
    if row["winner"]:
        return "winner"
    return ": ".join(filter(None, ["provisional" * row["provisional"], row["reason"]]))


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.1f}"


def _signed(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # no minus before a zero


def _tuned_word(value: object) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", value)
    return str(value) if plain else json.dumps(value)

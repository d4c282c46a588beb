"""Cells beside each other: bars, pairs, tuning."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.analysis.columns import ShownCell
from harness.analysis.line import Metric
from harness.analysis.stopping import DEFAULTS, Result, Setting, options_label
from harness.base import text
from harness.base.text import plural
from harness.dataset.study import Study, bounds, failure, figure, labels
from harness.report.plots import (
    FAINT,
    INK,
    NO_COLOUR,
    Figure,
    Mark,
    Named,
    Trace,
    figure_layout,
    legend,
    named_axis,
    plain_figure,
    words,
)
from harness.report.summary import LEAST_KLD, quality_is_kld
from harness.report.table import NONE, Table, formatted
from harness.report.tables import B, W, hidden, interval
from harness.stacks.header import Header, Options

# Figures of B and W: one bar per variant with its confidence interval and its limits.


BAR_HEIGHT = 24
CEILINGS = {"": "limit by the data sheet", "_measured": "limit measured here"}


def bars(model: str, named: Named, marks: Mapping[str, Mark]) -> list[Figure]:
    """B and W of each variant with the confidence interval and the limits."""
    drawn = (
        _bars(model, named, marks, "B", "B_ms", "B_ci95_ms", "B: TPOT at zero context, ms", limit=_B_limit),
        _bars(
            *(model, named, marks, "W", "W_tokens_per_ms", "W_ci95"),
            "W: tokens of context per further ms of TPOT",
            limit=_W_limit,
        ),
    )
    return [each for each in drawn if each]


def _B_limit(row: ShownCell, which: str) -> float | None:
    B_ms, ratio = figure(row, "B_ms"), figure(row, f"B{which}_ratio")
    theory = figure(row, "B_theory_ms") if not which else None
    return theory if theory is not None else B_ms * ratio if B_ms is not None and ratio is not None else None


def _W_limit(row: ShownCell, which: str) -> float | None:
    W, ratio = figure(row, "W_tokens_per_ms"), figure(row, f"W{which}_ratio")
    theory = figure(row, "W_theory_tokens_per_ms") if not which else None
    return theory if theory is not None else W / ratio if W is not None and ratio else None


def _bars(
    model: str,
    named: Named,
    marks: Mapping[str, Mark],
    name: str,
    key: str,
    interval_key: str,
    title: str,
    limit: Callable[[ShownCell, str], float | None],
) -> Figure | None:
    values = [_shown(row, key) for _, row in named]
    if not any(value is not None for value in values):
        return None
    axis = named_axis([label for label, _ in named])
    names = axis["tickvals"]  # escaped
    low, high = zip(*(bounds(row, interval_key) for _, row in named), strict=True)
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": values,
            "marker": {
                "color": [marks[row["name"]].colour for _, row in named],
                "opacity": 0.6,  # overlays stay visible
                "pattern": {"shape": ["/" if row.get("status") == "invalid" else "" for _, row in named]},
            },
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [_over(v, end) for v, end in zip(values, high, strict=True)],
                "arrayminus": [_over(end, v) for v, end in zip(values, low, strict=True)],
                "color": INK,
                "thickness": 1.5,
                "width": 4,
            },
            "showlegend": False,
            "hovertemplate": f"%{{y}}: {name} %{{x:,.2f}}<extra></extra>",
        }
    ]
    limits = {which: [limit(row, which) for _, row in named] for which in CEILINGS}
    baselines = [figure(row.get("baseline"), key) for _, row in named]
    overlays = {}
    for points, word, symbol, sign in (
        (limits[""], CEILINGS[""], "line-ns-open", "|"),
        (limits["_measured"], CEILINGS["_measured"], "x-thin-open", "x"),
        (baselines, "baseline", "diamond-open", "◇"),
    ):
        if any(point is not None for point in points):
            data.append(_ticks(names, points, word, symbol))
            overlays[word] = f"{sign} {word}"
    missing = {
        y: _why(row, key) for y, value, (_, row) in zip(names, values, named, strict=True) if value is None
    }
    if missing:
        data.append(words(missing, at=0))
    digits = 3 if name == "B" else 0
    form = f"{{:,.{digits}f}}"
    return Figure(
        name,
        title,
        f"{title}, of each variant of {model}{_drawn([*low, *high], overlays)}.",
        data,
        figure_layout(
            "",
            "",
            yaxis={**axis, "gridcolor": NO_COLOUR},
            xaxis={"rangemode": "tozero", "tickformat": ",~r"},
            margin={"l": 50, "r": 16, "t": 8, "b": 30},
            bargap=0.35,
        ),
        ["variant", name, "95% CI", *CEILINGS.values(), "baseline"],
        [
            [
                label,
                formatted(value, form) if value is not None else _why(row, key),
                interval(row, interval_key, digits),
                *(formatted(limits[which][place], form) for which in CEILINGS),
                formatted(baselines[place], form),
            ]
            for place, ((label, row), value) in enumerate(zip(named, values, strict=True))
        ],
        height=60 + BAR_HEIGHT * len(named),
        across=2,
        overlays=overlays,
    )


def _drawn(ends: Sequence[float | None], overlays: Mapping[str, str]) -> str:
    """The overlays of the bars, in words; many published figures have neither interval nor limit."""
    whiskers = (
        ", with 95% confidence intervals (an open end has no whisker)"
        if any(e is not None for e in ends)
        else ""
    )
    return whiskers + (f", compared with: {', '.join(overlays)}" if overlays else "")


def _shown(row: ShownCell, key: str) -> float | None:
    """The figure; null for a W that is not identifiable."""
    return None if key == "W_tokens_per_ms" and hidden(row) else figure(row, key)


def _why(row: ShownCell, key: str) -> str:
    text = (B if key == "B_ms" else W)(row, key)
    return text if text != NONE else failure(row) or NONE


def _over(low: float | None, high: float | None) -> float:
    return max(0.0, high - low) if low is not None and high is not None else 0.0


def _ticks(names: Sequence[str], points: Sequence[float | None], word: str, symbol: str) -> Trace:
    big = symbol.startswith("line")
    return {
        "type": "scatter",
        "mode": "markers",
        "name": word,
        "y": names,
        "x": points,
        "marker": {
            "symbol": symbol,
            "size": 16 if big else 9,
            "color": INK,
            "line": {"width": 2.5 if big else 1.5, "color": INK},
        },
        "meta": {"kind": word},
        "hovertemplate": f"%{{y}}: {word} %{{x:,.2f}}<extra></extra>",
    }


# Figures that compare variants and models: trade-offs, and MBU against model size.


FRONT_NAMED = 6  # variants of a Pareto front named in the caption
INTERVALS = {"B_ms": "B_ci95_ms", "kld_mean": "kld_mean_ci95"}
DIGITS = {"kld_mean": 6}
SIZES = ("model_bytes", "file_bytes", "loaded_bytes")  # the first that any cell has


def tradeoffs(model: str, named: Named, marks: Mapping[str, Mark]) -> list[Figure]:
    """Size, quality (KL divergence, else perplexity) and latency in pairs, with the Pareto front: variants
    that no other beats in both."""
    quality = "KLD" if quality_is_kld(named) else "perplexity"
    axes = {
        "size": (next((key for key in SIZES if _known(named, key)), SIZES[0]), 1e9, "size, GB"),
        "latency": ("B_ms", 1.0, "B, ms"),
        "perplexity": ("perplexity", 1.0, "perplexity"),
        "KLD": ("kld_mean", 1.0, "KLD, nats per token"),
    }
    pairs = (("size", "latency"), ("latency", quality), ("size", quality))
    drawn = (_tradeoff(model, named, marks, axes[x], axes[y], f"{x}-{y}") for x, y in pairs)
    found = [each for each in drawn if each]
    return [replace(each, across=len(found)) for each in found]


def _known(named: Named, key: str) -> bool:
    return any(figure(row, key) is not None for _, row in named)


def share(study: Study, marks: Mapping[str, Mark]) -> Figure | None:
    """MBU at B against model size, one line per variant: small models use less of the bandwidth."""
    by_label: dict[str, list[tuple[float, float, ShownCell]]] = {}
    for model, rows in study.decodes.items():
        for row, label in zip(rows, labels(rows, model), strict=True):
            size, ratio = figure(row, "weight_bytes_per_token"), figure(row, "B_ratio")
            if size is not None and ratio is not None and row.get("status") == "ok":
                by_label.setdefault(label, []).append((size / 1e9, ratio, row))
    if max((len(points) for points in by_label.values()), default=0) < 2:
        return None
    data: list[Trace] = []
    for place, (label, points) in enumerate(by_label.items()):
        points.sort(key=lambda point: point[0])
        mark = marks[points[0][2]["name"]]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plain_figure(label),
                "x": [round(x, 6) for x, _, _ in points],
                "y": [round(y, 5) for _, y, _ in points],
                "text": [plain_figure(str(row["model"])) for *_, row in points],
                "line": {"color": mark.colour, "width": 1.3},
                "marker": {"color": mark.colour, "symbol": mark.symbol, "size": 8},
                "hovertemplate": "%{text}: MBU %{y:.1%}, %{x:.3f} GB per token"
                "<extra>%{fullData.name}</extra>",
                "meta": {"v": place},
            }
        )
    return Figure(
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


def _tradeoff(
    model: str,
    named: Named,
    marks: Mapping[str, Mark],
    x_axis: tuple[str, float, str],
    y_axis: tuple[str, float, str],
    name: str,
) -> Figure | None:
    (x_key, x_unit, x_title), (y_key, y_unit, y_title) = x_axis, y_axis
    points: list[tuple[int, str, ShownCell, float, float]] = []
    for place, (label, row) in enumerate(named):
        x, y = figure(row, x_key), figure(row, y_key)
        if x is not None and y is not None and row.get("status") != "invalid":
            y = max(y, LEAST_KLD) if y_key == "kld_mean" else y
            points.append((place, label, row, x / x_unit, y / y_unit))
    if len(points) < 2:
        return None
    front = pareto([(x, y) for *_, x, y in points])
    corners = sorted((points[i][3], points[i][4]) for i in front)
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Pareto front",
            "x": [x for x, _ in corners],
            "y": [y for _, y in corners],
            "line": {"color": FAINT, "width": 1.5, "dash": "dot", "shape": "hv"},
            "hoverinfo": "skip",
        }
    ]
    labelled: set[tuple[float, float]] = set()
    for i, (place, label, row, x, y) in enumerate(points):
        shows_name = i in front and (x, y) not in labelled  # of variants that coincide, the first
        labelled.add((x, y))
        mark = marks[row["name"]]
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text" if shows_name else "markers",
                "name": plain_figure(label),
                "x": [x],
                "y": [y],
                "text": [plain_figure(str(row.get("variant") or label))],
                "textposition": "top right",
                "textfont": {"size": 11},
                "cliponaxis": False,
                **_bar("error_x", row, x_key),
                **_bar("error_y", row, y_key),
                "marker": {
                    "color": mark.colour,
                    "symbol": mark.symbol,
                    "size": 12,
                    "opacity": 1 if i in front else 0.4,
                },
                "hovertemplate": f"{x_title}: %{{x:.3f}}<br>{y_title}: %{{y:.{DIGITS.get(y_key, 3)}f}}"
                "<extra>%{fullData.name}</extra>",
                "meta": {"v": place},
            }
        )
    title = f"{_word(y_title)} against {_word(x_title)}"
    title = title[0].upper() + title[1:]
    best = [points[i][1] for i in sorted(front)]
    return Figure(
        name,
        title,
        f"{title} of {model}'s variants; lower is better in both. Pareto front (dotted), which no other"
        f" variant beats in both: {text.list_named(best, FRONT_NAMED)}.",
        data,
        figure_layout(x_title, y_title, yaxis={"type": "log"} if y_key == "kld_mean" else {}),
        ["variant", x_title, y_title, "Pareto front"],
        [
            [label, f"{x:.3f}", f"{y:.{DIGITS.get(y_key, 3)}f}", "yes" if i in front else ""]
            for i, (_, label, _, x, y) in enumerate(points)
        ],
        height=380,
        legend=legend(named, marks),
    )


def _bar(name: str, row: ShownCell, key: str) -> Trace:
    """The 95% interval of a figure as plotly.js draws it; empty where it is not known."""
    low, high = bounds(row, INTERVALS[key]) if key in INTERVALS else (None, None)
    value = figure(row, key)
    if value is None or low is None or high is None:
        return {}
    ends = {"array": [max(0.0, high - value)], "arrayminus": [max(0.0, value - low)]}
    return {name: {"type": "data", "symmetric": False, **ends, "thickness": 1, "width": 3}}


def _word(title: str) -> str:
    return title.split(",")[0]


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
    metric: Metric
    threshold: float
    reasons: Mapping[Setting, str]

    @property
    def measured(self) -> bool:
        """Whether there is a figure of the defaults, without which there is no verdict."""
        return any(each.setting == DEFAULTS and each.cost is not None for each in self.results)


def tuned_table(found: Found) -> Table:
    """A line for each setting."""
    headings = ["setting", "rounds", found.metric.unit, "gain", "95% CI", ""]
    lines = []
    for row in tuned_rows(found):
        interval = " to ".join(map(_signed, row["gain_ci95"] or ())) or NONE
        figures = [_number(row["figure"]), NONE if row["gain"] is None else _signed(row["gain"]), interval]
        lines.append([row["name"], str(row["rounds"]), *figures, _mark(row)])
    return Table(headings, lines, [False, True, True, True, True, False])


def tuned_rows(found: Found) -> list[dict[str, Any]]:
    """A flat object for each setting: `figure` in `unit`, `gain` against the defaults with its interval, both
    as a share of the defaults' figure; null: not measured, or of the defaults themselves."""
    return [
        {
            "name": options_label(each.setting),
            "options": dict(each.setting),
            "rounds": each.rounds,
            "metric": found.metric.name,
            "unit": found.metric.unit,
            "figure": None if each.cost is None else found.metric.figure(each.cost),
            **_gain(found.metric, each),
            "winner": each.setting == found.winner,
            "reason": found.reasons.get(each.setting) if each.cost is None else None,
        }
        for each in found.results
    ]


def tuned_verdict(found: Found) -> str:
    """One sentence."""
    if not found.measured:
        why = found.reasons.get(DEFAULTS, "no round of it has a valid figure")
        return f"the defaults could not be measured: {why}"
    without = sum(each.cost is None for each in found.results)
    lost = f"; {plural(without, 'setting')} gave no valid figure" if without else ""
    none = f"no setting is significantly faster than the defaults{lost}"
    if found.finalist is None:
        return f"{none}; gains below {100 * found.threshold:.3g}% are not looked for"
    (row,) = (each for each in tuned_rows(found) if each["name"] == options_label(found.finalist))
    gain = f"{_signed(row['gain'])} {row['unit']}, 95% CI {' to '.join(map(_signed, row['gain_ci95']))}"
    if found.winner is None:
        return f"{none}; the best of them, {row['name']}, has {gain}"
    return f"{row['name']} is significantly faster than the defaults: {gain}"


def tuned_command(header: Header, options: Options, weights: str | None) -> str | None:
    """The command line of the stack's own program with these options (resolved), but for the length of the
    context; null: it has none."""
    if not header.program or weights is None:
        return None
    words = [
        option.flag_for(options[name])
        for name, option in header.options.items()
        if option.default_from != "tokens"
    ]
    return " ".join([header.program.replace("{}", shlex.quote(weights)), *filter(None, words)])


def config_row(stack: str, options: Options) -> str:
    """`{stack: llamacpp, quant: q4_0, threads: 2}`, for the variants of a config."""
    pairs = (f"{key}: {_tuned_word(value)}" for key, value in {"stack": stack, **options}.items())
    return f"{{{', '.join(pairs)}}}"


def _gain(metric: Metric, result: Result) -> dict[str, Any]:
    if result.setting == DEFAULTS or not result.rounds:
        return {"gain": None, "gain_ci95": None}
    ends = result.change.ends
    known = sorted(metric.change(end) for end in ends) if ends else None
    return {"gain": metric.change(result.change.cost), "gain_ci95": known}


def _mark(row: Mapping[str, Any]) -> str:
    return "winner" if row["winner"] else row["reason"] or ""


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.1f}"


def _signed(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # no minus before a zero


def _tuned_word(value: object) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", value)
    return str(value) if plain else json.dumps(value)

"""Figures that compare variants and models: trade-offs, and MBU against model size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.analysis.rows import ShownCell
from harness.dataset.study import Study, bounds, figure, labels
from harness.report.drawing import FAINT, Figure, Mark, Named, Trace, layout, legend, plain
from harness.report.goals import LEAST_KLD, quality_is_kld
from harness.system import wording

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
                "name": plain(label),
                "x": [round(x, 6) for x, _, _ in points],
                "y": [round(y, 5) for _, y, _ in points],
                "text": [plain(str(row["model"])) for *_, row in points],
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
        layout(
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
                "name": plain(label),
                "x": [x],
                "y": [y],
                "text": [plain(str(row.get("variant") or label))],
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
        f" variant beats in both: {wording.named(best, FRONT_NAMED)}.",
        data,
        layout(x_title, y_title, yaxis={"type": "log"} if y_key == "kld_mean" else {}),
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

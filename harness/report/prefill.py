"""The chapter on prefill: time and rate of a pass against its tokens, with the measured ridge and theory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from harness.analysis.columns import Cell, PrefillDepth, PrefillRow
from harness.analysis.prefill import TARGETS
from harness.dataset.study import Curve, Floats, Study, bounds
from harness.report import chapters, parts
from harness.report.chapters import Chapter, column
from harness.report.figure_texts import interval, number
from harness.report.parts import line, lines, scatter
from harness.report.plots import Chart, Mark, Named, Plotly, figure_layout, legend, packed
from harness.report.tables import Column
from harness.report.text_table import NONE

TITLE = "Prefill"
KIND = "prefill"
MEANING = (
    "Time of one forward pass over p tokens. A short pass is memory-bound: it reads the weights once, and its"
    " time is a plateau. In a long one each further token adds as much time. At the ridge, computing alone"
    " takes as long as the plateau. Theory is the roofline of the data sheet: the larger of reading weights"
    " and cache once and of computing, with the lm_head on every token or on the last one alone. Intervals of"
    " 95% include how repeats differ; that of a single repeat may be of its passes alone, which is a lower"
    " bound."
)
EXTRAPOLATED = "*"
EXTRAPOLATION = f"{EXTRAPOLATED}: extrapolated from shorter passes"
OVERLAYS = {
    "depths": ("behind tokens in the cache (dash-dotted)", ""),
    "ridge": (
        "measured ridge with its interval (large open symbols)",
        "open symbols at the measured ridges, with their intervals",
    ),
    "last": ("theory, lm_head on last (dashed)", "dashed and dotted, theory"),
    "every": ("theory, lm_head on every (dotted)", ""),
}
DASHES = {"every": "dot", "last": "dash"}


class SweepRow(Cell):
    """The passes of a cell at one depth. `whole`: the figures of an empty cache; None at other depths."""

    passes_at: PrefillDepth | None
    whole: PrefillRow | None


def chapter(study: Study) -> Chapter[SweepRow] | None:
    """The chapter on prefill; None without a series of passes."""
    return chapters.chapter(
        study,
        TITLE,
        MEANING,
        {TITLE: COLUMNS},
        chapters.cells_where(study, lambda row: row["name"] in study.prefill),
        lambda rows: shown([row for row in rows if row["prefill"]]),
        partial(_figures, curves=study.prefill),
        lambda named: _notes([(label, sweep) for label, row in named if (sweep := row["prefill"])]),
    )


def shown(rows: Sequence[Cell]) -> list[SweepRow]:
    """A row per depth of each cell; those of deeper passes have no TTFT."""
    return [
        {**row, "passes_at": passes, "whole": whole if passes is whole else None}
        for row in rows
        for whole in [row["prefill"]]
        for passes in [whole, *(whole["depths"] if whole else ())]
    ]


def extrapolates(sweep: PrefillRow | None) -> bool:
    """Whether a TTFT in its line of the table is extrapolated."""
    return sweep is not None and any(ttft["how"] == "extrapolated" for ttft in sweep["ttft"])


def _notes(named: Sequence[tuple[str, PrefillRow]]) -> list[str]:
    """Notes where ridge and theory differ, a ridge is missing, or a TTFT is not extrapolated."""
    notes = [
        f"{label}: {text}" for label, sweep in named if (text := sweep["comparison"] or sweep["ridge_reason"])
    ]
    reasons: dict[str, dict[str, None]] = {}
    for label, sweep in named:
        for reason in filter(None, (ttft["reason"] for ttft in sweep["ttft"])):
            reasons.setdefault(reason, {})[label] = None
    notes += [f"no TTFT, {reason}: {', '.join(without)}" for reason, without in reasons.items()]
    return notes + [EXTRAPOLATION] * any(extrapolates(sweep) for _, sweep in named)


def _of_passes(text: Callable[[PrefillDepth], str]) -> Callable[[SweepRow], str]:
    return lambda row: text(row["passes_at"]) if row["passes_at"] else NONE


def _depth(row: SweepRow) -> str:
    """A dash where all passes begin at an empty cache."""
    passes, whole = row["passes_at"], row["whole"]
    return f"{passes['depth']:,.0f}" if passes and (passes["depth"] or (whole and whole["depths"])) else NONE


def _rate(passes: PrefillDepth) -> str:
    """`2,031 at 1,024`"""
    n, ms = passes["longest_n"], passes["longest_ms"]
    return f"{n / ms * 1e3:,.0f} at {n:,.0f}" if ms else NONE


def _plateau(passes: PrefillDepth) -> str:
    """`34.5 from 33` where an earlier kernel runs shorter passes."""
    text, start = number(passes["plateau_ms"], "{:,.1f}"), passes["kernel_from_n"]
    return text if text == NONE or start in (None, 1) else f"{text} from {start}"


def _ridge(passes: PrefillDepth) -> str:
    """`225 (170 to 292)`, `225 (> 170)`, `225` without an interval; `> 500` where it was not reached."""
    value = passes["ridge_n"]
    if value is None:
        is_beyond = (passes["ridge_reason"] or "").startswith("not reached")
        return f"> {passes['longest_n']:,.0f}" if is_beyond else NONE
    if passes["ridge_ci95"] is None:
        return f"{value:,.0f}"
    low, high = bounds(passes["ridge_ci95"])
    both = low is not None and high is not None
    return f"{value:,.0f} ({interval(passes['ridge_ci95'], 0) if both else f'> {low or 0:,.0f}'})"


def _first_token(row: SweepRow, n: int) -> str:
    """`71.2`, with a mark where it is extrapolated."""
    ttft = {time["n"]: time for time in row["whole"]["ttft"]}.get(n) if row["whole"] else None
    if ttft is None or ttft["ms"] is None:
        return NONE
    return f"{ttft['ms']:,.1f}" + EXTRAPOLATED * (ttft["how"] == "extrapolated")


DEPTH = Column("depth", _depth, "tokens in the KV cache before a pass")
PLATEAU = Column(
    "plateau ms", _of_passes(_plateau), "time of short passes; from: the first pass of this kernel"
)
RATE = Column("tok/s", _of_passes(_rate), "of the longest pass, and its tokens")
RIDGE = Column(
    "ridge",
    _of_passes(_ridge),
    "tokens from which computing takes longer than the plateau, and its 95% confidence interval",
)
FIRST_TOKENS = tuple(
    Column(f"TTFT {name} ms", partial(_first_token, n=n), f"of a prompt of {n:,} tokens; {EXTRAPOLATION}")
    for n, name in zip(TARGETS, ("512", "2k", "8k", "32k"), strict=True)
)
SHORT = (DEPTH, RATE, PLATEAU, RIDGE, *FIRST_TOKENS)
COLUMNS: tuple[Column[SweepRow], ...] = (
    DEPTH,
    PLATEAU,
    column(
        "ms per 1k",
        "passes_at.slope_ms",
        "{:,.1f}",
        "what 1,000 further tokens add, past the plateau",
        unit=1e-3,
    ),
    RATE,
    RIDGE,
    column(
        "theory, last",
        "whole.ridge_theory.last",
        "{:,.0f}",
        "the ridge by the data sheet, with the lm_head on the last token alone",
    ),
    column(
        "theory, every",
        "whole.ridge_theory.every",
        "{:,.0f}",
        "the ridge by the data sheet, with the lm_head on every token",
    ),
    *FIRST_TOKENS,
    column(
        "MFU",
        "whole.utilisation.-1.mfu",
        "{:.0%}",
        "FLOP/s of the longest pass, over the data sheet's fastest rate for such weights",
    ),
    column(
        "MBU",
        "whole.utilisation.0.mbu",
        "{:.0%}",
        "bytes read per second by the shortest pass, over the bandwidth of the data sheet",
    ),
)


@dataclass(frozen=True)
class Scale:
    """The y axis of a figure. `of`: its values, of tokens and ms."""

    name: str
    caption: str
    unit: str
    hover: str
    of: Callable[[Floats, Floats], Floats]


SCALES = (
    Scale("time", "Time in ms", "ms", "%{y:.3f} ms", lambda _, ms: ms),
    Scale("rate", "Tokens per second", "tokens/s", "%{y:,.0f} tokens/s", lambda n, ms: n / ms * 1e3),
)


def _figures(
    model: str,
    named: Named,
    marks: Mapping[str, Mark],
    curves: Mapping[str, Mapping[int, Curve]],
) -> Iterator[Chart]:
    """Time, and tokens per second, against tokens, on logarithmic axes."""
    longest = max(
        (float(curve.n[-1]) for _, row in named for curve in curves[row["name"]].values()), default=0.0
    )
    for scale in SCALES:
        yield Chart(
            f"prefill-{scale.name}",
            f"Prefill: {scale.name} against tokens",
            f"{scale.caption} of one forward pass of {model} against its tokens, on logarithmic axes.",
            [*_series(named, curves, marks, scale)],
            figure_layout(
                "tokens of the pass",
                f"{scale.name}, {scale.unit}",
                xaxis={"type": "log", "tickformat": ",d", "dtick": "D2" if longest < 1000 else 1},
                yaxis={"type": "log", "dtick": "D2", "tickformat": ",~r"},
            ),
            height=480,
            legend=legend(named, marks),
            known=OVERLAYS,
        )


def _series(
    named: Named, curves: Mapping[str, Mapping[int, Curve]], marks: Mapping[str, Mark], scale: Scale
) -> Iterator[Plotly]:
    """Of each variant: its passes at each depth, theory's lines, and the measured ridge on its curve with its
    interval, whose open ends are those of the curve."""
    hover = f"%{{x:,}} tokens: {scale.hover}"
    for v, (label, row) in enumerate(named):
        mark, sweep = marks[row["name"]], row["prefill"]
        for depth, curve in (of := curves[row["name"]]).items():
            name = label if not depth else f"{label}, behind {depth:,} tokens"
            trace = line(curve.n, scale.of(curve.n, curve.ms), name, v, mark, hover)
            trace["meta"] = {"v": v}  # without extents, of which page.js makes a linear range
            if depth > min(of):
                trace["line"]["dash"], trace["meta"]["kind"] = "dashdot", "depths"
            yield trace
        if sweep is None:
            continue
        for head, floor in (sweep["floors"] or {}).items():
            n, ms = np.array(floor, dtype=float).T
            name = f"{label}, theory, lm_head on {head}"
            yield lines(name, packed(n), packed(scale.of(n, ms)), mark, hover, v, head, DASHES[head])
        if (ridge := sweep["ridge_n"]) is not None:
            curve = of[sweep["depth"]]
            low, high = bounds(sweep["ridge_ci95"] or [ridge, ridge])
            ends: list[float | None] = [low or 0.0, float(curve.n[-1]) if high is None else high]
            y = scale.of(np.array([ridge]), np.interp([ridge], curve.n, curve.ms))
            yield scatter(
                label,
                [round(ridge, 2)],
                [round(float(y[0]), 4)],
                Mark(mark.colour, f"{mark.symbol}-open"),
                "measured ridge: %{x:,.0f} tokens",
                v,
                "ridge",
                marker={"size": 13, "line": {"width": 2, "color": mark.colour}},
                error_x=parts.error_bars([ridge], [ends], mark.colour),
            )

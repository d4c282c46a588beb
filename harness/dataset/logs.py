"""A log of any tool as rows and as a Study: the fits of its series, their flags, the hardware's limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from typing_extensions import TypedDict

from harness.analysis import repeat_figures, withheld
from harness.analysis.columns import Cell, Figures, Flagged
from harness.analysis.figures import empty_cell
from harness.analysis.flags import CEILING_TOLERANCE, Limit, digest, equal_series, flags, identical
from harness.analysis.line_fit import Floats
from harness.analysis.repeat_figures import SWEEP, Analysis, Unusable
from harness.analysis.warnings import Flag, Warnings
from harness.base.text import plural, printable
from harness.dataset.repeat_flags import drop_intervals, flag_kernel_changes
from harness.dataset.study import Curve, Study
from harness.records.foreign.log import Log, LogError, Request, Series
from harness.records.foreign.read import read_log
from harness.records.foreign.table import Options
from harness.theory import floors
from harness.theory.decoder import Decoder
from harness.theory.machines import Machine

MOST_SPREAD = 0.1  # of repetitions, as a share; B too is shown only where it is known to 10%
LEAST_TOKENS = 3  # the first token, and two for a line


class Against(TypedDict, total=False):
    """The limits for a model on a machine, and the shares of the limits that were reached."""

    B_theory_ms: float | None
    W_theory: float | None
    B_ratio: float | None
    W_ratio: float | None
    B_as_w16_ms: float | None


class Row(Flagged, Against):
    """One series or request of a log."""

    variant: str
    per_token: bool
    unusable: str | None
    bpw: float | None
    prompt_tokens: int | None  # of totals; a series begins behind its prompt
    spread: float | None  # of totals: of repetitions, as a share


def load_log(path: Path) -> Study:
    """The Study of one log, for a page or `load_results`. Raises LogError."""
    try:
        log = read(path, Options())
        rows = analysed(log, None, {})
        if all(row["unusable"] for row in rows):
            raise LogError(f"{path}: no usable series: {rows[0]['unusable']}")
    except LogError as wrong:
        if "--" not in str(wrong):
            raise
        raise type(wrong)(f"{wrong}, with `harness fit`") from wrong
    return study_of_log(path.name, rows, log)


def read(path: Path, options: Options) -> Log:
    """Read a log. Raises LogError with the file name in its message."""
    try:
        return read_log(path, options)
    except LogError as error:
        raise type(error)(f"{path}: {error}") from error


class Theory:
    """A model on a machine: the limit of B and W at some bits per weight."""

    def __init__(self, model: Decoder, machine: Machine) -> None:
        self._model = model
        self._ceiling = floors.Ceiling(machine.bandwidth_bytes_per_s, machine.flops)

    def limit(self, bpw: float | None, last_n: float) -> Limit:
        """The limit; B is 0 if the bits per weight are unknown.

        The slope is that at `last_n`, the least of a series: past its window a layer reads no more.
        """
        required = floors.demand_of_bits(self._model, bpw or 16)
        W = floors.W_tokens_per_s(required, self._ceiling, n=int(last_n))
        return Limit(1e3 * floors.B_s(required, self._ceiling) if bpw else 0.0, 1e3 / W if W else None)


def analysed(log: Log, theory: Theory | None, bpw: dict[str, float]) -> list[Row]:
    """One row per series and request, in the order of the log; `unusable` is the reason without a fit."""
    cut = {name: repeat_figures.without_end(series.n, series.ms) for name, series in log.series.items()}
    same = identical({name: digest(ms) for name, (_, ms, _) in cut.items()})
    lengths = [len(ms) for _, ms, _ in cut.values()] if log.equal_lengths else []
    longest = max(lengths, default=None)
    analyses = {name: _analysis(series, *cut[name][:2]) for name, series in log.series.items()}
    rows = []
    for name, series in analyses.items():
        bits = bpw.get(name)
        if isinstance(series, str):
            rows.append(_empty(name, bits, theory is not None) | {"unusable": printable(series)})
            continue
        limit = theory.limit(bits, float(cut[name][0][-1])) if theory else None
        raised = flags(series, limit, longest)
        died = cut[name][2]
        if died is not None:
            raised.append(Warnings.died.flag(n=died))
        raised += [equal_series(same[name])] if name in same else []
        against = _against(series.figures, bits, limit) if limit else None
        rows.append(_row(name, bits, series.figures, raised, against))
    flag_kernel_changes(rows)
    drop_intervals(rows)
    for row in rows:
        withheld.withhold(row)
    return rows + [_totals(name, series, bpw.get(name), theory) for name, series in log.requests.items()]


def _analysis(series: Series, n: Floats, ms: Floats) -> Analysis | str:
    """The analysis of a series, or the reason why there is none."""
    if series.fault:
        return series.fault
    try:
        analysis = repeat_figures.analyse(n, ms)
    except Unusable as reason:
        return str(reason)
    if len(ms) < LEAST_TOKENS:
        sweep = analysis.figures["shape"] == repeat_figures.SWEEP
        return f"only {plural(len(ms), 'point' if sweep else 'token')}; a line needs {LEAST_TOKENS}"
    return analysis


def _totals(name: str, request: Request, bpw: float | None, theory: Theory | None) -> Row:
    row = _empty(name, bpw, theory is not None) | {
        "per_token": False,
        "n_tokens": request.new_tokens,
        "prompt_tokens": request.prompt_tokens,
        "first_token_ms": request.first_token_ms,
        "tokens_per_s": request.tokens_per_s,
        "spread": request.spread,
    }
    raised = []
    if request.spread is not None and request.spread > MOST_SPREAD:
        raised.append(Warnings.repetitions_differ.flag(spread=request.spread))
    if theory and bpw and request.tokens_per_s:
        limit, mean_ms = theory.limit(bpw, 1), 1e3 / request.tokens_per_s
        if mean_ms < limit.B_ms / CEILING_TOLERANCE:
            took = f"{mean_ms:.2f} ms a token"
            raised.append(Warnings.faster_than_limit.flag(took=took, least=limit.B_ms))
    row["flags"] = [flag.row() for flag in raised]
    return row


def _row(
    name: str, bpw: float | None, figures: Figures, raised: Sequence[Flag], against: Against | None
) -> Row:
    return {
        "variant": printable(name),
        "per_token": True,
        "unusable": None,
        "bpw": bpw,
        "prompt_tokens": None,
        "spread": None,
        **figures,
        "flags": [flag.row() for flag in raised],
        **(against or {}),
    }


def _against(figures: Figures, bits: float | None, limit: Limit) -> Against:
    B, W = figures["B_ms"], figures["W_tokens_per_ms"]
    B_share, W_share = limit.shares(B, W, figures["W_identifiable"])
    return {
        "B_theory_ms": limit.B_ms or None,
        "W_theory": limit.W_tokens_per_ms,
        "B_ratio": B_share,
        "W_ratio": W_share,
        "B_as_w16_ms": B * 16 / bits if B is not None and bits else None,
    }


def _empty(name: str, bpw: float | None, with_theory: bool) -> Row:
    """A row without figures."""
    theory: Against = {
        "B_theory_ms": None,
        "W_theory": None,
        "B_ratio": None,
        "W_ratio": None,
        "B_as_w16_ms": None,
    }
    return _row(name, bpw, repeat_figures.empty_figures(None), [], theory if with_theory else None)


def study_of_log(title: str, rows: Sequence[Row], log: Log) -> Study:
    """The page of one log: its series as cells of one model, named after the file."""
    # A log knows no more of a cell: the page shows a dash for the rest.
    plain_cells = [
        {
            **empty_cell(),
            **row,
            "name": f"{title} {row['variant']}",
            "model": title,
            "variant": row["variant"],
            "status": "ok" if row["unusable"] is None else "unusable",
            "reasons": [row["unusable"]] if row["unusable"] else [],
            "kind": "logged",
            "tokens": row["n_tokens"],
            "ttft_ms": row["first_token_ms"],
            "B_as_w16_ms": row.get("B_as_w16_ms"),
            "repeats": 1,
            "repeats_ok": 1,
        }
        for row in rows
    ]
    cells = cast(list[Cell], plain_cells)
    # Rows of series come first; rows of requests have only totals.
    drawn = zip(cells, log.series.values(), strict=False)
    return Study(
        title=title,
        cells=cells,
        series={
            cell["name"]: Curve(curve.n, curve.ms, prefill=cell["shape"] != SWEEP)
            for cell, curve in drawn
            if cell["status"] == "ok"
        },
        further_methods={"Log": [log.format, *log.notes]},
        warnings=list(log.notes),
    )

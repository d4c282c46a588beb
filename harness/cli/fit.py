"""`harness fit`: the analysis of a log of any tool, as a table, JSON, a page or a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.analysis import flags as analysis_flags
from harness.analysis import repeat_figures
from harness.analysis.columns import Figures
from harness.analysis.flags import CEILING_TOLERANCE, Limit, digest, equal_series, flags, identical
from harness.analysis.line_fit import Floats
from harness.analysis.repeat_figures import Analysis, Unusable
from harness.analysis.warnings import Flag, Warnings
from harness.base.text import plural, printable, shortened
from harness.cli import NOT_OK, OK, REGRESSION, Mistake, options, say, theory_options
from harness.cli.options import unknown
from harness.dataset.table import drop_intervals, flag_kernel_changes
from harness.records import ResultsError
from harness.records.foreign.log import Log, LogError, Request, Series
from harness.records.foreign.read import read_log
from harness.records.foreign.table import Options
from harness.theory import floors
from harness.theory.decoder import Decoder
from harness.theory.floors import UNITS, Units
from harness.theory.known_models import NoModel, described
from harness.theory.machines import Machine

if TYPE_CHECKING:
    from harness.dataset.study import Study
    from harness.report.fit_text import Against, Row

MOST_SPREAD = 0.1  # of repetitions, as a share; B too is shown only where it is known to 10%
LEAST_TOKENS = 3  # the first token, and two for a line
OF_WEIGHTS = (Warnings.faster_than_limit, Warnings.first_token_faster_than_limit)
OF_SPEED = (*OF_WEIGHTS, Warnings.slope_faster_than_limit)
FAILING = (
    *(*OF_SPEED, Warnings.identical_series, Warnings.early_stop, Warnings.died, Warnings.drift),
    Warnings.repetitions_differ,
    *(Warnings[code] for code in analysis_flags.OF_LINE),
)
GATES = [warning.name for warning in FAILING]
"""Warnings that `fit` can raise on a log."""


def run(arguments: argparse.Namespace) -> int:
    """Print one row per series, as a table or JSON; write the page and the picture, if requested.

    Raises Mistake, and LogError for an unusable log.
    """
    path: Path = arguments.log
    options = Options(arguments.latency_column, arguments.time_column, arguments.group_column, arguments.unit)
    bpw = _bpw(arguments.bpw)
    theory = _theory(arguments.model, arguments.machine, UNITS[arguments.units])
    log = _read(path, options)
    if unmatched := bpw.keys() - log.series.keys() - log.requests.keys():
        raise Mistake(unknown("variant", min(unmatched), [*log.series, *log.requests]))
    _check_gate(arguments.fail_on, log, theory, bpw)
    rows = analysed(log, theory, bpw)
    notes = [printable(note) for note in log.notes]
    if arguments.json:
        print(json.dumps(rows, indent=1, allow_nan=False))
        for note in notes:
            say(f"{path}: {note}")
    else:
        from harness.report import fit_text

        fit_text.show_fits(rows, notes, arguments.wide)
    usable = any(row["unusable"] is None for row in rows)
    code = OK if usable else NOT_OK
    if usable and (arguments.output or arguments.png):
        code = _draw(path, log, rows, arguments.output, arguments.png)
    raised = {flag["code"] for row in rows for flag in row["flags"]}
    return REGRESSION if code == OK and raised.intersection(arguments.fail_on) else code


def _check_gate(fail_on: Sequence[str], log: Log, theory: Theory | None, bpw: dict[str, float]) -> None:
    """Raises Mistake where a flag of --fail-on could not be raised for want of another option."""
    of_speed = [*log.series, *(name for name, each in log.requests.items() if each.tokens_per_s)]
    without = [name for name in of_speed if name not in bpw]
    for code in fail_on:
        if code not in GATES:
            raise Mistake(f"--fail-on: {unknown('flag', code, GATES)}")
        if Warnings[code] in OF_SPEED and theory is None:
            raise Mistake(f"--fail-on {code} needs --model and --machine")
        if Warnings[code] in OF_WEIGHTS and without:
            raise Mistake(
                f'--fail-on {code} needs --bpw "{shortened(without[0])}=BITS", and so for every variant'
            )


def study(path: Path) -> Study:
    """The Study of one log, for `harness report`. Raises LogError."""
    from harness.report import fit_text

    try:
        log = _read(path, Options())
        rows = analysed(log, None, {})
        if all(row["unusable"] for row in rows):
            raise LogError(f"{path}: no usable series: {rows[0]['unusable']}")
    except LogError as wrong:
        if "--" not in str(wrong):
            raise
        raise type(wrong)(f"{wrong}, with `harness fit`") from wrong
    return fit_text.fit_study(path.name, rows, log)


def _read(path: Path, options: Options) -> Log:
    """Read a log. Raises LogError with the file name in its message."""
    try:
        return read_log(path, options)
    except LogError as error:
        raise type(error)(f"{path}: {error}") from error


def _draw(path: Path, log: Log, rows: list[Row], page: Path | None, picture: Path | None) -> int:
    from harness.report import fit_text, png
    from harness.report import page as report_page

    made = fit_text.fit_study(path.name, rows, log)
    try:
        if page:
            report_page.write(page, made)
            print(page.absolute())
        if picture:
            png.write_latency(picture, made)
            print(picture.absolute())
    except (ResultsError, png.FiguresError) as refusal:
        say(refusal)
        return NOT_OK
    return OK


class Theory:
    """A model on a machine: the limit of B and W at some bits per weight."""

    def __init__(self, model: Decoder, machine: Machine, units: Units) -> None:
        self._model, self._units = model, units
        self._ceiling = floors.Ceiling(machine.bandwidth_bytes_per_s * units.giga / 1e9, machine.flops)

    def limit(self, bpw: float | None, last_n: float) -> Limit:
        """The limit; B is 0 if the bits per weight are unknown.

        The slope is that at `last_n`, the least of a series: past its window a layer reads no more.
        """
        required = floors.demand_of_bits(self._model, bpw or 16, norms=self._units.norms)
        W = floors.W_tokens_per_s(required, self._ceiling, n=int(last_n))
        slope_ms = 1e3 / W if W else None
        B_ms = floors.B_s(required, self._ceiling) * 1e3 if bpw else 0.0
        return Limit(B_ms + (slope_ms or 0) * self._units.first_token_in_B * bool(bpw), slope_ms)


def analysed(log: Log, theory: Theory | None, bpw: dict[str, float]) -> list[Row]:
    """One row per series and request, in the order of the log; `unusable` is the reason without a fit."""
    cut = {name: repeat_figures.without_end(each.n, each.ms) for name, each in log.series.items()}
    same = identical({name: digest(ms) for name, (_, ms, _) in cut.items()})
    lengths = [len(ms) for _, ms, _ in cut.values()] if log.equal_lengths else []
    longest = max(lengths, default=None)
    found = {name: _analysis(each, *cut[name][:2]) for name, each in log.series.items()}
    rows = []
    for name, each in found.items():
        bits = bpw.get(name)
        if isinstance(each, str):
            rows.append(_empty(name, bits, theory is not None) | {"unusable": printable(each)})
            continue
        limit = theory.limit(bits, float(cut[name][0][-1])) if theory else None
        raised = flags(each, limit, longest)
        died = cut[name][2]
        if died is not None:
            raised.append(Warnings.died.flag(n=died))
        raised += [equal_series(same[name])] if name in same else []
        against = _against(each.figures, bits, limit) if limit else None
        rows.append(_row(name, bits, each.figures, raised, against))
    flag_kernel_changes(rows)
    drop_intervals(rows)
    for row in rows:
        analysis_flags.withhold(row)
    return rows + [_totals(name, each, bpw.get(name), theory) for name, each in log.requests.items()]


def _analysis(read: Series, n: Floats, ms: Floats) -> Analysis | str:
    """The analysis of a series, or the reason why there is none."""
    if read.fault:
        return read.fault
    try:
        found = repeat_figures.analyse(n, ms)
    except Unusable as reason:
        return str(reason)
    if len(ms) < LEAST_TOKENS:
        sweep = found.figures["shape"] == repeat_figures.SWEEP
        return f"only {plural(len(ms), 'point' if sweep else 'token')}; a line needs {LEAST_TOKENS}"
    return found


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


def _theory(model: str | None, machine: str | None, units: Units) -> Theory | None:
    if model is None and machine is None:
        return None
    if model is None or machine is None:
        raise Mistake("--model and --machine go together")
    try:
        _, found = described(model, Path(), otherwise="give its config.json")
    except NoModel as why:
        raise Mistake(f"--model: {why}") from why
    (which,) = theory_options.machines_of([machine], options.known()).values()
    return Theory(found.decoder, which, units)


def _bpw(given: list[str]) -> dict[str, float]:
    found = {}
    for text in given:
        variant, equals, bits = text.rpartition("=")
        try:
            found[variant] = float(bits)
        except ValueError:
            equals = ""
        if not equals or not variant or not 0.1 <= found[variant] <= 128:
            raise Mistake(f"--bpw {text}: expected VARIANT=BITS, such as q4_0.gguf=4.62")
    return found

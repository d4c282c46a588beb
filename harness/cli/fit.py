"""`harness fit`: the analysis of a log of any tool, as a table, JSON or a page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from harness.analysis import withheld
from harness.analysis.warnings import Warnings
from harness.api.fit import check_variants, limits
from harness.base.text import printable, shortened, unknown
from harness.cli import NOT_OK, OK, REGRESSION, Mistake, say
from harness.dataset.logs import Row, Theory, analysed, read, study_of_log
from harness.records import ResultsError
from harness.records.foreign.log import Log
from harness.records.foreign.table import Options

OF_WEIGHTS = (Warnings.faster_than_limit, Warnings.first_token_faster_than_limit)
OF_SPEED = (*OF_WEIGHTS, Warnings.slope_faster_than_limit)
GATES = (
    *(warning.name for warning in OF_SPEED),
    *("identical_series", "early_stop", "died", "drift", "repetitions_differ"),
    *withheld.OF_LINE,
)
"""Warnings that `fit` can raise on a log."""


def run(arguments: argparse.Namespace) -> int:
    """Print one row per series, as a table or JSON; write the page, if requested.

    Raises Mistake, and LogError for an unusable log.
    """
    path: Path = arguments.log
    options = Options(arguments.latency_column, arguments.time_column, arguments.group_column, arguments.unit)
    bpw = _bpw(arguments.bpw)
    theory = limits(arguments.model, arguments.machine)
    log = read(path, options)
    check_variants(bpw, log)
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
    if usable and arguments.output:
        code = _draw(path, log, rows, arguments.output)
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


def _draw(path: Path, log: Log, rows: list[Row], page: Path) -> int:
    from harness.report import page as report_page

    try:
        report_page.write(page, study_of_log(path.name, rows, log))
    except ResultsError as refusal:
        say(refusal)
        return NOT_OK
    print(page.absolute())
    return OK


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

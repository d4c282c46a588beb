"""`harness fit`: the analysis of any per-token log, from any tool: columns variant, n, latency_ms."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from harness.analysis import series
from harness.analysis.flags import Flag, Limit, flags, identical
from harness.analysis.line import Floats
from harness.analysis.series import Unusable
from harness.cli import NOT_STARTED, OK
from harness.cli.names import printable, shortened, unknown
from harness.theory import demand, floors, machine_names, names
from harness.theory.machines import Machine
from harness.theory.names import NotUnderstood
from harness.theory.shapes import Shape
from harness.theory.units import UNITS, Units

COLUMNS = ("variant", "n", "latency_ms")
Row = dict[str, Any]


class Mistake(ValueError):
    """The command line or the file makes no sense; the message is one sentence."""


def run(arguments: argparse.Namespace) -> int:
    """Print one object per variant, as a table or JSON. A mistake is one sentence and exit code 2."""
    try:
        bpw = _bpw(arguments.bpw)
        theory = _theory(arguments.model, arguments.machine, UNITS[arguments.units])
        variants = _read(arguments.series)
        if strangers := bpw.keys() - variants.keys():
            raise Mistake(unknown("variant", min(strangers), variants))
    except Mistake as mistake:
        print(f"harness: {mistake}", file=sys.stderr)
        return NOT_STARTED
    rows = analysed(variants, theory, bpw)
    if arguments.json:
        print(json.dumps(rows, indent=1, allow_nan=False))
    else:
        from harness.report import fits

        fits.show(rows)
    return OK


class Theory:
    """A model on a machine: what its ceiling allows at some bits per weight."""

    def __init__(self, shape: Shape, machine: Machine, units: Units) -> None:
        self._shape, self._units = shape, units
        self._ceiling = floors.Ceiling(machine.bandwidth_bytes_per_s * units.giga / 1e9, machine.flops)

    def limit(self, bpw: float | None) -> Limit:
        """B is 0 where the bits per weight are not known."""
        asked = demand.of_bits(self._shape, bpw or 16, norms=self._units.norms)
        W = floors.W_tokens_per_s(asked, self._ceiling)
        slope_ms = 1e3 / W if W else None
        B_ms = floors.B_s(asked, self._ceiling) * 1e3 if bpw else 0.0
        return Limit(B_ms + (slope_ms or 0) * self._units.first_token_in_B * bool(bpw), slope_ms)


def analysed(
    variants: dict[str, tuple[Floats, Floats]], theory: Theory | None, bpw: dict[str, float]
) -> list[Row]:
    """A row per variant, in the order of the file; one that is no series says why in `unusable`."""
    cut = {name: series.without_end(n, ms) for name, (n, ms) in variants.items()}
    same = identical({name: ms for name, (_, ms, _) in cut.items() if len(ms) > 1})
    longest = max((len(ms) for _, ms, _ in cut.values()), default=0)
    rows = []
    for name, (n, ms, died) in cut.items():
        bits = bpw.get(name)
        limit = theory.limit(bits) if theory else None
        row: Row = {"variant": printable(name), "unusable": None, "bpw": bits}
        try:
            found = series.analyse(n, ms)
        except Unusable as reason:
            rows.append(row | _unusable(str(reason), theory is not None))
            continue
        raised = flags(found, limit, longest)
        if died is not None:
            raised.append(Flag("died", f"zeros from n = {died} on, taken as its end", spoils=None))
        raised += [same[name]] if name in same else []
        row |= series.row(found) | {"flags": [flag.row() for flag in raised]}
        rows.append(row | (_against(row, limit) if limit else {}))
    return rows


def _against(row: Row, limit: Limit) -> Row:
    """The limit beside what was measured; ratios are shares of the ceiling that were reached."""
    B, W, bits = row["B_ms"], row["W_tokens_per_ms"], row["bpw"]
    B_share, W_share = limit.shares(B, W, row["W_identifiable"])
    return {
        "B_theory_ms": limit.B_ms or None,
        "W_theory": limit.W_tokens_per_ms,
        "B_ratio": B_share,
        "W_ratio": W_share,
        "B_as_w16_ms": B * 16 / bits if B is not None and bits else None,
    }


def _unusable(reason: str, with_theory: bool) -> Row:
    empty = series.row(series.Analysis(n_tokens=0)) | {"n_tokens": None}
    theory = dict.fromkeys(("B_theory_ms", "W_theory", "B_ratio", "W_ratio", "B_as_w16_ms"))
    return empty | {"unusable": reason, "flags": []} | (theory if with_theory else {})


def _read(path: Path) -> dict[str, tuple[Floats, Floats]]:
    """Position and latency by variant, in the order of their first rows. Raises Mistake."""
    import pandas

    try:
        table = pandas.read_csv(path, dtype=str, keep_default_na=False)
    except FileNotFoundError:
        raise Mistake(f"{path}: no such file") from None
    except (OSError, EOFError) as refusal:
        raise Mistake(f"{path}: cannot be read: {refusal}") from refusal
    except (ValueError, pandas.errors.ParserError) as damage:
        raise Mistake(
            f"{path}: is no CSV file: {str(damage).splitlines()[0] if str(damage) else damage}"
        ) from damage
    if missing := [name for name in COLUMNS if name not in table]:
        has = ", ".join(printable(str(name)) for name in table.columns[:8])
        raise Mistake(f"{path}: lacks the column {missing[0]}; it has {has}")
    if extra := [printable(str(name)) for name in table.columns if name not in COLUMNS]:
        print(f"harness: {path}: columns not used: {', '.join(extra[:8])}", file=sys.stderr)
    if table.empty:
        raise Mistake(f"{path}: has no rows")
    numbers = {name: pandas.to_numeric(table[name], errors="coerce") for name in COLUMNS[1:]}
    found = {}
    for name, rows in table.groupby("variant", sort=False).groups.items():
        n, ms = (numbers[column].loc[rows].to_numpy(dtype=float) for column in COLUMNS[1:])
        found[str(name)] = n, ms
    return found


def _theory(model: str | None, machine: str | None, units: Units) -> Theory | None:
    if model is None and machine is None:
        return None
    if model is None or machine is None:
        raise Mistake("--model and --machine go together")
    try:
        shape = names.model(model).shape
    except NotUnderstood as why:
        raise Mistake(why.sentence("model", shortened(model))) from why
    try:
        return Theory(shape, machine_names.one(machine, any_size=True), units)
    except NotUnderstood as why:
        raise Mistake(why.sentence("machine", shortened(machine))) from why


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

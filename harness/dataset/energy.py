"""What the user adds to energy: the price of a kWh, and the log of a wall meter.

A meter's log is aligned to tokens by the wall clock: a record has the UTC time at which its generation began,
so the clocks of the meter and of the machine must agree.
"""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import cast

import numpy as np

from harness.analysis import device_energy, sensors
from harness.analysis.columns import Cell, EnergySpent, Repeat
from harness.analysis.figures import BY_NAME, of_section, pooled
from harness.base import bounds
from harness.base.files import read_regular
from harness.dataset import cell_rows
from harness.dataset.study import Study
from harness.records import ResultsError, Stored
from harness.records.token_times import Floats

LATEST_S = 1e11  # of a Unix time in seconds; what is later is in milliseconds
# A meter's line is the mean since the one before: at both ends of a decode up to half an interval is of other
# work. Where an interval is a tenth of the decode, that is 10% of the difference to the idle machine.
LONGEST_GAP = 0.1
SOURCE = "wall meter: the whole machine with its power supply, other processes included"
JOULES_PER_KWH, MILLION = 3.6e6, 1e6
HALF_HOUR = timedelta(minutes=30)
FURTHEST = 28  # half hours between UTC and a zone


def with_energy(study: Study, per_kwh: float | None, log: Path | None) -> Study:
    """Add to all rows the price of the energy of a million tokens, and put a wall meter's figures in place of
    those of counters. `per_kwh`: in any currency. Raises ResultsError as power_log() and _metered() do."""
    if log is not None:
        study = _metered(study, power_log(log))
    if per_kwh is not None:
        rows = [*study.cells, *study.repeats]
        joules = list(map(BY_NAME["joules_per_token"].number, rows))
        if not any(spent is not None for spent in joules):
            why = next((reason for row in rows if (reason := row["energy_reason"])), "no energy was measured")
            study = replace(study, warnings=[*study.warnings, f"no price: {why}"])
        for row, spent in zip(rows, joules, strict=True):
            row["energy_price_per_mtok"] = (
                None if spent is None else spent * MILLION / JOULES_PER_KWH * per_kwh
            )
    return study


@dataclass(frozen=True, eq=False)
class PowerLog:
    """`at_s`: Unix times, which do not fall. `watts`: at each."""

    path: Path
    at_s: Floats
    watts: Floats


def power_log(path: Path) -> PowerLog:
    """A CSV file with the columns `time` (ISO 8601 with its offset from UTC, or a Unix time) and `watts`.

    Raises ResultsError: the file cannot be read, or a line of it is something else.
    """
    try:
        content = read_regular(path, bounds.POWER_LOG_BYTES, links=True)
    except OSError as refusal:
        raise ResultsError(f"{path}: {refusal.strerror}") from refusal
    if content.count(b"\n") > bounds.POWER_LOG_LINES:
        raise ResultsError(f"{path}: more than {bounds.POWER_LOG_LINES:,} lines")
    lines = csv.DictReader(io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline=""))
    at_s, watts = array("d"), array("d")
    try:
        if not {"time", "watts"}.issubset(lines.fieldnames or ()):
            raise ValueError("it must begin with a line that names the columns time,watts")
        for line in lines:
            at_s.append(_unix_s(line["time"] or ""))
            watts.append(_watts(line["watts"] or ""))
            if at_s[-1] < max(at_s[-2:]):
                raise ValueError("its time is before that of the line above")
    except UnicodeDecodeError as refusal:
        raise ResultsError(f"{path}: not a text file in UTF-8") from refusal
    except (ValueError, csv.Error) as refusal:
        raise ResultsError(f"{path}:{lines.line_num}: {refusal}") from refusal
    if len(at_s) < 2:
        raise ResultsError(f"{path}: fewer than two lines with a time and watts")
    return PowerLog(path, np.array(at_s), np.array(watts))


def _unix_s(text: str) -> float:
    text = text.strip()
    try:
        at_s = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text.removesuffix("Z") + "+00:00" * text.endswith("Z"))
        except ValueError:
            raise ValueError(f"{text!r} is no time, as 2026-11-27T10:00:00+01:00 or 1795773600") from None
        if moment.tzinfo is None:
            raise ValueError(
                f"{text} has no offset from UTC, and may be of any zone; write {text}+01:00, or Z for UTC"
            ) from None
        at_s = moment.timestamp()
    if not 0 <= at_s < LATEST_S:  # also where it is not a number
        raise ValueError(f"{text} is no Unix time in seconds")
    return at_s


def _watts(text: str) -> float:
    try:
        watts = float(text)
    except ValueError:
        watts = math.nan
    if not 0 <= watts < math.inf:
        raise ValueError(f"{text!r} is no power in watts")
    return watts


def _metered(study: Study, log: PowerLog) -> Study:
    """The study with the meter's figures alone, as those of counters count something else.

    Raises ResultsError: no record has the time of its tokens, or the log does not cover them.
    """
    decodes = {
        cell_rows.cell_identity(row): at_s
        for row, stored in zip(study.repeats, study.stored, strict=True)
        if (at_s := _token_times(row, stored)) is not None
    }
    if not decodes:
        raise ResultsError(f"{log.path}: no record here says at what time its tokens came: measure anew")
    several = len({row["campaign"] for row in study.repeats if cell_rows.cell_identity(row) in decodes}) > 1
    _check_covered(log, [*decodes.values()], several)
    figures = [
        of_section("energy", _spent(log, decodes.get(cell_rows.cell_identity(row)))) for row in study.repeats
    ]
    repeats = [cast(Repeat, row | metered) for row, metered in zip(study.repeats, figures, strict=True)]
    shown, cells = cell_rows.shown_repeats(repeats), list[Cell]()
    for cell in study.cells:
        repeats_of_cell = shown[cell["content_key"]]
        whole = {**repeats_of_cell[-1], **pooled(repeats_of_cell)}
        cells.append(cast(Cell, cell | {name: whole[name] for name in figures[0]}))
    return replace(study, repeats=repeats, cells=cells)


def _token_times(row: Repeat, stored: Stored) -> Floats | None:
    """The Unix time of each token of a decode; None without two tokens, or where it is not known."""
    began = stored.record.get("timing", {}).get("generate_utc")
    if began is None or row["series"] is None:  # also where its file is damaged
        return None
    during = sensors.timed(stored.record.get("done"), stored.times)
    if during is None or len(during.t_ns) < 2:
        return None
    at_s: Floats = datetime.fromisoformat(began).timestamp() + (during.t_ns - during.start_ns) / 1e9
    return at_s


def _spent(log: PowerLog, at_s: Floats | None) -> EnergySpent:
    """What the meter counted between the first and the last token, which came at these Unix times."""
    if at_s is None:
        return device_energy.no_energy("the record does not say at what time its tokens came", SOURCE)
    first, last = at_s[0], at_s[-1]
    inside = log.at_s[(log.at_s > first) & (log.at_s < last)]
    times = np.array([first, *inside, last])
    window_s = float(last - first)
    if (gap_s := float(np.diff(times).max())) > LONGEST_GAP * window_s:
        why = f"the power log has no line for {gap_s:.3g} s of a decode of {window_s:.3g} s"
        return device_energy.no_energy(f"{why}: it needs one each tenth of it", SOURCE)
    joules = float(np.trapezoid(np.interp(times, log.at_s, log.watts), times))
    counted = device_energy.no_energy(None, SOURCE, window_s)
    return {**counted, "joules": joules, "tokens": len(at_s) - 1}


def _check_covered(log: PowerLog, decodes: Sequence[Floats], several: bool) -> None:
    """Raises ResultsError if the log does not cover the tokens, with the shift by which it would. `several`:
    they are of more than one campaign."""
    began, ended = min(at_s[0] for at_s in decodes), max(at_s[-1] for at_s in decodes)
    from_s, to_s = float(log.at_s[0]), float(log.at_s[-1])
    if from_s <= began and ended <= to_s:
        return
    half_hour_s = HALF_HOUR.total_seconds()
    shifts = sorted(range(-FURTHEST, FURTHEST + 1), key=abs)
    fits = (n for n in shifts if from_s + n * half_hour_s <= began and ended <= to_s + n * half_hour_s)
    hint = "; --campaign latest shows one campaign alone" if several else ""
    if (shift := next(fits, None)) is not None:
        hint = f"; shifted by {shift / 2:+g} h it would: is it of another time zone?"
    raise ResultsError(
        f"{log.path}: from {_utc(from_s)} to {_utc(to_s)} (UTC) it does not cover the decodes here, from"
        f" {_utc(began)} to {_utc(ended)}{hint}"
    )


def _utc(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, timezone.utc):%Y-%m-%d %H:%M:%S}"

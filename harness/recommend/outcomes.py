"""Predictions that were measured later: kept beside the records, and how far off they were so far."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import TypedDict

from harness.analysis.rows import Cell
from harness.recommend.answer import Choice
from harness.recommend.commands import measured_name
from harness.recommend.type_rates import FOLDER

NAME = "outcomes.jsonl"  # in that folder of the results


class Outcome(TypedDict):
    """Tokens per second at the last position of `context`, predicted with its interval, and measured."""

    model: str
    stack: str
    variant: str
    device: str
    context: int
    predicted: float
    low: float
    high: float
    measured: float


def of_choice(choice: Choice, windows: Sequence[Cell], context: int) -> Outcome | None:
    """A prediction beside what was measured at its context, the latest if several; null if nothing was."""
    cell, found = choice.candidate.cell, choice.deep
    wanted = cell.model.name, cell.variant.stack, measured_name(cell)
    mine = [
        row for row in windows if (row["model"], row["stack"], row["variant"]) == wanted and row["depths"]
    ]
    for row in sorted(mine, key=lambda row: row["started_utc"], reverse=True):
        for at in row["depths"]["at"] if row["depths"] else []:
            if at["depth"] == context - 1 and row["status"] == "ok":
                return {
                    "model": wanted[0],
                    "stack": wanted[1],
                    "variant": wanted[2],
                    "device": choice.candidate.traits.device,
                    "context": context,
                    "predicted": found.value,
                    "low": found.low,
                    "high": found.high,
                    "measured": at["tokens_per_s"],
                }
    return None


def sentence(choice: Choice, outcome: Outcome | None) -> str:
    """What came of a prediction."""
    found = choice.deep
    said = f"{choice.title}: predicted {found.value:.3g} tok/s ({found.low:.3g} to {found.high:.3g})"
    if outcome is None:
        return f"{said}, no measurement is ok"
    return f"{said}, measured {outcome['measured']:.3g}: off by {error(outcome):+.1%}"


def error(outcome: Outcome) -> float:
    """Predicted over measured, less 1."""
    return outcome["predicted"] / outcome["measured"] - 1


def keep(results: Path, outcome: Outcome) -> None:
    """Append an outcome."""
    with (results / FOLDER / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")


def so_far(results: Path) -> str | None:
    """The error of all predictions that were measured; null without any. A damaged line does not count."""
    try:
        lines = (results / FOLDER / NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    errors, inside = [], 0
    for line in lines:
        try:
            outcome: Outcome = json.loads(line)
            off, lies_in = abs(error(outcome)), outcome["low"] <= outcome["measured"] <= outcome["high"]
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            continue
        if math.isfinite(off):
            errors.append(off)
            inside += lies_in
    if not errors:
        return None
    return (
        f"of {len(errors)} predictions that were measured, {inside} lie in their interval; median error "
        f"{statistics.median(errors):.1%}, largest {max(errors):.1%}"
    )

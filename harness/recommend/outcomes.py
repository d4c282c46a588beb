"""Predictions that were measured later, stored with the records, and their errors so far."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from harness.analysis.columns import Cell as ColumnsCell
from harness.base.data import RECOMMENDED
from harness.recommend import evidence
from harness.recommend.commands import measured_name
from harness.recommend.evidence import DECODE, how_far_off

if TYPE_CHECKING:
    from harness.dataset.study import Study
from harness.recommend.answer import Choice

HEADING = "predictions"


def with_predictions(study: Study, folders: Iterable[Path]) -> Study:
    """The study with outcomes of predictions that `harness recommend --prove` stored in these results."""
    outcomes = [sentence for folder in folders if (sentence := outcomes_so_far(folder))]
    if not outcomes:
        return study
    errors = [how_far_off(family) for family, phase in evidence.table() if phase == DECODE]
    return replace(study, further_methods={**study.further_methods, HEADING: [*outcomes, *errors]})


NAME = "outcomes.jsonl"  # in the folder RECOMMENDED of the results


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


def outcome_of_choice(choice: Choice, windows: Sequence[ColumnsCell], context: int) -> Outcome | None:
    """Pair a prediction with the latest measurement at its context; None: there is none."""
    cell, predicted = choice.candidate.cell, choice.deep
    names = cell.model.name, cell.variant.stack, measured_name(cell)
    mine = [row for row in windows if (row["model"], row["stack"], row["variant"]) == names and row["depths"]]
    for row in sorted(mine, key=lambda row: row["started_utc"], reverse=True):
        for depth in row["depths"]["at"] if row["depths"] else []:
            if depth["depth"] == context - 1 and row["status"] == "ok":
                return {
                    "model": names[0],
                    "stack": names[1],
                    "variant": names[2],
                    "device": choice.candidate.traits.device,
                    "context": context,
                    "predicted": predicted.value,
                    "low": predicted.low,
                    "high": predicted.high,
                    "measured": depth["tokens_per_s"],
                }
    return None


def outcome_sentence(choice: Choice, outcome: Outcome | None) -> str:
    """Compare a prediction with its measurement."""
    deep = choice.deep
    predicted = f"{choice.title}: predicted {deep.value:.3g} tok/s ({deep.low:.3g} to {deep.high:.3g})"
    if outcome is None:
        return f"{predicted}, no measurement is ok"
    return f"{predicted}, measured {outcome['measured']:.3g}: off by {error(outcome):+.1%}"


def error(outcome: Outcome) -> float:
    """Predicted over measured, less 1."""
    return outcome["predicted"] / outcome["measured"] - 1


def keep_outcome(results: Path, outcome: Outcome) -> None:
    """Append an outcome."""
    with (results / RECOMMENDED / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")


def outcomes_so_far(results: Path) -> str | None:
    """The error of all predictions that were measured; None without any. A damaged line does not count."""
    try:
        lines = (results / RECOMMENDED / NAME).read_text(encoding="utf-8").splitlines()
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

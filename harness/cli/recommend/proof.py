"""`harness recommend --prove`: measure the first of a ranking, and keep how far off the predictions were."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from harness import machine
from harness.cli.exits import NOT_OK, OK, Mistake, say
from harness.cli.inputs import stored
from harness.cli.recommend.inputs import Given
from harness.dataset.gather import Gathered
from harness.recommend import answer, commands, outcomes
from harness.recommend.answer import Choice
from harness.recommend.type_rates import FOLDER


def prove(arguments: argparse.Namespace, given: Given, choices: Sequence[Choice]) -> None:
    """Measure these variants with a short decode and windows up to the context, and append each prediction
    with its outcome. Raises Mistake."""
    from harness.cli import main

    assert given.source.row is not None  # checked before
    folder = arguments.results / FOLDER
    config = folder / f"{given.subject.model.name}.yaml"
    device = "cpu" if choices[0].candidate.traits.family == "cpu" else "cuda"
    cells = [choice.candidate.cell for choice in choices]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(commands.config(cells, given.source.row, device, arguments.context))
    except OSError as refusal:
        raise Mistake(f"{config}: cannot be written: {refusal.strerror}") from refusal
    if main(["run", str(config), "-o", str(arguments.results)]) not in (OK, NOT_OK):
        raise Mistake(f"{config} could not be measured")
    here = machine.facts()["slug"]
    rows = Gathered([*stored(arguments.results)]).cells
    windows = [row for row in rows if row["depths"] and row["machine"] == here]
    for choice in choices:
        outcome = outcomes.of_choice(choice, windows, arguments.context)
        say(outcomes.sentence(choice, outcome))
        if outcome and choice.basis != answer.MEASURED:  # that was no prediction
            outcomes.keep(arguments.results, outcome)

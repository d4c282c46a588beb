"""How fast a MODEL reads a prompt, beside its decode, where that takes little time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness import machine
from harness.campaign import forecast, loaded_model
from harness.config import ConfigError, Experiment, plan
from harness.config.plan import Cell
from harness.config.yaml_text import Document
from harness.models.locate import WeightsError
from harness.report.timed_rows import PROMPT
from harness.theory.decoder import parameters

PASSES = 2
PASS = {"kind": "prefill", "lengths": [PROMPT], "passes": PASSES, "repeats": 1}
# Of a stack that is a server, which answers with a token.
TURN = {"kind": "turns", "first": PROMPT, "turns": 1, "new_tokens": 1, "prefix_cache": [False], "repeats": 1}
BUDGET_S = 60.0  # of a model on a CPU, warm-up included
SLOWEST_FLOPS = 5e9  # of a thread: what is within the budget at this rate is not estimated


def added(made: Document, load: Callable[[Document], Experiment]) -> Document:
    """The config with a prompt of PROMPT tokens beside the decode; as it was where a stack cannot do that, or
    it would take a CPU longer than BUDGET_S, or an unknown time."""
    for workload in (PASS, TURN):
        rows = [*made.data.get("workloads", [{"kind": "decode"}]), workload]
        longer = replace(made, data=made.data | {"workloads": rows})
        try:
            experiment = load(longer)
        except ConfigError:  # of a stack that lacks the room
            continue
        cells = [cell for cell in plan.cells(experiment) if cell.workload.kind == workload["kind"]]
        threads = experiment.protocol.threads or machine.default_threads()
        if not any(cell.impossible(threads) for cell in cells):
            return longer if experiment.device != "cpu" or _within_budget(cells, threads) else made
    return made


def _within_budget(cells: Sequence[Cell], threads: int) -> bool:
    operations = [_operations(cell) for cell in cells]
    if not operations or None in operations:
        return False
    most = max(filter(None, operations))
    if most <= BUDGET_S * SLOWEST_FLOPS * threads:
        return True
    try:
        return most <= BUDGET_S * machine.matrix_rate(threads)["flops_per_s"]
    except machine.ProbeError:
        return False


def _operations(cell: Cell) -> float | None:
    """Of the warm-up and the passes of a cell; None where its model is not known yet."""
    try:
        model: Any = loaded_model.made_of(cell, forecast.local_weights(cell))
    except WeightsError:  # reported by the campaign
        return None
    return 2.0 * (1 + PASSES) * PROMPT * parameters(model) if model else None

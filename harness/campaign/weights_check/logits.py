"""Run a job that computes logits in a cell's own stack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.campaign.repeat import Inputs
from harness.plan import Cell
from harness.results import Draft
from harness.worker import launch
from runners.protocol import Died, Done, Failed

Logits = tuple[NDArray[np.float32], list[int]]
"""Logits (positions, vocabulary), and the positions."""


class NoLogits(RuntimeError):
    """A job ended without logits: `outcome`, and the reason in one sentence."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def logits_of(
    cell: Cell,
    inputs: Inputs,
    ids: list[int],
    windows: Sequence[Sequence[int]],
    seconds: float,
    folder: Path,
    arrays: Path,
) -> tuple[Logits, Draft]:
    """Run a `logits` job. Returns its logits and the facts of Done. `folder`: log; `arrays`: logits.

    Raises NoLogits.
    """
    (first, prompt_tokens), *deeper = windows
    file = arrays / "logits.npy"
    workload = {
        "ids": ids[: windows[-1][1]],
        "prompt_tokens": prompt_tokens,
        "prompt_keep": prompt_tokens - first,
        "windows": [list(window) for window in deeper],
        "seconds": seconds,
    }
    request = inputs.request(cell, "logits", workload, {"logits": str(file)})
    try:
        ended = None
        for event in launch.run_job(request, inputs.interpreter, folder, inputs.timeout_s, inputs.threads):
            ended = event
        if isinstance(ended, (Failed, Died)):
            raise NoLogits(ended.outcome, ended.reason)
        if not isinstance(ended, Done) or not isinstance(ended.facts.get("positions"), list):
            raise NoLogits("error", "worker protocol error: a logits job without positions")
        # Loaded now, because the next job may overwrite the file.
        return (np.load(file), ended.facts["positions"]), ended.facts
    except (OSError, ValueError) as damage:
        raise NoLogits("error", f"the job's logits cannot be read: {damage}") from damage
    except MemoryError as full:
        raise NoLogits("oom", f"the job's logits do not fit the controller's memory: {full}") from full
    finally:
        file.unlink(missing_ok=True)

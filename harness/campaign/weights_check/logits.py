"""Run a job that computes logits in a cell's own stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.campaign.repeat import Inputs
from harness.plan import Cell
from harness.results import Draft
from harness.worker import launch
from runners.protocol import SCORED, Died, Done, Event, Failed, Phase

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
    experts: Path | None = None,
    follow: Path | None = None,
) -> tuple[Logits, Draft]:
    """Run a `logits` job. Returns its logits and the facts of Done. `folder`: log; `arrays`: logits.
    `experts`: for the experts that are chosen; `follow`: those to choose (see runners/experts.py).

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
    files = {"logits": file, "experts": experts, "follow": follow}
    named = {name: str(path) for name, path in files.items() if path}
    request = inputs.request(cell, "logits", workload, named)
    with _readable(file):
        ended = None
        for event in launch.run_job(request, inputs.interpreter, folder, inputs.timeout_s, inputs.threads):
            ended = event
        job_facts = _done(ended)
        if not isinstance(job_facts.get("positions"), list):
            raise NoLogits("error", "worker protocol error: a logits job without positions")
        # Loaded now, because the next job may overwrite the file.
        return (np.load(file), job_facts["positions"]), job_facts


def windows_of(
    cell: Cell,
    inputs: Inputs,
    windows: Sequence[Sequence[int]],
    keep: int,
    folder: Path,
    arrays: Path,
    each: Callable[[int, NDArray[np.float32]], None],
) -> Draft:
    """Run a `score` job: calls `each` with the number of a window (from 0) and its logits after its last
    `keep` ids, one window at a time. Returns the facts of Done. `folder`: log; `arrays`: logits.

    Raises NoLogits, and what `each` raises.
    """
    file, ended, number = arrays / "logits.npy", None, 0
    workload: dict[str, object] = {"windows": [list(ids) for ids in windows], "keep": keep}
    request = inputs.request(cell, "score", workload, {"logits": str(file)})
    with _readable(file):
        for event in launch.run_job(request, inputs.interpreter, folder, inputs.timeout_s, inputs.threads):
            ended = event
            if isinstance(event, Phase) and event.name == SCORED:
                logits = np.load(file)
                if logits.ndim != 2 or len(logits) != keep or number == len(windows):
                    raise NoLogits("error", "worker protocol error: other windows than requested")
                each(number, logits)
                number += 1
        job_facts = _done(ended)
        if number != len(windows):
            raise NoLogits("error", "worker protocol error: a score job without all of its windows")
        return job_facts


def _done(ended: Event | Died | None) -> Draft:
    """The facts of the Done that ended a job. Raises NoLogits."""
    if isinstance(ended, (Failed, Died)):
        raise NoLogits(ended.outcome, ended.reason)
    if not isinstance(ended, Done):
        raise NoLogits("error", "worker protocol error: a job of logits without its end")
    return ended.facts


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn what goes wrong with the file of logits into NoLogits, and delete it."""
    try:
        yield
    except (OSError, ValueError) as damage:
        raise NoLogits("error", f"the job's logits cannot be read: {damage}") from damage
    except MemoryError as full:
        raise NoLogits("oom", f"the job's logits do not fit the controller's memory: {full}") from full
    finally:
        file.unlink(missing_ok=True)

"""Score a cell: its logits after fixed tokens, and one record of what they say against a reference.

A check of weights and a score on a text are this job with different verdicts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.base.text import duration
from harness.campaign import repeat, worker
from harness.campaign.repeat import Failure, Inputs, NotReady
from harness.campaign.rounds import Campaign
from harness.campaign.worker import Facts
from harness.config import plan
from harness.config.plan import Cell
from harness.records import Record, Running, Stored
from harness.records.checked import Check
from harness.records.scored import Quality
from harness.records.searched import UntimedEnd
from harness.records.values import plain
from runners.protocol import SCORED

Logits = tuple[NDArray[np.float32], list[int]]
"""Logits (positions, vocabulary), and the positions."""


class NoLogits(Failure):
    """A job ended without logits."""


@dataclass(frozen=True)
class Passage:
    """Token ids, fed from an empty context. `windows`: positions [first, end) whose logits are wanted: those
    at the end of the prompt, which is fed at once, then those that are fed one by one, as in decode."""

    ids: Sequence[int]
    windows: Sequence[Sequence[int]]

    def workload(self, seconds: float | None) -> dict[str, object]:
        """Of a job of logits. `seconds`: compute time; None: no limit."""
        (first, prompt_tokens), *deeper = self.windows
        return {
            "ids": [*self.ids],
            "prompt_tokens": prompt_tokens,
            "prompt_keep": prompt_tokens - first,
            "windows": [[*window] for window in deeper],
            "seconds": seconds,
        }


@dataclass(frozen=True)
class LogitsJob:
    """A cell whose logits are computed in its own stack. `folder`: for the log; `arrays`: for the logits;
    `seconds`: compute time (None: no limit); `say`: shows its progress."""

    cell: Cell
    inputs: Inputs
    folder: Path
    arrays: Path
    seconds: float | None
    say: Callable[[str], None]

    def run(
        self,
        passages: Sequence[Passage],
        add: Callable[[int, Logits], None],
        files: Mapping[str, Path | None] | None = None,
    ) -> Facts:
        """Call `add` with the number of each passage (from 0) and its logits, one passage at a time. Return
        the facts of Done. `files`: `experts`, for those that are chosen, and `follow`, those to choose (see
        runners/workloads/experts.py).

        Raises NoLogits, and what `add` raises.
        """
        path, inputs, count = self.arrays / "logits.npy", self.inputs, len(passages)
        done, began_s = 0, time.monotonic()

        def on_phase(name: str) -> None:
            nonlocal done
            if name.startswith("logits: "):
                self.say(f"{self.cell.id} computes {name}")
            elif name == SCORED:
                if done == count:
                    raise NoLogits("error", "worker protocol error: more logits than requested")
                add(done, self._read(path, passages[done]))
                done += 1
                if count > 1:
                    fed, left = (
                        sum(len(each.ids) for each in part) for part in (passages[:done], passages[done:])
                    )
                    left_s = (time.monotonic() - began_s) / fed * left
                    words = f"{done} of {count} windows, about {duration(left_s)} left"
                    self.say(f"scoring {self.cell.id}: {words}")

        named = {name: str(file) for name, file in {"logits": path, **(files or {})}.items() if file}
        workloads = [each.workload(self.seconds) for each in passages]
        request = inputs.request(self.cell, "logits", workloads, named)
        events = worker.run_job(request, inputs.interpreter, self.folder, inputs.timeout_s, inputs.threads)
        try:
            facts = worker.facts_of(events, on_phase)
        except worker.JobFailed as failure:
            raise NoLogits(failure.outcome, str(failure)) from failure
        except OSError as damage:
            raise NoLogits("error", f"the job's logits cannot be read: {damage}") from damage
        except MemoryError as full:
            raise NoLogits("oom", f"the job's logits do not fit the controller's memory: {full}") from full
        finally:
            path.unlink(missing_ok=True)
        if done != count:
            raise NoLogits("error", "worker protocol error: a job of logits without all of them")
        return facts

    def one(self, passage: Passage, files: Mapping[str, Path | None] | None = None) -> tuple[Logits, Facts]:
        """The logits of one passage, and the facts of Done. Raises NoLogits."""
        found: list[Logits] = []
        facts = self.run([passage], lambda _, logits: found.append(logits), files)
        return found[0], facts

    def _read(self, path: Path, passage: Passage) -> Logits:
        """Raises NoLogits: the file is damaged, or has not the rows of whole windows."""
        positions = [place for first, end in passage.windows for place in range(first, end)]
        counts = list(itertools.accumulate(end - first for first, end in passage.windows))
        try:
            rows = np.load(path)
        except (ValueError, EOFError) as damage:
            raise NoLogits("error", f"the job's logits cannot be read: {damage}") from damage
        if rows.ndim != 2 or len(rows) not in (counts[-1:] if self.seconds is None else counts):
            raise NoLogits("error", "worker protocol error: other logits than requested")
        return rows, positions[: len(rows)]


# The records of scored cells: an earlier one that answers the same, or a new one.


@dataclass(frozen=True)
class Purpose:
    """What logits are computed for. `kind`: of the records, which have the result in `part`; `phase`: the
    part of a run that they name; `status`: of an earlier record, for plan.is_done."""

    kind: Literal["checked", "scored"]
    part: Literal["check", "quality"]
    phase: str
    status: Callable[[Record], str]


def earlier(campaign: Campaign, cell: Cell, purpose: Purpose, result: Check | Quality) -> Stored | None:
    """The latest record of the cell with the same `asked`, for all cells that `result` speaks for, unless it
    has to be made again."""
    options, cells = campaign.options, set(plain(result).get("speaks_for", ()))
    before: list[Stored] = []
    for stored in campaign.checks if purpose.kind == "checked" else campaign.scores:
        stored_result = plain(stored.record)[purpose.part]
        same = stored.record["content_key"] == campaign.keys[cell.id]
        same = same and stored_result["asked"] == result["asked"]
        if same and cells <= set(stored_result.get("speaks_for", ())):
            before.append(stored)
    last = max(before, key=lambda stored: str(stored.record["started_utc"]), default=None)
    is_done = last and plan.is_done(purpose.status(last.record), options.fresh, options.retry_failed)
    return last if is_done else None


def recorded(
    campaign: Campaign,
    cell: Cell,
    purpose: Purpose,
    result: Check | Quality,
    compare: Callable[[Inputs, Path], None],
) -> Stored:
    """A new record of the cell. `compare`: adds to `result`; it gets the inputs, and a folder for the log.
    It may raise Failure."""
    begun, inputs = campaign.begun(cell, kind=purpose.kind), campaign.inputs(cell)
    begun |= plain({purpose.part: result.copy()})
    if purpose.kind == "scored":
        begun["workload"]["prompt_tokens"] = 0
    if isinstance(inputs, Inputs):
        repeat.add_inputs(begun, cell, inputs)

    def work(running: Running, end: UntimedEnd) -> None:
        end |= plain({purpose.part: result})
        if isinstance(inputs, NotReady):
            raise inputs
        compare(inputs, running.folder)

    return repeat.untimed(campaign.folder, begun, purpose.phase, work)

"""The records of scored cells: an earlier one that answers the same, or a new one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.campaign import provenance, repeat
from harness.campaign.opening import Campaign
from harness.campaign.repeat import Inputs, NotReady
from harness.config import plan
from harness.config.plan import Cell
from harness.records import Record, Running, Stored
from harness.records.checked import Check
from harness.records.scored import Quality
from harness.records.searched import UntimedEnd
from harness.records.values import plain


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
        provenance.add_inputs(begun, cell, inputs)

    def work(running: Running, end: UntimedEnd) -> None:
        end |= plain({purpose.part: result})
        if isinstance(inputs, NotReady):
            raise inputs
        compare(inputs, running.folder)

    return repeat.untimed(campaign.folder, begun, purpose.phase, work)

"""Compare every variant's logits with the 16-bit reference of its model: fast but wrong is worthless.

A quantized variant is compared with its own weights, dequantized, as well: see `own`. Writes one record per
variant; finished checks are kept.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import records
from harness.analysis import quality
from harness.campaign import repeat, weights_reference
from harness.campaign.prepare import NotReady, Preparation
from harness.campaign.repeat import Inputs
from harness.campaign.weights_reference import (
    Logits,
    NoLogits,
    NoReference,
    Reference,
    lengthened,
    logits_of,
    windows_of_reference,
)
from harness.config import Experiment, plan
from harness.config.plan import Cell
from harness.records import Draft, Record, Stored
from harness.theory.tensors import Packing

SECONDS = 60.0  # compute time per variant; depths beyond it are skipped
OTHER_IDS = "its token ids for the text differ from the reference's"
NO_WEIGHTS = "its stack loads no weights: there is nothing to compare"


@dataclass(frozen=True)
class Checking:
    """Arguments that all checks of a campaign share. `keys`: content key by cell; `inputs`: the Inputs of a
    cell, or why it cannot run; `folder`: results of this machine; `shared`: fields of every record."""

    experiment: Experiment
    preparation: Preparation
    inputs: Callable[[Cell], Inputs | NotReady]
    keys: Mapping[str, str]
    folder: Path
    shared: Draft
    seconds: float
    fresh: bool
    retry_failed: bool


def check(cells: Sequence[Cell], given: Checking, before: Sequence[Stored]) -> list[Stored]:
    """Check every model and variant at the depths of its longest workload. Returns one record per variant,
    including those of `before` that are kept.

    Raises ResultsError (the results cannot be written), KeyboardInterrupt after an interrupted record.
    """
    found = []
    for group in _groups(cells):
        with tempfile.TemporaryDirectory(prefix="harness-check-") as folder:
            every = [cell for cells in group for cell in cells]
            reference = Reference(every, given.preparation, given.inputs, given.seconds, Path(folder))
            for cell, *others in group:
                speaks_for = sorted(given.keys[each.id] for each in (cell, *others))
                settings = {
                    "windows": reference.windows,
                    "seconds": given.seconds,
                    "reference": reference.identity,
                    "own": weights_reference.identity(cell, given.preparation),
                }
                kept = _kept(before, given.keys[cell.id], settings, speaks_for)
                if kept and plan.is_done(_worth(kept.record), given.fresh, given.retry_failed):
                    found.append(kept)
                    continue
                given.preparation.say(f"checking the weights of {cell.id}")
                found.append(_check(cell, given, reference, {"asked": settings, "speaks_for": speaks_for}))
    return found


def _groups(cells: Sequence[Cell]) -> Iterator[list[list[Cell]]]:
    """Variants that share a reference run; each is a list of the cells of a variant, longest first."""
    variants: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        variants.setdefault((cell.model.name, cell.variant.model_dump_json()), []).append(cell)
    groups: dict[tuple[str, str, Packing | None], list[list[Cell]]] = {}
    for each in variants.values():
        each.sort(key=lambda cell: -cell.tokens)
        first = each[0]
        groups.setdefault((first.model.name, str(windows_of_reference(first)), first.packing), []).append(
            each
        )
    yield from groups.values()


def _kept(before: Sequence[Stored], key: str, settings: Draft, speaks_for: Sequence[str]) -> Stored | None:
    """The latest earlier record of the same check."""
    same = [
        each
        for each in before
        if each.record["content_key"] == key
        and each.record["check"]["asked"] == settings
        and set(speaks_for) <= set(each.record["check"]["speaks_for"])
    ]
    return max(same, key=lambda each: str(each.record["started_utc"]), default=None)


def _worth(record: Record) -> str:
    """The status for plan.is_done. A missing reference is a result, not a failure."""
    return str(record["outcome"]) if quality.agreement_verdict(record)[0] == "failed" else "ok"


def _check(cell: Cell, given: Checking, reference: Reference, check_facts: Draft) -> Stored:
    """Run one variant's job (and the reference's, if this is the first to need it), and write the record."""
    experiment = given.experiment
    begun = given.shared | {"kind": "checked", "check": check_facts}
    begun |= repeat.repeat_fields(cell, 1, given.keys[cell.id], experiment.device, experiment.gpu)
    inputs = given.inputs(cell)
    if isinstance(inputs, Inputs):
        begun |= repeat.input_fields(cell, inputs, begun)
    running = records.begin(given.folder / cell.model.name / cell.id, begun)
    started, interrupted, outcome, reason = time.monotonic(), False, "ok", None
    check = dict(check_facts)
    try:
        if isinstance(inputs, NotReady):
            raise inputs
        if inputs.weights is None:
            raise NoReference(NO_WEIGHTS)
        check |= _compared(cell, given, inputs, reference, running.folder)
    except NoReference as lack:
        outcome, reason = "unavailable", str(lack)
        check["unchecked"] = reason
    except (NoLogits, NotReady) as failure:
        outcome, reason = failure.outcome, str(failure)
    except KeyboardInterrupt:
        interrupted, outcome, reason = True, "interrupted", "stopped by the user"
    stored = running.finish(
        begun
        | {
            "check": check,
            "outcome": outcome,
            "phase": "check",
            "reason": reason,
            "tokens": 0,
            "timing": {"started_utc": begun["started_utc"], "wall_s": time.monotonic() - started},
            "log_tail": records.tail(running.folder / "worker.log") if outcome != "ok" else [],
        }
    )
    if interrupted:
        raise KeyboardInterrupt
    return stored


def _fused(cell: Cell, ran: Draft | None) -> bool:
    options = (ran or {}).get("options") or {}
    return any(options.get(name) not in (None, value) for name, value in cell.header.unfused.items())


def _unfused(
    cell: Cell,
    given: Checking,
    ids: list[int],
    ours: Logits,
    windows: list[list[int]],
    folder: Path,
    arrays: Path,
) -> Draft:
    """Compare fused layers with the same kernel unfused. Returns `unfused`, or the reason why that failed in
    `unfused_failure`."""
    variant = cell.variant.model_copy(
        update={"name": "unfused", "options": cell.variant.options | cell.header.unfused}
    )
    twin = replace(cell, variant=variant)
    inputs = given.inputs(twin)
    if isinstance(inputs, NotReady):
        return {"unfused_failure": str(inputs)}
    try:
        theirs, _ = logits_of(twin, inputs, ids, windows, given.seconds, folder, arrays)
        return {"unfused": quality.compare(*theirs, *ours, windows)}
    except (NoLogits, ValueError, MemoryError) as failure:
        return {"unfused_failure": str(failure)}


def _compared(cell: Cell, given: Checking, inputs: Inputs, reference: Reference, folder: Path) -> Draft:
    """Compare the variant's logits with the reference's, per window, and with those of its own weights.

    Raises NoReference, NoLogits, NotReady.
    """
    ids = given.preparation.prompt(lengthened(cell), inputs.weights)[0]
    if ids[: len(inputs.prompt)] != inputs.prompt:
        raise NoLogits("error", OTHER_IDS)
    theirs, lack, windows, chosen = None, None, reference.windows, None
    if not (mixture := inputs.weights is not None and inputs.weights.is_mixture):
        theirs, lack = _theirs(cell, inputs, reference, ids)
        windows = [window for window in windows if not theirs or window[1] - 1 in theirs[1]]
    experts = reference.folder / "experts.npy" if mixture else None
    arguments = (inputs, ids, windows, given.seconds, folder, reference.folder)
    ours, job_facts = logits_of(cell, *arguments, experts)
    if mixture:  # the reference has to choose the same experts
        heard = job_facts.get("experts") or {}
        chosen = experts if heard.get("tokens") == ours[1][-1] + 1 else None
        theirs, lack = _theirs(cell, inputs, reference, ids, chosen)
    found: Draft = {}
    try:
        if theirs:
            found = {"reference": reference.description, "depths": quality.compare(*theirs, *ours, windows)}
            found |= weights_reference.followed(reference)
        if weights_reference.is_quantized(cell, inputs):
            found |= _own(cell, given, reference, ids, ours, windows, chosen)
    except ValueError as mismatch:
        raise NoLogits("error", str(mismatch)) from mismatch
    except MemoryError as full:
        raise NoLogits("oom", f"the controller ran out of memory comparing logits: {full}") from full
    if lack and "own" not in found:
        raise NoReference(f"{lack}; nor with its own weights: {found['own_failure']}") from lack
    if lack:  # its own weights are all there is to compare with
        found |= {key: found["own"][key] for key in ("reference", "depths", "experts") if key in found["own"]}
    compared, ran = [depth["n"] for depth in found["depths"]], job_facts.get("ran")
    return found | {
        "ran": ran,
        **(_unfused(cell, given, ids, ours, windows, folder, reference.folder) if _fused(cell, ran) else {}),
        "left_out": [window for window in reference.windows if window[1] not in compared],
        "seconds": job_facts.get("seconds"),
        "versions": job_facts.get("versions"),
    }


def _theirs(
    cell: Cell, inputs: Inputs, reference: Reference, ids: list[int], follow: Path | None = None
) -> tuple[Logits | None, NoReference | None]:
    """The reference's logits, or why there are none where the cell's own weights can be compared instead.

    Raises NoReference, NoLogits.
    """
    try:
        theirs = reference.logits(follow)
    except NoReference as missing:
        if not weights_reference.is_quantized(cell, inputs):
            raise
        return None, missing
    if ids != reference.ids:
        raise NoLogits("error", OTHER_IDS)
    return theirs, None


def _own(
    cell: Cell,
    given: Checking,
    reference: Reference,
    ids: list[int],
    ours: Logits,
    windows: Sequence[Sequence[int]],
    chosen: Path | None,
) -> Draft:
    """Compare with the variant's own weights. Returns `own`, or the reason why that failed in
    `own_failure`."""
    given.preparation.say(f"its own weights, dequantized: {cell.id}")
    try:
        original = reference.original()
        arguments = (given.preparation, given.inputs, given.seconds, reference.folder, original)
        return {"own": weights_reference.compare(cell, *arguments, ids, ours, windows, chosen)}
    except weights_reference.FAILURES as failure:
        return {"own_failure": str(failure)}

"""Compare every variant's logits with the 16-bit reference of its model: fast but wrong is worthless.

A quantized variant is compared with its own weights, dequantized, as well: see `own`. Writes one record per
variant; finished checks are kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from harness.analysis import agreement
from harness.base.text import duration
from harness.campaign import repeat, weights_reference
from harness.campaign.repeat import Failure, Inputs, NotReady
from harness.campaign.rounds import Campaign
from harness.campaign.weights_reference import (
    Logits,
    LogitsJob,
    NoLogits,
    NoReference,
    Reference,
    lengthened,
    windows_of_reference,
)
from harness.config import plan
from harness.config.plan import Cell
from harness.records import Record, Running, Stored
from harness.records.kinds import Check, CheckAsked, UntimedEnd
from harness.records.parts import StackFacts, plain
from harness.theory.tensors import Packing

SECONDS = 60.0  # compute time per variant; depths beyond it are skipped
OTHER_IDS = "its token ids for the text differ from the reference's"
NO_WEIGHTS = "its stack loads no weights: there is nothing to compare"


def check(campaign: Campaign, seconds: float) -> list[Stored]:
    """Check every model and variant at the depths of its longest workload, for `seconds` of compute each.
    Returns one record per variant, kept ones included.

    Raises ResultsError (the results cannot be written), KeyboardInterrupt after an interrupted record.
    """
    found = []
    options, keys = campaign.options, campaign.keys
    for group in _groups([cell for cell in campaign.cells if not cell.scores]):
        with tempfile.TemporaryDirectory(prefix="harness-check-") as folder:
            every = [cell for cells in group for cell in cells]
            reference = Reference(every, campaign.preparation, campaign.inputs, seconds, Path(folder))
            for cell, *others in group:
                speaks_for = sorted(keys[each.id] for each in (cell, *others))
                asked: CheckAsked = {
                    "windows": reference.windows,
                    "seconds": seconds,
                    "reference": reference.identity,
                    "own": weights_reference.identity(cell, campaign.preparation),
                }
                kept = _kept(campaign.checks, keys[cell.id], asked, speaks_for)
                if kept and plan.is_done(_worth(kept.record), options.fresh, options.retry_failed):
                    found.append(kept)
                    continue
                campaign.watcher.say(
                    f"checking the weights of {cell.title}: at most {duration(seconds)} of computing, and as"
                    " much for each reference"
                )
                found.append(_check(cell, campaign, reference, {"asked": asked, "speaks_for": speaks_for}))
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


def _kept(before: Sequence[Stored], key: str, asked: CheckAsked, speaks_for: Sequence[str]) -> Stored | None:
    """The latest earlier record of the same check."""
    same = [
        each
        for each in before
        if each.record["content_key"] == key
        and each.record["check"]["asked"] == asked
        and set(speaks_for) <= set(each.record["check"]["speaks_for"])
    ]
    return max(same, key=lambda each: str(each.record["started_utc"]), default=None)


def _worth(record: Record) -> str:
    """The status for plan.is_done. A missing reference is a result, not a failure."""
    return str(record["outcome"]) if agreement.verdict(record)[0] == "failed" else "ok"


def _check(cell: Cell, campaign: Campaign, reference: Reference, check: Check) -> Stored:
    """Run one variant's job (and the reference's, if this is the first to need it), and write the record."""
    begun, inputs = campaign.begun(cell, kind="checked"), campaign.inputs(cell)
    begun["check"] = check.copy()
    if isinstance(inputs, Inputs):
        repeat.add_inputs(begun, cell, inputs)

    def work(running: Running, end: UntimedEnd) -> None:
        end["check"] = check
        try:
            if isinstance(inputs, NotReady):
                raise inputs
            if why := cell.header.cannot.get("logits"):
                raise NoReference(why)
            if inputs.weights is None:
                raise NoReference(NO_WEIGHTS)
            found = check.copy()
            _Comparison(cell, campaign, inputs, reference, running.folder, found).run()
            end["check"] = found
        except NoReference as lack:
            check["unchecked"] = str(lack)
            raise Failure("unavailable", str(lack)) from lack

    return repeat.untimed(campaign.folder, begun, "check", work)


def _fused(cell: Cell, ran: StackFacts | None) -> bool:
    options = plain((ran or {}).get("options") or {})
    return any(options.get(name) not in (None, value) for name, value in cell.header.unfused.items())


@dataclass(frozen=True)
class _Comparison:
    """Compare one variant's logits per window with the reference's, and with its weights' logits.
    Results are added to `check`; `folder`: for the log."""

    cell: Cell
    campaign: Campaign
    inputs: Inputs
    reference: Reference
    folder: Path
    check: Check

    @cached_property
    def _ids(self) -> list[int]:
        return self.campaign.preparation.prompts.ids(lengthened(self.cell), self.inputs.weights)[0]

    def _job(self, cell: Cell, inputs: Inputs) -> LogitsJob:
        seconds, say = self.check["asked"]["seconds"], self.campaign.watcher.say
        return LogitsJob(cell, inputs, self.folder, self.reference.folder, seconds, say)

    def run(self) -> None:
        """Raises NoReference, NoLogits, NotReady."""
        ids, inputs, reference, check = self._ids, self.inputs, self.reference, self.check
        if ids[: len(inputs.prompt)] != inputs.prompt:
            raise NoLogits("error", OTHER_IDS)
        theirs, lack, windows, chosen = None, None, reference.windows, None
        if not (mixture := inputs.weights is not None and inputs.weights.is_mixture):
            theirs, lack = self._theirs()
            windows = [window for window in windows if not theirs or window[1] - 1 in theirs[1]]
        experts = reference.folder / "experts.npy" if mixture else None
        ours, job_facts = self._job(self.cell, inputs).logits(ids, windows, experts)
        if mixture:  # the reference has to choose the same experts
            heard = job_facts.get("experts") or {}
            chosen = experts if heard.get("tokens") == ours[1][-1] + 1 else None
            theirs, lack = self._theirs(chosen)
        try:
            if theirs:
                assert reference.description is not None  # it has run
                check["reference"] = reference.description
                check["depths"] = agreement.compare(*theirs, *ours, windows)
                if followed := weights_reference.followed(reference):
                    check["experts"] = followed
            if weights_reference.is_quantized(self.cell, inputs):
                self._add_own(ours, windows, chosen)
        except ValueError as mismatch:
            raise NoLogits("error", str(mismatch)) from mismatch
        except MemoryError as full:
            raise NoLogits("oom", f"the controller ran out of memory comparing logits: {full}") from full
        if lack and "own" not in check:
            raise NoReference(f"{lack}; nor with its own weights: {check['own_failure']}") from lack
        if lack:  # its own weights are all there is to compare with
            own = check["own"]
            check |= {"reference": own["reference"], "depths": own["depths"]}
            if "experts" in own:
                check["experts"] = own["experts"]
        compared = [depth["n"] for depth in check["depths"]]
        check["ran"] = job_facts.get("ran")
        if _fused(self.cell, check["ran"]):
            self._add_unfused(ours, windows)
        check["left_out"] = [window for window in reference.windows if window[1] not in compared]
        check |= {"seconds": job_facts.get("seconds"), "versions": job_facts.get("versions")}

    def _theirs(self, follow: Path | None = None) -> tuple[Logits | None, NoReference | None]:
        """The reference's logits, or why there are none where the cell's own weights can be compared instead.

        Raises NoReference, NoLogits.
        """
        try:
            theirs = self.reference.logits(follow)
        except NoReference as missing:
            if not weights_reference.is_quantized(self.cell, self.inputs):
                raise
            return None, missing
        if self._ids != self.reference.ids:
            raise NoLogits("error", OTHER_IDS)
        return theirs, None

    def _add_unfused(self, ours: Logits, windows: list[list[int]]) -> None:
        """Compare fused layers with the same kernel unfused. Adds `unfused`, or the reason why that failed as
        `unfused_failure`."""
        header, options = self.cell.header, self.cell.variant.options
        unfused = {"name": "unfused", "options": options | header.unfused}
        twin = replace(self.cell, variant=self.cell.variant.model_copy(update=unfused))
        try:
            inputs = self.campaign.inputs(twin)
            if isinstance(inputs, NotReady):
                raise inputs
            theirs, _ = self._job(twin, inputs).logits(self._ids, windows)
            self.check["unfused"] = agreement.compare(*theirs, *ours, windows)
        except (NoLogits, NotReady, ValueError, MemoryError) as failure:
            self.check["unfused_failure"] = str(failure)

    def _add_own(self, ours: Logits, windows: Sequence[Sequence[int]], chosen: Path | None) -> None:
        """Compare with the variant's own weights. Adds `own`, or the reason why that failed as
        `own_failure`."""
        campaign, reference, seconds = self.campaign, self.reference, self.check["asked"]["seconds"]
        campaign.watcher.say(f"comparing with its own weights, dequantized: {self.cell.title}")

        def dequantized(own: tuple[Path, list[int]]) -> Reference:
            prepared = campaign.preparation, campaign.inputs
            return Reference([self.cell], *prepared, seconds, reference.folder, own)

        try:
            compared = self._ids, ours, windows, chosen
            original = reference.original()
            self.check["own"] = weights_reference.compare(
                self.cell, campaign.preparation, dequantized, original, *compared
            )
        except weights_reference.FAILURES as failure:
            self.check["own_failure"] = str(failure)

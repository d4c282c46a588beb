"""Compare every variant's logits with the 16-bit reference of its model: fast but wrong is worthless.

A quantized variant is compared with its own weights, dequantized, as well: do the kernels compute correctly?
The file's values and settings are then compared with the 16-bit weights, tensor by tensor. Writes one record
per variant; finished checks are kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.analysis import agreement, own_weights
from harness.base.files import CacheError
from harness.base.text import duration
from harness.campaign import scored_records
from harness.campaign.opening import Campaign
from harness.campaign.prepare import Preparation
from harness.campaign.repeat import Failure, Inputs, NotReady
from harness.campaign.scored_records import Purpose
from harness.campaign.scoring import Logits, LogitsJob, NoLogits, Passage
from harness.campaign.weights_reference import NoReference, Reference, digest_of
from harness.campaign.worker import Facts
from harness.config.plan import Cell
from harness.models.locate import WeightsError
from harness.models.make import FULL_TYPES
from harness.records import Record, Stored, checked
from harness.records.checked import Check, CheckAsked
from harness.stacks.header import references
from harness.theory.decoder import dense_fields
from harness.theory.packed_sizes import Packing

SECONDS = 60.0  # compute time per variant; depths beyond it are skipped
OTHER_IDS = "its token ids for the text differ from the reference's"
NO_WEIGHTS = "its stack loads no weights: there is nothing to compare"
OWN_METHOD = 2  # bump when a check against own weights compares something else
OWN_FAILURES = (NoLogits, NoReference, NotReady, CacheError, WeightsError, OSError, ValueError, MemoryError)


def _status(record: Record) -> str:
    """A missing reference is a result, not a failure."""
    return str(record["outcome"]) if agreement.verdict(record)[0] == "failed" else "ok"


CHECK = Purpose("checked", "check", "check", _status)


def check(campaign: Campaign, seconds: float) -> list[Stored]:
    """Check every model and variant at the depths of its longest workload, for `seconds` of compute each.
    Returns one record per variant, kept ones included.

    Raises ResultsError (the results cannot be written), KeyboardInterrupt after an interrupted record.
    """
    found = []
    for variants in _groups([cell for cell in campaign.cells if not cell.scores]):
        with tempfile.TemporaryDirectory(prefix="harness-check-") as folder:
            compared = _Comparison(
                campaign, [cell for cells in variants for cell in cells], seconds, Path(folder)
            )
            found += [compared.stored(cells) for cells in variants]
    return found


def _groups(cells: Sequence[Cell]) -> Iterator[list[list[Cell]]]:
    """Variants that share a reference run; each is a list of the cells of a variant, longest first."""
    variants: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        variants.setdefault((cell.model.name, cell.variant.model_dump_json()), []).append(cell)
    groups: dict[tuple[str, str, Packing | None], list[list[Cell]]] = {}
    for variant in variants.values():
        variant.sort(key=lambda cell: -cell.tokens)
        key = (variant[0].model.name, str(_windows(variant[0])), variant[0].packing)
        groups.setdefault(key, []).append(variant)
    yield from groups.values()


def _windows(cell: Cell) -> list[list[int]]:
    return agreement.windows(int(cell.workload.prompt_tokens or 0), cell.tokens)


@dataclass(frozen=True)
class _Answer:
    """Logits of a reference that has run, of these ids. `experts`: how far the experts that it followed are
    from its own choice; None: it followed none."""

    logits: Logits
    ids: list[int]
    description: checked.Reference
    experts: checked.Experts | None


class _Comparison:
    """Variants of one model that share a reference, whose logits are computed when first needed."""

    def __init__(self, campaign: Campaign, cells: Sequence[Cell], seconds: float, folder: Path) -> None:
        """`folder`: for arrays."""
        self._campaign, self._seconds, self._folder = campaign, seconds, folder
        self._windows = _windows(cells[0])
        self._answer: _Answer | None = None
        self._reference = Reference(cells, campaign.preparation, campaign.inputs, seconds, folder)

    def stored(self, cells: Sequence[Cell]) -> Stored:
        """The record of a variant: an earlier one of the same check, or a new one."""
        campaign, cell = self._campaign, cells[0]
        asked: CheckAsked = {
            "windows": self._windows,
            "seconds": self._seconds,
            "reference": self._reference.identity,
            "own": own_identity(cell, campaign.preparation),
        }
        result: Check = {"asked": asked, "speaks_for": sorted(campaign.keys[each.id] for each in cells)}
        if kept := scored_records.earlier(campaign, cell, CHECK, result):
            return kept
        say = campaign.watcher.say
        say(
            f"checking the weights of {cell.title}: at most {duration(self._seconds)} of computing, and as"
            " much for each reference"
        )

        def compare(inputs: Inputs, folder: Path) -> None:
            try:
                if (why := cell.header.cannot.get("logits")) or inputs.weights is None:
                    raise NoReference(why or NO_WEIGHTS)
                job = LogitsJob(cell, inputs, folder, self._folder, self._seconds, say)
                result.update(self._compared(job, result))
            except NoReference as lack:
                result["unchecked"] = str(lack)
                raise Failure("unavailable", str(lack)) from lack

        return scored_records.recorded(campaign, cell, CHECK, result, compare)

    def _compared(self, job: LogitsJob, check: Check) -> Check:
        """The check with its results. Raises NoReference, NoLogits, NotReady."""
        cell, inputs, windows = job.cell, job.inputs, self._windows
        ids = self._campaign.preparation.prompts.ids(_lengthened(cell), inputs.weights)[0]
        if ids[: len(inputs.prompt)] != inputs.prompt:
            raise NoLogits("error", OTHER_IDS)
        quantized, found = _is_quantized(cell, inputs), check.copy()
        row, lack = None, None
        if not quantized and self._reference.identity is None:
            self._theirs(None)  # raises with the reason
        experts = self._folder / "experts.npy" if inputs.weights and inputs.weights.is_mixture else None
        ours, facts = job.one(Passage(ids[: windows[-1][1]], windows), {"experts": experts})
        # The reference of a mixture has to choose the same experts.
        heard = (facts.get("experts") or {}).get("tokens") == ours[1][-1] + 1
        follow = experts if heard else None
        try:
            try:
                theirs = self._theirs(follow)
                if ids != theirs.ids:
                    raise NoLogits("error", OTHER_IDS)
                row = _row(theirs, ours, windows)
            except NoReference as missing:
                if not quantized:
                    raise
                lack = missing
            if quantized:
                self._add_own(found, cell, ids, ours, follow)
        except ValueError as mismatch:
            raise NoLogits("error", str(mismatch)) from mismatch
        except MemoryError as full:
            raise NoLogits("oom", f"the controller ran out of memory comparing logits: {full}") from full
        row = row or found.get("own")  # own weights may be all there is to compare with
        if row is None:
            raise NoReference(f"{lack}; nor with its own weights: {found['own_failure']}") from lack
        found |= {"reference": row["reference"], "depths": row["depths"]}
        if "experts" in row:
            found["experts"] = row["experts"]
        compared = [depth["n"] for depth in row["depths"]]
        found["left_out"] = [window for window in windows if window[1] not in compared]
        found["ran"] = facts.get("ran")
        return found | {"seconds": facts.get("seconds"), "versions": facts.get("versions")}

    def _theirs(self, follow: Path | None) -> _Answer:
        """The reference's logits; those that follow no experts are computed once.

        Raises NoReference, NoLogits.
        """
        if follow:
            return self._run(self._reference, None, follow)
        self._answer = self._answer or self._run(self._reference)
        return self._answer

    def _run(self, reference: Reference, ids: list[int] | None = None, follow: Path | None = None) -> _Answer:
        """`ids`: in place of those of its tokenizer. `follow`: experts for its routers to choose."""

        def job(job: LogitsJob, why: str) -> _Answer:
            prompts = self._campaign.preparation.prompts
            fed = ids or prompts.ids(_lengthened(job.cell), job.inputs.weights)[0]
            files = {"experts": self._folder / "reference-experts.npy" if follow else None, "follow": follow}
            logits, facts = job.one(Passage(fed[: self._windows[-1][1]], self._windows), files)
            return _Answer(logits, fed, reference.described(job, why, facts), _followed(facts.get("experts")))

        return reference.run(job)

    def _add_own(self, result: Check, cell: Cell, ids: list[int], ours: Logits, follow: Path | None) -> None:
        """Compare with the variant's own weights, dequantized. Adds `own`, or the reason why that failed as
        `own_failure`."""
        preparation = self._campaign.preparation
        self._campaign.watcher.say(f"comparing with its own weights, dequantized: {cell.title}")
        try:
            original, loaded = self._reference.original(), preparation.weights(cell)
            assert loaded is not None  # its logits are there
            settings, values = list[str](), None
            mine, theirs = dense_fields(loaded.decoder), dense_fields(original.decoder if original else None)
            if loaded.format == "gguf" and mine and theirs:
                settings = own_weights.other_settings(mine, theirs)
            with preparation.dequantized(cell, loaded, original) as own:
                if original and not settings and own.format == "hf":
                    values = preparation.differences(cell, own.path, original)
                inputs = self._campaign.inputs
                reference = Reference([cell], preparation, inputs, self._seconds, self._folder, own.path)
                row = _row(self._run(reference, ids, follow), ours, self._windows)
            result["own"] = row | {"settings": settings, "values": values}
        except OWN_FAILURES as failure:
            result["own_failure"] = str(failure)


def _row(theirs: _Answer, ours: Logits, windows: Sequence[Sequence[int]]) -> checked.OwnWeights:
    """Raises ValueError: the vocabularies differ."""
    row: checked.OwnWeights = {
        "settings": [],
        "reference": theirs.description,
        "depths": agreement.compare(*theirs.logits, *ours, windows),
    }
    if theirs.experts:
        row["experts"] = theirs.experts
    return row


def _lengthened(cell: Cell) -> Cell:
    """The cell with a prompt as long as its workload: the teacher-forced ids, which begin with its prompt."""
    return replace(cell, workload=cell.workload.model_copy(update={"prompt_tokens": cell.tokens}))


def _followed(facts: Facts | None) -> checked.Experts | None:
    """Statistics on experts, from a reference that followed a variant's; None: it followed none."""
    if not facts or "followed" not in facts:
        return None
    theirs = facts["followed"]
    return {
        "experts": facts["experts"],
        "used": facts["used"],
        "chosen": theirs["used"],
        "choices": theirs["choices"],
        "others": theirs["others"],
        "gap": theirs["gap"],
    }


def own_identity(cell: Cell, preparation: Preparation) -> Mapping[str, str | int] | None:
    """Identifies the check against a variant's own weights across campaigns; None for one not quantized."""
    stack, form = references().get("hf"), cell.weights_format
    full = FULL_TYPES if form == "gguf" else (None, *FULL_TYPES)
    cannot = cell.packing or "dequantize" in cell.header.cannot or form not in ("gguf", "hf")
    if stack is None or cannot or cell.quant in full:
        return None
    try:
        return {"method": OWN_METHOD, "lock": digest_of(preparation.interpreter(stack))}
    except NotReady:
        return None


def _is_quantized(cell: Cell, inputs: Inputs) -> bool:
    """Whether its weights as loaded are other than 16 or 32 bits, can be dequantized, and are no packed
    checkpoint's, which is compared with its own weights anyway."""
    stored = inputs.weights.quant if inputs.weights else None
    quant = stored if cell.weights_format == "gguf" else cell.quant or stored
    if cell.packing or "dequantize" in cell.header.cannot:
        return False
    return bool(stored) and quant not in FULL_TYPES

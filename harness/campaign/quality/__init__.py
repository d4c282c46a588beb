"""Score every variant on a text, teacher-forced: perplexity, and the divergence from the 16-bit weights.

Writes one record per variant; finished scores are kept. The reference of a model is computed once.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness import plan, results
from harness.analysis.records import quality as records
from harness.analysis.series import divergence, quality
from harness.analysis.series.divergence import Scores
from harness.campaign import facts, readiness
from harness.campaign.held import made_of
from harness.campaign.opened import Campaign
from harness.campaign.prepare import NotReady
from harness.campaign.quality import kept
from harness.campaign.quality.kept import KeptReference, Made
from harness.campaign.quality.texts import Text, TextError, read
from harness.campaign.repeat import Inputs
from harness.campaign.weights_check.logits import NoLogits, windows_of
from harness.campaign.weights_check.reference import NoReference, Reference
from harness.config import Quality, Variant
from harness.plan import Cell
from harness.results import Draft, Stored
from harness.stacks.header import references

__all__ = ["TextError", "score", "texts_of"]

METHOD = 1  # bump when other positions are scored, or figures mean something else
RANDOM = (
    "random weights: their agreement says nothing of any text (harness check-weights compares their logits)"
)


Add = Callable[[int, divergence.Logits], None]
"""Takes the logits of a window."""

OTHER_TOKENS = "its tokenizer makes other tokens of the text: a KL divergence needs the same tokens"


class _NotFinite(Exception):
    """A window's logits are NaN or infinite after this position; both counted from 1."""

    def __init__(self, window: int, position: int) -> None:
        super().__init__(window, position)
        self.window, self.position = window, position


def texts_of(cells: Sequence[Cell]) -> dict[str, Text]:
    """The texts of the cells that are scored, by their names in the config. Raises TextError."""
    found: dict[str, Text] = {}
    for cell in cells:
        if isinstance(cell.workload, Quality) and cell.workload.text not in found:
            found[cell.workload.text] = read(cell.workload)
    return found


def score(cells: Sequence[Cell], campaign: Campaign, texts: dict[str, Text]) -> list[Stored]:
    """Score cells whose workload is Quality. Returns one record per cell, kept ones included.

    Raises ResultsError (the results cannot be written), KeyboardInterrupt after an interrupted record.
    """
    found = []
    for group in _groups(cells):
        workload = group[0].workload
        assert isinstance(workload, Quality)
        with tempfile.TemporaryDirectory(prefix="harness-quality-") as folder:
            scoring = _Scoring(group, workload, campaign, texts[workload.text], Path(folder))
            found += [scoring.stored(cell) for cell in group]
    return found


def _groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells that share a reference."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.model.name, cell.workload.model_dump_json()), []).append(cell)
    yield from groups.values()


def _unpacked(cell: Cell) -> Cell:
    """The cell whose model's 16-bit weights are the reference: of a packed one, those of the model."""
    if cell.packing is None or (stack := references().get("hf")) is None:
        return cell
    return replace(cell, variant=Variant(stack=stack.stack, name="reference", options=stack.reference or {}))


class _Scoring:
    """The cells of one model and workload: their text, and their reference, computed when first needed."""

    def __init__(
        self, cells: Sequence[Cell], workload: Quality, campaign: Campaign, text: Text, arrays: Path
    ) -> None:
        self._workload, self._campaign, self._text, self._arrays = workload, campaign, text, arrays
        loading = [_unpacked(cell) for cell in cells]
        self._reference = Reference(loading, campaign.preparation, self._inputs, np.inf, arrays)
        self._kept: KeptReference | None = None
        self._ids: list[list[int]] = []

    def _inputs(self, cell: Cell) -> Inputs | NotReady:
        campaign = self._campaign
        return readiness.inputs(cell, campaign.experiment, campaign.preparation, campaign.device)

    def stored(self, cell: Cell) -> Stored:
        """The record of a cell: an earlier one of the same score, or a new one."""
        campaign = self._campaign
        key, options = campaign.keys[cell.id], campaign.options
        asked = {"method": METHOD, "text": self._text.sha256, "reference": self._reference.identity}
        before = [
            each
            for each in campaign.scores
            if each.record["content_key"] == key and each.record["quality"]["asked"] == asked
        ]
        last = max(before, key=lambda each: str(each.record["started_utc"]), default=None)
        if last and plan.is_done(records.verdict(last.record).status, options.fresh, options.retry_failed):
            campaign.watcher.say(f"{cell.id} has already been scored")
            return last
        campaign.watcher.say(f"scoring {cell.id}")
        return self._scored(cell, asked)

    def _scored(self, cell: Cell, asked: Draft) -> Stored:
        campaign = self._campaign
        begun = campaign.shared | {"kind": "scored", "quality": {"asked": asked}}
        experiment = campaign.experiment
        begun |= facts.of_repeat(cell, 1, campaign.keys[cell.id], experiment.device, experiment.gpu)
        begun["workload"] |= {"prompt_tokens": 0}
        inputs = self._inputs(cell)
        if isinstance(inputs, Inputs):
            begun |= facts.of_inputs(cell, inputs, begun)
        running = results.begin(campaign.folder / cell.model.name / cell.id, begun)
        started, interrupted, outcome, reason = time.monotonic(), False, "ok", None
        found: Draft = {"asked": asked}
        try:
            if isinstance(inputs, NotReady):
                raise inputs
            self._compare(cell, inputs, running.folder, found)
        except _NotFinite as where:
            found["not_finite"] = {"window": where.window, "position": where.position}
        except NoReference as lack:
            outcome, reason = "unavailable", str(lack)
        except (NoLogits, NotReady) as failure:
            outcome, reason = failure.outcome, str(failure)
        except KeyboardInterrupt:
            interrupted, outcome, reason = True, "interrupted", "stopped by the user"
        ending: Draft = {
            "quality": found,
            "outcome": outcome,
            "reason": reason,
            "phase": "score",
            "tokens": 0,
        }
        wall_s = time.monotonic() - started
        ending["timing"] = {"started_utc": begun["started_utc"], "wall_s": wall_s}
        ending["log_tail"] = results.tail(running.folder / "worker.log") if outcome != "ok" else []
        stored = running.finish(begun | ending)
        if interrupted:
            raise KeyboardInterrupt
        return stored

    def _compare(self, cell: Cell, inputs: Inputs, folder: Path, found: Draft) -> None:
        """Score the windows, and add what is found. Raises NoReference, NoLogits, NotReady, _NotFinite."""
        if inputs.weights is None:
            raise NotReady("unavailable", "its stack loads no weights: there is no text model to score")
        if inputs.weights.synthetic:
            raise NotReady("refused", RANDOM)
        ids, total = self._ids_of(cell, inputs)
        found["text"] = {
            "file": str(self._text.path),
            "sha256": self._text.sha256,
            "license": self._text.license,
            "tokens": total,
            "ids_sha256": hashlib.sha256(np.concatenate(ids).astype("<i8").tobytes()).hexdigest(),
        }
        if self._ids and ids != self._ids:
            raise NotReady("refused", OTHER_TOKENS)
        self._ids = ids
        reference = self._kept = self._kept or self._reference.run(self._kept_reference)
        scores: list[Scores] = []

        def add(number: int, logits: divergence.Logits) -> None:
            rows = _finite(number, logits, self._workload)
            scores.append(divergence.scores(rows, self._targets(ids[number]), reference.window(number)))

        try:
            job_facts = self._windows(cell, inputs, ids, folder, add)
        except divergence.OtherVocabulary as other:
            raise NotReady("refused", f"{other}: a KL divergence needs the same tokens") from other
        nll = [reference.window(number).nll for number in range(len(ids))]
        made = made_of(cell, inputs.weights)
        found |= {
            "windows": self._workload.chunks,
            "n_ctx": self._workload.n_ctx,
            "scored": self._workload.chunks * self._workload.positions,
            "trained_context": made.context if made else None,
            "vocabulary": reference.vocabulary,
            "reference": reference.description,
            "loss_nats": quality.loss_nats(scores),
            **self._figures(scores, nll),
            **{key: job_facts.get(key) for key in ("ran", "versions", "seconds")},
        }

    def _figures(self, scores: list[Scores], nll: list[divergence.Floats]) -> Draft:
        """Of the windows of n_ctx, and of those of each depth."""
        chunks = self._workload.chunks
        parts = [slice(first, first + chunks) for first in range(0, len(scores), chunks)]
        each = [
            {
                "figures": quality.figures(scores[part], nll[part]),
                "means": quality.means(scores[part], nll[part]),
            }
            for part in parts
        ]
        count = {"windows": chunks, "scored": chunks * self._workload.positions}
        deep = zip(self._workload.depths, each[1:], strict=True)
        return each[0] | {"at_depth": [{"depth": depth, **count, **found} for depth, found in deep]}

    def _ids_of(self, cell: Cell, inputs: Inputs) -> tuple[list[list[int]], int]:
        """The ids of the windows, and how many the whole text has. Raises NotReady."""
        assert inputs.weights is not None
        workload = self._workload
        windows = workload.windows()
        ids = self._campaign.preparation.ids_of(cell, inputs.weights, self._text.content, 1 << 62)
        if len(ids) < (needed := max(end for _, end in windows)):
            fits = workload.fitting(len(ids))
            hint = f"chunks: {fits} would fit" if fits else "give a longer text, or shorter windows"
            needs = f"{workload.chunks} windows of {workload.holds} tokens need {needed:,}"
            raise NotReady("refused", f"{self._text.path}: has {len(ids):,} tokens, and {needs}; {hint}")
        return [ids[first:end] for first, end in windows], len(ids)

    def _kept_reference(self, cell: Cell, inputs: Inputs, why: str, log: Path) -> KeptReference:
        """Raises NoLogits, NotReady, CacheError, OSError."""
        ids = self._ids
        if self._ids_of(cell, inputs)[0] != ids:
            raise NotReady("refused", OTHER_TOKENS)

        def make(made: Made) -> Draft:
            def add(number: int, logits: divergence.Logits) -> None:
                rows = _finite(number, logits, self._workload)
                made(number, divergence.kept(rows, self._targets(ids[number])))

            job_facts = self._windows(cell, inputs, ids, log, add)
            return self._reference.described(cell, inputs, why, job_facts)

        known_by = {"reference": self._reference.identity, "options": inputs.options, "ids": ids}
        try:
            return kept.of(known_by, len(ids), make)
        except kept.TooLarge as large:
            raise NotReady("refused", str(large)) from large
        except _NotFinite as where:
            at = f"position {where.position} of window {where.window}"
            raise NoLogits("error", f"NaN or infinite logits at {at}") from where

    def _windows(self, cell: Cell, inputs: Inputs, ids: list[list[int]], log: Path, add: Add) -> Draft:
        # One position more than are scored: llama-perplexity evaluates whole windows too.
        return windows_of(cell, inputs, ids, self._workload.positions + 1, log, self._arrays, add)

    def _targets(self, window: list[int]) -> list[int]:
        """The text's token after each scored position."""
        return window[-self._workload.positions :]


def _finite(number: int, logits: divergence.Logits, workload: Quality) -> divergence.Logits:
    """The logits after the scored positions. Raises _NotFinite."""
    rows = logits[: workload.positions]
    if (place := divergence.first_not_finite(rows)) is not None:
        first, end = workload.windows()[number]
        raise _NotFinite(number + 1, end - first - workload.positions + place)
    return rows

"""Score a text with a cell, against the reference where there is one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from harness.analysis import quality as analysis_quality
from harness.analysis.quality import Scores
from harness.base.files import CacheError, NotFinished
from harness.campaign import forecast, reference_scores, repeat
from harness.campaign.forecast import made_of
from harness.campaign.reference_scores import (
    BadReference,
    GivenReference,
    KeptReference,
    Made,
    Origin,
    Text,
    TextError,
    Tokens,
    read,
    tokens_of,
)
from harness.campaign.repeat import Inputs, NotReady
from harness.campaign.rounds import Campaign
from harness.campaign.weights_reference import LogitsJob, NoLogits, NoReference, Reference, free_bytes
from harness.campaign.worker import Facts
from harness.config import Quality, Variant, plan
from harness.config.plan import Cell
from harness.models.locate import Ready, WeightsError
from harness.records import Running, Stored, kinds
from harness.records.kinds import Figure, UntimedEnd, WindowMeans
from harness.stacks.header import references

# Score the cells of one model and workload against one reference, which is computed or read from a file;
# without one their perplexity alone.


METHOD = 3  # bump when other positions are scored, or figures mean something else
RANDOM = (
    "random weights: their agreement says nothing of any text (harness run --check-weights compares their"
    " logits)"
)
ELSEWHERE = (
    "compute it on a larger machine (harness run --quality --export-reference FILE), and give it here"
    " (--reference FILE)"
)
OTHER_TOKENS = "its tokenizer makes other tokens of the text: a KL divergence needs the same tokens"
OTHER_BOS = (
    "its tokenizer and that of the reference disagree on a BOS in front of a text: a KL divergence needs the"
    " same tokens; score both without it (bos: false)"
)

Add = Callable[[int, analysis_quality.Logits], None]
"""Takes the logits of a window."""


class _NotFinite(Exception):
    """A window's logits are NaN or infinite after this position; both counted from 1."""

    def __init__(self, window: int, position: int) -> None:
        super().__init__(window, position)
        self.window, self.position = window, position


class NotExported(NotFinished):
    """A reference was not written; the message is one sentence."""


def _unpacked(cell: Cell) -> Cell:
    """The cell whose model's 16-bit weights are the reference: of a packed one, those of the model."""
    return cell if cell.packing is None else _as_checkpoint(cell)


def _as_checkpoint(cell: Cell) -> Cell:
    """The cell in the reference stack of checkpoints, if there is one."""
    if (stack := references().get("hf")) is None:
        return cell
    return replace(cell, variant=Variant(stack=stack.stack, name="reference", options=stack.reference or {}))


class Scoring:
    """The cells of one model and workload: their text, and their reference, computed when first needed."""

    def __init__(
        self,
        cells: Sequence[Cell],
        workload: Quality,
        campaign: Campaign,
        text: Text,
        arrays: Path,
        given: GivenReference | None = None,
    ) -> None:
        self._workload, self._campaign, self._text, self._arrays = workload, campaign, text, arrays
        self._cells, self._given = cells, given
        self._kept: KeptReference | None = None
        self._tokens: Tokens | None = None

    @cached_property
    def _reference(self) -> Reference:
        loading = [_unpacked(cell) for cell in self._cells]
        return Reference(loading, self._campaign.preparation, self._campaign.inputs, np.inf, self._arrays)

    def stored(self, cell: Cell) -> Stored:
        """The record of a cell: an earlier one of the same score, or a new one."""
        campaign = self._campaign
        key, options = campaign.keys[cell.id], campaign.options
        reference = {"file": self._given.identity} if self._given else self._reference.identity
        request = {"method": METHOD, "text": self._text.sha256, "reference": reference}
        before = [
            each
            for each in campaign.scores
            if each.record["content_key"] == key and each.record["quality"]["asked"] == request
        ]
        last = max(before, key=lambda each: str(each.record["started_utc"]), default=None)
        if last and plan.is_done(
            analysis_quality.verdict(last.record).status, options.fresh, options.retry_failed
        ):
            campaign.watcher.say(f"{cell.title} has already been scored")
            return last
        campaign.watcher.say(f"scoring {cell.title}")
        return self._scored(cell, request)

    def _scored(self, cell: Cell, request: object) -> Stored:
        campaign = self._campaign
        begun, inputs = campaign.begun(cell, kind="scored"), campaign.inputs(cell)
        begun["quality"] = {"asked": request}
        begun["workload"]["prompt_tokens"] = 0
        if isinstance(inputs, Inputs):
            repeat.add_inputs(begun, cell, inputs)

        def work(running: Running, end: UntimedEnd) -> None:
            found = end["quality"] = {"asked": request}
            try:
                if isinstance(inputs, NotReady):
                    raise inputs
                self._compare(
                    LogitsJob(cell, inputs, running.folder, self._arrays, np.inf, campaign.watcher.say), found
                )
            except _NotFinite as where:
                found["not_finite"] = {"window": where.window, "position": where.position}

        return repeat.untimed(campaign.folder, begun, "score", work)

    def _compare(self, job: LogitsJob, found: kinds.Quality) -> None:
        """Score the windows, and add what is found. Raises NoLogits, NotReady, _NotFinite."""
        cell, inputs = job.cell, job.inputs
        if inputs.weights is None:
            raise NotReady("unavailable", "its stack loads no weights: there is no text model to score")
        if inputs.weights.synthetic:
            raise NotReady("refused", RANDOM)
        tokens = self._tokenized(cell, inputs)
        ids = tokens.windows
        found["bos"] = tokens.bos
        found["text"] = {
            "file": str(self._text.path),
            "sha256": self._text.sha256,
            "license": self._text.license,
            "tokens": tokens.total,
            "ids_sha256": tokens.sha256,
            "special": self._text.special,
            "carriage_returns": self._text.content.count("\r"),
        }
        self._same(tokens)
        reference: KeptReference | None = None
        try:
            reference = self._kept = self._of_file(cell, inputs) if self._given else self._computed()
            found["reference"] = reference.description
        except NoReference as lack:
            found["no_reference"] = str(lack)
        scores: list[Scores] = []

        def add(number: int, logits: analysis_quality.Logits) -> None:
            rows = _finite(number, logits, self._workload)
            kept = reference.window(number) if reference else None
            scores.append(analysis_quality.scores(rows, self._targets(ids[number]), kept))
            found["vocabulary"] = rows.shape[1]

        try:
            job_facts = self._windows(job, ids, add)
        except analysis_quality.OtherVocabulary as other:
            raise NotReady("refused", f"{other}: a KL divergence needs the same tokens") from other
        nll = [reference.window(number).nll for number in range(len(ids))] if reference else None
        made = made_of(cell, inputs.weights)
        (figures, means), *deep = self._figures(scores, nll)
        chunks = self._workload.chunks
        scored = chunks * self._workload.positions
        found |= {
            "windows": chunks,
            "scored": scored,
            "n_ctx": self._workload.n_ctx,
            "trained_context": made.context if made else None,
            "figures": figures,
            "means": means,
            "at_depth": [
                {"depth": depth, "windows": chunks, "scored": scored, "figures": figures, "means": means}
                for depth, (figures, means) in zip(self._workload.depths, deep, strict=True)
            ],
            "ran": job_facts.get("ran"),
            "versions": job_facts.get("versions"),
            "seconds": job_facts.get("seconds"),
        }
        if reference:
            found["loss_nats"] = analysis_quality.loss_nats(scores)

    def _computed(self) -> KeptReference:
        """The model's own reference. Raises NoReference, NoLogits."""
        try:
            return self._kept or self._reference.run(self._kept_reference)
        except NoLogits as failure:
            hint = f"; {ELSEWHERE}" if failure.outcome == "oom" else ""
            raise NoLogits(failure.outcome, f"{failure}{hint}") from failure

    def _of_file(self, cell: Cell, inputs: Inputs) -> KeptReference:
        """The given reference. Raises NotReady: it is of something else, or damaged."""
        assert self._given is not None
        here = [ready for ready in (inputs.weights, _whole(cell)) if ready is not None]
        if wrong := self._given.mismatch(self._origin, here):
            raise NotReady("refused", wrong)
        try:
            return self._kept or self._given.kept()
        except (BadReference, CacheError, reference_scores.TooLarge) as refusal:
            raise NotReady("refused", str(refusal)) from refusal

    @property
    def _origin(self) -> Origin:
        assert self._tokens is not None  # of the cell, or of the reference that has run
        return Origin(self._text.sha256, self._workload, self._tokens.sha256, self._tokens.bos)

    def export(self, path: Path) -> None:
        """Raises BadReference, NotExported."""
        try:
            weights = self._reference.original()
            if weights and weights.synthetic:
                raise NotReady("refused", RANDOM)
            reference = self._computed()
        except (NoReference, NoLogits, NotReady) as failure:
            raise NotExported(str(failure)) from failure
        assert weights is not None  # it has run
        reference_scores.write_reference(path, reference, self._origin, self._cells[0].model.name, weights)

    def _figures(
        self, scores: list[Scores], nll: list[analysis_quality.Floats] | None
    ) -> Iterator[tuple[dict[str, Figure], WindowMeans]]:
        """The figures of the windows of n_ctx, then of each depth."""
        chunks = self._workload.chunks
        for first in range(0, len(scores), chunks):
            part = slice(first, first + chunks)
            given = scores[part], nll and nll[part]
            yield analysis_quality.figures(*given), analysis_quality.means(*given)

    def _tokenized(self, cell: Cell, inputs: Inputs) -> Tokens:
        """Raises NotReady."""
        return tokens_of(cell, inputs, self._campaign.preparation, self._workload, self._text)

    def _same(self, tokens: Tokens) -> None:
        """All cells of a reference score the same tokens. Raises NotReady."""
        known = self._tokens = self._tokens or tokens
        if tokens.bos != known.bos:
            raise NotReady("refused", OTHER_BOS)
        if tokens.windows != known.windows:
            raise NotReady("refused", OTHER_TOKENS)

    def _kept_reference(self, job: LogitsJob, why: str) -> KeptReference:
        """Raises NoLogits, NotReady, CacheError, OSError."""
        cell, inputs = job.cell, job.inputs
        self._same(tokens := self._tokenized(cell, inputs))
        ids = tokens.windows

        def make(made: Made) -> kinds.Reference:
            assert inputs.weights is not None  # tokens_of has used their tokenizer
            free = free_bytes(self._campaign.preparation.device_id)
            if reason := no_room(inputs.weights.sizes["parameters"], inputs.options.get("dtype"), free):
                raise NoLogits("oom", reason)

            def add(number: int, logits: analysis_quality.Logits) -> None:
                rows = _finite(number, logits, self._workload)
                made(number, analysis_quality.kept(rows, self._targets(ids[number])))

            return self._reference.described(job, why, self._windows(job, ids, add))

        known_by = {"reference": self._reference.identity, "options": inputs.options, "ids": ids}
        try:
            return reference_scores.scores_of(known_by, len(ids), make)
        except reference_scores.TooLarge as large:
            raise NotReady("refused", str(large)) from large
        except _NotFinite as where:
            at = f"position {where.position} of window {where.window}"
            raise NoLogits("error", f"NaN or infinite logits at {at}") from where

    def _windows(self, job: LogitsJob, ids: list[list[int]], add: Add) -> Facts:
        # One position more than are scored: llama-perplexity evaluates whole windows too.
        return job.windows(ids, self._workload.positions + 1, add)

    def _targets(self, window: list[int]) -> list[int]:
        """The text's token after each scored position."""
        return window[-self._workload.positions :]


def _whole(cell: Cell) -> Ready | None:
    """The model's 16-bit checkpoint, if it is on this machine."""
    try:
        return forecast.local_weights(_as_checkpoint(cell))
    except WeightsError:
        return None


def no_room(parameters: int, dtype: object, free: int | None) -> str | None:
    """Why a reference's weights do not fit in `free` bytes; null if they do, or if that is not known."""
    needed = parameters * (4 if dtype == "fp32" else 2)
    if dtype is None or free is None or needed <= free:
        return None
    return f"in {dtype} its weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"


def _finite(number: int, logits: analysis_quality.Logits, workload: Quality) -> analysis_quality.Logits:
    """The logits after the scored positions. Raises _NotFinite."""
    rows = logits[: workload.positions]
    if (place := analysis_quality.first_not_finite(rows)) is not None:
        first, end = workload.windows()[number]
        raise _NotFinite(number + 1, end - first - workload.positions + place)
    return rows


# Score every variant on a text, teacher-forced: perplexity, and the divergence from 16-bit weights.
#
# Writes one record per variant; finished scores are kept. The reference of a model is computed once.


__all__ = ["BadReference", "GivenReference", "NotExported", "TextError", "export", "score", "texts_of"]


def texts_of(cells: Sequence[Cell]) -> dict[str, Text]:
    """The texts of the cells that are scored, by their names in the config. Raises TextError."""
    found: dict[str, Text] = {}
    for cell in cells:
        if isinstance(cell.workload, Quality) and cell.workload.text not in found:
            found[cell.workload.text] = read(cell.workload)
    return found


def score(
    cells: Sequence[Cell], campaign: Campaign, texts: dict[str, Text], given: GivenReference | None = None
) -> list[Stored]:
    """Score cells whose workload is Quality, `given` in place of references that are computed. Returns one
    record per cell, kept ones included.

    Raises ResultsError (the results cannot be written), KeyboardInterrupt after an interrupted record.
    """
    found = []
    for group in _groups(cells):
        workload = group[0].workload
        assert isinstance(workload, Quality)
        with tempfile.TemporaryDirectory(prefix="harness-quality-") as folder:
            scoring = Scoring(group, workload, campaign, texts[workload.text], Path(folder), given)
            found += [scoring.stored(cell) for cell in group]
    return found


def export(cells: Sequence[Cell], campaign: Campaign, texts: dict[str, Text], path: Path) -> None:
    """Write the reference of the cells to a file, computed if it is not kept.

    Raises BadReference (they have several, or the file cannot be written), NotExported.
    """
    group, *others = _groups(cells)
    if others:
        raise BadReference(
            f"a file holds one reference, and these cells have {1 + len(others)}: one per model and workload;"
            " choose with --only"
        )
    workload = group[0].workload
    assert isinstance(workload, Quality)
    with tempfile.TemporaryDirectory(prefix="harness-quality-") as folder:
        Scoring(group, workload, campaign, texts[workload.text], Path(folder)).export(path)


def _groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells that share a reference."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.model.name, cell.workload.model_dump_json()), []).append(cell)
    yield from groups.values()

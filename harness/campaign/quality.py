"""Score every variant on a text, teacher-forced: perplexity, and the divergence from 16-bit weights.

Writes one record per variant; finished scores are kept. The reference of a model and workload is computed
once, or read from a file; without one there is the perplexity alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from harness.analysis import quality as analysis_quality
from harness.analysis import quality_figures, token_scores
from harness.analysis.token_scores import Scores
from harness.base.files import CacheError, NotFinished
from harness.campaign import forecast, reference_files, reference_scores, scored_records
from harness.campaign.loaded_model import made_of
from harness.campaign.opening import Campaign
from harness.campaign.quality_text import Text, Tokens, read, tokens_of
from harness.campaign.reference_files import BadReference, GivenReference, Origin
from harness.campaign.reference_scores import KeptReference, TooLarge, Writer
from harness.campaign.repeat import Inputs, NotReady
from harness.campaign.scored_records import Purpose
from harness.campaign.scoring import Logits, LogitsJob, NoLogits, Passage
from harness.campaign.weights_reference import NoReference, Reference, free_bytes
from harness.campaign.worker import Facts
from harness.config import Quality, Variant
from harness.config.plan import Cell
from harness.models.locate import WeightsError
from harness.records import Stored, checked, scored
from harness.stacks.header import references

METHOD = 3  # bump when other positions are scored, or figures mean something else
QUALITY = Purpose("scored", "quality", "score", lambda record: analysis_quality.verdict(record).status)
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


class _NotFinite(Exception):
    """A window's logits are NaN or infinite after this position; both counted from 1."""

    def __init__(self, window: int, position: int) -> None:
        super().__init__(f"position {position} of window {window}")
        self.window, self.position = window, position


class NotExported(NotFinished):
    """A reference was not written; the message is one sentence."""


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
        with tempfile.TemporaryDirectory(prefix="harness-quality-") as folder:
            compared = _Comparison(group, campaign, texts, Path(folder), given)
            found += [compared.stored(cell) for cell in group]
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
    with tempfile.TemporaryDirectory(prefix="harness-quality-") as folder:
        _Comparison(group, campaign, texts, Path(folder)).export(path)


def _groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells that share a reference."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.model.name, cell.workload.model_dump_json()), []).append(cell)
    yield from groups.values()


class _Comparison:
    """The cells of one model and workload: their text, and their reference, computed when first needed."""

    def __init__(
        self,
        cells: Sequence[Cell],
        campaign: Campaign,
        texts: dict[str, Text],
        arrays: Path,
        given: GivenReference | None = None,
    ) -> None:
        workload = cells[0].workload
        assert isinstance(workload, Quality)
        self._workload, self._campaign, self._text = workload, campaign, texts[workload.text]
        self._cells, self._arrays, self._given = cells, arrays, given
        # The reference of packed cells is the model's 16-bit weights.
        loading = [cell if cell.packing is None else _as_checkpoint(cell) for cell in cells]
        self._reference = Reference(loading, campaign.preparation, campaign.inputs, None, arrays)
        self._kept: KeptReference | None = None
        self._tokens: Tokens | None = None

    def stored(self, cell: Cell) -> Stored:
        """The record of a cell: an earlier one of the same score, or a new one."""
        campaign, say = self._campaign, self._campaign.watcher.say
        reference = {"file": self._given.identity} if self._given else self._reference.identity
        asked = {"method": METHOD, "text": self._text.sha256, "reference": reference}
        result: scored.Quality = {"asked": asked}
        if kept := scored_records.earlier(campaign, cell, QUALITY, result):
            say(f"{cell.title} has already been scored")
            return kept
        say(f"scoring {cell.title}")

        def compare(inputs: Inputs, folder: Path) -> None:
            try:
                self._compare(LogitsJob(cell, inputs, folder, self._arrays, None, say), result)
            except _NotFinite as where:
                result["not_finite"] = {"window": where.window, "position": where.position}

        return scored_records.recorded(campaign, cell, QUALITY, result, compare)

    def _compare(self, job: LogitsJob, result: scored.Quality) -> None:
        """Score the windows, and add the result. Raises NoLogits, NotReady, _NotFinite."""
        weights, text, workload = job.inputs.weights, self._text, self._workload
        if weights is None:
            raise NotReady("unavailable", "its stack loads no weights: there is no text model to score")
        if weights.synthetic:
            raise NotReady("refused", RANDOM)
        tokens = tokens_of(job.cell, job.inputs, self._campaign.preparation, workload, text)
        result["bos"] = tokens.bos
        result["text"] = {
            "file": str(text.path),
            "sha256": text.sha256,
            "license": text.license,
            "tokens": tokens.total,
            "ids_sha256": tokens.sha256,
            "special": text.special,
            "carriage_returns": text.content.count("\r"),
        }
        self._expect(tokens)
        reference: KeptReference | None = None
        try:
            reference = self._of_file(job) if self._given else self._computed()
            result["reference"] = reference.description
        except NoReference as lack:
            result["no_reference"] = str(lack)
        scores: list[Scores] = []

        def add(number: int, rows: token_scores.Logits, targets: Sequence[int]) -> None:
            kept = reference.window(number) if reference else None
            scores.append(token_scores.scores(rows, targets, kept))
            result["vocabulary"] = rows.shape[1]

        try:
            facts = self._windows(job, tokens, add)
        except token_scores.OtherVocabulary as other:
            raise NotReady("refused", f"{other}: a KL divergence needs the same tokens") from other
        made, chunks = made_of(job.cell, weights), workload.chunks
        of_depths: list[scored.AtDepth] = []
        for number, depth in enumerate((workload.n_ctx, *workload.depths)):
            numbers = range(number * chunks, (number + 1) * chunks)
            nll = [reference.window(window).nll for window in numbers] if reference else None
            values = [scores[window] for window in numbers], nll
            of_depths.append(
                {
                    "depth": depth,
                    "windows": chunks,
                    "scored": chunks * workload.positions,
                    "figures": quality_figures.figures(*values),
                    "means": quality_figures.means(*values),
                }
            )
        base, *at_depth = of_depths
        result |= {
            "windows": base["windows"],
            "scored": base["scored"],
            "n_ctx": workload.n_ctx,
            "trained_context": made.context if made else None,
            "figures": base["figures"],
            "means": base["means"],
            "at_depth": at_depth,
            "ran": facts.get("ran"),
            "versions": facts.get("versions"),
            "seconds": facts.get("seconds"),
        }
        if reference:
            result["loss_nats"] = quality_figures.loss_nats(scores)

    def _windows(
        self,
        job: LogitsJob,
        tokens: Tokens,
        add: Callable[[int, token_scores.Logits, Sequence[int]], None],
    ) -> Facts:
        """Call `add` with the number of each window, the logits of its scored positions, and the text's token
        after each. Raises NoLogits, _NotFinite."""
        positions = self._workload.positions

        def check(number: int, logits: Logits) -> None:
            rows = logits[0][:positions]
            if (place := token_scores.first_not_finite(rows)) is not None:
                raise _NotFinite(number + 1, len(tokens.windows[number]) - positions + place)
            add(number, rows, tokens.windows[number][-positions:])

        # One position more than are scored: llama-perplexity evaluates whole windows too.
        passages = [Passage(ids, [(len(ids) - positions - 1, len(ids))]) for ids in tokens.windows]
        return job.run(passages, check)

    def _expect(self, tokens: Tokens) -> None:
        """All cells of a reference score the same tokens. Raises NotReady."""
        first = self._tokens = self._tokens or tokens
        if tokens.bos != first.bos:
            raise NotReady("refused", OTHER_BOS)
        if tokens.windows != first.windows:
            raise NotReady("refused", OTHER_TOKENS)

    def _of_file(self, job: LogitsJob) -> KeptReference:
        """The reference that was given. Raises NotReady: it is of something else, or damaged."""
        assert self._given is not None
        try:
            checkpoint = forecast.local_weights(_as_checkpoint(job.cell))
        except WeightsError:
            checkpoint = None
        here = [ready for ready in (job.inputs.weights, checkpoint) if ready is not None]
        if wrong := self._given.mismatch(self._origin, here):
            raise NotReady("refused", wrong)
        try:
            self._kept = self._kept or self._given.kept()
        except (BadReference, CacheError) as refusal:
            raise NotReady("refused", str(refusal)) from refusal
        return self._kept

    def _computed(self) -> KeptReference:
        """The model's own reference. Raises NoReference, NoLogits."""
        try:
            self._kept = self._kept or self._reference.run(self._scores)
        except NoLogits as failure:
            hint = f"; {ELSEWHERE}" if failure.outcome == "oom" else ""
            raise NoLogits(failure.outcome, f"{failure}{hint}") from failure
        return self._kept

    def _scores(self, job: LogitsJob, why: str) -> KeptReference:
        """Raises NoLogits, NotReady, CacheError, OSError."""
        inputs, preparation = job.inputs, self._campaign.preparation
        tokens = tokens_of(job.cell, inputs, preparation, self._workload, self._text)
        self._expect(tokens)

        def make(folder: Path) -> checked.Reference:
            assert inputs.weights is not None  # tokens_of has used their tokenizer
            free = free_bytes(preparation.device_id)
            if reason := no_room(inputs.weights.sizes["parameters"], inputs.options.get("dtype"), free):
                raise NoLogits("oom", reason)
            with Writer(folder, len(tokens.windows)) as writer:
                facts = self._windows(
                    job, tokens, lambda number, *rows: writer.add(number, token_scores.kept(*rows))
                )
            return self._reference.described(job, why, facts)

        known_by = {"reference": self._reference.identity, "options": inputs.options, "ids": tokens.windows}
        try:
            return reference_scores.kept(known_by, make)
        except TooLarge as large:
            raise NotReady("refused", str(large)) from large
        except _NotFinite as where:
            raise NoLogits("error", f"NaN or infinite logits at {where}") from where

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
        reference_files.write_reference(path, reference, self._origin, self._cells[0].model.name, weights)


def _as_checkpoint(cell: Cell) -> Cell:
    """The cell in the reference stack of checkpoints, if there is one."""
    if (stack := references().get("hf")) is None:
        return cell
    return replace(cell, variant=Variant(stack=stack.stack, name="reference", options=stack.reference or {}))


def no_room(parameters: int, dtype: object, free: int | None) -> str | None:
    """Why a reference's weights do not fit in `free` bytes; None if they do, or if that is not known."""
    needed = parameters * (4 if dtype == "fp32" else 2)
    if dtype is None or free is None or needed <= free:
        return None
    return f"in {dtype} its weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"

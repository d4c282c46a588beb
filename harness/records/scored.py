"""`kind: scored`: the quality of one variant on a text, teacher-forced."""

from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.records.checked import Reference
from harness.records.common import Common, Own
from harness.records.parts import StackFacts
from harness.records.values import Count, From0, Number, Positive, Text


class Figure(TypedDict):
    value: Number
    low: Number | None
    """of its 95% interval over windows; null for a maximum, and of a single window"""
    high: Number | None
    standard_error: NotRequired[From0 | None]
    """from the spread of the windows; missing for percentiles"""


class ScoredText(TypedDict):
    file: Text
    sha256: Text
    license: NotRequired[Text | None]
    """of the text that is shipped"""
    tokens: Positive
    """of the whole text"""
    ids_sha256: Text
    """of the ids of the windows, as 64-bit integers, little-endian"""
    special: NotRequired[dict[str, Count]]
    """how often strings come that are special tokens of some tokenizers; they are scored as text"""
    carriage_returns: NotRequired[Count]
    """of lines that end in CRLF; they are scored as they stand"""


class WindowMeans(TypedDict):
    """One value a window."""

    nll: list[Number]
    """nats per token"""
    reference_nll: NotRequired[list[Number]]
    kld: NotRequired[list[Number]]
    top1: NotRequired[list[Number]]


class AtDepth(TypedDict):
    """Windows of one length, of which as many last positions are scored as of those of `n_ctx`."""

    depth: Positive
    """tokens of a window"""
    windows: Positive
    scored: Positive
    """positions"""
    figures: dict[str, Figure]
    """as of the whole score"""
    means: WindowMeans


class NotFinite(TypedDict):
    """The first position whose logits are NaN or infinite, counted from 1."""

    window: Positive
    position: Positive


class Quality(TypedDict):
    asked: Any
    """text, windows and reference: a score with the same `asked` and `content_key` is not repeated"""
    text: NotRequired[ScoredText]
    windows: NotRequired[Count]
    n_ctx: NotRequired[Positive]
    """tokens of a window; those after its first half are scored"""
    scored: NotRequired[Count]
    """positions"""
    bos: NotRequired[Count | None]
    """the id of the BOS that each window begins with; null: none, because the tokenizer asks for none or the
    workload has `bos: false`; missing: none, in records of earlier versions"""
    vocabulary: NotRequired[Positive]
    reference: NotRequired[Reference]
    no_reference: NotRequired[Text]
    """why there are no 16-bit weights to compare with; the figures are then `ppl` alone"""
    loss_nats: NotRequired[From0]
    """by which the mean KLD may be off, because the reference is kept in 16 bits a logit"""
    figures: NotRequired[dict[str, Figure]]
    """`ppl`, `ln_ppl_ratio`, `kld_mean`, `kld_median`, `kld_p90`, `kld_p99`, `kld_p99_9`, `kld_max` (nats),
    `top1`, `top5`, `rms_dp` (shares)"""
    means: NotRequired[WindowMeans]
    at_depth: NotRequired[list[AtDepth]]
    """of the workload's `depths`; they end at the same tokens"""
    trained_context: NotRequired[Positive | None]
    """the longest context of the model's training, in tokens; null: not known"""
    not_finite: NotRequired[NotFinite]
    ran: NotRequired[StackFacts | None]
    """facts of the job: kernels, options"""
    versions: NotRequired[Any]
    seconds: NotRequired[Any]


class OnlyScored(TypedDict):
    """Keys that no other kind has."""

    quality: Quality


class Scored(Common, Own, OnlyScored):
    """A score: no series, and the keys of a measured record up to `conditions`."""


def scored_error(record: Scored) -> str | None:
    """A completed score's missing part, as a clause: figures, or the position that is not finite."""
    quality = record["quality"]
    if record["outcome"] == "ok" and "not_finite" not in quality and not quality.get("figures"):
        return "quality.figures must be there where the outcome is ok"
    return None

"""Quality on a text: perplexity, divergence and agreement with the reference, and whether they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import scipy
from numpy.typing import NDArray

from harness.analysis.agreement import mismatches
from harness.analysis.columns import Identity, Repeat, Score
from harness.analysis.identity import computes, identity, weights
from harness.analysis.line_fit import CONFIDENCE, students_half
from harness.analysis.paired import Change, changes
from harness.analysis.verdicts import USABLE, Verdict
from harness.analysis.warnings import Warnings
from harness.records.kinds import AtDepth, Figure, Quality, Record, WindowMeans

# Logits after each token of a text -> how likely the text is, and how far from a reference. Pure, in slices.
#
# Definitions are those of llama.cpp's llama-perplexity (tools/perplexity/perplexity.cpp).


Floats = NDArray[np.float64]
Logits = NDArray[np.float32]

SLICE_BYTES = 32 << 20  # of float64 at once: a vocabulary of 152,000 has 1.2 MB a position
TOP = 5
# A reference is kept in 16 bits a logit: the root of its distance in nats from the most likely token, so that
# steps are small where probability is. Tokens less likely than 24 nats below count as 24: 152,000 of them
# have less than 6e-6 together.
RANGE_NATS = 24.0
CODES = int(np.iinfo(np.uint16).max)


@dataclass(frozen=True)
class Kept:
    """The reference after each position: `codes` (positions, vocabulary), see nats_below, the ids of the TOP
    most likely tokens, best first, and the text's `nll` in nats, exact."""

    codes: NDArray[np.uint16]
    top: NDArray[np.int64]
    nll: Floats


@dataclass(frozen=True)
class Scores:
    """One value a position. `nll`: -ln of the probability of the text's token. The others compare with the
    reference: `kld` in nats, KL(reference || this); `same_top`: 1 where both rank the same token first;
    `same_top5`: the share of the reference's first five among this one's; `change`: of the probability of the
    text's token; `loss`: by how much `kld` may be off for the rounding of the reference, to first order.
    Without a reference they are empty."""

    nll: Floats
    kld: Floats
    same_top: Floats
    same_top5: Floats
    change: Floats
    loss: Floats


class OtherVocabulary(Exception):
    """Two models have different vocabularies; the message is a clause."""


def first_not_finite(logits: Logits) -> int | None:
    """The first position with a logit that is NaN or infinite; None if there is none."""
    bad = ~np.isfinite(logits).all(axis=1)
    return int(bad.argmax()) if bad.any() else None


def kept(logits: Logits, targets: Sequence[int]) -> Kept:
    """A reference's logits (positions, vocabulary), to be kept. `targets`: the text's token after each."""
    codes, tops, nll = [], [], []
    for rows, wanted in _slices(logits, targets):
        log_p = _log_softmax(rows)
        below = np.minimum(log_p.max(axis=1, keepdims=True) - log_p, RANGE_NATS)
        codes.append(np.rint(CODES * np.sqrt(below / RANGE_NATS)).astype(np.uint16))
        tops.append(_top(rows))
        nll.append(-_of(log_p, wanted))
    return Kept(np.concatenate(codes), np.concatenate(tops), np.concatenate(nll))


def scores(logits: Logits, targets: Sequence[int], reference: Kept | None) -> Scores:
    """Raises OtherVocabulary."""
    if reference is not None and reference.codes.shape != logits.shape:
        ours, theirs = logits.shape[1], reference.codes.shape[1]
        raise OtherVocabulary(f"its vocabulary has {ours} tokens, and the reference's {theirs}")
    parts, at = [], 0
    for rows, wanted in _slices(logits, targets):
        log_q = _log_softmax(rows)
        nll = -_of(log_q, wanted)
        if reference is None:
            nothing = np.empty(0)
            parts.append(Scores(nll, *[nothing] * 5))
            continue
        here = slice(at, at := at + len(rows))
        codes = reference.codes[here].astype(np.float64)
        log_p = _log_softmax(-nats_below(codes))
        half_steps = RANGE_NATS * (codes + 0.25) / CODES**2  # the largest errors of those distances, in nats
        theirs, ours = reference.top[here], _top(rows)
        p, ratio = np.exp(log_p), log_p - log_q
        kld = (p * ratio).sum(axis=1)
        parts.append(
            Scores(
                nll=nll,
                kld=kld,
                same_top=(theirs[:, 0] == ours[:, 0]).astype(float),
                same_top5=(theirs[:, :, None] == ours[:, None, :]).any(axis=2).mean(axis=1),
                change=np.exp(-nll) - np.exp(-reference.nll[here]),
                loss=(p * np.abs(ratio - kld[:, None]) * half_steps).sum(axis=1),
            )
        )
    return Scores(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Scores))
    )


def nats_below(codes: Floats) -> Floats:
    """Decode distances from the most likely token."""
    return RANGE_NATS * (codes / CODES) ** 2


def _slices(logits: Logits, targets: Sequence[int]) -> Iterator[tuple[Logits, NDArray[np.int64]]]:
    step = max(1, SLICE_BYTES // (8 * logits.shape[1]))
    wanted = np.asarray(targets, np.int64)
    for first in range(0, len(logits), step):
        yield logits[first : first + step], wanted[first : first + step]


def _log_softmax(logits: NDArray[np.floating]) -> Floats:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _of(log_p: Floats, wanted: NDArray[np.int64]) -> Floats:
    found: Floats = np.take_along_axis(log_p, wanted[:, None], axis=1)[:, 0]
    return found


def _top(rows: Logits) -> NDArray[np.int64]:
    """The ids of the TOP largest logits of each row, best first; of equal ones the lowest id first."""
    few = np.sort(np.argpartition(-rows, TOP - 1, axis=1)[:, :TOP], axis=1)
    order = np.argsort(-np.take_along_axis(rows, few, axis=1), axis=1, kind="stable")
    found: NDArray[np.int64] = np.take_along_axis(few, order, axis=1)
    return found


# Scores of the windows of a text -> perplexity, KL divergence and agreement, each with its interval. Pure.
#
# Windows, not tokens, are the unit: tokens of one window depend on each other. Intervals are Student's t over
# windows: percentiles of a bootstrap are too narrow for few of them (docs/validation.md).


# KLD in nats per token. Below it, KLD does not order types by their scores at tasks: a rank correlation of
# nil (arXiv 2606.19558).
EQUAL_KLD = 0.02
FEWEST_WINDOWS = 8  # of a verdict: a few windows of a text may all be easy, which their own spread hides
# Of a bootstrap of windows, for the standard error of a percentile (Efron and Tibshirani 1993, chapter 6).
DRAWS, SEED = 1000, 0
DRAWS_AT_ONCE = 100
HIGHEST_NLL = 40.0  # nats; the perplexity of a broken model would be no number
PERCENTILES = {"kld_median": 50.0, "kld_p90": 90.0, "kld_p99": 99.0, "kld_p99_9": 99.9}


def figures(windows: Sequence[Scores], reference_nll: Sequence[Floats] | None) -> dict[str, Figure]:
    """The figures of windows of equal length; those that compare only with a reference's nll.

    `ppl`; `ln_ppl_ratio` to the reference, from the difference in each window; `kld_mean` and its percentiles
    and `kld_max`, in nats; `top1` and `top5`, shares; `rms_dp`, root mean square of the change of the
    probability of the text's tokens. Standard errors are of means over windows.
    """
    found = of_means(means(windows, reference_nll))
    if reference_nll is None:
        return found
    kld = np.array([each.kld for each in windows])
    found |= _percentiles(kld)
    found["kld_max"] = {"value": float(kld.max()), "low": None, "high": None}
    found["top5"] = _figure([each.same_top5.mean() for each in windows], _share)
    found["rms_dp"] = _figure(
        [(each.change**2).mean() for each in windows],
        lambda mean: math.sqrt(max(0.0, mean)),
        lambda value, error: error / (2 * value) if value else 0.0,
    )
    return found


def of_means(found: WindowMeans) -> dict[str, Figure]:
    """Those of the figures that follow from the mean of each window."""
    nll = np.array(found["nll"])
    figures = {
        "ppl": _figure(nll, lambda mean: math.exp(min(mean, HIGHEST_NLL)), lambda value, error: value * error)
    }
    if "reference_nll" in found:
        figures["ln_ppl_ratio"] = _figure(nll - np.array(found["reference_nll"]), lambda mean: mean)
    if "kld" in found:
        figures["kld_mean"] = _figure(found["kld"], lambda mean: max(0.0, mean))
    if "top1" in found:
        figures["top1"] = _figure(found["top1"], _share)
    return figures


def means(windows: Sequence[Scores], reference_nll: Sequence[Floats] | None) -> WindowMeans:
    """The mean of each window, so that two variants can be compared window by window."""
    found: WindowMeans = {"nll": [float(each.nll.mean()) for each in windows]}
    if reference_nll is not None:
        found["reference_nll"] = [float(each.mean()) for each in reference_nll]
        found["kld"] = [float(each.kld.mean()) for each in windows]
        found["top1"] = [float(each.same_top.mean()) for each in windows]
    return found


def change(base: Sequence[float], new: Sequence[float], level: float) -> Change:
    """The change of ln PPL between two scores of the same windows, from the difference of their mean nll in
    each window, with the interval of Student's t at this level. No interval of one window."""
    found = changes({"": np.subtract(new, base).tolist()}, level)[""]
    return replace(found, middle=found.cost)  # the perplexity is of the mean: a broken window counts


def loss_nats(windows: Sequence[Scores]) -> float:
    """The possible error of the mean KLD from a reference stored in 16 bits."""
    return float(np.mean([each.loss for each in windows]))


def _share(mean: float) -> float:
    return min(max(0.0, mean), 1.0)


def _figure(
    values: Sequence[float] | Floats,
    of_mean: Callable[[float], float],
    of_error: Callable[[float, float], float] = lambda value, error: error,
) -> Figure:
    """A function of the mean of the windows' values, with the standard error that `of_error` makes of the
    mean's. One window has no interval."""
    of_windows = np.asarray(values, float)
    mean = float(of_windows.mean())
    if len(of_windows) == 1:
        return {"value": of_mean(mean), "low": None, "high": None, "standard_error": None}
    half, error = students_half(of_windows), float(of_windows.std(ddof=1)) / math.sqrt(len(of_windows))
    found: Figure = {"value": of_mean(mean), "low": of_mean(mean - half), "high": of_mean(mean + half)}
    return found | {"standard_error": of_error(found["value"], error)}


def _percentiles(kld: Floats) -> dict[str, Figure]:
    """Percentiles over positions; their standard errors from draws of whole windows."""
    wanted = list(PERCENTILES.values())
    draws = np.random.default_rng(SEED).integers(len(kld), size=(DRAWS, len(kld)))
    values = np.percentile(kld, wanted)
    drawn = np.concatenate(
        [
            np.percentile(kld[some].reshape(len(some), -1), wanted, axis=1)
            for some in np.array_split(draws, DRAWS // DRAWS_AT_ONCE)
        ],
        axis=1,
    )
    found: dict[str, Figure] = {}
    for name, value, of_draws in zip(PERCENTILES, values, drawn, strict=True):
        found[name] = {"value": max(0.0, float(value)), "low": None, "high": None}
        if len(kld) > 1:
            # The windows drawn differ by less than windows of the text do, by a factor of (n - 1) / n.
            error = float(of_draws.std()) * math.sqrt(len(kld) / (len(kld) - 1))
            half = error * float(scipy.special.stdtrit(len(kld) - 1, (1 + CONFIDENCE) / 2))
            found[name] |= {"low": max(0.0, float(value) - half), "high": max(0.0, float(value) + half)}
    return found


# Scores of a text -> rows: perplexity, KL divergence and agreement, and whether they hold. Pure.


NOT_SCORED = "not scored"
OTHER_TEXT = "other text"  # its scores are of other text or windows than those of most variants


def verdict(record: Record) -> Verdict:
    """The outcome of a score, or `invalid`, with the reasons."""
    if record["outcome"] != "ok":
        reason = record.get("reason")
        return Verdict(str(record["outcome"]), [reason] if reason else [])
    quality = record["quality"]
    if reason := _wrong(record):
        return Verdict("invalid", [reason], next_steps=[Warnings.logits_not_finite.next_step])
    if found := mismatches(record, quality.get("ran")):
        return Verdict("invalid", [f"did not run as requested: {each.detail}" for each in found])
    return Verdict("ok", [])


def _wrong(record: Record) -> str | None:
    """The first position with NaN or infinite logits, as a clause; None: none."""
    if record["outcome"] != "ok" or not (where := record["quality"].get("not_finite")):
        return None
    place = f"position {where['position']} of window {where['window']}"
    return Warnings.logits_not_finite.flag(where=place).detail


def row(record: Record) -> Score:
    """One score as lists and reports show it; `figures` are empty where it is not ok."""
    judged = verdict(record)
    quality = record["quality"]
    reference, text = quality.get("reference"), quality.get("text")
    figures = _figures(quality) if judged.status == "ok" else {}
    return {
        **identity(record),
        "computes": computes(record),
        "kind": record["kind"],
        "workload": record["workload"]["kind"],
        "weights": weights(record),
        "status": judged.status,
        "reasons": judged.reasons,
        "reference": reference["name"] if reference else None,
        "text": text["file"] if text else None,
        "text_sha256": text["sha256"] if text else None,
        "special": text.get("special", {}) if text else {},
        "carriage_returns": text.get("carriage_returns", 0) if text else 0,
        "n_ctx": quality.get("n_ctx"),
        "windows": quality.get("windows"),
        "scored": quality.get("scored"),
        "bos": quality.get("bos"),
        "bos_wanted": record["workload"].get("bos", "bos" in quality),
        "ids_sha256": text["ids_sha256"] if text else None,
        "figures": figures,
        "perplexity": figures["ppl"]["value"] if figures else None,
        "kld_mean": figures["kld_mean"]["value"] if "kld_mean" in figures else None,
        "top1": figures["top1"]["value"] if "top1" in figures else None,
        "no_reference": quality.get("no_reference"),
        "wrong": _wrong(record),
        "means": quality.get("means"),
        "at_depth": [
            {**deep, "figures": _figures(deep)} for deep in (quality.get("at_depth") or []) if figures
        ],
        "trained_context": quality.get("trained_context"),
        "loss_nats": quality.get("loss_nats"),
        "seconds": quality.get("seconds"),
    }


def _figures(scored: Quality | AtDepth) -> dict[str, Figure]:
    """The stored figures, with the intervals of this version where the means of windows give them."""
    figures, of_windows = {**(scored.get("figures") or {})}, scored.get("means")
    for name, known in of_means(of_windows).items() if of_windows else ():
        if name in figures:
            figures[name] = {**figures[name], "low": known["low"], "high": known["high"]}
    return figures


def comparable(scores: Sequence[Score]) -> list[Score]:
    """The scores with figures of one text and windows for each model: those that most variants have, and of
    these the ones of most tokens. A divergence compares with others on the same tokens alone."""
    texts: dict[str, dict[tuple[object, ...], list[Score]]] = {}
    for each in scores:
        if each["figures"]:
            text = each["ids_sha256"], each["n_ctx"], each["windows"]
            texts.setdefault(each["model"], {}).setdefault(text, []).append(each)
    return [
        each
        for of_model in texts.values()
        for each in max(
            of_model.values(), key=lambda found: (len({*map(_variant, found)}), found[0]["scored"] or 0)
        )
    ]


def apply(rows: Sequence[Repeat], scores: Sequence[Score]) -> None:
    """Set the quality of measured rows from the last score of the same model, stack, variant, machine and
    device, with the same packages and weights, on the text and windows that most variants of the model have.
    Rows without one are `not scored` where others of their model are. The speed of a variant with NaN or
    infinite logits is invalid."""
    ordered = sorted(scores, key=lambda each: each["started_utc"])
    of = {_built(each): each for each in comparable(ordered)}
    states = {_built(each): OTHER_TEXT if each["figures"] else each["status"] for each in ordered}
    wrong = {_built(each): f"{each['wrong']} of the scored text" for each in ordered if each["wrong"]}
    models = {score["model"] for score in scores}
    for row in rows:
        if row["kind"] != "measured" or row["model"] not in models:
            continue
        built = _built(row)
        never_ready = states.get((*_variant(row), None), NOT_SCORED)
        row["quality"] = states.get(built, never_ready)
        if found := of.get(built):
            ppl, kld = found["figures"]["ppl"], found["figures"].get("kld_mean")
            row["quality"] = found["status"]
            row["perplexity"], row["perplexity_stderr"] = ppl["value"], ppl.get("standard_error")
            row["kld_mean"], row["top1"] = found["kld_mean"], found["top1"]
            row["kld_mean_ci95"] = [kld["low"], kld["high"]] if kld else None
        if built in wrong and (row["status"] in USABLE or row["disturbed"]):
            row["status"], row["reasons"] = "invalid", [*row["reasons"], wrong[built]]
            row["disturbed"] = None  # another attempt would not help


def _variant(row: Identity) -> tuple[object, ...]:
    return row["model"], row["stack"], row["variant"], row["machine"], row["device"]


def _built(row: Repeat | Score) -> tuple[object, ...]:
    return *_variant(row), row["computes"]

"""Scores of a text -> rows: perplexity, KL divergence and agreement, and whether they hold. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.agreement import mismatches
from harness.analysis.columns import Identity, Repeat, Score
from harness.analysis.identity import computes, identity, weights
from harness.analysis.quality_figures import of_means
from harness.analysis.verdicts import USABLE, Verdict
from harness.analysis.warnings import Warnings
from harness.records.kinds import Record
from harness.records.scored import AtDepth, Figure, Quality

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
    if differing := mismatches(record, quality.get("ran")):
        return Verdict("invalid", [f"did not run as requested: {mismatch.detail}" for mismatch in differing])
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
    for score in scores:
        if score["figures"]:
            text = score["ids_sha256"], score["n_ctx"], score["windows"]
            texts.setdefault(score["model"], {}).setdefault(text, []).append(score)
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
        if score_of := of.get(built):
            ppl, kld = score_of["figures"]["ppl"], score_of["figures"].get("kld_mean")
            row["quality"] = score_of["status"]
            row["perplexity"], row["perplexity_stderr"] = ppl["value"], ppl.get("standard_error")
            row["kld_mean"], row["top1"] = score_of["kld_mean"], score_of["top1"]
            row["kld_mean_ci95"] = [kld["low"], kld["high"]] if kld else None
        if built in wrong and (row["status"] in USABLE or row["disturbed"]):
            row["status"], row["reasons"] = "invalid", [*row["reasons"], wrong[built]]
            row["disturbed"] = None  # another attempt would not help


def _variant(row: Identity) -> tuple[object, ...]:
    return row["model"], row["stack"], row["variant"], row["machine"], row["device"]


def _built(row: Repeat | Score) -> tuple[object, ...]:
    return *_variant(row), row["computes"]

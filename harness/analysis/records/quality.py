"""Scores of a text -> rows: perplexity, KL divergence and agreement, and whether they hold. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.records.agreement import mismatches
from harness.analysis.records.identity import identity, weights
from harness.analysis.records.verdicts import USABLE, Verdict
from harness.analysis.rows import Identity, Repeat, Score
from harness.results.kinds import Record

NOT_SCORED = "not scored"


def verdict(record: Record) -> Verdict:
    """The outcome of a score, or `invalid`, with the reasons."""
    if record["outcome"] != "ok":
        reason = record.get("reason")
        return Verdict(str(record["outcome"]), [reason] if reason else [])
    quality = record["quality"]
    if reason := _wrong(record):
        return Verdict("invalid", [reason])
    if found := mismatches(record, quality.get("ran")):
        return Verdict("invalid", [f"did not run as requested: {each}" for each in found])
    return Verdict("ok", [])


def _wrong(record: Record) -> str | None:
    """The first position whose logits are no numbers, as a clause; null: all are."""
    if record["outcome"] != "ok" or not (where := record["quality"].get("not_finite")):
        return None
    return f"NaN or infinite logits at position {where['position']} of window {where['window']}"


def row(record: Record) -> Score:
    """One score as lists and reports show it; `figures` are empty where it is not ok."""
    judged = verdict(record)
    quality = record["quality"]
    reference, text = quality.get("reference"), quality.get("text")
    figures = (quality.get("figures") or {}) if judged.status == "ok" else {}
    return {
        **identity(record),
        "kind": record["kind"],
        "workload": record["workload"]["kind"],
        "weights": weights(record),
        "status": judged.status,
        "reasons": judged.reasons,
        "reference": reference["name"] if reference else None,
        "text": text["file"] if text else None,
        "text_sha256": text["sha256"] if text else None,
        "n_ctx": quality.get("n_ctx"),
        "windows": quality.get("windows"),
        "scored": quality.get("scored"),
        "ids_sha256": text["ids_sha256"] if text else None,
        "figures": figures,
        "perplexity": figures["ppl"]["value"] if figures else None,
        "kld_mean": figures["kld_mean"]["value"] if figures else None,
        "top1": figures["top1"]["value"] if figures else None,
        "wrong": _wrong(record),
        "means": quality.get("means"),
        "loss_nats": quality.get("loss_nats"),
        "seconds": quality.get("seconds"),
    }


def apply(rows: Sequence[Repeat], scores: Sequence[Score]) -> None:
    """Set the quality of measured rows from the score of the same model, stack, variant, machine and device:
    of several, from that of most tokens, and of these from the last. Rows without one are `not scored` where
    others of their model are. The speed of a variant whose logits are no numbers is invalid."""
    of: dict[tuple[object, ...], Score] = {}
    wrong: dict[tuple[object, ...], str] = {}
    for score in sorted(scores, key=lambda each: (each["scored"] or 0, each["started_utc"])):
        of[_variant(score)] = score
        if score["wrong"]:
            wrong[_variant(score)] = f"{score['wrong']} of the scored text"
    models = {score["model"] for score in scores}
    for row in rows:
        if row["kind"] != "measured" or row["model"] not in models:
            continue
        found, reason = of.get(_variant(row)), wrong.get(_variant(row))
        row["quality"] = found["status"] if found else NOT_SCORED
        if found and found["figures"]:
            ppl, kld = found["figures"]["ppl"], found["figures"]["kld_mean"]
            row["perplexity"], row["perplexity_stderr"] = ppl["value"], ppl.get("standard_error")
            row["kld_mean"], row["kld_mean_ci95"] = kld["value"], [kld["low"], kld["high"]]
            row["top1"] = found["top1"]
        if reason and row["status"] in USABLE:
            row["status"], row["reasons"] = "invalid", [*row["reasons"], reason]
            row["disturbed"] = None  # another attempt would not help


def _variant(row: Identity) -> tuple[object, ...]:
    return row["model"], row["stack"], row["variant"], row["machine"], row["device"]

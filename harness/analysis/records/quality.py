"""Scores of a text -> rows: perplexity, KL divergence and agreement, and whether they hold. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.records.agreement import mismatches
from harness.analysis.records.identity import identity, weights
from harness.analysis.records.verdicts import Verdict
from harness.analysis.rows import Identity, Repeat, Score
from harness.results.kinds import Record


def verdict(record: Record) -> Verdict:
    """The outcome of a score, or `invalid`, with the reasons."""
    if record["outcome"] != "ok":
        reason = record.get("reason")
        return Verdict(str(record["outcome"]), [reason] if reason else [])
    quality = record["quality"]
    if where := quality.get("not_finite"):
        at = f"position {where['position']} of window {where['window']}"
        return Verdict("invalid", [f"NaN or infinite logits at {at}"])
    if found := mismatches(record, quality.get("ran")):
        return Verdict("invalid", [f"did not run as requested: {each}" for each in found])
    return Verdict("ok", [])


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
        "means": quality.get("means"),
        "at_depth": (quality.get("at_depth") or []) if figures else [],
        "trained_context": quality.get("trained_context"),
        "loss_nats": quality.get("loss_nats"),
        "seconds": quality.get("seconds"),
    }


def apply(rows: Sequence[Repeat], scores: Sequence[Score]) -> None:
    """Set perplexity, KLD and top-1 of measured rows, from the score of the same model, stack, variant,
    machine and device; of several, from that of most tokens."""
    of: dict[tuple[object, ...], Score] = {}
    for score in sorted(scores, key=lambda each: each["scored"] or 0):
        if score["figures"]:
            of[_variant(score)] = score
    for row in rows:
        if row["kind"] == "measured" and (found := of.get(_variant(row))):
            row["perplexity"], row["kld_mean"] = found["perplexity"], found["kld_mean"]
            row["top1"] = found["top1"]
            row["perplexity_stderr"] = found["figures"]["ppl"].get("standard_error")


def _variant(row: Identity) -> tuple[object, ...]:
    return row["model"], row["stack"], row["variant"], row["machine"], row["device"]

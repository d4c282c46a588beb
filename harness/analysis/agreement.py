"""Compare a variant's logits with those of the 16-bit reference: is it still the same model? Pure.

A quantized type explains an error of a known size. A larger error means another model. Smaller faults of a
quantized variant show against its own weights: see own_weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import scipy
from numpy.typing import NDArray

from harness.analysis import flags
from harness.analysis.columns import Check, Repeat
from harness.analysis.identity import identity
from harness.analysis.own_weights import (
    CACHE_TYPES,
    allowed_own_weights,
    depths_wrong,
    experts_wrong,
    file_wrong,
    is_free,
    other_count,
    own_weights_wrong,
    too_far,
)
from harness.analysis.requested import other_kernels, other_options
from harness.analysis.traffic import nominal_bits
from harness.analysis.verdicts import USABLE
from harness.analysis.warnings import Flag, Warnings
from harness.base.text import plural
from harness.records.checked import Depth
from harness.records.kinds import Record
from harness.records.parts import StackFacts

Logits = NDArray[np.float32]

WINDOW = 25  # positions compared of the prompt and at each depth, as many as the usual prompt has
DEPTHS = (300, 2_100)  # past llama.cpp's first padding of its cache, and past 2,048, where some caches end

# (bits of the coarsest type, bound): a mean relative error above the bound is another model's. Worst window
# measured at n = 25 to 2,100, on random weights (harsher than trained ones), 2 to 24 layers of qwen1.5-0.5b:
# f16 and f32 0.002, bf16 0.015; 8 bits 0.044; 5 bits 0.19; 4 bits 0.37, fp4 0.42; 3 bits 0.57; 2 bits 0.84.
# Two unrelated models: 1.41, the square root of two. Below 8 bits this finds little else.
WRONG_ABOVE: tuple[tuple[int, float], ...] = ((16, 0.06), (8, 0.15), (5, 0.4), (4, 0.6), (1, 1.1))
FULL_BITS = 16  # or more
REFERENCE = "the 16-bit reference"
NEAR_TIE = 1e-3  # of the spread of a position's logits: below this, rounding decides which token comes first


def windows(prompt_tokens: int, tokens: int) -> list[list[int]]:
    """The windows of positions to compare, each [first, end), counted from 0; they do not overlap.

    WINDOW positions end at the end of the prompt, at each of DEPTHS, at the last depth doubled again and
    again, and at the workload's length. Doubling means that a check cut short by time still reaches half of
    the depth it could have reached. Where two windows would overlap, the workload's own wins.
    """
    ranges = [[max(0, prompt_tokens - WINDOW), prompt_tokens]]
    deepest = [max(prompt_tokens, tokens - WINDOW), tokens]
    doubled = (DEPTHS[-1] << doublings for doublings in itertools.count(1))
    for end in itertools.takewhile(lambda end: end <= deepest[0], itertools.chain(DEPTHS, doubled)):
        if ranges[-1][1] <= end - WINDOW:
            ranges.append([end - WINDOW, end])
    return [*ranges, deepest] if deepest[0] < tokens else ranges


def shown_checks(compared: Sequence[int]) -> list[int]:
    """The compared depths that a table shows: the prompt, DEPTHS and the deepest. `compared`: ascending n."""
    return [n for n in compared if n in (compared[0], *DEPTHS, compared[-1])]


def compare(
    reference: Logits,
    reference_positions: Sequence[int],
    variant: Logits,
    variant_positions: Sequence[int],
    requested: Sequence[Sequence[int]],
) -> list[Depth]:
    """How far a variant's logits are from the reference's: one row per requested window that both cover.

    Logits are float32 of shape (positions, vocabulary). An error is the norm of the difference over the norm
    of the reference. Float64 is used for one position at a time: a row may have 152,000 logits. Raises
    ValueError: the vocabularies or the numbers of rows differ.
    """
    if reference.ndim != 2 or variant.ndim != 2 or reference.shape[1] != variant.shape[1]:
        widths = [str(each.shape[-1]) if each.ndim else "1" for each in (variant, reference)]
        raise ValueError(f"{widths[0]} logits per position, the reference has {widths[1]}")
    places = []
    for logits, positions in ((reference, reference_positions), (variant, variant_positions)):
        if len(logits) != len(positions):
            raise ValueError(f"{len(logits)} rows of logits for {len(positions)} positions")
        places.append({position: row_number for row_number, position in enumerate(positions)})
    errors: list[Depth] = []
    for first, end in requested:
        positions_of_window = range(first, end)
        if all(position in of for position in positions_of_window for of in places):
            rows = [
                (reference[places[0][position]], variant[places[1][position]])
                for position in positions_of_window
            ]
            errors.append(_window(end, rows))
    return errors


def _window(n: int, rows: Sequence[tuple[Logits, Logits]]) -> Depth:
    """One window, from the reference's and the variant's logits at each position; errors are None where
    either side has a position that is not comparable."""
    row: Depth = {
        "n": n,
        "positions": len(rows),
        "not_finite": sum(not np.isfinite(ours).all() for _, ours in rows),
        # A reference of zeros alone compares with nothing.
        "reference_not_finite": sum(not (np.isfinite(theirs).all() and theirs.any()) for theirs, _ in rows),
        "relative_error": None,
        "relative_error_max": None,
        "scale": None,
        "top1_agreement": None,
        "near_ties": None,
        "kl_nats": None,
    }
    if row["not_finite"] or row["reference_not_finite"]:
        return row
    errors, scales, same, tied, kl_nats = np.array([_position(*both) for both in rows]).T
    return row | {
        "relative_error": float(errors.mean()),
        "relative_error_max": float(errors.max()),
        "scale": float(scales.mean()),
        "top1_agreement": float(same.mean()),
        "near_ties": int((tied * (1 - same)).sum()),
        # Rounding may make it negative for equal logits.
        "kl_nats": max(0.0, float(kl_nats.mean())),
    }


def _position(reference: Logits, variant: Logits) -> tuple[float, float, float, float, float]:
    """The relative error at one position, the ratio of the norms, 1 if the same token comes first, 1 if the
    reference's first two nearly tie, and the divergence in nats."""
    theirs, ours = reference.astype(np.float64), variant.astype(np.float64)
    second, first = np.partition(theirs, -2)[-2:]
    log_p, log_q = scipy.special.log_softmax(theirs), scipy.special.log_softmax(ours)
    norm = float(np.linalg.norm(theirs))
    return (
        float(np.linalg.norm(ours - theirs)) / norm,
        float(np.linalg.norm(ours)) / norm,
        float(theirs.argmax() == ours.argmax()),
        float(first - second <= NEAR_TIE * (first - theirs.min())),
        float((np.exp(log_p) * (log_p - log_q)).sum()),
    )


def bits(record: Record) -> int:
    """Bits of the coarsest type requested for a variant's weights or KV cache, from the types' names.

    16 where the reference has the same weights, unpacked.
    """
    if _unpacked(record):
        return 16
    options = record.get("options") or {}
    weights = options.get("quant") or options.get("dtype") or record["model"]["weights"].get("quant")
    named = (weights, *(options.get(key, "f16") for key in CACHE_TYPES))
    return min(nominal_bits(str(name)) or 1 for name in named)


def allowed(record: Record) -> float:
    """The largest mean relative error that the variant's types explain."""
    if _unpacked(record) and record["check"].get("own"):
        return allowed_own_weights(record)
    of = bits(record)
    return next(bound for least, bound in WRONG_ABOVE if of >= least)


def verdict(record: Record) -> tuple[str, str | None]:
    """The result of a check and its reason.

    `agrees`, `wrong`, `failed` (the variant or the reference gave no logits) or `unchecked` (no reference).
    """
    check = record["check"]
    if record["outcome"] != "ok":
        word = "unchecked" if check.get("unchecked") else "failed"
        return word, record.get("reason") or str(record["outcome"])
    if differing := mismatches(record, check.get("ran")):
        return "unchecked", f"did not run as requested: {differing[0].detail}"
    for depth in check["depths"]:
        if depth["not_finite"]:
            many = f"{depth['not_finite']} of {plural(depth['positions'], 'position')} up to n = {depth['n']}"
            return "wrong", Warnings.logits_not_finite.flag(where=many).detail
        if depth["reference_not_finite"]:
            return "unchecked", f"the reference has NaN or infinite logits up to n = {depth['n']}"
    counted = other_count(check.get("experts"), REFERENCE)
    if difference := file_wrong(record) or counted:
        return "wrong", Warnings.weights_disagree.flag(difference=difference).detail
    experts = check.get("experts")
    same = experts_wrong(experts, allowed(record), REFERENCE) or _depths_wrong(record)
    if not (difference := own_weights_wrong(record) or same):
        return "agrees", None
    reference = check.get("reference")
    in_other = not reference or reference.get("stack") != record.get("stack")
    excuses = [flag.detail for flag in flags.rotary_notes(record)] if in_other else []
    if not excuses and is_free(record, check):  # a mixture whose experts the reference could not follow
        unheard = "its stack does not report the experts it chose"
        excuses = [f"{unheard}, and a router near a tie may choose others"]
    if excuses:
        return "unchecked", "; ".join([*excuses, difference])
    return "wrong", Warnings.weights_disagree.flag(difference=difference).detail


def _depths_wrong(record: Record) -> str | None:
    """Why the logits are another model's; None if the types explain the difference."""
    depths, bound = record["check"]["depths"], allowed(record)
    if _unpacked(record):
        return depths_wrong(depths, bound, "its own weights, unpacked")
    if bits(record) == FULL_BITS:
        return depths_wrong(depths, bound, REFERENCE)
    return too_far(depths, bound, REFERENCE, "its types explain")


def mismatches(record: Record, ran: StackFacts | None) -> list[Flag]:
    """Kernels and options of a job of logits that differ from the requested ones."""
    return [*other_kernels(ran), *other_options(record["options"], ran)] if ran else []


def _unpacked(record: Record) -> bool:
    """Whether the reference has the weights of a packed checkpoint, unpacked."""
    reference = record["check"].get("reference")
    return bool(reference and reference.get("unpacked"))


def row(record: Record) -> Check:
    """One check as lists and reports show it. Missing values are None."""
    word, reason = verdict(record)
    check = record["check"]
    reference, own = check.get("reference"), check.get("own")
    return {
        **identity(record),
        "speaks_for": check["speaks_for"],
        "outcome": record["outcome"],
        "verdict": word,
        "reason": reason,
        "reference": reference and reference["name"],
        "unpacked": _unpacked(record),
        "own": own["depths"] if own else [],
        "own_allowed_error": allowed_own_weights(record) if own else None,
        "own_failure": check.get("own_failure"),
        "experts": (own or check).get("experts"),
        "allowed_error": allowed(record) if record["outcome"] == "ok" else None,
        "depths": check.get("depths") or [],
        "left_out_n": [end for _, end in check.get("left_out") or []],
    }


def latest_checks(rows: Sequence[Check]) -> list[Check]:
    """One row per content key, in order of first appearance: the last that finished, else the last."""
    latest: dict[str, Check] = {}
    for check in _ordered(rows):
        latest[check["content_key"]] = check
    return [check for check in rows if latest[check["content_key"]] is check]


def apply_checks(rows: Sequence[Repeat], checks: Sequence[Check]) -> None:
    """Set `weights_check` of measured rows from their latest checks; a `wrong` one makes a row invalid."""
    check_of = {key: row for row in _ordered(checks) for key in row["speaks_for"]}
    for row in rows:
        check = check_of.get(row["content_key"])
        row["weights_check"] = check and check["verdict"]
        if check and check["verdict"] == "wrong":
            row["flags"].append(Flag(Warnings.weights_disagree, str(check["reason"])).row())
            row["reasons"] = [*row["reasons"], str(check["reason"])]
            row["status"] = "invalid" if row["status"] in USABLE else row["status"]
            row["disturbed"] = None  # another attempt would not help


def _ordered(checks: Sequence[Check]) -> list[Check]:
    """Unfinished checks first, then finished ones; each group oldest first."""
    return sorted(checks, key=lambda check: (check["outcome"] == "ok", str(check["started_utc"])))

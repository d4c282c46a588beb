"""Is a variant still the same model? Its logits against the 16-bit reference's: by how much they differ, and
whether that is what its types cost or another model. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.analysis.records.identity import identity
from harness.analysis.records.traffic import nominal_bits
from harness.analysis.records.verdicts import USABLE, other_kernels, other_options
from harness.system.wording import plural

Record = dict[str, Any]
Row = dict[str, Any]

WINDOW = 25  # positions compared of the prompt and at each depth, as many as the usual prompt has
DEPTHS = (300, 2_100)  # past llama.cpp's first padding of its cache, and past 2,048, where some caches end

# Above these a mean relative error is another model's, by the bits of the coarsest type in play. Measured on
# random weights, which are harsher than trained ones, of 2 layers to the 24 of qwen1.5-0.5b, at n = 25 to
# 2,100, the worst window: f16 and f32 0.002, bf16 0.015; 8 bits 0.044; 5 bits 0.19; 4 bits 0.37, fp4 0.42;
# 3 bits 0.57; 2 bits 0.84. Two models with nothing in common: 1.41, the square root of two. One matrix of the
# last of two layers with its rows in another order: 0.5 to 0.8, of the first 0.8 to 1.3. So down to 8 bits
# any such fault is seen, at 4 most are, below only a model that is unrelated.
WRONG_ABOVE: tuple[tuple[int, float], ...] = ((16, 0.06), (8, 0.15), (5, 0.4), (4, 0.6), (1, 1.1))
NEAR_TIE = 1e-3  # of the spread of a position's logits: which of two comes first is then a matter of rounding


def windows(prompt_tokens: int, tokens: int) -> list[list[int]]:
    """The positions to compare, each [first, end) counting from 0: the last WINDOW of the prompt, and WINDOW
    up to each of DEPTHS, to twice the last of these, four times and so on, and to the workload's own length:
    past these, the deepest that there is time for is half of what would fit, or deeper. They do not overlap;
    the last goes before the one above it."""
    found = [[max(0, prompt_tokens - WINDOW), prompt_tokens]]
    deepest = [max(prompt_tokens, tokens - WINDOW), tokens]
    for end in itertools.takewhile(lambda end: end <= deepest[0], _depths()):
        if found[-1][1] <= end - WINDOW:
            found.append([end - WINDOW, end])
    return [*found, deepest] if deepest[0] < tokens else found


def _depths() -> Iterator[int]:
    yield from DEPTHS
    yield from (DEPTHS[-1] << doublings for doublings in itertools.count(1))


def shown(compared: Sequence[int]) -> list[int]:
    """Of the depths n compared, shallowest first, those that a table shows: the prompt, DEPTHS, and the
    deepest."""
    return [n for n in compared if n in (compared[0], *DEPTHS, compared[-1])]


def compare(
    reference: NDArray[np.float32],
    reference_positions: Sequence[int],
    variant: NDArray[np.float32],
    variant_positions: Sequence[int],
    asked: Sequence[Sequence[int]],
) -> list[Row]:
    """How far a variant's logits are from the reference's, one row a window of `asked` that both have whole.

    The logits are (positions, vocabulary), float32, a row for each of the positions. Errors are shares: the
    length of the difference over the reference's. What is computed in 64 bits is one position at a time: a
    row may have 152,000 logits. Raises ValueError: the vocabularies or the numbers of rows differ.
    """
    if reference.ndim != 2 or variant.ndim != 2 or reference.shape[1] != variant.shape[1]:
        widths = [str(each.shape[-1]) if each.ndim else "1" for each in (variant, reference)]
        raise ValueError(f"{widths[0]} logits a position, and the reference has {widths[1]}")
    places = []
    for logits, positions in ((reference, reference_positions), (variant, variant_positions)):
        if len(logits) != len(positions):
            raise ValueError(f"{len(logits)} rows of logits for {len(positions)} positions")
        places.append({position: place for place, position in enumerate(positions)})
    found = []
    for first, end in asked:
        wanted = range(first, end)
        if all(position in of for position in wanted for of in places):
            rows = ((reference[places[0][position]], variant[places[1][position]]) for position in wanted)
            found.append({"n": end, **_window([_position(*each) for each in rows])})
    return found


@dataclass(frozen=True)
class _Position:
    """One position; the figures are 0 where either side is not comparable."""

    reference_holds: bool
    variant_holds: bool
    error: float = 0.0
    same: bool = False
    tied: bool = False
    kl_nats: float = 0.0


def _position(reference: NDArray[np.float32], variant: NDArray[np.float32]) -> _Position:
    # A reference of zeros alone compares with nothing.
    holds = (bool(np.isfinite(reference).all() and reference.any()), bool(np.isfinite(variant).all()))
    if not all(holds):
        return _Position(*holds)
    theirs, ours = reference.astype(np.float64), variant.astype(np.float64)
    second, first = np.partition(theirs, -2)[-2:]
    log_p, log_q = _log_softmax(theirs), _log_softmax(ours)
    return _Position(
        *holds,
        error=float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)),
        same=bool(theirs.argmax() == ours.argmax()),
        tied=bool(first - second <= NEAR_TIE * (first - theirs.min())),
        kl_nats=float((np.exp(log_p) * (log_p - log_q)).sum()),
    )


def _window(positions: Sequence[_Position]) -> Row:
    """One window; errors are null where either side has a position that is not comparable."""
    many = len(positions)
    row: Row = {
        "positions": many,
        "not_finite": sum(not each.variant_holds for each in positions),
        "reference_not_finite": sum(not each.reference_holds for each in positions),
        "relative_error": None,
        "relative_error_max": None,
        "top1_agreement": None,
        "near_ties": None,
        "kl_nats": None,
    }
    if row["not_finite"] or row["reference_not_finite"]:
        return row
    return row | {
        "relative_error": sum(each.error for each in positions) / many,
        "relative_error_max": max(each.error for each in positions),
        "top1_agreement": sum(each.same for each in positions) / many,
        "near_ties": sum(each.tied and not each.same for each in positions),
        # Of equals it rounds to either side of 0.
        "kl_nats": max(0.0, sum(each.kl_nats for each in positions) / many),
    }


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found


def bits(record: Record) -> int:
    """Of the coarsest type that a variant's weights or cache are asked to have, by the types' names; 16 where
    the reference has the very weights, unpacked."""
    if _unpacked(record):
        return 16
    options = record.get("options") or {}
    weights = options.get("quant") or options.get("dtype") or record["model"]["weights"].get("quant")
    named = (weights, *(options.get(key, "f16") for key in CACHE_TYPES))
    return min(nominal_bits(str(name)) or 1 for name in named)


CACHE_TYPES = ("type_k", "type_v")


def allowed(record: Record) -> float:
    """The mean relative error from which a check is wrong."""
    of = bits(record)
    return next(bound for least, bound in WRONG_ABOVE if of >= least)


def verdict(record: Record) -> tuple[str, str | None]:
    """What a check says: `agrees`, `wrong`, `failed` (the variant or the reference gave no logits) or
    `unchecked` (there is no reference), and why, as a sentence."""
    check = record["check"]
    if record["outcome"] != "ok":
        word = "unchecked" if check.get("unchecked") else "failed"
        return word, record.get("reason") or str(record["outcome"])
    if mismatches := _mismatches(record):
        return "unchecked", f"not what was asked for: {mismatches[0]}"
    for depth in check["depths"]:
        if depth["not_finite"]:
            many = f"{depth['not_finite']} of {plural(depth['positions'], 'position')} up to n = {depth['n']}"
            return "wrong", f"not-a-number logits at {many}"
        if depth["reference_not_finite"]:
            return "unchecked", f"the reference's own logits are no numbers up to n = {depth['n']}"
    worst = max(check["depths"], key=lambda depth: float(depth["relative_error"]))
    error, bound = worst["relative_error"], allowed(record)
    if error <= bound:
        return "agrees", None
    of, why = "the 16-bit reference", "its types explain"
    if _unpacked(record):
        of, why = "its own weights, unpacked,", "arithmetic explains"
    detail = f"logits are {error:.0%} off {of} up to n = {worst['n']}"
    return "wrong", f"{detail}, and {why} {bound:.0%} at most: it is not the same model"


def _mismatches(record: Record) -> list[str]:
    """Where the logits are another kernel's than was asked for, or of other options."""
    ran = record["check"].get("ran")
    return [*other_kernels(ran), *other_options(record["options"], ran)] if ran else []


def _unpacked(record: Record) -> bool:
    """Whether the reference has the very weights of a packed checkpoint."""
    return bool((record["check"].get("reference") or {}).get("unpacked"))


def row(record: Record) -> Row:
    """One check as lists and reports show it. Missing is null."""
    word, reason = verdict(record)
    check = record["check"]
    return {
        **identity(record),
        "speaks_for": check["speaks_for"],
        "outcome": record["outcome"],
        "verdict": word,
        "reason": reason,
        "reference": (check.get("reference") or {}).get("name"),
        "unpacked": _unpacked(record),
        "unfused": check.get("unfused") or [],
        "allowed_error": allowed(record) if record["outcome"] == "ok" else None,
        "depths": check.get("depths") or [],
        "left_out_n": [end for _, end in check.get("left_out") or []],
    }


def latest(rows: Sequence[Row]) -> list[Row]:
    """One row a content key, in order of first appearance: the last that came to its end, else the last."""
    found: dict[str, Row] = {}
    for each in _ordered(rows):
        found[each["content_key"]] = each
    return [each for each in rows if found[each["content_key"]] is each]


def held_against(rows: Sequence[Row], checks: Sequence[Row]) -> None:
    """Say in each measured row what the latest check of it found, `weights_check`; one that is wrong makes it
    invalid."""
    speaking = {key: each for each in _ordered(checks) for key in each["speaks_for"]}
    for each in rows:
        found = speaking.get(each["content_key"], {})
        each["weights_check"] = found.get("verdict")
        if found.get("verdict") == "wrong":
            each["flags"].append({"code": "weights_disagree", "detail": str(found["reason"])})
            each["reasons"] = [*each["reasons"], str(found["reason"])]
            each["status"] = "invalid" if each["status"] in USABLE else each["status"]
            each["disturbed"] = None  # it is invalid for more than what the machine did


def _ordered(checks: Sequence[Row]) -> list[Row]:
    """Those that came to their end last, and of those the latest last."""
    return sorted(checks, key=lambda each: (each["outcome"] == "ok", str(each["started_utc"])))

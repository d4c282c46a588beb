"""Weight checks as one table for the terminal, the page and Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis import agreement
from harness.analysis.columns import Check
from harness.base.text import plural
from harness.dataset.study import finite
from harness.records.checked import Depth, Experts
from harness.report.text_table import NONE, Table, formatted

AGREEMENT_HEADING = "Same model? Logits against the 16-bit reference"
AGREEMENT_MEANING = (
    "Every variant reads the same token ids. Its logits are compared with those of the model's 16-bit weights"
    " (a GPTQ or AWQ checkpoint: with those of its own weights, unpacked). Logits are taken after each of the"
    " last tokens of the prompt and after each of the last tokens before a depth n; the latter are fed one by"
    " one, as in decoding. Error: norm of the difference over norm of the reference, mean over the positions;"
    " two unrelated models differ by 141%. Own weights: the worst error of a quantized variant against its"
    " own weights, dequantized and run in float32, which only arithmetic explains; in brackets the largest"
    " that it explains. Top-1: share of positions where both rank the same token first."
    " Near tie: a position where they do not, but the reference itself hardly prefers one token. Allowed: the"
    " error that the coarsest type of the variant explains; a larger one means a different model. The verdict"
    " covers all depths compared; the table shows the prompt, n = 300, n = 2,100 and the deepest."
)


def headings(checks: Sequence[Check]) -> list[str]:
    depths = [f"{metric} n={n:,}" for n in _depths(checks) for metric in ("error", "top-1")]
    own_weights = ["own weights"] if any(check["own"] for check in checks) else []
    return ["cell", "reference", *depths, "allowed", *own_weights, "verdict"]


def cells(check: Check, checks: Sequence[Check]) -> list[str]:
    """One check as cells, in the order of the headings."""
    depths = {depth["n"]: depth for depth in check["depths"]}
    metrics = [text for n in _depths(checks) for text in (_error(depths.get(n)), _top1(depths.get(n)))]
    return [
        str(check["name"]),
        str(check["reference"] or NONE),
        *metrics,
        formatted(finite(check["allowed_error"]), "{:.0%}"),
        *([_own(check)] if any(other["own"] for other in checks) else []),
        str(check["verdict"]),
    ]


def agreement_table(checks: Sequence[Check]) -> Table:
    """One line per check."""
    named = headings(checks)
    numeric = [False, False, *[True] * (len(named) - 3), False]
    marked = ["yellow" if check["verdict"] != "agrees" else "" for check in checks]
    return Table(named, [cells(check, checks) for check in checks], numeric, marked, AGREEMENT_HEADING)


def agreement_notes(checks: Sequence[Check]) -> list[str]:
    """Reasons of checks that do not agree, and depths that were skipped because of the time limit."""
    reasons = [f"{check['name']}: {check['reason']}" for check in checks if check["reason"]]
    limited = [check for check in checks if check["left_out_n"]]
    skipped = [
        f"{check['name']}: n = {', '.join(f'{n:,}' for n in check['left_out_n'])}" for check in limited
    ]
    reasons += [
        f"{check['name']}: not compared with its own weights: {check['own_failure']}"
        for check in checks
        if check["own_failure"]
    ]
    reasons += [f"{check['name']}: {_experts(experts)}" for check in checks if (experts := check["experts"])]
    return reasons + [f"not compared, over the time limit: {depths}" for depths in skipped]


def _depths(checks: Sequence[Check]) -> list[int]:
    """The depths that have columns. The records hold the other depths, which count for the verdict too."""
    compared = [sorted(depth["n"] for depth in check["depths"]) for check in checks if check["depths"]]
    return sorted({n for depths in compared for n in agreement.shown_checks(depths)})


def _error(depth: Depth | None) -> str:
    if depth is None:
        return NONE
    error = finite(depth["relative_error"])
    return "NaN" if error is None else f"{error:.2%}" if error < 0.1 else f"{error:.0%}"


def _top1(depth: Depth | None) -> str:
    """`96%`, `84% (2 near ties)`."""
    share = finite(depth["top1_agreement"]) if depth else None
    if depth is None or share is None:
        return NONE
    return f"{share:.0%}" + (
        f" ({plural(round(ties), 'near tie')})" if (ties := finite(depth["near_ties"])) else ""
    )


def _own(check: Check) -> str:
    """`4.1% (10%)`."""
    if not check["own"]:
        return NONE
    worst = max(check["own"], key=lambda depth: finite(depth["relative_error"]) or 0.0)
    return f"{_error(worst)} ({formatted(finite(check['own_allowed_error']), '{:.0%}')})"


def _experts(experts: Experts) -> str:
    share = f"{experts['others']:,} of {experts['choices']:,} choices of experts"
    return f"compared with the experts that it chose: {share} were others than the reference's own"

"""Checks of weights as text: the same table for the terminal, the page and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rich.table import Table

from harness.analysis.records import agreement
from harness.dataset.study import Row, figure

HEADING = "Same model? Logits against the 16-bit reference"
MEANING = (
    "Every variant reads the same ids, and its logits are held against those of the model's own 16-bit"
    " weights (those of a GPTQ or AWQ checkpoint, against its own weights, unpacked): after each of the last"
    " tokens of the prompt, and of those before a depth n, the latter fed one"
    " by one as in decoding. Off: the length of the difference over the reference's, mean over the positions;"
    " two models that have nothing in common are 141% off. Same first: the share of positions at which the"
    " same token comes first; near are those where it does not, and the reference itself hardly prefers one."
    " Allowed: what the coarsest of a variant's types explains; more is another model. The verdict is of all"
    " depths compared; the table shows the prompt, n = 300, n = 2,100 and the deepest."
)
NONE = "-"


def headings(checks: Sequence[Row]) -> list[str]:
    depths = [f"{what} n={n:,}" for n in _depths(checks) for what in ("off", "same first")]
    return ["cell", "reference", *depths, "allowed", "verdict"]


def cells(check: Row, checks: Sequence[Row]) -> list[str]:
    """A row's cells below the headings of all."""
    of = {depth["n"]: depth for depth in check["depths"]}
    found = [text for n in _depths(checks) for text in (_off(of.get(n)), _first(of.get(n)))]
    allowed = figure(check, "allowed_error")
    return [
        str(check["name"]),
        str(check["reference"] or NONE),
        *found,
        NONE if allowed is None else f"{allowed:.0%}",
        str(check["verdict"]),
    ]


def terminal(checks: Sequence[Row]) -> Table:
    """One line a check."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings(checks)):
        figures = 1 < number < len(headings(checks)) - 1
        table.add_column(heading, justify="right" if figures else "left", overflow="fold")
    for check in checks:
        table.add_row(*cells(check, checks), style=None if check["verdict"] == "agrees" else "yellow")
    return table


def told(checks: Sequence[Row]) -> list[str]:
    """What there is to say of those that do not agree, and of depths that took too long."""
    reasons = [f"{check['name']}: {check['reason']}" for check in checks if check["reason"]]
    left = [check for check in checks if check["left_out_n"]]
    late = [f"{check['name']}: n = {', '.join(f'{n:,}' for n in check['left_out_n'])}" for check in left]
    reasons += [f"{check['name']}: {_unfused(check)}" for check in checks if check["unfused"]]
    return reasons + [f"not compared, as it would have taken too long: {said}" for said in late]


def section(checks: Sequence[Row]) -> Iterable[str]:
    """The page's section; nothing where nothing was checked."""
    if not checks:
        return
    yield f'<section id="agreement"><h2>{escape(HEADING)}</h2><p>{escape(MEANING)}</p>'
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings(checks))
    body = []
    for check in checks:
        kind = "" if check["verdict"] == "agrees" else " class=bad"
        name, *rest = cells(check, checks)
        columns = "".join(f"<td class=num>{escape(text)}</td>" for text in rest)
        body.append(f'<tr{kind}><th scope="row">{escape(name)}</th>{columns}</tr>')
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    yield f'<div class="scroll tall" tabindex="0" role="region" aria-label="{escape(HEADING)}">{table}</div>'
    said = "".join(f"<li>{escape(each)}</li>" for each in told(checks))
    yield f"<ul>{said}</ul></section>" if said else "</section>"


def lines(checks: Sequence[Row]) -> list[list[str]]:
    """The table's lines, headings first; nothing where nothing was checked."""
    return [headings(checks), *(cells(check, checks) for check in checks)] if checks else []


def _depths(checks: Sequence[Row]) -> list[int]:
    """Those that have columns. What was found at one between them is in the records, and counts."""
    of = [sorted(depth["n"] for depth in check["depths"]) for check in checks if check["depths"]]
    return sorted({n for compared in of for n in agreement.shown(compared)})


def _off(depth: Row | None) -> str:
    if depth is None:
        return NONE
    error = figure(depth, "relative_error")
    return "NaN" if error is None else f"{error:.2%}" if error < 0.1 else f"{error:.0%}"


def _first(depth: Row | None) -> str:
    """`96%`, `84% (2 near)`."""
    share = figure(depth, "top1_agreement")
    if depth is None or share is None:
        return NONE
    return f"{share:.0%}" + (f" ({ties:.0f} near)" if (ties := figure(depth, "near_ties")) else "")


def _unfused(check: Row) -> str:
    worst = max(check["unfused"], key=lambda depth: figure(depth, "relative_error") or 0.0)
    off = f"fused layers are {_off(worst)} off the unfused up to n = {worst['n']:,}"
    return f"{off}, and the same token comes first at {_first(worst)} of the positions"

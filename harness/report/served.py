"""What serving adds to a token, and where: the same weights behind a server and in process. Pure."""

from __future__ import annotations

from collections.abc import Callable
from math import hypot

from harness.analysis.columns import Cell, ShownCell
from harness.dataset.study import bounds, finite
from harness.records import Stored
from harness.report.summary import Named

Behind = Callable[[Cell], Stored | None]


def added(named: Named, behind: Behind) -> list[str]:
    """A sentence for each served cell and each in process that has the same weights, options and number of
    tokens."""
    here = [(label, row) for label, row in named if row["served_by"] is None]
    return [
        sentence
        for label, row in named
        if row["served_by"]
        for other, beside in here
        if _same_work(row, beside, behind) and (sentence := _sentence(label, row, other, beside))
    ]


def _same_work(a: ShownCell, b: ShownCell, behind: Behind) -> bool:
    """Options that both have are equal, but for those that one leaves to its stack."""
    options, others = (
        (each.record.get("options") if (each := behind(row)) else None) or {} for row in (a, b)
    )
    for name in options.keys() & others:
        if None not in (options[name], others[name]) and options[name] != others[name]:
            return False
    one, other = (
        (row["model_bytes"], row["tokens"], row["prompt_tokens"], row["machine"], row["device"])
        for row in (a, b)
    )
    return one == other and one[0] is not None and a["speculation"] is b["speculation"] is None


def _sentence(label: str, row: ShownCell, other: str, beside: ShownCell) -> str | None:
    served, alone = _ms(row), _ms(beside)
    if served is None or alone is None:
        return None
    more, half = served[0] - alone[0], hypot(served[1], alone[1])
    text = f"{label} takes {more:+.3f} ms a token ({more - half:+.3f} to {more + half:+.3f}) beside {other}"
    if (own := row["stack_ms"]) is not None:
        text += f": {own - alone[0]:+.3f} in the server, {served[0] - own:+.3f} between it and its client"
    return f"{text}."


def _ms(row: ShownCell) -> tuple[float, float] | None:
    """Milliseconds of a token, and half of their 95% interval; null where either is unknown."""
    rate, (low, high) = finite(row["tokens_per_s"]), bounds(row["tokens_per_s_ci95"])
    return (1e3 / rate, (1e3 / low - 1e3 / high) / 2) if rate and low and high else None

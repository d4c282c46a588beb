"""What serving adds to a token, and where: the same weights behind a server and in process. Pure."""

from __future__ import annotations

from collections.abc import Callable
from math import hypot

from harness.analysis.columns import Cell, ShownCell
from harness.dataset.study import bounds, finite
from harness.records import Record, Stored
from harness.records.kinds import served_elsewhere
from harness.report.summary import Named


def added(named: Named, behind: Callable[[Cell], Stored | None]) -> list[str]:
    """A sentence for each served cell and each in process that has the same weights, options and number of
    tokens. `behind`: the record of a row."""
    if not any(row["served_by"] for _, row in named):
        return []
    known = [(label, row, each.record) for label, row in named if (each := behind(row))]
    return [
        sentence
        for label, row, record in known
        if row["served_by"]
        for other, unserved, in_process in known
        if unserved["served_by"] is None and _same_work(row, unserved) and _same_options(record, in_process)
        if (sentence := _sentence(label, row, other, unserved, served_elsewhere(record)))
    ]


def _same_work(a: ShownCell, b: ShownCell) -> bool:
    one, other = (
        (row["model_bytes"], row["tokens"], row["prompt_tokens"], row["machine"], row["device"])
        for row in (a, b)
    )
    return one == other and one[0] is not None and a["speculation"] is b["speculation"] is None


def _same_options(a: Record, b: Record) -> bool:
    """Whether options that both have are equal, but for those that one leaves to its stack."""
    one, other = ({k: v for k, v in (of.get("options") or {}).items() if v is not None} for of in (a, b))
    return all(one[name] == other[name] for name in one.keys() & other)


def _sentence(label: str, row: ShownCell, other: str, unserved: ShownCell, is_elsewhere: bool) -> str | None:
    served, alone = _ms(row), _ms(unserved)
    if served is None or alone is None:
        return None
    more, half = served[0] - alone[0], hypot(served[1], alone[1])
    if abs(more) <= half:
        return f"{label} and {other}: not distinguishable in speed."
    text = f"{label} takes {more:+.3f} ms a token ({more - half:+.3f} to {more + half:+.3f}) beside {other}"
    if (between := row["outside_stack_ms"]) is not None:
        text += f": {more - between:+.3f} in the server, {between:+.3f} between it and its client"
    return f"{text}{'; its threads and options are its own' * is_elsewhere}."


def _ms(row: ShownCell) -> tuple[float, float] | None:
    """Milliseconds of a token, and half of their 95% interval; null where either is unknown."""
    rate, (low, high) = finite(row["tokens_per_s"]), bounds(row["tokens_per_s_ci95"])
    return (1e3 / rate, (1e3 / low - 1e3 / high) / 2) if rate and low and high else None

"""A server: how fast it is, what this machine allows, and what serving adds to a token. Pure."""

from __future__ import annotations

from collections.abc import Callable
from math import hypot

from harness.analysis.columns import Cell, ServerRow, ShownCell
from harness.dataset.study import bounds, finite, ok
from harness.records import Record, Stored
from harness.records.kinds import served_elsewhere
from harness.report.ranked_groups import Group, Named

FASTER = 1.05  # than this machine allows: more than its bandwidth varies


def answers(group: Group, behind: Callable[[Cell], Stored | None]) -> list[str]:
    """A sentence for each served decode: its speed, what this machine allows for the model, and why it may be
    slow, or why it has no speed. `behind`: the record of a row."""
    sentences = []
    named = [row["name"] for _, row in group.named]
    for label, row in group.every:
        has_failed = bool(row["reasons"]) and not ok(row)
        if not (row["server"] or has_failed):
            continue
        if not ((stored := behind(row)) and served_elsewhere(stored.record)):
            continue
        which = f"{group.title} {label}" if len(group.every) > 1 else group.title
        if row["name"] in named and row["server"]:
            sentences.append("provisional: " * group.provisional + _answer(which, row, row["server"]))
        elif has_failed:
            sentences.append(f"{which}: no speed: {row['reasons'][0]}.")
    return sentences


def _answer(which: str, row: Cell, server: ServerRow) -> str:
    facts = ", ".join(filter(None, [server["quant"], server["device"]]))
    rate, allows = finite(row["tokens_per_s"]), server["allows_tokens_per_s"]
    text = f"{which} ({facts}): {f'{rate:,.1f} tok/s' if rate else 'no speed was measured'}"
    if rate and allows and rate > FASTER * allows:
        text += (
            f", more than the {allows:,.1f} tok/s that this machine allows ({server['by']}): check that it"
            " runs on this machine, and which model it has"
        )
    elif rate and allows:
        text += f", {rate / allows:.0%} of the {allows:,.1f} tok/s that this machine allows ({server['by']})"
    elif server["unknown"]:
        text += f"; what its machine allows is not known: {server['unknown']}"
    return f"{text}. Why: {'; '.join(server['causes'])}." if server["causes"] else f"{text}."


def added(named: Named, behind: Callable[[Cell], Stored | None]) -> list[str]:
    """A sentence for each served cell and each in process that has the same weights, options and number of
    tokens. `behind`: the record of a row."""
    if not any(row["served_by"] for _, row in named):
        return []
    with_records = [(label, row, stored.record) for label, row in named if (stored := behind(row))]
    return [
        sentence
        for label, row, record in with_records
        if row["served_by"]
        for other, unserved, in_process in with_records
        if unserved["served_by"] is None and _same_work(row, unserved) and _same_options(record, in_process)
        if row["device"] == unserved["device"] or not record["machine"].get("gpus")
        if (sentence := _sentence(label, row, other, unserved, served_elsewhere(record)))
    ]


def _same_work(a: ShownCell, b: ShownCell) -> bool:
    one, other = ((row["model_bytes"], row["tokens"], row["prompt_tokens"], row["machine"]) for row in (a, b))
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
    """Milliseconds of a token, and half of their 95% interval; None where either is unknown."""
    rate, (low, high) = finite(row["tokens_per_s"]), bounds(row["tokens_per_s_ci95"])
    return (1e3 / rate, (1e3 / low - 1e3 / high) / 2) if rate and low and high else None

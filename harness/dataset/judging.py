"""Judge each record: what it says as flat facts, and its row."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json
from typing_extensions import TypedDict

from harness import records
from harness.analysis import agreement, quality, served, traffic
from harness.analysis.verdicts import USABLE, verdict
from harness.base.files import FAULTS
from harness.dataset import campaign_order, search_rows, table
from harness.records import NO_TOKENS, Record, ResultsError, Stored, TokenTimes
from harness.records.kinds import loaded_of, served_elsewhere


class Facts(TypedDict):
    """What a record says. `damage`: why it cannot be read or analysed; then the rest is None or empty.

    `warnings`: about its files. `place`: sorts campaigns. `usable`, `disturbed`: by the record alone, as
    attempts are counted; `unjudged`: why they are not known. `probes`: read bandwidths that it measured,
    `ceiling`: the best of its campaign, by which its row was made, bytes/s. `provenance`: equal for records
    of the same machine, protocol, versions, command and source.
    """

    damage: str | None
    warnings: list[str]
    kind: str
    model: str
    campaign: str
    place: str
    config: str
    machine: str
    asked: str | None
    cell: str
    repeat: int | None
    started_utc: str
    content_key: str
    usable: bool
    disturbed: bool
    unjudged: str | None
    probes: list[float]
    ceiling: float | None
    provenance: str


@dataclass(frozen=True)
class Judged:
    """A record, its facts, and as JSON its row (of a repeat, a search, a check or a score) and its timed
    rows."""

    stored: Stored
    facts: Facts
    row_json: bytes
    timed_json: bytes

    @property
    def timed(self) -> dict[str, list[int]]:
        """The columns of its timed rows; empty if it has none, or their times are not those of the server."""
        columns: dict[str, list[int]] = from_json(self.timed_json)
        return columns


def rows_of(judged: Iterable[Judged]) -> list[Any]:
    """The row of each record, made anew. `series` is an absolute path."""
    here, rows = Path.cwd(), []
    for record in judged:
        row = from_json(record.row_json)
        if row.get("series"):
            row["series"] = os.path.join(here, record.stored.folder, row["series"])  # noqa: PTH118 - Path takes 0.5 s for 10,000
        rows.append(row)
    return rows


def judge(stored: Iterable[Stored], ceilings: Mapping[str, float] | None = None) -> list[Judged]:
    """Judge some records. `ceilings`: the best bandwidth known of each campaign, bytes/s, besides those that
    these records measured."""
    with_facts = [(record, _facts(record)) for record in stored]
    best = dict(ceilings or {})
    for _, facts in with_facts:
        if is_repeat(facts):
            best[facts["campaign"]] = max([best.get(facts["campaign"], 0.0), *facts["probes"]])
    return [_with_row(record, facts, best.get(facts["campaign"]) or None) for record, facts in with_facts]


def _facts(stored: Stored) -> Facts:
    try:
        record = stored.record
        return _facts_of(record)
    except ResultsError as damage:
        return _damaged(str(damage))
    except FAULTS as fault:
        return _damaged(_left_out(stored, fault))


def _facts_of(record: Record) -> Facts:
    usable, disturbed, unjudged = False, False, None
    try:
        judged = quality.verdict(record) if record["kind"] == "scored" else verdict(record)
        usable, disturbed = judged.status in USABLE, judged.disturbed is not None
    except FAULTS as fault:
        unjudged = repr(fault)
    adopted = (record.get("environment") or {}).get("adopted") or {}
    provenance = [
        *(record["kind"], record["stack"], record["machine"], record.get("source"), record.get("protocol")),
        *(record.get("harness"), record["campaign"].get("command_line")),
        *(loaded_of(record).get("versions"), bool(record.get("loaded")), adopted.get("pins_not_met")),
        served_elsewhere(record),
    ]
    return {
        "damage": None,
        "warnings": [],
        "kind": record["kind"],
        "model": str(record["model"]["name"]),
        "campaign": record["campaign"]["id"],
        "place": campaign_order.place(record),
        "config": record["campaign"]["name"],
        "machine": record["machine"]["slug"],
        "asked": (record.get("asked") or {}).get("device"),
        "cell": record["cell"],
        "repeat": record.get("repeat"),
        "started_utc": record["started_utc"],
        "content_key": record["content_key"],
        "usable": usable,
        "disturbed": disturbed,
        "unjudged": unjudged,
        "probes": traffic.probed_bytes_per_s([record]),
        "ceiling": None,
        "provenance": hashlib.sha256(json.dumps(provenance, sort_keys=True).encode()).hexdigest()[:16],
    }


def _damaged(damage: str) -> Facts:
    return {
        **dict.fromkeys(Facts.__annotations__, ""),  # type: ignore[typeddict-item]
        "damage": damage,
        "warnings": [],
        "probes": [],
        "ceiling": None,
        "repeat": None,
        "unjudged": None,
    }


def _with_row(stored: Stored, facts: Facts, ceiling: float | None) -> Judged:
    if facts["damage"]:
        return Judged(stored, facts, b"{}", b"{}")
    readers: dict[str, Callable[[Record], Any]] = {
        "searched": search_rows.search_row,
        "checked": agreement.row,
        "scored": quality.row,
    }
    timed: dict[str, list[int]] = {}
    try:
        if facts["kind"] in readers:
            row = readers[facts["kind"]](stored.record)
        else:
            facts["ceiling"] = ceiling
            times, timed = _series(stored, facts["warnings"])
            series = "tokens.parquet" if times else None
            row = table.repeat_row(stored.record, times, series, ceiling, timed)
            if served.times_are_unknown(stored.record):
                timed = {}
    except FAULTS as fault:
        return Judged(stored, _damaged(_left_out(stored, fault)), b"{}", b"{}")
    return Judged(stored, facts, json.dumps(row).encode(), json.dumps(timed).encode())


def _series(stored: Stored, warnings: list[str]) -> tuple[TokenTimes, dict[str, list[int]]]:
    """The times of its tokens, and its timed rows; empty, with a warning, if a file is damaged."""
    times, timed = NO_TOKENS, dict[str, list[int]]()
    try:
        times = stored.times
    except ResultsError as damage:
        warnings.append(str(damage))
    try:
        timed = records.table(stored)
    except ResultsError as damage:
        warnings.append(str(damage))
    return times, timed


def _left_out(stored: Stored, fault: Exception) -> str:
    return f"{stored.folder}: cannot be analysed: {fault!r}"


def is_repeat(facts: Facts) -> bool:
    return facts["kind"] in ("measured", "reported")

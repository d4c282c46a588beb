"""Which records a card is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256

from harness.analysis.identity import device
from harness.dataset import campaign_order
from harness.records import Stored
from harness.records.files import read_columns
from harness.records.kinds import Record
from harness.share.bundle import TABLES


def place(record: Record) -> tuple[str, str]:
    """The machine and the model of a record."""
    return record["machine"]["slug"], str(record["model"]["name"])


def newest_places(stored: Sequence[Stored]) -> list[tuple[str, str]]:
    """The places of the newest campaign."""
    newest = max(campaign_order.place(result.record) for result in stored)
    return sorted(
        {place(result.record) for result in stored if campaign_order.place(result.record) == newest}
    )


def latest(stored: Sequence[Stored]) -> list[Stored]:
    """The records of each variant's last measurement of each workload: of one length, one build, one file."""

    def measurement(record: Record) -> tuple[str | None, ...]:
        return record["kind"], record["stack"], record["variant"], record["workload"]["kind"], device(record)

    in_order = sorted(stored, key=lambda each: each.record["started_utc"])
    last = {measurement(each.record): each.record["content_key"] for each in in_order}
    return [result for result in stored if last[measurement(result.record)] == result.record["content_key"]]


def checksum(anonymous: Sequence[Stored]) -> str:
    """SHA-256 of records and the values of their tables, in any order. A bundle's records give that of the
    folder: the content keys, which it computes again, are left out."""
    contents = []
    for result in anonymous:
        record = {**result.record} | {"content_key": None}
        if "check" in record:
            record["check"] = {**result.record["check"], "speaks_for": None}
        read = {name: read_columns(result.folder / f"{name}.parquet", ()) for name in TABLES}
        columns = {name: table for name, table in read.items() if table}  # kinds to come change nothing
        contents.append(sha256(json.dumps([record, columns], sort_keys=True).encode()).hexdigest())
    return sha256("".join(sorted(contents)).encode()).hexdigest()

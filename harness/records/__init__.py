"""Read and write results/. A record is written completely or not at all, and never overwritten.

results/<machine>/<model>/<cell>/<when>/ holds record.json, tokens.parquet, memory.parquet, sensors.parquet
(where there are sensors) and worker.log. While a repeat runs, its folder holds begun.json and events.jsonl
instead of a record; a later campaign that finds such a folder unlocked turns it into an interrupted record.
Invalid records are reported and skipped.
"""

from harness.base.files import FULL
from harness.records.files import ResultsError
from harness.records.kinds import Record
from harness.records.read import (
    SCHEMA,
    Stored,
    check_folder,
    listing,
    memory_series,
    no_records,
    prefill_series,
    read,
    records,
    series,
    table,
)
from harness.records.searched import Draft
from harness.records.tables import Tables, add_rows
from harness.records.token_times import NO_TOKENS, TokenTimes
from harness.records.values import OUTCOMES
from harness.records.write import Running, begin, check_writable, events_in, keep, receive, recover, tail

__all__ = [
    "FULL",
    "NO_TOKENS",
    "OUTCOMES",
    "SCHEMA",
    "Draft",
    "Record",
    "ResultsError",
    "Running",
    "Stored",
    "Tables",
    "TokenTimes",
    "add_rows",
    "begin",
    "check_folder",
    "check_writable",
    "events_in",
    "keep",
    "listing",
    "memory_series",
    "no_records",
    "prefill_series",
    "read",
    "receive",
    "records",
    "recover",
    "series",
    "table",
    "tail",
]

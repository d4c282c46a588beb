"""Read and write results/. A record is written completely or not at all, and never overwritten.

results/<machine>/<model>/<cell>/<when>/ holds record.json, tokens.parquet, memory.parquet, sensors.parquet
(where there are sensors) and worker.log. While a repeat runs, its folder holds begun.json and events.jsonl
instead of a record; a later campaign that finds such a folder unlocked turns it into an interrupted record.
Invalid records are reported and skipped.
"""

from harness.results.files import ResultsError
from harness.results.kinds import Record
from harness.results.kinds.values import OUTCOMES
from harness.results.reading import (
    SCHEMA,
    Draft,
    Stored,
    check_folder,
    memory_series,
    no_records,
    prefill_series,
    read,
    records,
    series,
    table,
)
from harness.results.tables import Tables, add_rows
from harness.results.token_times import NO_TOKENS, TokenTimes
from harness.results.writing import (
    Running,
    begin,
    check_writable,
    events_in,
    keep,
    receive,
    recover,
    tail,
)
from harness.system.files import FULL

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

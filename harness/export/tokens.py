"""Parquet export: every token of every repeat with a series; one row group per repeat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from harness.analysis.rows import Repeat as Row
from harness.export.chosen import Repeat
from harness.results import ResultsError
from harness.results.tables import TABLE_OF

WHOSE = ("campaign", "cell", "model", "stack", "variant", "kind", "machine", "device", "started_utc")
COLUMNS = ("n", "latency_ns", "token_id", "device_ns")
SCHEMA = pa.schema(
    [
        *((name, pa.dictionary(pa.int32(), pa.string())) for name in WHOSE),
        ("repeat", pa.int64()),
        *((name, pa.int64()) for name in COLUMNS),
    ]
)


def fits(row: Row) -> str:
    """Why an ok repeat has no tokens to export; empty where it may have some."""
    return f"workload {row['workload']}" if row["workload"] in TABLE_OF else ""


def write(target: Path, chosen: Iterable[Sequence[Repeat]]) -> int:
    """Write the file and return the number of repeats in it; without a series there is no file.

    It is written as TARGET.partial and then renamed. `n` is as its source counts it; a value not measured is
    null. Raises ResultsError.
    """
    partial, count = target.with_name(f"{target.name}.partial"), 0
    try:
        with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as file:
            for campaign in chosen:
                for repeat in campaign:
                    count += _group(file, repeat)
        if count:
            partial.replace(target)
    except OSError as refusal:
        raise ResultsError(f"{target}: cannot be written: {refusal.strerror or refusal}") from refusal
    finally:
        partial.unlink(missing_ok=True)
    return count


def _group(file: pq.ParquetWriter, repeat: Repeat) -> int:
    row, each = repeat
    named: Mapping[str, object] = row
    series = each.times.columns()
    if not series:
        return 0
    length = len(series["n"])
    zeros = pa.array([0] * length, pa.int32())
    columns = [pa.DictionaryArray.from_arrays(zeros, pa.array([str(named[name])])) for name in WHOSE]
    columns.append(pa.array([row["repeat"]] * length, pa.int64()))
    columns += [pa.array(series.get(name, [None] * length), pa.int64()) for name in COLUMNS]
    file.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
    return 1

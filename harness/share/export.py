"""Results as CSV, a line per repeat, and as Parquet, every token of every repeat with a series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from harness import records
from harness.analysis import figures
from harness.analysis.columns import Repeat as Row
from harness.base.files import TABLE_OF
from harness.base.lookup import value_at
from harness.base.text import csv_text
from harness.dataset.judging import Judged
from harness.dataset.study import Study
from harness.records import ResultsError, Stored

Repeat = tuple[Row, Stored]


def chosen(
    judged: Sequence[Judged], study: Study, unfit: Callable[[Row], str] | None = None
) -> tuple[list[Repeat], Counter[str]]:
    """The ok repeats, those of the oldest campaign first, and the number of other records by reason.
    `study`: of these records. `unfit`: why an ok repeat cannot be exported; empty where it can."""
    places = {record.facts["campaign"]: record.facts["place"] for record in judged}
    left_out = Counter("search" for record in judged if record.facts["kind"] == "searched")
    fit: list[Repeat] = []
    for row, stored in zip(study.repeats, study.stored, strict=True):
        if row["status"] != "ok":
            left_out["disturbed" if row["disturbed"] else str(row["status"])] += 1
        elif unfit and (why := unfit(row)):
            left_out[why] += 1
        else:
            fit.append((row, stored))
    return sorted(fit, key=lambda repeat: places[repeat[0]["campaign"]]), left_out


# CSV export: one line per repeat, all figures at full precision.


def lines_text(repeats: Iterable[Repeat]) -> str:
    """A heading and a line per repeat, of several users one per number of them; empty without repeats."""
    lines = [
        [
            *figures.csv_values(
                "repeats", {**row, "flags": " ".join(dict.fromkeys(flag["code"] for flag in row["flags"]))}
            ),
            row["users"][0]["users"] if row["users"] else None,
        ]
        for whole, _ in repeats
        for row in _by_users(whole)
    ]
    return csv_text([[*figures.csv_headings("repeats"), "users"], *lines]) if lines else ""


def _by_users(row: Row) -> list[Row]:
    """The row for each number of users; as it is without any."""
    whole = [{**row, "users": [at]} for at in row["users"]]
    return [cast(Row, each | figures.again(each)) for each in whole] or [row]


WHOSE = ("campaign", "cell", "model", "stack", "variant", "kind", "machine", "device", "started_utc")
COLUMNS = ("n", "latency_ns", "token_id", "device_ns")
SCHEMA = pa.schema(
    [
        *((name, pa.dictionary(pa.int32(), pa.string())) for name in WHOSE),
        ("repeat", pa.int64()),
        *((name, pa.int64()) for name in COLUMNS),
    ]
)


def unfit_tokens(row: Row) -> str:
    """Why an ok repeat has no tokens to export; empty where it may have some."""
    return f"workload {row['workload']}" if row["workload"] in TABLE_OF else ""


def write_tokens(target: Path, repeats: Iterable[Repeat]) -> int:
    """Write the file and return the number of repeats in it; without a series there is no file.

    The file is written as TARGET.partial and then renamed. `n` is as its source counts it; a value not
    measured is null. Raises ResultsError.
    """
    partial, count = target.with_name(f"{target.name}.partial"), 0
    try:
        with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as file:
            for row, stored in repeats:
                if not (series := records.series(stored)):
                    continue
                length = len(series["n"])
                zeros = pa.array([0] * length, pa.int32())
                columns = [
                    pa.DictionaryArray.from_arrays(zeros, pa.array([str(value_at(row, name))]))
                    for name in WHOSE
                ]
                columns.append(pa.array([row["repeat"]] * length, pa.int64()))
                columns += [pa.array(series.get(name, [None] * length), pa.int64()) for name in COLUMNS]
                file.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
                count += 1
        if count:
            partial.replace(target)
    except OSError as refusal:
        raise ResultsError(f"{target}: cannot be written: {refusal.strerror or refusal}") from refusal
    finally:
        partial.unlink(missing_ok=True)
    return count

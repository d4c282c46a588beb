"""Read and write the files of a record: whole or not at all, and integer columns in small parquet files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base import bounds, files
from harness.base.files import FAULTS, NotStarted
from harness.base.text import shortened

if TYPE_CHECKING:
    import pyarrow as pa
from harness.records.parquet_sizes import page_columns, page_sizes, page_values


class ResultsError(NotStarted):
    """The results folder cannot be read or written; the message is one printable line, even if it quotes a
    damaged record."""

    def __init__(self, sentence: str) -> None:
        super().__init__(shortened(sentence, most=1000))


def read_columns(path: Path, whole: Sequence[str]) -> dict[str, list[int]]:
    """The columns of a file; empty if it does not exist. `whole`: columns that must exist without nulls.

    All sizes that its reader goes by are checked before any of it is decoded: 182 kB may hold 1.8 GB.
    """
    try:
        content = files.read_regular(path, bounds.SERIES_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as refusal:
        raise ResultsError(f"{path}: not a series: {refusal.strerror}") from refusal
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        most = {
            "thrift_container_size_limit": bounds.SERIES_COLUMNS,
            "thrift_string_size_limit": bounds.SERIES_NAME_BYTES,
        }
        # read_table would import all of pandas
        with pq.ParquetFile(pa.BufferReader(content), **most) as file:
            for field in file.schema_arrow:
                if not pa.types.is_integer(field.type):
                    raise ValueError(f"its column {field.name} does not hold integers")
            if _is_too_large(content):
                raise ValueError(f"it has more than {bounds.SERIES_VALUES:,} values")
            table = file.read(use_threads=False)  # of a few KB: starting threads takes longer
        for name in whole:
            if name not in table.column_names:
                raise ValueError(f"it has no column {name}")
            if table[name].null_count:
                raise ValueError(f"its column {name} has nulls")
        columns: dict[str, list[int]] = table.to_pydict()
    except (*FAULTS, OSError, RecursionError, MemoryError, pa.ArrowException) as damage:
        message = " ".join(str(damage).split()).rstrip(" :")  # pyarrow may take several lines
        raise ResultsError(f"{path}: not a series: {message}") from damage
    return columns


def write_columns(path: Path, columns: Mapping[str, Sequence[int | None]]) -> None:
    """Write columns as deltas with zstd: 10,000 latencies take 26 KB, 83 KB with pyarrow's defaults."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_arrays([_int64(values) for values in columns.values()], list(columns))
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=False,
        column_encoding=dict.fromkeys(columns, "DELTA_BINARY_PACKED"),
        write_statistics=False,
        store_schema=False,
    )
    write_whole(path, sink.getvalue().to_pybytes())


def _int64(values: Sequence[int | None]) -> pa.Array:
    """A column, made of its buffers: pa.array imports pandas, which takes as long as the whole command."""
    import numpy as np
    import pyarrow as pa

    count = len(values)
    known = np.fromiter((value is not None for value in values), bool, count)
    numbers = np.fromiter((value or 0 for value in values), np.int64, count)
    buffers = [pa.py_buffer(np.packbits(known, bitorder="little")), pa.py_buffer(numbers)]
    return pa.Array.from_buffers(pa.int64(), count, buffers)


def write_whole(path: Path, content: bytes) -> None:
    """Call files.write_whole. Raises ResultsError."""
    _written(files.write_whole, path, content)


def write_output(path: Path, content: str | bytes) -> None:
    """Call files.write_output. In text, names of files that are not UTF-8 are escaped. Raises
    ResultsError."""
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    _written(files.write_output, path, content)


def _written(write: Callable[[Path, bytes], None], path: Path, content: bytes) -> None:
    try:
        write(path, content)
    except OSError as refusal:
        raise ResultsError(f"{path}: cannot be written: {refusal.strerror}") from refusal


def is_sound(path: Path) -> bool:
    """Whether the sizes that a file's reader goes by can be read, and are not too large."""
    try:
        return not _is_too_large(files.read_regular(path, bounds.SERIES_BYTES))
    except (OSError, *FAULTS):
        return False


def _is_too_large(content: bytes) -> bool:
    columns = page_columns(content)
    pages = [*islice(page_sizes(content, columns), bounds.SERIES_PAGES + 1)]
    values = sum(map(page_values, columns))
    return (
        values > bounds.SERIES_VALUES or len(pages) > bounds.SERIES_PAGES or sum(pages) > bounds.SERIES_BYTES
    )

"""The files of a record, and how their tables are written and read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base import bounds, files
from harness.base.files import FAULTS, NotStarted
from harness.base.text import shortened

if TYPE_CHECKING:
    import pyarrow as pa


# The sizes that a parquet file claims, in its footer and in the header of each page, which may say more.
#
# pyarrow's metadata of a damaged footer ends the process: it throws where nothing catches.


_MOST_HEADER_BYTES = 1 << 16
_FOOTER_END = 8  # bytes: its length and PAR1
# Types of Thrift's compact protocol, as in its specification.
_FLAGS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12
# Fields, as in parquet.thrift: of FileMetaData, RowGroup, ColumnChunk, ColumnMetaData and PageHeader.
_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3
_VALUES, _COMPRESSED_BYTES, _DATA_PAGE, _DICTIONARY_PAGE = 5, 7, 9, 11
_PAGE_BYTES, _STORED_BYTES = 2, 3


def page_columns(content: bytes) -> list[dict[int, Any]]:
    """The ColumnMetaData of each column of each row group, by field. Raises ValueError, LookupError and
    TypeError if the footer is damaged."""
    length = int.from_bytes(content[-_FOOTER_END:-4], "little")
    footer, _ = _struct(content[-_FOOTER_END - length : -_FOOTER_END], 0)
    return [chunk[_META_DATA] for group in footer[_ROW_GROUPS] for chunk in group[_COLUMNS]]


def page_values(column: dict[int, Any]) -> int:
    """How many values a column has, by the footer."""
    return abs(int(column[_VALUES]))


def page_sizes(content: bytes, found: Iterable[dict[int, Any]]) -> Iterator[int]:
    """Bytes of each page once decompressed, of each of the `columns` found. Raises as they do."""
    for column in found:
        at = min(column[_DATA_PAGE], column.get(_DICTIONARY_PAGE) or column[_DATA_PAGE])
        end = at + column[_COMPRESSED_BYTES]
        while 0 <= at < end:
            header, length = _struct(content[at : at + _MOST_HEADER_BYTES], 0)
            yield abs(header[_PAGE_BYTES])
            at += length + abs(header[_STORED_BYTES])


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """The whole numbers, structs and lists of a struct by field, and where it ends."""
    found: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _number(data, at)
        found[field], at = _value(data, at, head & 15)
    return found, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in _INTEGERS:
        return _number(data, at)
    if kind == _STRUCT:
        return _struct(data, at)
    if kind == _BINARY:
        length, at = _varint(data, at)
        return 0, at + length
    if kind in _LISTS:
        head, at = data[at], at + 1
        length, at = (head >> 4, at) if head >> 4 < 15 else _varint(data, at)
        if length > len(data):
            raise ValueError("damaged list")
        items = []
        for _ in range(length):
            item, at = (0, at + 1) if head & 15 in _FLAGS else _value(data, at, head & 15)
            items.append(item)
        return items, at
    sizes = {**dict.fromkeys(_FLAGS, 0), _BYTE: 1, _DOUBLE: 8}
    if kind not in sizes:
        raise ValueError("damaged header")
    return 0, at + sizes[kind]


def _number(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return value >> 1 ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("damaged header")


# Read and write the files of a record: whole or not at all, and integer columns in small parquet files.


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

"""The sizes that a parquet file claims, in its footer and in the header of each page, which may say more.

pyarrow's metadata of a damaged footer ends the process: it throws where nothing catches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


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


def page_sizes(content: bytes, columns: Iterable[dict[int, Any]]) -> Iterator[int]:
    """Bytes of each page once decompressed, of each of the `columns` found. Raises as they do."""
    for column in columns:
        at = min(column[_DATA_PAGE], column.get(_DICTIONARY_PAGE) or column[_DATA_PAGE])
        end = at + column[_COMPRESSED_BYTES]
        while 0 <= at < end:
            header, length = _struct(content[at : at + _MOST_HEADER_BYTES], 0)
            yield abs(header[_PAGE_BYTES])
            at += length + abs(header[_STORED_BYTES])


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """The whole numbers, structs and lists of a struct by field, and where it ends."""
    fields: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _number(data, at)
        fields[field], at = _value(data, at, head & 15)
    return fields, at + 1


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

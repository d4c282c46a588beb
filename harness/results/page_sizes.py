"""The size of each page of a parquet file, by the headers that its reader obeys. The footer may say less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_MOST_HEADER_BYTES = 1 << 16
# Types of Thrift's compact protocol, as in its specification.
_FLAGS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12
_PAGE_BYTES, _STORED_BYTES = 2, 3  # fields of a PageHeader: uncompressed_page_size, compressed_page_size


def page_sizes(content: bytes, metadata: Any) -> Iterator[int]:
    """Bytes of each page once decompressed, column by column. Raises ValueError and IndexError if a header is
    damaged."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            at = column.data_page_offset
            if column.has_dictionary_page:
                at = min(at, column.dictionary_page_offset)
            end = at + column.total_compressed_size
            while 0 <= at < end:
                header, length = _struct(content[at : at + _MOST_HEADER_BYTES], 0)
                yield abs(header[_PAGE_BYTES])
                at += length + abs(header[_STORED_BYTES])


def _struct(data: bytes, at: int) -> tuple[dict[int, int], int]:
    """The whole numbers of a struct by field, and where it ends."""
    found, field = {}, 0
    while head := data[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _number(data, at)
        found[field], at = _value(data, at, head & 15)
    return found, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[int, int]:
    if kind in _INTEGERS:
        return _number(data, at)
    if kind == _STRUCT:
        return 0, _struct(data, at)[1]
    if kind == _BINARY:
        length, at = _varint(data, at)
        return 0, at + length
    if kind in _LISTS:
        head, at = data[at], at + 1
        length, at = (head >> 4, at) if head >> 4 < 15 else _varint(data, at)
        for _ in range(length):
            at = at + 1 if head & 15 in _FLAGS else _value(data, at, head & 15)[1]
        return 0, at
    sizes = {**dict.fromkeys(_FLAGS, 0), _BYTE: 1, _DOUBLE: 8}
    if kind not in sizes:
        raise ValueError("damaged page header")
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
            raise ValueError("damaged page header")

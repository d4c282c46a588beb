"""Files of descriptions, of which any part may be junk: GGUF, safetensors, parquet, CSV and JSON lines."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any

from benchmarks.hostile.mutations import dumped


def _number(value: Any, bits: int = 64) -> int:
    return int(value) & ((1 << bits) - 1) if isinstance(value, int) else 0


def _text(value: Any) -> bytes:
    """A string as GGUF has it; of a number, a length without its bytes."""
    if not isinstance(value, str):
        return struct.pack("<Q", _number(value))
    content = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(content)) + content


def _value(kind: Any, value: Any) -> bytes:
    sizes = {0: 8, 1: 8, 2: 16, 3: 16, 4: 32, 5: 32, 6: 32, 7: 8, 10: 64, 11: 64, 12: 64}
    if bits := sizes.get(kind if isinstance(kind, int) else -1):
        return _number(value, bits).to_bytes(bits // 8, "little")
    if kind == 9 and isinstance(value, dict):
        parts = value.get("items")
        listed = parts if isinstance(parts, list) else []
        element = _number(value.get("type"), 32)
        count = _number(value.get("count")) if isinstance(value.get("count"), int) else len(listed)
        return struct.pack("<IQ", element, count) + b"".join(_value(element, part) for part in listed[:100])
    return _text(value)


def gguf(spec: Any) -> bytes:
    """A GGUF of a description, of which any part may be junk."""
    if not isinstance(spec, dict):
        return dumped(spec)
    keys = spec.get("keys") if isinstance(spec.get("keys"), dict) else {}
    tensors = spec.get("tensors") if isinstance(spec.get("tensors"), dict) else {}
    counts = [
        _number(spec[name]) if isinstance(spec.get(name), int) else len(found)
        for name, found in (("n_tensors", tensors), ("n_keys", keys))
    ]
    made = b"GGUF" + struct.pack("<IQQ", _number(spec.get("version"), 32), *counts)
    for key, entry in keys.items():
        kind, value = (entry.get("type"), entry.get("value")) if isinstance(entry, dict) else (8, entry)
        made += _text(key) + struct.pack("<I", _number(kind, 32)) + _value(kind, value)
    for name, entry in tensors.items():
        if not isinstance(entry, dict):
            made += _text(name) + _text(entry)
            continue
        dims = entry.get("dims") if isinstance(entry.get("dims"), list) else []
        claimed = _number(entry["n"], 32) if isinstance(entry.get("n"), int) else len(dims)
        made += (
            _text(name)
            + struct.pack("<I", claimed)
            + b"".join(struct.pack("<Q", _number(dim)) for dim in dims[:64])
        )
        made += struct.pack("<IQ", _number(entry.get("type"), 32), _number(entry.get("offset")))
    return made + bytes(-len(made) % 32) + bytes(min(_number(spec.get("data")), 1 << 20))


def safetensors(spec: Any) -> bytes:
    """A safetensors file of a description: its header, the length it claims, and its bytes of data."""
    if not isinstance(spec, dict):
        return dumped(spec)
    header = dumped(spec.get("header"))
    length = _number(spec["length"]) if isinstance(spec.get("length"), int) else len(header)
    return struct.pack("<Q", length) + header + bytes(min(_number(spec.get("data")), 1 << 20))


def parquet(columns: Mapping[str, Any], **options: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table(dict(columns)), sink, **options)
    return sink.getvalue()


def rows(spec: Any) -> bytes:
    """A CSV of a description: header and cells."""
    found = spec.get("rows") if isinstance(spec, dict) else None
    listed = [
        row if isinstance(row, list) else [row]
        for row in (found.values() if isinstance(found, dict) else [found])
    ]
    return "\n".join(",".join(map(str, row)) for row in listed).encode("utf-8", "surrogatepass")


def lines(spec: Any) -> bytes:
    return b"\n".join(dumped(row) for row in (spec.values() if isinstance(spec, dict) else [spec]))

"""Open a log, detect its format from its content, and read it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from harness.base import bounds
from harness.base.files import FAULTS, nearest, read_regular
from harness.records.foreign import table
from harness.records.foreign.form import Format, Row, read
from harness.records.foreign.formats import FORMATS
from harness.records.foreign.log import Log, LogError, OptionError, usable
from harness.records.foreign.table import Options

GZIP, GGUF = b"\x1f\x8b", b"GGUF"
_START = re.compile(r"^[\[{]", re.MULTILINE)
_LLAMA_BENCH_CSV = re.compile(r"^[^\n]{0,2000}\bavg_ns\b[^\n]{0,200}\bavg_ts\b", re.MULTILINE)
_DAMAGE = (ValueError, RecursionError)  # ValueError: also a number of thousands of digits


def read_log(path: Path, options: Options) -> Log:
    """The log in a file. Raises LogError."""
    text = _file_text(path)
    if not text.strip():
        raise LogError("it is empty")
    documents = _documents(text)
    objects = documents if all(isinstance(document, dict) for document in documents) else []
    for form in FORMATS:
        if rows := form.rows(objects, text):
            if options != Options():
                raise OptionError(
                    f"the {form.name} defines names and units itself: --unit and column options are for "
                    "tables"
                )
            log = _read(form, rows)
            return log if objects else replace(log, notes=[*log.notes, *_others(form, text)])
    if text.lstrip()[0] not in "{[" and not objects:
        return table.read(table.of_csv(text), options)
    return table.read(_table_of(documents, text), options)


def _read(form: Format, rows: list[Row]) -> Log:
    """A file with unexpected content gives one sentence, not a traceback. Raises LogError."""
    if form.refusal:
        raise LogError(f"the {form.name} {form.refusal}")
    try:
        return usable(read(form, rows))
    except FAULTS as damage:
        raise LogError(f"its fields are not those of the {form.name} that it looks like") from damage


def _others(chosen: Format, text: str) -> list[str]:
    """A note on what other tools printed in the same text."""
    names = dict.fromkeys(form.name for form in FORMATS if form.rows([], text))
    return [
        f"the file also has output of another tool, which is not read: {name}"
        for name in names
        if name != chosen.name
    ]


def _file_text(path: Path) -> str:
    try:
        content = read_regular(path, bounds.LOG_BYTES, links=True)
    except FileNotFoundError:
        raise OptionError(f"no such file{nearest(path)}") from None
    except IsADirectoryError:
        raise LogError("it is a folder, not a file") from None
    except OSError as refusal:
        raise LogError(f"it cannot be read: {refusal.strerror}") from refusal
    if content.startswith(GGUF):
        raise LogError("it is a model, not a log; `harness theory FILE` says what limits it")
    if content.startswith(GZIP):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(bounds.LOG_BYTES + 1)
        except (OSError, EOFError, zlib.error) as damage:
            raise LogError("it is a damaged gzip file") from damage
    if len(content) > bounds.LOG_BYTES:
        raise LogError(f"it is larger than {bounds.LOG_BYTES >> 20} MiB when decompressed")
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # written by > in PowerShell
    try:
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise LogError("it is not a text file")
    if sum(map(text.count, "\n\r,;\t[{")) > bounds.LOG_VALUES:
        raise LogError(f"it has more than {bounds.LOG_VALUES:,} values")
    return text


def _documents(text: str) -> list[Any]:
    """The elements of one JSON document, or objects one per line (also as server-sent events), or the rows of
    llama-bench's CSV; any of these also behind lines of standard error. Empty: none of these, or damaged."""
    try:
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    except _DAMAGE:
        pass
    lines = (line.removeprefix("data:").lstrip(" ") for line in text.splitlines())
    try:
        if found := [json.loads(line) for line in lines if line.startswith("{")]:
            with_timings = [row for row in found if "timings" in row]
            return with_timings if "\ndata:" in f"\n{text}" and with_timings else found
    except _DAMAGE:
        pass
    if "avg_ts" in text and (header := _LLAMA_BENCH_CSV.search(text)):
        return [row for row in csv.DictReader(io.StringIO(text[header.start() :])) if row.get("avg_ts")]
    for start in islice(_START.finditer(text), bounds.LOG_STARTS):
        try:
            document, end = json.JSONDecoder().raw_decode(text, start.start())
        except _DAMAGE:
            continue
        several = _START.search(text, end)
        return [] if several else document if isinstance(document, list) else [document]
    return []


def _table_of(documents: list[Any], text: str) -> table.Table:
    """The table in objects: one per row, a list of them in one document, or a list of each column. Raises
    LogError."""
    if not documents:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                json.loads(line or "0")
            except _DAMAGE:
                raise LogError(f"it is not JSON, and as JSONL line {number} is damaged") from None
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise LogError("it is JSON, but not objects")
    if len(documents) == 1:
        lists = {name: value for name, value in documents[0].items() if isinstance(value, list) and value}
        (rows,) = lists.values() if len(lists) == 1 else ((),)
        if rows and all(isinstance(row, dict) for row in rows):
            return table.of_objects(rows)
        if len({len(column) for column in lists.values()}) == 1:
            return table.of_columns(lists)
    return table.of_objects(documents)

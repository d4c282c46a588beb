"""Open a log, detect its format from its content, and read it."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

from harness.logs import aiperf, csv, guidellm, llama_server, vllm
from harness.logs.log import Log, LogError, OptionError
from harness.logs.table import Options
from harness.system.endings import FAULTS
from harness.system.files import read_regular

GZIP = b"\x1f\x8b"
MOST_BYTES = 1 << 25  # decompressed
MOST_VALUES = 1_500_000  # a column of text, or a number of JSON, takes up to 100 bytes of memory


def read(path: Path, options: Options) -> Log:
    """The log in a file. Raises LogError."""
    text = _text(path)
    if not text.strip():
        raise LogError("it is empty")
    if text.lstrip()[0] in "{[":
        return _of_json(_documents(text), options)
    for is_one, reader in (
        (llama_server.is_stream, llama_server.read_stream),
        (llama_server.is_log, llama_server.read_log),
    ):
        if is_one(text):
            _no_columns(options, llama_server.FORMAT)
            return reader(text)
    return csv.read(text, options)


def _text(path: Path) -> str:
    try:
        content = read_regular(path, MOST_BYTES, links=True)
    except FileNotFoundError:
        raise OptionError("no such file") from None
    except IsADirectoryError:
        raise LogError("it is a folder, not a file") from None
    except OSError as refusal:
        raise LogError(f"it cannot be read: {refusal.strerror}") from refusal
    if content.startswith(GZIP):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(MOST_BYTES + 1)
        except (OSError, EOFError, zlib.error) as damage:
            raise LogError("it is a damaged gzip file") from damage
    if len(content) > MOST_BYTES:
        raise LogError(f"it is larger than {MOST_BYTES >> 20} MiB when decompressed")
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # written by > in PowerShell
    try:
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise LogError("it is not a text file")
    if sum(map(text.count, "\n\r,;\t[{")) > MOST_VALUES:
        raise LogError(f"it has more than {MOST_VALUES:,} values")
    return text


def _documents(text: str) -> list[Any]:
    """One JSON document, or one per line. Raises LogError."""
    try:
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        pass
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as damage:
            raise LogError(f"it is not JSON, and as JSONL line {number} is damaged") from damage
    return found


def _of_json(documents: list[Any], options: Options) -> Log:
    if not documents or not all(isinstance(each, dict) for each in documents):
        raise LogError("it is JSON, but not objects")
    for reader in (vllm, aiperf, llama_server):
        if all(reader.is_one(each) for each in documents):
            _no_columns(options, reader.FORMAT)
            return _guarded(reader.read, documents, reader.FORMAT)
    if len(documents) == 1 and guidellm.is_one(documents[0]):
        _no_columns(options, guidellm.FORMAT)
        return _guarded(guidellm.read, documents[0], guidellm.FORMAT)
    if len(documents) == 1 and (found := csv.of_lists(documents[0], options)):
        return found
    return csv.of_objects(documents, options)


def _no_columns(options: Options, form: str) -> None:
    if options.any:
        raise OptionError(
            f"it is a {form}, which defines names and units itself: --unit and column options are for tables"
        )


def _guarded(reader: Any, content: Any, form: str) -> Log:
    """Run a reader. A file with unexpected content gives one sentence, not a traceback. Raises LogError."""
    try:
        log: Log = reader(content)
    except LogError:
        raise
    except FAULTS as damage:
        raise LogError(f"it looks like a {form}, but its fields are not as documented") from damage
    return log
